# SPDX-License-Identifier: Apache-2.0
"""Master weights and moments: in chunks, streamed past the optimizer in ascending order.

During an update chunk ``i`` is worked on while ``i+1 … i+k`` are being read and ``i-1 …`` written back; ``k`` is
whatever the staging pool has room for. A sub-group may instead be resident, which is the same update without the
transfers.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.io import Extent, ExtentStore, Priority, Ticket
from tencache_ds.io.mapping import map_pieces
from tencache_ds.memory.pool import BufferPool, Lease, PoolTimeout
from tencache_ds.observability.counters import Counters, Link, Stall
from tencache_ds.planning.chunks import Chunk, cut_sub_group

MASTER = "master"


class StateResidency(enum.Enum):
    """Where a sub-group's optimizer state lives."""

    HOST = "host"
    """One whole tensor per kind of state in host memory."""

    STORED = "stored"
    """In chunks on NVMe; in host memory only while a chunk is worked on."""


@dataclass(frozen=True, slots=True)
class SubGroupSpec:
    """A sub-group as the tier sees it.

    Attributes:
        numel: elements of this rank's partition.
        kinds: ``(kind, dtype)`` of each state the optimizer keeps, ``master`` first.
        residency: where the state lives.
    """

    numel: int
    kinds: tuple[tuple[str, torch.dtype], ...]
    residency: StateResidency


@dataclass(slots=True)
class _SubGroup:
    spec: SubGroupSpec
    chunks: tuple[Chunk, ...]
    extents: list[Extent] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def dtype(self, kind: str) -> torch.dtype:
        for name, dtype in self.spec.kinds:
            if name == kind:
                return dtype
        raise KeyError(kind)


@dataclass(slots=True)
class ChunkInUse:
    """A chunk whose state is in host memory.

    Attributes:
        chunk: which one.
        views: 1-D tensor per kind of state, ``chunk.numel`` elements each.
    """

    chunk: Chunk
    views: dict[str, torch.Tensor]
    _lease: Lease | None = None


@dataclass(slots=True)
class _Ahead:
    chunk: Chunk
    lease: Lease
    ticket: Ticket


