# SPDX-License-Identifier: Apache-2.0
"""The home of a weight's shard: where it lives between two uses, and its memory there, whoever has allocated it.
The host memory of weights that stay there is packed into slabs.

[Note: home and copy] A weight has two states. Its home changes by relocation only: from RAM or NVMe into GPU memory,
and back to where it came from. Its copy (:class:`~tencache_ds.tiers.weight_record.CopyState`) says what a staging
buffer holds of a weight that lives on NVMe, and changes with every use; a weight with its home in memory has none. A
home changes only while there is no copy.

Two engines may share a weight, as frozen weights are. Each gives it memory of its own: the weight lives in that of the
last, and in an earlier one's as engines end, in whatever order they do.

A weight in GPU memory keeps the host memory it has left, so that it can return at once, until something else needs it.
DeepSpeed's own shards are the same but for that: their host memory is DeepSpeed's, and is never freed here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.memory.arena import HostArena
from tencache_ds.placement.places import Place

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
