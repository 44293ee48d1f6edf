# SPDX-License-Identifier: Apache-2.0
"""Chunks of optimizer state: on NVMe, streamed through staging buffers in the order of a pass, and in host memory.

[Note: fresh chunks] Before the first update all state but the master weights is zero, and these are the model's
weights, so that remainders are zero too. Of a fresh chunk only its first piece, the master weights, is written, and
where these are split nothing. Its extent is as large as it will need to be; the first write after an update fills it.

Master weights may be split in both places (:mod:`tencache_ds.tiers.split_master`); only who asks for it sees them so.
In host memory everybody else gets a copy. A chunk whose master weights are whole for once takes the memory for that,
and gives it back when they are split again: after the next update at the latest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.io import ExtentStore, Priority, Ticket
from tencache_ds.layout import round_up
from tencache_ds.memory.arena import HostArena
from tencache_ds.memory.pool import BufferPool, Lease
from tencache_ds.observability.counters import Stall
from tencache_ds.planning.chunks import Chunk
from tencache_ds.tensors import empty
from tencache_ds.tiers.mover import Mover
from tencache_ds.tiers.split_master import SplitMasters, split_layout
from tencache_ds.tiers.sub_group import ChunkInUse, SubGroup


@dataclass(slots=True)
class _Ahead:
    chunk: Chunk
    lease: Lease
    ticket: Ticket | None  # None: there is nothing to read

    @property
    def done(self) -> bool:
        return self.ticket is None or self.ticket.done

    def end(self) -> None:
        """Gives the buffer back, once nothing is read into it any more."""
        if self.ticket is None:
            self.lease.release()
        else:
            self.lease.release_with(self.ticket)


class StoredChunks:
    """Used by the thread of the optimizer's state.

    Args:
        groups: all sub-groups; kept up to date by the tier.
        mover: moves the bytes.
        pool: the pool of chunk buffers.
        masters: splits master weights; None where they are always whole.
    """

    def __init__(
        self,
        groups: Sequence[SubGroup],
        mover: Mover,
        pool: Callable[[], BufferPool],
        masters: SplitMasters | None = None,
    ) -> None:
        self._groups = groups
        self._mover = mover
        self._pool = pool
        self._masters = masters
        self._ahead: deque[_Ahead] = deque()
        self._queue: deque[Chunk] = deque()

    @property
    def largest_nbytes(self) -> int:
        """The most bytes that a chunk here may have."""
        return self._pool().largest_nbytes

    @property
    def n_buffers(self) -> int:
        """How many chunks can be in buffers at a time."""
        return sum(size_class.count for size_class in self._pool().stats().classes)

    # A pass

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """Starts a pass over those of the chunks that live here, and reads the first ones ahead."""
        self.abandon()
        self._queue = deque(filter(self._is_here, chunks))
        self.read_ahead()

    def begin_within(self, chunks: Iterable[Chunk]) -> None:
        """Reads the next chunks ahead, unless a pass under way reaches them anyway."""
        here = [chunk for chunk in chunks if self._is_here(chunk)]
        if len(here) > 1 and not any(entry.chunk is here[0] for entry in self._ahead):
            self.begin(here)

    def read_ahead(self) -> None:
        """Reads the next ones of the pass into the buffers that are free."""
        while self._queue:
            chunk = self._queue[0]
            lease = self._pool().try_lease(chunk.nbytes, _owner(chunk), "read-ahead")
            if lease is None:
                return
            self._queue.popleft()
            self._ahead.append(self._start_read(chunk, lease, Priority.BACKGROUND))

    def abandon(self) -> None:
        """Ends the pass; unused read-ahead is discarded."""
        self._queue.clear()
        self._abandon_ahead()

    # One chunk

    def take(self, chunk: Chunk, *, split: bool = False) -> tuple[Lease, bytes]:
        """A buffer with a chunk's bytes, read ahead in the order of the pass or read now.

        Args:
            chunk: which one.
            split: its master weights may be split, for an update that compares the weights and writes to them.

        Returns:
            The buffer, and the digest of the weights that its master weights are split over; empty: they are whole.

        Raises:
            StorageError: the read failed.
            TenCacheError: the master weights were split over weights that were changed since.
        """
        if self._ahead and self._ahead[0].chunk is chunk:
            entry = self._ahead.popleft()
        else:
            self._skip_to(chunk)
            entry = self._start_read(chunk, self._lease(chunk), Priority.URGENT)
        if entry.ticket is not None:
            self._mover.wait(entry.ticket, Stall.OPTIMIZER_READ, entry.lease)
        try:
            digest = self._ready(chunk, entry.lease.buffer, split=split)
        except BaseException:
            entry.lease.release()
            raise
        self.read_ahead()
        return entry.lease, digest

    def ready(self, chunk: Chunk) -> bool:
        """Whether its bytes were read ahead and are there."""
        return bool(self._ahead) and self._ahead[0].chunk is chunk and self._ahead[0].done

    def blank(self, chunk: Chunk, *, fresh: bool = False) -> Lease:
        """A zeroed buffer for a chunk whose bytes are of no interest; of a ``fresh`` one only the first piece is."""
        # Read-ahead of a pass may be this chunk's old state, or hold the buffers this would wait for.
        if self._ahead:
            self.abandon()
        lease = self._lease(chunk)
        lease.buffer[: chunk.pieces[0].nbytes if fresh else chunk.nbytes].zero_()
        return lease

    def put(
        self,
        chunk: Chunk,
        lease: Lease,
        *,
        changed: bool,
        digest: bytes = b"",
        keep_whole: bool = False,
        fresh: bool = False,
    ) -> None:
        """Ends the use of a buffer; a changed chunk is written without waiting.

        Args:
            chunk: which one.
            lease: the buffer.
            changed: whether its bytes are others than those stored.
            digest: of the weights that its master weights are split over in the buffer; empty: they are whole.
            keep_whole: they are not to be.
            fresh: only its first piece is in the buffer, whole master weights; the others are zero.
        """
        if changed:
            self._write_back(chunk, lease, digest, keep_whole=keep_whole, fresh=fresh)
        else:
            lease.release()
        self.read_ahead()

    def start_split(self, chunk: Chunk) -> bool:
        """Gives a chunk its state before the first update, with split master weights that equal the model's weights;
        without a transfer. False, and nothing is changed, where they cannot be split.
        """
        group = self._groups[chunk.sub_group]
        extent = group.extents.get(chunk.index)
        if self._masters is None or extent is None or extent.nbytes != split_layout(chunk).nbytes:
            return False
        digest = self._masters.start(chunk, group.spec.states)
        if not digest:
            return False
        if self._ahead:
            self.abandon()
        group.split[chunk.index] = digest
        group.fresh.add(chunk.index)
        return True

    def is_split(self, chunk: Chunk) -> bool:
        """Whether a chunk's master weights are stored split."""
        group = self._groups[chunk.sub_group]
        return chunk.index in group.extents and chunk.index in group.split

    @contextmanager
    def reading(self, chunk: Chunk) -> Iterator[torch.Tensor]:
        """The bytes of a chunk, waited for, in a staging buffer until the block ends; its master weights are whole.

        Raises:
            StorageError: the read failed.
            TenCacheError: the master weights were split over weights that were changed since.
        """
        entry = self._start_read(chunk, self._lease(chunk), Priority.URGENT)
        try:
            if entry.ticket is not None:
                entry.ticket.wait(self._mover.timeout_s)
            self._ready(chunk, entry.lease.buffer, split=False)
            yield entry.lease.buffer[: chunk.nbytes]
        finally:
            entry.end()

    # Places

    def allocate(self, group: SubGroup, chunk: Chunk) -> None:
        """Allocates a place for a chunk; its contents are undefined.

        Raises:
            SpaceError: not enough space.
            TenCacheError: there is no store.
        """
        masters = self._masters
        nbytes = chunk.nbytes if masters is None else masters.nbytes_of(chunk, group.spec.states)
        self._allocate(group, chunk, nbytes)

    def store(self, group: SubGroup, chunk: Chunk, source: torch.Tensor) -> None:
        """Gives a chunk a place here and writes its bytes, which is waited for; without it after an error.

        Raises:
            SpaceError: not enough space.
            StorageError: the write failed.
            TenCacheError: there is no store.
        """
        self._require_store(chunk)
        lease = self._lease(chunk)
        try:
            lease.buffer[: chunk.nbytes].copy_(source)
            self._allocate(group, chunk, chunk.nbytes)
        except BaseException:
            lease.release()
            raise
        try:
            self._write_back(chunk, lease, b"", keep_whole=False).wait(self._mover.timeout_s)
        except BaseException:
            self.forget(group, chunk)
            raise

    def forget(self, group: SubGroup, chunk: Chunk) -> None:
        """Gives up a chunk's place here, if it has one."""
        extent = group.extents.pop(chunk.index, None)
        group.split.pop(chunk.index, None)
        group.fresh.discard(chunk.index)
        if extent is not None:
            self._require_store(chunk).free(extent)

    # Mechanics

    def _require_store(self, chunk: Chunk) -> ExtentStore:
        if self._mover.store is None:
            raise TenCacheError(f"sub-group {chunk.sub_group} is assigned to NVMe, but there is no store")
        return self._mover.store

    def _is_here(self, chunk: Chunk) -> bool:
        return chunk.index in self._groups[chunk.sub_group].extents

    def _skip_to(self, chunk: Chunk) -> None:
        """The caller left the order of the pass: chunks read ahead are useless if they lie before ``chunk``."""
        if chunk in self._queue:
            while self._queue.popleft() is not chunk:
                pass
            self._abandon_ahead()
        elif self._ahead:
            self.abandon()

    def _abandon_ahead(self) -> None:
        while self._ahead:
            self._ahead.popleft().end()

    def _lease(self, chunk: Chunk) -> Lease:
        return self._mover.lease(self._pool(), chunk.nbytes, _owner(chunk), "update")

    def _start_read(self, chunk: Chunk, lease: Lease, priority: Priority) -> _Ahead:
        group, nbytes = self._groups[chunk.sub_group], self._written_nbytes(chunk)
        if nbytes == 0:
            return _Ahead(chunk, lease, None)
        return _Ahead(chunk, lease, self._mover.read(group.extents[chunk.index], lease, priority, nbytes=nbytes))

    def _written_nbytes(self, chunk: Chunk) -> int:
        """How many bytes of a chunk are stored, from its first: see [Note: fresh chunks]."""
        group = self._groups[chunk.sub_group]
        if chunk.index not in group.fresh:
            return group.extents[chunk.index].allocated_nbytes
        return 0 if chunk.index in group.split else round_up(chunk.pieces[0].nbytes)

    def _allocate(self, group: SubGroup, chunk: Chunk, nbytes: int) -> None:
        name = f"optimizer chunk {chunk.sub_group}.{chunk.index}"
        group.extents[chunk.index] = self._require_store(chunk).allocate(nbytes, name)

    def _ready(self, chunk: Chunk, buffer: torch.Tensor, *, split: bool) -> bytes:
        """Makes of a chunk that was read what its user expects; the digest of what its master weights are split over
        then."""
        group = self._groups[chunk.sub_group]
        digest = group.split.get(chunk.index)
        written_nbytes, end = self._written_nbytes(chunk), group.extents[chunk.index].allocated_nbytes
        if written_nbytes < end:
            buffer[written_nbytes:end].zero_()
        if digest is None or self._masters is None:
            return b""
        if split and self._masters.in_place(chunk):
            return digest
        self._masters.join(chunk, buffer, self._masters.check(chunk, digest))
        return b""

    def _write_back(
        self, chunk: Chunk, lease: Lease, digest: bytes, *, keep_whole: bool, fresh: bool = False
    ) -> Ticket:
        group = self._groups[chunk.sub_group]
        try:
            digest = digest or self._split(chunk, lease.buffer, keep_whole=keep_whole or fresh)
            nbytes = split_layout(chunk).nbytes if digest else chunk.nbytes
            old = group.extents[chunk.index]
            if old.nbytes == nbytes:
                group.extents[chunk.index] = self._mover.relocate(old)
            else:
                self._allocate(group, chunk, nbytes)
                self._require_store(chunk).free(old)
        except BaseException:
            lease.release()
            raise
        if digest:
            group.split[chunk.index] = digest
        else:
            group.split.pop(chunk.index, None)
        if fresh:
            group.fresh.add(chunk.index)
        else:
            group.fresh.discard(chunk.index)
        return self._mover.write_back(group.extents[chunk.index], lease, nbytes=self._written_nbytes(chunk))

    def _split(self, chunk: Chunk, buffer: torch.Tensor, *, keep_whole: bool) -> bytes:
        """Splits the master weights of a whole chunk in a buffer, if it can; the digest of the weights, or nothing."""
        if self._masters is None or keep_whole:
            return b""
        return self._masters.split(chunk, buffer, self._groups[chunk.sub_group].spec.states)


