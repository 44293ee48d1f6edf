# SPDX-License-Identifier: Apache-2.0
"""Carries out moves of weights, gradients and optimizer state between GPU memory, host memory and NVMe, and keeps
account of them. What moves is decided in :mod:`tencache_ds.placement.gpu_homes` and
:mod:`tencache_ds.placement.host_homes`.
"""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tencache_ds.errors import MemoryLimitError, TenCacheError
from tencache_ds.memory.device_memory import DeviceMemory
from tencache_ds.placement.gpu_policy import chunks_to_release
from tencache_ds.placement.places import Place, place_state
from tencache_ds.tiers.gradients import GradientTier
from tencache_ds.tiers.momentum import Momentum
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.sub_group import ADAM_IN_FP32, MASTERS_ALONE

logger = logging.getLogger("DeepSpeed.tencache")


class Accounts(Protocol):
    """The owner of the memory accounts (a :class:`tencache_ds.runtime.session.Session`)."""

    @property
    def host_left_nbytes(self) -> int:
        """The unused part of this rank's host memory."""

    def count_host(self, nbytes: int) -> None:
        """Adds ``nbytes`` (may be negative) to the host memory in use by gradients and optimizer state."""

    def note_gpu(self, *, weight_nbytes: int, gradient_nbytes: int, momentum_nbytes: int) -> None:
        """Bytes of weights, gradients and momentum in GPU memory now."""


class StateMoves:
    """Used by one thread at a time.

    Args:
        tier: the optimizer's state.
        n_sub_groups: of it.
        accounts: of host memory.
        open_store: makes NVMe ready for state, if it may go there; returns whether it may.
        before: called before anything moves: waits until it is not in use.
        moved: called with a sub-group whose state has changed its places.
    """

    def __init__(
        self,
        tier: OptimizerStateTier,
        n_sub_groups: int,
        accounts: Accounts,
        *,
        open_store: Callable[[], bool],
        before: Callable[[], None] = lambda: None,
        moved: Callable[[int], None],
    ) -> None:
        self.tier = tier
        self.n_sub_groups = n_sub_groups
        self.accounts = accounts
        self.open_store = open_store
        self._moved = moved
        self._collected_nbytes = 0
        self._counted_nbytes = tier.resident_nbytes
        self.before = before
        self.free_unused: Callable[[], int] = lambda: 0
        """Frees host memory that nothing is in, and returns how much: that of weights and gradients in GPU memory,
        which is kept so that they can return quickly."""

    @property
    def any_on_nvme(self) -> bool:
        """Whether state is on NVMe."""
        return any(Place.NVME in self.tier.places(index) for index in range(self.n_sub_groups))

    def relocate(self, places: Mapping[int, Sequence[Place]]) -> None:
        """Gives the chunks of some sub-groups other places. Between two passes over the state.

        Raises:
            MemoryLimitError: not enough memory.
            SpaceError, StorageError: not enough space on NVMe, or a transfer failed.
        """
        self.collect()
        try:
            self.tier.relocate(places)
        finally:
            self._count()
            self._collected_nbytes = self.tier.collected_nbytes
            for index in places:
                self._moved(index)

    def collect(self) -> int:
        """Takes note of state whose GPU memory training has taken back, and that is in host memory since; returns the
        bytes that are new."""
        self.before()
        self.tier.collect()
        nbytes, self._collected_nbytes = self.tier.collected_nbytes - self._collected_nbytes, self.tier.collected_nbytes
        self._count()  # master weights that were split or joined, too
        if nbytes:
            for index in range(self.n_sub_groups):
                self._moved(index)
        return nbytes

    def take_host_memory(self, nbytes: int) -> int:
        """Moves chunks from NVMe to host memory, spread evenly over the step.

        Args:
            nbytes: upper limit.

        Returns:
            How many did.
        """
        return self._move(Place.NVME, Place.HOST, lambda sizes: place_state(sizes, max(nbytes, 0)))

    def leave_host_memory(self, nbytes: int) -> int:
        """Chunks that are in host memory go to NVMe, as evenly.

        Args:
            nbytes: lower limit, as far as available.

        Returns:
            How many did: 0 where state may not go there.
        """
        if not self.open_store():
            return 0
        return self._move(Place.HOST, Place.NVME, lambda sizes: place_state(sizes, max(sum(sizes) - nbytes, 0)))

    def _move(self, old: Place, new: Place, place: Callable[[list[int]], Sequence[Place]]) -> int:
        places = {
            index: list(self.tier.places(index)) for index in range(self.n_sub_groups) if not self.tier.whole(index)
        }
        candidates = [
            (group, index, self.tier.host_nbytes_of(self.tier.chunks(group)[index]))
            for group, homes in places.items()
            for index, home in enumerate(homes)
            if home is old
        ]
        moved, changed = 0, {}
        for (group, index, nbytes), home in zip(
            candidates, place([nbytes for _, _, nbytes in candidates]), strict=True
        ):
            if home is new:
                places[group][index] = new
                changed[group] = places[group]
                moved += nbytes
        if changed:
            self.relocate(changed)
        return moved

    def _count(self) -> None:
        nbytes = self.tier.resident_nbytes
        self.accounts.count_host(nbytes - self._counted_nbytes)
        self._counted_nbytes = nbytes


