# SPDX-License-Identifier: Apache-2.0
"""Homes of weights' shards between two uses, their copies in staging buffers, and the registry of both.

A home is where a shard lives, and its memory there, whoever has allocated it. The host memory of weights that stay
there is packed into slabs.

[Note: home and copy] A weight has two states. Its home changes by relocation only: from RAM or NVMe into GPU memory,
and back to where it came from. Its copy (:class:`~tencache_ds.tiers.weight_homes.CopyState`) says what a staging
buffer holds of a weight that lives on NVMe, and changes with every use; a weight with its home in memory has none. A
home changes only while there is no copy.

Two engines may share a weight, as frozen weights are. Each gives it memory of its own: the weight lives in that of the
last, and in an earlier one's as engines end, in whatever order they do.

A weight in GPU memory keeps the host memory it has left, so that it can return at once, until something else needs it.
DeepSpeed's own shards are the same but for that: their host memory is DeepSpeed's, and is never freed here.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.io import Extent, Ticket
from tencache_ds.memory.arena import HostArena
from tencache_ds.memory.lease import DeviceEvent
from tencache_ds.observability.counters import Access
from tencache_ds.placement.places import Place
from tencache_ds.tiers.mover import Buffer

SLAB_NBYTES = 2 * 2**20
"""One registration with the driver per slab instead of one per small weight. Larger weights get their own memory, which
goes back when they move to GPU memory; that of a slab stays as long as one of its weights is in it."""

ALIGNMENT_NBYTES = 256


class ResidentMemory:
    """Hands out pieces of an arena, in any thread; pieces that are not returned are freed by the arena's owner."""

    def __init__(self, arena: HostArena) -> None:
        self.arena = arena
        self._lock = threading.Lock()
        self._slab: torch.Tensor | None = None
        self._used = 0
        self._pieces: dict[int, tuple[torch.Tensor, int]] = {}  # by storage: its slab, and how many pieces are in use

    def take(self, nbytes: int) -> torch.Tensor:
        """A zeroed 1-D uint8 tensor of ``nbytes``.

        Raises:
            MemoryLimitError, LockedMemoryError: the arena has no such memory.
        """
        with self._lock:
            length = -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
            if length >= SLAB_NBYTES:
                slab = self.arena.allocate(length, "resident weights")
                piece = slab[:length]
            else:
                if self._slab is None or self._used + length > self._slab.numel():
                    self._slab, self._used = self.arena.allocate(SLAB_NBYTES, "resident weights"), 0
                slab = self._slab
                piece = slab[self._used : self._used + length]
                self._used += length
            _, n_pieces = self._pieces.get(_address(slab), (slab, 0))
            self._pieces[_address(slab)] = slab, n_pieces + 1
        return piece.zero_()[:nbytes]

    def shares_pages(self, nbytes: int) -> bool:
        """Whether a piece of ``nbytes`` is in a slab with others."""
        return nbytes + ALIGNMENT_NBYTES <= SLAB_NBYTES

    def give_back(self, piece: torch.Tensor) -> None:
        """A piece is not needed any more. A slab goes back to the system when all of its pieces are, and when nothing
        refers to it any more; no device may still access it.

        Raises:
            LockedMemoryError: the driver refused; the memory stays mapped.
        """
        with self._lock:
            slab, n_pieces = self._pieces[_address(piece)]
            if n_pieces > 1:
                self._pieces[_address(piece)] = slab, n_pieces - 1
                return
            del self._pieces[_address(piece)]
            if self._slab is slab:
                self._slab = None
        self.arena.leave(slab)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Home:
    """One weight's home. Guarded by its owner's lock.

    Args:
        memory: the shard in host memory, 1-D; None if it lives on NVMe.
        source: where this memory goes when nothing needs it; None if it is someone else's, and stays.

    Attributes:
        place: where the shard lives.
        memory: the shard there, 1-D; None on NVMe.
        returns_to: where it goes from GPU memory.
    """

    __slots__ = ("_earlier", "_source", "_vacant", "memory", "place", "returns_to")

    def __init__(self, memory: torch.Tensor | None, source: ResidentMemory | None = None) -> None:
        self.memory = memory
        self.place = self.returns_to = Place.NVME if memory is None else Place.HOST
        self._source = source
        self._vacant: torch.Tensor | None = None  # host memory of a shard that is in GPU memory
        self._earlier: list[torch.Tensor] = []  # device memory of other engines

    @property
    def stored(self) -> bool:
        """Whether the shard lives on NVMe."""
        return self.place is Place.NVME

    @property
    def in_host_memory(self) -> torch.Tensor | None:
        """The shard, if it lives in host memory."""
        return self.memory if self.place is Place.HOST else None

    # Host memory, in bytes

    @property
    def host_nbytes(self) -> int:
        """Host memory that the shard is in, or has left and keeps."""
        return sum(tensor.nbytes for tensor in (self.in_host_memory, self._vacant) if tensor is not None)

    @property
    def missing_nbytes(self) -> int:
        """Host memory that has to be allocated before the shard can return to it."""
        returns = self.place is Place.GPU and self.returns_to is Place.HOST
        return self.memory.nbytes if returns and self.memory is not None and self._vacant is None else 0

    def free_unused(self) -> int:
        """Frees host memory that the shard has left; returns how much. No copy from it may be under way."""
        if self._vacant is None or self._source is None:
            return 0
        memory, self._vacant = self._vacant, None
        self._source.give_back(memory)
        return memory.nbytes

    def end(self) -> None:
        """The weight is gone, and nothing refers to its shard any more: its host memory goes back."""
        if self._source is not None and self.in_host_memory is not None:
            self._source.give_back(self.in_host_memory)
        self.free_unused()
        self.memory = None

    # Relocation

    def to_device(self, memory: torch.Tensor, read: Callable[[], torch.Tensor] | None = None) -> None:
        """Moves the shard into device memory.

        Args:
            memory: 1-D, of the shard's length and dtype; its contents are replaced.
            read: gives the value of a shard that lives on NVMe; not asked for others.

        Raises:
            StorageError: it could not be read; it stays where it is.
        """
        if self.memory is not None:
            memory.copy_(self.memory)
        else:
            assert read is not None, "it lives on NVMe"
            memory.copy_(read())
        if self.place is Place.GPU and self.memory is not None:
            self._earlier.append(self.memory)
        else:
            self._vacant = self.memory
        self.memory, self.place = memory, Place.GPU

    def leave_device(self, write: Callable[[torch.Tensor], None] | None = None) -> None:
        """Moves the shard out of the memory of the last :meth:`to_device`, to where it was.

        Args:
            write: stores the value of a shard that lived on NVMe; not asked for others.

        Raises:
            MemoryLimitError, StorageError: there is no place for it; it stays.
            TenCacheError: it is not there.
        """
        if self.place is not Place.GPU or self.memory is None:
            raise TenCacheError("a weight that is not in GPU memory cannot leave it")
        if self._earlier:
            memory = self._earlier.pop()
            self.memory = memory.copy_(self.memory)
            return
        host = self._vacant
        if self.returns_to is Place.NVME:
            assert write is not None, "it lives on NVMe"
            write(self.memory)
        else:
            if host is None:
                assert self._source is not None, "the memory of others is never freed"
                host = self._source.take(self.memory.nbytes).view(self.memory.dtype)
            host.copy_(self.memory)
        self.memory, self._vacant, self.place = host, None, self.returns_to