def _owner(chunk: Chunk) -> str:
    """Its name in messages about buffers."""
    return f"chunk {chunk.sub_group}.{chunk.index}"


# In host memory


PURPOSE = "optimizer state"


class ResidentChunks:
    """Used by the thread of the optimizer's state.

    Args:
        groups: all sub-groups; kept up to date by the tier.
        memory: of the chunks.
        masters: splits master weights; None where they are always whole.
    """

    def __init__(self, groups: Sequence[SubGroup], memory: HostArena, masters: SplitMasters | None) -> None:
        self._groups = groups
        self._memory = memory
        self._masters = masters if masters is not None and masters.in_memory else None

    def nbytes_of(self, group: SubGroup, chunk: Chunk) -> int:
        """Bytes that a chunk takes here, or would take if it were here."""
        memory = group.resident.get(chunk.index)
        if memory is not None:
            return memory.nbytes
        if self._masters is None or group.spec.whole:
            return chunk.nbytes
        extent = group.extents.get(chunk.index)
        return self._masters.nbytes_of(chunk, group.spec.states) if extent is None else extent.nbytes

    def allocate(self, group: SubGroup, chunk: Chunk) -> None:
        """Gives a chunk memory of zeros, to be written next: by :meth:`start_split` or into :meth:`blank`."""
        group.resident[chunk.index] = self._memory.allocate(self.nbytes_of(group, chunk), PURPOSE)

    def start_split(self, chunk: Chunk) -> bool:
        """See :meth:`OptimizerStateTier.start_split`: of a chunk of zeros."""
        group = self._groups[chunk.sub_group]
        if self._masters is None or chunk.index not in group.resident:
            return False
        digest = self._masters.start(chunk, group.spec.states)
        if digest:
            group.split[chunk.index] = digest
        return bool(digest)

    def take(self, chunk: Chunk, *, split: bool) -> ChunkInUse:
        """See :meth:`OptimizerStateTier.take`."""
        group = self._groups[chunk.sub_group]
        digest = group.split.get(chunk.index)
        if digest is None or self._masters is None:
            return ChunkInUse(chunk, group.resident_views(chunk))
        if split and self._masters.in_place(chunk):
            return ChunkInUse(chunk, group.views_of(split_layout(chunk), group.resident[chunk.index]), digest)
        copy = self._joined(self._masters, group, chunk)
        return ChunkInUse(chunk, group.views_of(chunk, copy), _write_back=partial(self._write_back, group, chunk, copy))

    def blank(self, chunk: Chunk) -> ChunkInUse:
        """A chunk whose old state is of no interest, whole."""
        group = self._groups[chunk.sub_group]
        memory = group.resident.get(chunk.index)
        if memory is not None and (chunk.index in group.split or memory.nbytes < chunk.nbytes):
            self._replace(group, chunk, self._memory.allocate(chunk.nbytes, PURPOSE))
            group.split.pop(chunk.index, None)
        return ChunkInUse(chunk, group.resident_views(chunk))

    def put(self, chunk: Chunk, digest: bytes) -> None:
        """A chunk was changed in place: split over weights of this digest, or whole if it is empty."""
        if digest:
            self._groups[chunk.sub_group].split[chunk.index] = digest
        else:
            self.split(chunk)

    def split(self, chunk: Chunk) -> None:
        """Splits whole master weights if it can, of a chunk that is here."""
        group = self._groups[chunk.sub_group]
        memory = group.resident.get(chunk.index)
        if self._masters is None or memory is None or chunk.index in group.split:
            return
        digest = self._masters.split(chunk, memory, group.spec.states)
        if digest:
            group.split[chunk.index] = digest  # in memory of a whole chunk, if there is no other
            less = self._memory.allocate(split_layout(chunk).nbytes, PURPOSE)
            self._replace(group, chunk, less.copy_(memory[: less.nbytes]))

    def join(self, chunk: Chunk) -> None:
        """Makes split master weights whole, of a chunk that is here.

        Raises:
            TenCacheError: they were split over weights that were changed since.
        """
        group = self._groups[chunk.sub_group]
        if chunk.index in group.resident and chunk.index in group.split and self._masters is not None:
            self._make_whole(group, chunk, self._joined(self._masters, group, chunk))

    # Mechanics

    @staticmethod
    def _joined(masters: SplitMasters, group: SubGroup, chunk: Chunk) -> torch.Tensor:
        """A copy of a chunk's bytes with whole master weights."""
        memory, copy = group.resident[chunk.index], empty(chunk.nbytes, torch.uint8)
        copy[: memory.nbytes] = memory[: copy.nbytes]
        masters.join(chunk, copy, masters.check(chunk, group.split[chunk.index]))
        return copy

    def _write_back(self, group: SubGroup, chunk: Chunk, copy: torch.Tensor) -> None:
        """Takes a changed copy of a chunk whose master weights are split."""
        self._make_whole(group, chunk, copy)
        self.split(chunk)

    def _make_whole(self, group: SubGroup, chunk: Chunk, whole: torch.Tensor) -> None:
        memory = self._memory.allocate(chunk.nbytes, PURPOSE)
        memory[: chunk.nbytes] = whole
        self._replace(group, chunk, memory)
        group.split.pop(chunk.index, None)

    def _replace(self, group: SubGroup, chunk: Chunk, memory: torch.Tensor) -> None:
        """A chunk is in this memory from now on."""
        old, group.resident[chunk.index] = group.resident[chunk.index], memory
        self._memory.free(old)