Agree = Callable[[str, Any, Callable[[Sequence[Any]], Any]], Any]
"""A joint decision of all ranks: the topic, this rank's value, and the function that combines the values."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One weight's shard.

    Attributes:
        key: of the weight.
        nbytes: of the shard.
        stored: whether it is on NVMe.
        frees_host: whether its host memory can be freed when it is in device memory.
    """

    key: int
    nbytes: int
    stored: bool = False
    frees_host: bool = False


class MovableWeights(Protocol):
    """The weights of a model, as far as they may live in device memory. Between two steps."""

    def shards(self) -> Sequence[Shard]:
        """All of them, in the same order on every rank."""

    def to_device(self, key: int, memory: torch.Tensor) -> None:
        """Moves one into device memory (uint8, of its length)."""

    def to_host(self, key: int) -> None:
        """Moves one back to where it was.

        Raises:
            MemoryLimitError, StorageError: there is no place for it; it stays.
        """

    def belongs_to_host(self, key: int) -> bool:
        """Whether it came from host memory, to which it can return without the other ranks noticing."""

    def host_nbytes_of(self, keys: Iterable[int]) -> int:
        """Bytes of host memory that have to be allocated before these can return to it."""

    def free_unused(self) -> int:
        """Frees host memory of those that are in device memory, as far as possible; returns how much."""