class CopyState(enum.Enum):
    """What a staging buffer holds of a weight, which lives on NVMe if it holds anything. See [Note: home and copy] in
    :mod:`tencache_ds.tiers.weight_homes`."""

    NONE = "not in use"
    """There is no buffer: the value is on NVMe, or in the memory of the weight's home."""

    INITIAL = "initial"
    """In ordinary memory, being filled for the first time; not yet on NVMe."""

    READING = "reading"
    """On NVMe, and a read into a staging buffer is under way."""

    STAGED = "staged"
    """On NVMe, with a clean, still unused copy in a staging buffer."""

    EXPOSED = "exposed"
    """On NVMe, with a clean copy in a staging buffer that DeepSpeed is reading from."""

    UPDATING = "updating"
    """The copy on NVMe is out of date: the optimizer is filling a staging buffer that will be written."""

    OVERWRITING = "overwriting"
    """The copy on NVMe is still the old value: DeepSpeed is filling a staging buffer with a new one from outside the
    optimizer. Until then the contents of the buffer are undefined."""


_TRANSITIONS: dict[CopyState, frozenset[CopyState]] = {
    CopyState.INITIAL: frozenset({CopyState.NONE}),
    CopyState.NONE: frozenset({CopyState.READING, CopyState.UPDATING, CopyState.OVERWRITING}),
    CopyState.READING: frozenset({CopyState.STAGED, CopyState.NONE}),
    CopyState.STAGED: frozenset({CopyState.EXPOSED, CopyState.NONE}),
    CopyState.EXPOSED: frozenset({CopyState.NONE, CopyState.STAGED, CopyState.OVERWRITING}),
    CopyState.UPDATING: frozenset({CopyState.NONE}),
    CopyState.OVERWRITING: frozenset({CopyState.NONE}),
}