class OptimizerStateTier:
    """Optimizer state of one rank. One thread (the training thread) calls it."""

    def __init__(
        self,
        specs: Sequence[SubGroupSpec],
        *,
        store: ExtentStore | None,
        pool: Callable[[], BufferPool],
        counters: Counters,
        chunk_nbytes: int,
        timeout_s: float,
    ) -> None:
        """
        Args:
            specs: the sub-groups in order.
            store: where stored sub-groups live; may be None when all are resident.
            pool: the pool of chunk buffers.
            counters: where bytes and stalls are counted.
            chunk_nbytes: wanted bytes per chunk.
            timeout_s: longest wait for one transfer or buffer.

        Raises:
            SpaceError: the store has no room for the state.
        """
        self._store = store
        self._pool = pool
        self._counters = counters
        self._chunk_nbytes = chunk_nbytes
        self._timeout_s = timeout_s
        self._groups = [self._make(index, spec) for index, spec in enumerate(specs)]
        self._ahead: deque[_Ahead] = deque()
        self._queue: deque[Chunk] = deque()

    # Shape

    def chunks(self, sub_group: int) -> tuple[Chunk, ...]:
        """The chunks of a sub-group in ascending order."""
        return self._groups[sub_group].chunks

    def kinds(self, sub_group: int) -> tuple[str, ...]:
        """The kinds of state a sub-group keeps, ``master`` first."""
        return tuple(kind for kind, _ in self._groups[sub_group].spec.kinds)

    def residency(self, sub_group: int) -> StateResidency:
        """Where a sub-group's state lives."""
        return self._groups[sub_group].spec.residency

    # The update: a stream of chunks

    def begin_update(self, sub_groups: Sequence[int] | None = None) -> None:
        """Starts a pass over the stored chunks (of some sub-groups), ascending, and reads the first ones ahead."""
        self._abandon_ahead()
        groups = self._groups if sub_groups is None else [self._groups[index] for index in sub_groups]
        self._queue = deque(
            chunk for group in groups if group.spec.residency is StateResidency.STORED for chunk in group.chunks
        )
        self._read_ahead()

    def take(self, chunk: Chunk) -> ChunkInUse:
        """A chunk's state in host memory, read ahead in the order of the pass or read now.

        Raises:
            StorageError: the read failed.
        """
        group = self._groups[chunk.sub_group]
        if group.spec.residency is StateResidency.HOST:
            views = {k: group.tensors[k][chunk.start : chunk.start + chunk.numel] for k, _ in group.spec.kinds}
            return ChunkInUse(chunk, views)
        if self._ahead and self._ahead[0].chunk is chunk:
            entry = self._ahead.popleft()
        else:
            self._skip_to(chunk)
            entry = self._start_read(chunk, self._lease(chunk), Priority.URGENT)
        try:
            if entry.ticket.done:
                entry.ticket.wait(0)
            else:
                with self._counters.stall(Stall.OPTIMIZER_READ):
                    entry.ticket.wait(self._timeout_s)
        except BaseException:
            entry.lease.release_with(entry.ticket)
            raise
        self._read_ahead()
        return ChunkInUse(chunk, self._views(group, chunk, entry.lease.buffer), entry.lease)

    def put(self, used: ChunkInUse, *, changed: bool = True) -> None:
        """Ends the use of a chunk; a changed one goes to NVMe without waiting."""
        lease, used._lease = used._lease, None
        used.views = {}
        if lease is None:
            return
        if changed:
            try:
                ticket = self._start_write(used.chunk, lease)
            except BaseException:
                lease.release()
                raise
            lease.release_with(ticket)
        else:
            lease.release()
        self._read_ahead()

    # Whole kinds of state of a sub-group

    def read(self, sub_group: int, kind: str, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """A copy of ``numel`` elements of one kind of state, beginning at element ``start``.

        Raises:
            KeyError: the sub-group keeps no such state (yet).
        """
        group = self._groups[sub_group]
        numel = group.spec.numel - start if numel is None else numel
        result = torch.empty(numel, dtype=group.dtype(kind))
        for chunk, low, high in self._covering(group, start, numel):
            used = self.take(chunk)
            result[low - start : high - start] = used.views[kind][low - chunk.start : high - chunk.start]
            self.put(used, changed=False)
        return result

    def read_all(self, sub_group: int) -> dict[str, torch.Tensor]:
        """Copies of every kind of state of a sub-group, whole; each chunk is read once."""
        group = self._groups[sub_group]
        result = {kind: torch.empty(group.spec.numel, dtype=dtype) for kind, dtype in group.spec.kinds}
        self.begin_update([sub_group])
        for chunk in group.chunks:
            used = self.take(chunk)
            for kind, view in used.views.items():
                result[kind][chunk.start : chunk.start + chunk.numel] = view
            self.put(used, changed=False)
        return result

    def write(self, sub_group: int, values: Mapping[str, torch.Tensor], start: int = 0) -> None:
        """Replaces elements of some kinds of state, beginning at element ``start``; all values have the same length.

        Chunks that are replaced whole are not read first.
        """
        group = self._groups[sub_group]
        numels = {value.numel() for value in values.values()}
        if len(numels) != 1:
            raise TenCacheError(f"states of sub-group {sub_group} differ in length: {sorted(numels)}")
        (numel,) = numels
        everything = {kind for kind, _ in group.spec.kinds} == set(values)
        for chunk, low, high in self._covering(group, start, numel):
            whole = everything and high - low == chunk.numel
            used = self.overwrite(chunk) if whole else self.take(chunk)
            for kind, value in values.items():
                used.views[kind][low - chunk.start : high - chunk.start].copy_(value[low - start : high - start])
            self.put(used)

    def overwrite(self, chunk: Chunk) -> ChunkInUse:
        """A chunk whose old state is of no interest: views to be filled completely; :meth:`put` has to follow."""
        group = self._groups[chunk.sub_group]
        if group.spec.residency is StateResidency.HOST:
            return self.take(chunk)
        # What a pass has read ahead may be this chunk's old state, or hold the buffers this would wait for.
        if self._ahead:
            self._abandon_ahead()
        lease = self._lease(chunk)
        lease.buffer[: chunk.nbytes].zero_()
        return ChunkInUse(chunk, self._views(group, chunk, lease.buffer), lease)

    def whole(self, sub_group: int, kind: str) -> torch.Tensor:
        """All of one kind of state as one 1-D tensor, for reading: the resident tensor, or a mapping of the files.

        The result of a stored sub-group must be out of use before the next update.
        """
        group = self._groups[sub_group]
        if group.spec.residency is StateResidency.HOST:
            return group.tensors[kind]
        if self._store is None:
            raise TenCacheError(f"sub-group {sub_group} has no store")
        self._store.drain()
        pieces = []
        for chunk, extent in zip(group.chunks, group.extents, strict=True):
            piece = chunk.piece(kind)
            pieces.append((extent.file, extent.offset + piece.offset, piece.nbytes))
        return map_pieces(pieces).view(group.dtype(kind))

    def add_kinds(self, sub_group: int, added: Sequence[tuple[str, torch.dtype]]) -> None:
        """Makes room for states an optimizer turned out to keep; they hold zeros, and what was there stays.

        Raises:
            SpaceError: the store has no room for them.
        """
        group = self._groups[sub_group]
        old = self.read_all(sub_group)
        extents = group.extents
        spec = SubGroupSpec(group.spec.numel, (*group.spec.kinds, *added), group.spec.residency)
        if self._store is not None:
            self._store.drain()
            for extent in extents:
                self._store.free(extent)
        self._groups[sub_group] = self._make(sub_group, spec)
        values = old | {kind: torch.zeros(spec.numel, dtype=dtype) for kind, dtype in added}
        self.write(sub_group, values)

    # Lifetime

    def drain(self) -> None:
        """Waits until everything written is on NVMe."""
        self._abandon_ahead()
        if self._store is not None:
            with self._counters.stall(Stall.WRITE_BACK):
                self._store.drain()

    def check(self) -> None:
        """Raises the error of an earlier asynchronous write, if one failed."""
        if self._store is not None:
            self._store.check()

    def close(self) -> None:
        """Gives every buffer back. Idempotent; the store is closed by its owner."""
        self._abandon_ahead()
        self._groups = []

    # Mechanics

    def _make(self, index: int, spec: SubGroupSpec) -> _SubGroup:
        kinds = [(kind, dtype.itemsize) for kind, dtype in spec.kinds]
        group = _SubGroup(spec, cut_sub_group(index, spec.numel, kinds, self._chunk_nbytes))
        if spec.residency is StateResidency.HOST:
            group.tensors = {kind: torch.zeros(spec.numel, dtype=dtype) for kind, dtype in spec.kinds}
        elif self._store is None:
            raise TenCacheError(f"sub-group {index} is to be stored, but there is no store")
        else:
            for chunk in group.chunks:
                group.extents.append(self._store.allocate(chunk.nbytes, f"optimizer chunk {index}.{chunk.index}"))
        return group

    @staticmethod
    def _covering(group: _SubGroup, start: int, numel: int) -> list[tuple[Chunk, int, int]]:
        found = []
        for chunk in group.chunks:
            low, high = max(start, chunk.start), min(start + numel, chunk.start + chunk.numel)
            if low < high:
                found.append((chunk, low, high))
        return found

    def _views(self, group: _SubGroup, chunk: Chunk, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            piece.kind: buffer[piece.offset : piece.offset + piece.nbytes].view(group.dtype(piece.kind))
            for piece in chunk.pieces
        }

    def _lease(self, chunk: Chunk) -> Lease:
        pool, owner = self._pool(), f"chunk {chunk.sub_group}.{chunk.index}"
        lease = pool.try_lease(chunk.nbytes, owner, "update")
        if lease is None:
            try:
                with self._counters.stall(Stall.BUFFER):
                    lease = pool.lease(chunk.nbytes, owner, "update", urgent=True, timeout_s=self._timeout_s)
            except PoolTimeout:
                # Buffers are held by transfers: the one that hangs says more than a list of who waits for it.
                if self._store is not None:
                    self._store.raise_overdue(self._timeout_s)
                raise
        return lease

    def _read_ahead(self) -> None:
        while self._queue:
            chunk = self._queue[0]
            lease = self._pool().try_lease(chunk.nbytes, f"chunk {chunk.sub_group}.{chunk.index}", "read-ahead")
            if lease is None:
                return
            self._queue.popleft()
            self._ahead.append(self._start_read(chunk, lease, Priority.BACKGROUND))

    def _skip_to(self, chunk: Chunk) -> None:
        """The caller left the order of the pass: what was read ahead is of no use if it lies before ``chunk``."""
        if chunk in self._queue:
            while self._queue.popleft() is not chunk:
                pass
            self._abandon(self._ahead)
        elif self._ahead:
            self._abandon_ahead()

    def _abandon_ahead(self) -> None:
        self._queue.clear()
        self._abandon(self._ahead)

    @staticmethod
    def _abandon(entries: deque[_Ahead]) -> None:
        while entries:
            entry = entries.popleft()
            entry.lease.release_with(entry.ticket)

    def _extent(self, chunk: Chunk) -> Extent:
        return self._groups[chunk.sub_group].extents[chunk.index]

    def _start_read(self, chunk: Chunk, lease: Lease, priority: Priority) -> _Ahead:
        extent = self._extent(chunk)
        if self._store is None:
            raise TenCacheError(f"sub-group {chunk.sub_group} has no store")
        self._counters.moved(Link.NVME_READ, extent.allocated_nbytes)
        try:
            ticket = self._store.read(extent, lease.buffer[: extent.allocated_nbytes], priority=priority)
        except BaseException:
            lease.release()
            raise
        return _Ahead(chunk, lease, ticket)

    def _start_write(self, chunk: Chunk, lease: Lease) -> Ticket:
        if self._store is None:
            raise TenCacheError(f"sub-group {chunk.sub_group} has no store")
        extent = self._store.relocate(self._extent(chunk))
        self._groups[chunk.sub_group].extents[chunk.index] = extent
        self._counters.moved(Link.NVME_WRITE, extent.allocated_nbytes)
        return self._store.write(extent, lease.buffer[: extent.allocated_nbytes], priority=Priority.BACKGROUND)