class WeightMoves:
    """Used by one thread at a time.

    Args:
        memory: of the compute device.
        weights: the weights.
    """

    def __init__(self, memory: DeviceMemory, weights: MovableWeights) -> None:
        self._memory = memory
        self._weights = weights
        self._there: dict[int, int] = {}  # bytes of each weight, in the order in which they came
        self._out: dict[int, int] = {}  # of those that had to leave, the last one to leave last

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in GPU memory."""
        return sum(self._there.values())

    @property
    def there(self) -> Collection[int]:
        """The weights (keys) in GPU memory, in the order in which they came."""
        return self._there.keys()

    @property
    def out(self) -> Collection[int]:
        """Those that had to leave it and have not come back."""
        return self._out.keys()

    def bring(self, shards: Sequence[Shard], agree: Agree) -> bool:
        """Moves all of them that are not there on all ranks, or none on any: those from NVMe leave the order in which
        collectives are made. Between two passes."""
        shards = [shard for shard in shards if shard.key not in self._there]
        buffers: dict[int, torch.Tensor] = {}
        try:
            for shard in shards:
                buffers[shard.key] = self._memory.allocate(shard.nbytes)
        except MemoryLimitError as error:
            logger.warning("no weight moves to GPU memory: %s", error)
            buffers.clear()
        if not agree("weights in GPU memory", len(buffers) == len(shards), all):
            return False
        for key, memory in buffers.items():
            self._bring(key, memory)
        return True

    def bring_back(self, nbytes: int) -> int:
        """Moves evicted weights back into GPU memory up to ``nbytes``, the last to leave first; returns the bytes
        moved. Between two passes."""
        brought = 0
        try:
            for key, size in reversed(list(self._out.items())):
                if size <= nbytes - brought:
                    self._bring(key, self._memory.allocate(size))
                    brought += size
        except MemoryLimitError as error:
            logger.warning("a weight that left GPU memory stays out: %s", error)
        return brought

    def release(self, key: int) -> int:
        """Takes one that is not in use out of GPU memory; returns its bytes. The device must be done with it.

        Raises:
            MemoryLimitError, StorageError: it has nowhere to go; it stays.
        """
        self._weights.to_host(key)
        self._out[key] = self._there.pop(key)
        return self._out[key]

    def close(self) -> None:
        """Gives all of them back to their model, where they were. Idempotent."""
        for key in reversed(list(self._there)):
            del self._there[key]
            try:
                self._weights.to_host(key)
            except TenCacheError:
                logger.exception("a weight could not leave GPU memory, and stays there")

    def _bring(self, key: int, memory: torch.Tensor) -> None:
        self._weights.to_device(key, memory)
        self._there[key] = memory.nbytes
        self._out.pop(key, None)


class GpuMoves:
    """Used by one thread at a time.

    Args:
        memory: of the compute device.
        state: moves the optimizer's state.
        gradients: the accumulated gradients.
        sub_groups: of each sub-group the weights (keys) of which its elements are, with their numbers of elements, in
            the order in which they lie in it.
        weights: the weights.
        accounts: of device memory.
        moved_gradient: called with a weight and the tensor in which its gradient is accumulated from now on.
        momentum: of Muon's matrices, which goes wherever their gradients go; None without any.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        state: StateMoves,
        gradients: GradientTier,
        sub_groups: Sequence[Sequence[tuple[int, int]]],
        weights: MovableWeights,
        accounts: Accounts,
        *,
        moved_gradient: Callable[[int, torch.Tensor], None],
        momentum: Momentum | None = None,
    ) -> None:
        self._memory = memory
        self._momentum = momentum
        self._state = state
        self._tier = state.tier
        self._gradients = gradients
        self._sub_groups = sub_groups
        self._weights = weights
        self._accounts = accounts
        self._moved_gradient = moved_gradient
        self._weight_moves = WeightMoves(memory, weights)
        state.free_unused = self.free_unused_host_memory
        self.state_nbytes = state.tier.device_nbytes
        """Bytes of state in GPU memory. Asked for in each pass: not a sum over all chunks."""

    # Contents

    @property
    def weight_nbytes(self) -> int:
        """Bytes of weights in GPU memory."""
        return self._weight_moves.nbytes

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of gradients in GPU memory."""
        return self._gradients.device_nbytes

    @property
    def momentum_nbytes(self) -> int:
        """Bytes of momentum in GPU memory."""
        return 0 if self._momentum is None else self._momentum.device_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of state, weights, gradients and momentum in GPU memory."""
        return self.weight_nbytes + self.gradient_nbytes + self.momentum_nbytes + self.state_nbytes

    @property
    def weights_there(self) -> Collection[int]:
        """The weights (keys) in GPU memory."""
        return self._weight_moves.there

    @property
    def any_on_nvme(self) -> bool:
        """Whether state is on NVMe."""
        return self._state.any_on_nvme

    def counts(self) -> list[int]:
        """Number of chunks of each sub-group that are there, counted from its first."""
        return [self._tier.places(index).count(Place.GPU) for index in range(len(self._sub_groups))]

    def note(self) -> None:
        """Reports the contents to the accounts."""
        self._accounts.note_gpu(
            weight_nbytes=self.weight_nbytes,
            gradient_nbytes=self.gradient_nbytes,
            momentum_nbytes=self.momentum_nbytes,
        )

    def may_move(self, sub_group: int) -> bool:
        """Whether the state of a sub-group may be there: Adam's, in single precision."""
        dtypes = {kind: self._tier.dtype(sub_group, kind) for kind in self._tier.kinds(sub_group)}
        return dtypes in (ADAM_IN_FP32, MASTERS_ALONE)

    def weights_of(self, sub_group: int) -> list[tuple[int, ...]]:
        """Weights (keys) that each chunk of a sub-group has elements of."""
        runs: list[tuple[int, ...]] = []
        ends = list(itertools.accumulate(numel for _, numel in self._sub_groups[sub_group]))
        keys = [key for key, _ in self._sub_groups[sub_group]]
        for chunk in self._tier.chunks(sub_group):
            first = bisect.bisect_right(ends, chunk.start)
            last = bisect.bisect_left(ends, chunk.start + chunk.numel)
            runs.append(tuple(keys[first : last + 1]))
        return runs

    def gradient_nbytes_of(self, key: int) -> int:
        """Bytes of a weight's gradient, with those of its momentum; 0 where none is accumulated."""
        return self._gradients.nbytes_of(key) + self._momentum_nbytes(key) if self._gradients.accumulates(key) else 0

    # Into GPU memory, between two steps

    def bring_weights(self, shards: Sequence[Shard], agree: Agree) -> bool:
        """All of them on all ranks, or none on any: those from NVMe leave the order of collectives."""
        if any(shard.key not in self._weight_moves.there for shard in shards):
            self._state.before()
        return self._weight_moves.bring(shards, agree)

    def bring_state(self, counts: Sequence[int]) -> None:
        """Moves the state of the first ``counts`` chunks of each sub-group, and the gradients of weights that are there
        with all of their state; each rank decides alone. Ends at an allocation that fails. Host memory that becomes
        free takes state from NVMe."""
        if any(counts):
            self._state.before()  # an update reads gradients
        try:
            for index, (count, there) in enumerate(zip(counts, self.counts(), strict=True)):
                if count and count >= there:
                    self._bring_gradients(index, count)
                if count > there:
                    self.relocate({index: self._with_device_chunks(index, count)})
        except MemoryLimitError as error:
            logger.warning("less optimizer state than planned moves to GPU memory: %s", error)
        if self.nbytes and self._state.any_on_nvme:
            self.free_unused_host_memory()
            self._state.take_host_memory(self._state.accounts.host_left_nbytes)

    def free_unused_host_memory(self) -> int:
        """Frees the host memory of weights and gradients that are in GPU memory, as far as possible; returns how much.
        It is kept until something else needs it, because what has to leave GPU memory is out faster then."""
        self._state.before()
        self._memory.synchronize()
        nbytes = self._gradients.unused_host_nbytes
        self._gradients.free_unused()
        return nbytes + self._weights.free_unused()

    def bring_back(self, nbytes: int) -> int:
        """Moves evicted items, then new ones, into GPU memory up to ``nbytes``; returns the bytes moved."""
        self._state.before()
        before = self.nbytes
        nbytes -= self._weight_moves.bring_back(nbytes)
        if self._weight_moves.out:
            return self.nbytes - before
        counts, there = self.counts(), set(self._weight_moves.there)
        for index in filter(self.may_move, range(len(counts))):
            chunks, weights = self._tier.chunks(index), self.weights_of(index)
            numels = dict(self._sub_groups[index])
            while counts[index] < len(chunks):
                chunk = chunks[counts[index]]
                beside = there.intersection(weights[counts[index]])
                per_element = [self._gradients.dtype.itemsize + self._momentum_nbytes(k) // numels[k] for k in beside]
                nbytes -= chunk.nbytes + chunk.numel * max(per_element, default=0)
                if nbytes < 0:
                    break
                counts[index] += 1
            if counts[index] < len(chunks):
                break
        self.bring_state(counts)
        self.note()
        return self.nbytes - before

    def _bring_gradients(self, sub_group: int, count: int) -> None:
        """Those of weights in GPU memory all of whose elements belong to the first chunks of a sub-group."""
        there = self._weight_moves.there
        for key, numel, belongs in self._within(sub_group, count):
            if belongs and key in there and not self._gradients.on_device(key):
                memory = self._memory.allocate(numel * self._gradients.dtype.itemsize)
                momentum_nbytes = self._momentum_nbytes(key)
                if self._momentum is not None and momentum_nbytes:
                    self._momentum.move(key, self._memory.allocate(momentum_nbytes))
                self._moved_gradient(key, self._gradients.move(key, memory.view(self._gradients.dtype)))

    # Out of GPU memory

    def collect(self) -> int:
        """Takes note of state whose memory training has taken back within an allocation; returns its bytes. What
        exceeds the host memory then goes to NVMe, if it may."""
        nbytes = self._state.collect()
        self.state_nbytes = self._tier.device_nbytes
        if nbytes and self._state.accounts.host_left_nbytes < 0:
            self._state.leave_host_memory(-self._state.accounts.host_left_nbytes)
        return nbytes

    def release_state(self, nbytes: int) -> int:
        """Releases at least ``nbytes`` of state, from the end of the update; returns the number released. Also within a
        pass, because only the optimizer uses state.

        Raises:
            MemoryLimitError: it has nowhere to go.
        """
        self.collect()
        before, counts = self.state_nbytes, self.counts()
        states = [[chunk.nbytes for chunk in self._tier.chunks(index)] for index in range(len(counts))]
        left = chunks_to_release(states, counts, nbytes)
        gradients = [
            key
            for index, count in enumerate(left)
            for key, _, belongs in self._within(index, count)
            if not belongs and self._gradients.on_device(key)
        ]
        host_nbytes = self._make_host_memory(self._gradients.host_nbytes_of(gradients))
        places: dict[int, list[Place]] = {}
        for index, count in enumerate(left):
            if count == counts[index]:
                continue
            places[index] = list(self._tier.places(index))
            for chunk in self._tier.chunks(index)[count : counts[index]]:
                fits = chunk.nbytes <= host_nbytes or not self._state.open_store()
                host_nbytes -= chunk.nbytes if fits else 0
                places[index][chunk.index] = Place.HOST if fits else Place.NVME
        self._memory.synchronize()
        self.relocate(places)
        self._memory.trim()
        return before - self.state_nbytes

    def release_gradients(self) -> None:
        """Those of weights that have left, or whose state has."""
        if not self._gradients.device_nbytes:
            return
        there = self._weight_moves.there
        for index, count in enumerate(self.counts()):
            for key, _, belongs in self._within(index, count):
                if self._gradients.on_device(key) and not (belongs and key in there):
                    self._moved_gradient(key, self._gradients.move(key, None))
                    if self._momentum is not None:
                        self._momentum.move(key, None)
        self._memory.synchronize()
        self.note()

    def release_weights(self, *, on_all_ranks: bool = False) -> int:
        """The last resort; returns how many. Between two steps.

        Args:
            on_all_ranks: whether all ranks do so now; else only weights leave that can without the others noticing.

        Raises:
            MemoryLimitError, StorageError: a weight, or the state that has to make place for it, has nowhere to go.
        """
        self._state.before()
        there = self._weight_moves.there
        leaving = [key for key in there if on_all_ranks or self._weights.belongs_to_host(key)]
        self._make_host_memory(self._weights.host_nbytes_of(leaving))
        self._memory.synchronize()
        try:
            for key in leaving:
                self._weight_moves.release(key)
        finally:
            self._memory.trim()
            self.note()
        return len(leaving)

    def _make_host_memory(self, nbytes: int) -> int:
        """Moves state to NVMe, if allowed, until so much host memory is left. Returns the excess."""
        left_nbytes = self._state.accounts.host_left_nbytes - nbytes
        if nbytes and left_nbytes < 0:
            self._state.leave_host_memory(-left_nbytes)
            left_nbytes = self._state.accounts.host_left_nbytes - nbytes
        return left_nbytes

    def relocate(self, places: Mapping[int, Sequence[Place]]) -> None:
        """Gives the chunks of some sub-groups other places."""
        try:
            self._state.relocate(places)
        finally:
            self.state_nbytes = self._tier.device_nbytes

    def close(self) -> None:
        """Gives the weights back to their model, where they were. Idempotent; the tiers are closed by their owner."""
        if not self._weight_moves.there:
            return
        try:
            self._make_host_memory(self._weights.host_nbytes_of(self._weight_moves.there))
        except TenCacheError:
            logger.exception("optimizer state does not make place for the weights that leave GPU memory")
        self._memory.synchronize()
        self._weight_moves.close()
        self.note()

    # Mechanics

    def _within(self, sub_group: int, count: int) -> Iterator[tuple[int, int, bool]]:
        """The weights of a sub-group with their lengths, and whether they end within its first chunks."""
        end, position = sum(chunk.numel for chunk in self._tier.chunks(sub_group)[:count]), 0
        for key, numel in self._sub_groups[sub_group]:
            position += numel
            yield key, numel, position <= end

    def _momentum_nbytes(self, key: int) -> int:
        return 0 if self._momentum is None else self._momentum.nbytes_of(key)

    def _with_device_chunks(self, sub_group: int, count: int) -> list[Place]:
        """The first chunks on the device, the others where they are."""
        places = self._tier.places(sub_group)
        return [Place.GPU if index < count else place for index, place in enumerate(places)]