@dataclass(frozen=True, slots=True)
class WeightHome:
    """Where a weight's shard lives between two uses.

    Attributes:
        key: DeepSpeed's parameter id.
        name: name in messages.
        numel: elements of the shard, padding included.
        on_nvme: on NVMe, or else in host memory.
    """

    key: int
    name: str
    numel: int
    on_nvme: bool


class StagingBuffer(Buffer, Protocol):
    """Memory behind a weight that is not resident: of a pool, or ordinary host memory when there is none."""

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the pool's slot that it is; 0 for ordinary memory."""

    @property
    def for_gpu(self) -> bool:
        """Whether it is memory of the compute device, which may only be accessed by copies within the device."""

    def release_after(self, event: DeviceEvent, /) -> None:
        """Gives it back when its last reader is done."""


@dataclass(slots=True)
class Weight:
    """One weight's shard.

    Attributes:
        key: DeepSpeed's parameter id.
        name: name in messages.
        numel: elements of the shard, padding included.
        dtype: the weight's dtype.
        home: where it lives, and its memory there.
        copy: what its staging buffer holds; changed by :meth:`move_to` only.
        extent: its place on NVMe, once it has one.
        buffer: memory it is staged in, if any.
        ticket: the read under way or just done.
        trainable: whether the optimizer updates it.
        prefetched: whether it was in memory, or being read, before it was requested.
        kept: whether it is staged still, from an earlier exposure.
        reader: of a staged weight that was exposed before: what still copies from its buffer.
        counted: whether it has a part of the budget of resident weights.
    """

    key: int
    name: str
    numel: int
    dtype: torch.dtype
    home: Home
    copy: CopyState = CopyState.NONE
    extent: Extent | None = None
    buffer: StagingBuffer | None = None
    ticket: Ticket | None = None
    trainable: bool = True
    prefetched: bool = False
    kept: bool = False
    reader: DeviceEvent | None = None
    counted: bool = False

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def unused(self) -> bool:
        """Whether it is staged, or being read, and not in use yet."""
        return self.copy in (CopyState.STAGED, CopyState.READING)

    @property
    def incomplete(self) -> bool:
        """Whether its staging buffer is being filled with a new value and holds none yet."""
        return self.copy in (CopyState.UPDATING, CopyState.OVERWRITING)

    @property
    def evictable(self) -> bool:
        """Whether the staging buffer holds a clean copy that is not in use."""
        read = self.copy is CopyState.READING and self.ticket is not None and self.ticket.done
        return read or self.copy is CopyState.STAGED

    @property
    def access(self) -> Access:
        """How the bytes of a requested weight were available."""
        if not self.prefetched:
            return Access.DEMAND
        under_way = self.ticket is not None and not self.ticket.done
        return Access.LATE if under_way else Access.PREFETCHED

    @property
    def only_stored(self) -> bool:
        """Whether it lives on NVMe and no buffer holds it."""
        return self.home.stored and self.copy is CopyState.NONE

    def move_to(self, copy: CopyState) -> None:
        """Changes the state of the copy; a transition that the table does not know is a bug and raises."""
        if copy not in _TRANSITIONS[self.copy]:
            raise TenCacheError(f"weight {self.name}: no transition from {self.copy.value} to {copy.value}")
        self.copy = copy

    def memory(self) -> torch.Tensor:
        """The staging buffer's bytes."""
        if self.buffer is None:
            raise TenCacheError(f"weight {self.name} has no staging buffer: it is {self.copy.value}")
        return self.buffer.buffer

    def view(self) -> torch.Tensor:
        """The shard in its staging buffer, 1-D."""
        return self.memory()[: self.nbytes].view(self.dtype)


