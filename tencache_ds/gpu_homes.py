# SPDX-License-Identifier: Apache-2.0
"""What of one DeepSpeed engine lives in GPU memory: decided after the recorded step, given back when a step needs the
memory. Part of the composition root (:mod:`tencache_ds.session`).

[Note: memory that training needs] Everything here lies in memory that training left idle, and training may want it
back at any time: for a longer sequence, an evaluation, a second model. torch's allocator cannot be asked to wait. So a
part of the memory stays free, as much as activations and gradients took in the recorded step. Between modules it is
looked at how much the pass has taken and, compared with the recorded pass, how much it is going to take. Before that
exceeds what is left, and whenever half of what stayed free is gone, optimizer state leaves the GPU. It can leave in the
middle of a pass, because only the optimizer looks at it; weights and gradients leave between two steps. What has left
does not come back: memory that was needed once is needed again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from tencache_ds.config import Share, TenCacheConfig
from tencache_ds.errors import MemoryLimitError, TenCacheError
from tencache_ds.items import Place
from tencache_ds.layout import gib
from tencache_ds.memory.device_memory import CudaMemory, DeviceMemory
from tencache_ds.planning.gpu_placement import (
    LEAST_HEADROOM_NBYTES,
    GpuPlan,
    chunks_to_release,
    gpu_budget,
    headroom,
    plan_gpu,
)
from tencache_ds.planning.memory_curve import MemoryCurve
from tencache_ds.planning.placement import place_state
from tencache_ds.tiers.device_adam import DeviceAdam, TritonAdam
from tencache_ds.tiers.fused_adam import EXP_AVG, EXP_AVG_SQ, FusedAdam
from tencache_ds.tiers.gradients import GradientTier
from tencache_ds.tiers.optimizer_state import MASTER, OptimizerStateTier

logger = logging.getLogger("DeepSpeed.tencache")

COPY_TIMEOUT_S = 600.0
"""A copy within host memory takes milliseconds; where it takes this long, nothing else gets on either."""

LOOK_EVERY_S = 0.002
"""Memory is looked at no more often than this, so that it costs less than one percent."""

SPARE_SHARE = 0.25
"""Of the headroom: so much more than a pass is expected to take is kept free."""

LOST_SHARE = 0.1
"""Of what a pass is going to take: what is lost between allocations."""

QUANTUM_SHARE = 0.5
"""Of the headroom: so much more state leaves than has to, because each time the device is waited for."""

Agree = Callable[[str, Any, Callable[[Sequence[Any]], Any]], Any]
"""Lets all ranks decide one thing: the topic, this rank's value, and what is made of those of all ranks."""


class MovableWeights(Protocol):
    """The weights of a model, as far as they may live in device memory. Between two steps."""

    def shards(self) -> Sequence[tuple[int, int]]:
        """``(key, bytes)`` of each, in the order in which device memory is given to them."""

    def to_device(self, key: int, memory: torch.Tensor) -> None:
        """Moves one into device memory (uint8, of its length)."""

    def to_host(self, key: int) -> None:
        """Moves one back to where it was."""

    def keeps_host_memory(self, key: int) -> bool:
        """Whether it can go back without a transfer to NVMe."""


class Accounts(Protocol):
    """Who keeps account of memory (a :class:`tencache_ds.session.Session`)."""

    @property
    def host_left_nbytes(self) -> int:
        """What of this rank's host memory nothing has taken."""

    def count_host_state(self, nbytes: int) -> None:
        """More of it is taken by optimizer state, or less."""

    def note_gpu(self, *, weight_nbytes: int, gradient_nbytes: int) -> None:
        """What weights and gradients take in GPU memory now."""


def open_device(on_cuda: bool, fused: FusedAdam) -> tuple[DeviceMemory, DeviceAdam] | None:
    """The memory of the compute device and the kernel for state in it; None where neither is worth having.

    Raises:
        ConfigError: there is no Triton.
    """
    if not on_cuda:
        return None
    device = torch.device("cuda", torch.cuda.current_device())

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        if not fused.copy(target, source).wait(COPY_TIMEOUT_S):
            raise TenCacheError(f"a copy of {source.nbytes} bytes in host memory was not done after {COPY_TIMEOUT_S} s")

    return CudaMemory(device, copy), TritonAdam(device, tail_contracted=fused.tail_contracted)