class WeightHomes:
    """The weights of a tier. Changed with the tier's lock held; questions may be asked in any thread.

    Args:
        memory: of resident weights.
        budget_nbytes: bytes of weights that may stay resident; asked once, at the first weight.

    Attributes:
        weights: by DeepSpeed's parameter id, in the order of registration.
    """

    def __init__(self, memory: ResidentMemory, budget_nbytes: Callable[[], int]) -> None:
        self.weights: dict[int, Weight] = {}
        self._memory = memory
        self._budget = budget_nbytes
        self._left_nbytes: int | None = None

    def make(self, key: int, name: str, numel: int, dtype: torch.dtype, *, always_resident: bool) -> Weight:
        """A new weight, not among the others yet: in zeroed resident memory, if there is some left or it is to be there
        always; otherwise its first value needs a buffer.

        Raises:
            MemoryLimitError, LockedMemoryError: the arena has no such memory.
            TenCacheError: there is such a weight already.
        """
        if key in self.weights:
            raise TenCacheError(f"weight {name} (id {key}) is registered twice")
        if self._left_nbytes is None:
            self._left_nbytes = self._budget()
        weight = Weight(key, name, numel, dtype, Home(None), CopyState.INITIAL)
        if always_resident or weight.nbytes <= self._left_nbytes:
            weight.counted = not always_resident
            self._left_nbytes -= weight.nbytes if weight.counted else 0
            weight.home = Home(self._memory.take(weight.nbytes).view(dtype), self._memory)
            weight.copy = CopyState.NONE
        return weight

    def drop(self, key: int) -> None:
        """Removes a weight and gives its memory back, which another one may have."""
        weight = self.weights.pop(key)
        if self._left_nbytes is not None and weight.counted:
            self._left_nbytes += weight.nbytes
        weight.home.end()

    def holds(self, key: int) -> bool:
        """Whether there is such a weight."""
        return key in self.weights

    @property
    def keys(self) -> frozenset[int]:
        """All weights."""
        return frozenset(self.weights)

    def of(self, key: int) -> Home:
        """The home of one weight."""
        return self.weights[key].home

    def is_resident(self, key: int) -> bool:
        """Whether the weight lives in memory, of the host or the device, and nowhere else."""
        return not self.of(key).stored

    def on_device(self, key: int) -> bool:
        """Whether the weight lives in device memory."""
        return self.of(key).place is Place.GPU

    def free_unused(self) -> int:
        """Frees the host memory of weights that are in device memory; returns how much. No copy from it may be under
        way."""
        return sum(weight.home.free_unused() for weight in self.weights.values())

    def nbytes_of(self, key: int) -> int:
        """Bytes of one shard."""
        return self.weights[key].nbytes

    def stored_nbytes(self) -> list[int]:
        """Bytes of each shard that lives on NVMe, in the order of registration."""
        return [weight.nbytes for weight in self.weights.values() if weight.home.stored]

    def all(self) -> list[WeightHome]:
        """Where each weight lives, in the order of registration."""
        return [
            WeightHome(weight.key, weight.name, weight.numel, weight.home.stored)
            for weight in tuple(self.weights.values())
        ]

    @property
    def largest_nbytes(self) -> int:
        """Bytes of the largest shard."""
        return max((weight.nbytes for weight in self.weights.values()), default=0)

    @property
    def sharing_nbytes(self) -> int:
        """Bytes of resident weights whose host memory comes back only with that of others."""
        resident = (weight.nbytes for weight in self.weights.values() if not weight.home.stored)
        return sum(nbytes for nbytes in resident if self._memory.shares_pages(nbytes))

    @property
    def allocated_nbytes(self) -> int:
        """Bytes that the weights take on NVMe."""
        return sum(w.extent.allocated_nbytes for w in self.weights.values() if w.extent is not None)

    @property
    def resident_nbytes(self) -> int:
        """Bytes of host memory that weights keep; those of weights that are in device memory for now among them."""
        return sum(weight.home.host_nbytes for weight in self.weights.values())