class GpuHomes:
    """Used by the training thread; :meth:`relieve` by any thread that computes.

    Args:
        options: of the user.
        memory: of the compute device.
        tier: the optimizer's state.
        gradients: the accumulated gradients.
        sub_groups: of each sub-group the weights (keys) of which its elements are, with their numbers of elements, in
            the order in which they lie in it.
        weights: the weights.
        accounts: of host memory for what leaves the device, and of device memory.
        has_store: whether state may go to NVMe.
        agree: among all ranks.
        moved_state: called with a sub-group whose state has changed its places.
        moved_gradient: called with a weight and the tensor in which its gradient is accumulated from now on.
        say: tells the user, on one rank.
    """

    def __init__(
        self,
        options: TenCacheConfig,
        memory: DeviceMemory,
        tier: OptimizerStateTier,
        gradients: GradientTier,
        sub_groups: Sequence[Sequence[tuple[int, int]]],
        weights: MovableWeights,
        accounts: Accounts,
        *,
        has_store: bool,
        agree: Agree,
        moved_gradient: Callable[[int, torch.Tensor], None],
        moved_state: Callable[[int], None],
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._memory = memory
        self._tier = tier
        self._gradients = gradients
        self._sub_groups = sub_groups
        self._weights = weights
        self._accounts = accounts
        self._has_store = has_store
        self._agree = agree
        self._moved_gradient = moved_gradient
        self._moved_state = moved_state
        self._say = say
        self._planned = False
        self._headroom_nbytes = LEAST_HEADROOM_NBYTES
        self._weights_there: list[int] = []
        self._lock = threading.Lock()
        self._t_looked_s = 0.0
        self._stuck = False
        self._curve = MemoryCurve()
        self._place = self._base_nbytes = self._left_nbytes = self._n_flushes = 0
        self._state_nbytes = 0  # in GPU memory: asked for between modules, and a sum over all chunks
        memory.record()

    # Between two steps

    def step_done(self) -> None:
        """An optimizer step is over. After the first, all ranks plan; later, what training needs is given back."""
        if not self._planned:
            self._planned = True
            self._plan()
            return
        if self._state_nbytes and not self._stuck:
            short_nbytes = self._short_nbytes(None)
            if short_nbytes > 0:
                self._release_state(short_nbytes)
        elif self._weights_there and self._short_nbytes(None) > 0:
            self._release_weights()
        self._n_flushes = self._memory.usage().n_flushes
        if self._left_nbytes:
            self._return_gradients()
            logger.warning(
                "training needed GPU memory in this step: %s of optimizer state left it, %s are still there",
                gib(self._left_nbytes),
                gib(self._state_nbytes),
            )
            self._left_nbytes = 0

    def _plan(self) -> None:
        self._memory.synchronize()
        usage = self._memory.usage()
        self._headroom_nbytes = headroom(usage)
        self._curve.complete(usage.peak_nbytes - self._base_nbytes)
        wanted = self._options.gpu_memory
        if isinstance(wanted, Share):
            wanted = int(wanted.fraction * (usage.available_nbytes + usage.allocated_nbytes))
        budget = gpu_budget(usage, wanted)
        smallest = self._agree("GPU memory", budget.nbytes, min)
        reason = budget.reason if smallest == budget.nbytes else "what the rank with the least has free"
        shards = list(self._weights.shards())
        chunks = [
            self._tier.chunks(index) if self._updated_there(index) else () for index in range(len(self._sub_groups))
        ]
        states = [[chunk.nbytes for chunk in group] for group in chunks]
        gradients = [[chunk.numel * self._gradients.dtype.itemsize for chunk in group] for group in chunks]
        plan = plan_gpu([nbytes for _, nbytes in shards], states, gradients, smallest)
        t_start_s = time.perf_counter()
        self._move_weights(shards, plan)
        self._move_state(plan)
        self._memory.synchronize()
        self._memory.trim()
        self._n_flushes = self._memory.usage().n_flushes
        self._report(reason, time.perf_counter() - t_start_s)

    def _updated_there(self, sub_group: int) -> bool:
        """Whether the kernel takes a sub-group's state: Adam's, in single precision."""
        kinds = self._tier.kinds(sub_group)
        dtypes = {self._tier.dtype(sub_group, kind) for kind in kinds}
        return set(kinds) == {MASTER, EXP_AVG, EXP_AVG_SQ} and dtypes == {torch.float32}

    def _move_weights(self, shards: Sequence[tuple[int, int]], plan: GpuPlan) -> None:
        """All ranks move the same weights, or none: those from NVMe leave the order in which collectives are made."""
        chosen = [shard for shard, goes in zip(shards, plan.weights, strict=True) if goes]
        found: dict[int, torch.Tensor] = {}
        try:
            for key, nbytes in chosen:
                found[key] = self._memory.allocate(nbytes)
        except MemoryLimitError as error:
            logger.warning("no weight moves to GPU memory: %s", error)
            found.clear()
        if not self._agree("weights in GPU memory", len(found) == len(chosen), all):
            return
        for key, memory in found.items():
            self._weights.to_device(key, memory)
            self._weights_there.append(key)

    def _move_state(self, plan: GpuPlan) -> None:
        """State and gradients; each rank for itself. An allocation that fails ends it, with what is there."""
        if len(self._weights_there) < sum(plan.weights):
            return
        try:
            for index, count in enumerate(plan.chunks):
                if count:
                    self._move_gradients(index, count)
                    self._relocate({index: self._with_device_chunks(index, count)})
        except MemoryLimitError as error:
            logger.warning("less optimizer state than planned moves to GPU memory: %s", error)
        self._refill_host()

    def _move_gradients(self, sub_group: int, count: int) -> None:
        """Those of weights all of whose elements belong to the first chunks of a sub-group."""
        for key, numel, belongs in self._within(sub_group, count):
            if belongs and not self._gradients.on_device(key):
                memory = self._memory.allocate(numel * self._gradients.dtype.itemsize)
                self._moved_gradient(key, self._gradients.move(key, memory.view(self._gradients.dtype)))

    def _return_gradients(self) -> None:
        """Those of weights whose state has left."""
        for index in range(len(self._sub_groups)):
            for key, _, belongs in self._within(index, self._tier.places(index).count(Place.GPU)):
                if not belongs and self._gradients.on_device(key):
                    self._moved_gradient(key, self._gradients.move(key, None))
        self._note()

    def _within(self, sub_group: int, count: int) -> Iterator[tuple[int, int, bool]]:
        """The weights of a sub-group with their lengths, and whether they end within its first chunks."""
        end, position = sum(chunk.numel for chunk in self._tier.chunks(sub_group)[:count]), 0
        for key, numel in self._sub_groups[sub_group]:
            position += numel
            yield key, numel, position <= end

    def _with_device_chunks(self, sub_group: int, count: int) -> list[Place]:
        """The first chunks on the device, the others where they are."""
        places = self._tier.places(sub_group)
        return [Place.GPU if index < count else place for index, place in enumerate(places)]

    def _refill_host(self) -> None:
        """Chunks that are still on NVMe get the host memory that others have left."""
        places = {index: list(self._tier.places(index)) for index in range(len(self._sub_groups))}
        stored = [
            (group, index, self._tier.chunks(group)[index].nbytes)
            for group, found in places.items()
            for index, place in enumerate(found)
            if place is Place.NVME
        ]
        homes = place_state([nbytes for _, _, nbytes in stored], max(self._accounts.host_left_nbytes, 0))
        for (group, index, _), home in zip(stored, homes, strict=True):
            places[group][index] = home
        if Place.HOST in homes:
            self._relocate(places)

    def _relocate(self, places: dict[int, list[Place]]) -> None:
        before = self._tier.resident_nbytes
        try:
            self._tier.relocate(places, self._memory)
        finally:
            self._accounts.count_host_state(self._tier.resident_nbytes - before)
            self._state_nbytes = self._tier.device_nbytes
            for index in places:
                self._moved_state(index)

    # Giving back

    def begin_pass(self) -> None:
        """A forward pass begins."""
        self._place, self._base_nbytes = 0, self._memory.usage().allocated_nbytes
        if not self._planned:
            self._curve.begin()

    def relieve(self) -> None:
        """Called between modules: takes optimizer state out of GPU memory where training is about to need it. Cheap,
        unless it is."""
        place, self._place = self._place, self._place + 1
        if not self._planned:
            self._curve.record(self._memory.usage().allocated_nbytes - self._base_nbytes)
            return
        now_s = time.monotonic()
        if now_s - self._t_looked_s < LOOK_EVERY_S or not self._lock.acquire(blocking=False):
            return
        try:
            self._t_looked_s = now_s
            if self._state_nbytes and not self._stuck:
                short_nbytes = self._short_nbytes(place)
                if short_nbytes > 0:
                    self._release_state(short_nbytes)
        except MemoryLimitError as error:
            self._stuck = True
            logger.warning("training needs GPU memory, but optimizer state has nowhere to go: %s", error)
        finally:
            self._lock.release()

    def _short_nbytes(self, place: int | None) -> int:
        """Bytes that have to become free: what is missing to the headroom, if half of that is gone, or what the rest
        of a pass will take beyond what is there. Between two passes ``place`` is None."""
        usage = self._memory.usage()
        available_nbytes = usage.available_nbytes
        short_nbytes = self._headroom_nbytes - available_nbytes
        if available_nbytes >= self._headroom_nbytes // 2:
            short_nbytes = 0
        if place is not None:
            more_nbytes = self._curve.more_nbytes(place, usage.allocated_nbytes - self._base_nbytes)
            needed_nbytes = (1 + LOST_SHARE) * more_nbytes + SPARE_SHARE * self._headroom_nbytes
            short_nbytes = max(short_nbytes, int(needed_nbytes) - available_nbytes)
        elif usage.n_flushes > self._n_flushes:  # it found memory, but each time it does a step takes twice as long
            short_nbytes = max(short_nbytes, self._headroom_nbytes)
        return short_nbytes

    def _release_state(self, nbytes: int) -> None:
        there = self._state_nbytes
        states = [[chunk.nbytes for chunk in self._tier.chunks(index)] for index in range(len(self._sub_groups))]
        counts = [sum(place is Place.GPU for place in self._tier.places(index)) for index in range(len(states))]
        left = chunks_to_release(states, counts, nbytes + int(QUANTUM_SHARE * self._headroom_nbytes))
        host_nbytes = self._accounts.host_left_nbytes
        places: dict[int, list[Place]] = {}
        for index, count in enumerate(left):
            if count == counts[index]:
                continue
            places[index] = list(self._tier.places(index))
            for chunk in self._tier.chunks(index)[count : counts[index]]:
                fits = chunk.nbytes <= host_nbytes or not self._has_store
                host_nbytes -= chunk.nbytes if fits else 0
                places[index][chunk.index] = Place.HOST if fits else Place.NVME
        self._memory.synchronize()
        self._relocate(places)
        self._memory.trim()
        left_nbytes = there - self._state_nbytes
        self._base_nbytes -= left_nbytes
        self._left_nbytes += left_nbytes

    def _release_weights(self) -> None:
        """The last resort, and only weights that go without the other ranks noticing."""
        leaving = [key for key in self._weights_there if self._weights.keeps_host_memory(key)]
        self._memory.synchronize()
        for key in leaving:
            self._weights.to_host(key)
            self._weights_there.remove(key)
        self._memory.trim()
        self._note()
        if leaving:
            logger.warning("training needs GPU memory: %d weights left it", len(leaving))

    # Reporting and lifetime

    def _report(self, reason: str, seconds: float) -> None:
        nbytes = self._note()
        self._say(
            f"per rank {gib(nbytes)} of weights, {gib(self._gradients.device_nbytes)} of gradients and "
            f"{gib(self._state_nbytes)} of optimizer state are in GPU memory from now on ({reason}); moved in "
            f"{seconds:.1f} s"
        )

    def _note(self) -> int:
        """Tells what is there; returns the weights' bytes."""
        nbytes = dict(self._weights.shards())
        weights = sum(nbytes[key] for key in self._weights_there)
        self._accounts.note_gpu(weight_nbytes=weights, gradient_nbytes=self._gradients.device_nbytes)
        return weights

    def close(self) -> None:
        """Gives the weights back to their model, where they were. Idempotent; the tiers are closed by their owner."""
        if not self._weights_there:
            return
        self._memory.synchronize()
        while self._weights_there:
            key = self._weights_there.pop()
            try:
                self._weights.to_host(key)
            except TenCacheError:
                logger.exception("a weight could not leave GPU memory, and stays there")
        self._note()
