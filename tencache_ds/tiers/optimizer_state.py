# SPDX-License-Identifier: Apache-2.0
"""Master weights and moments: in chunks, streamed through the optimizer in ascending order.

During an update chunk ``i`` is updated while ``i+1 … i+k`` are being read and ``i-1 …`` written back; ``k`` depends on
the size of the staging pool. Chunks that live in host memory take part without the transfers. Those that live in device
memory are updated there (:mod:`tencache_ds.tiers.device_update`); all other readers get copies of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.io import ExtentStore
from tencache_ds.memory.arena import HostArena, Locking, untouched_zeros
from tencache_ds.memory.device_memory import DeviceMemory
from tencache_ds.memory.pool import BufferPool
from tencache_ds.observability.counters import Counters
from tencache_ds.placement.places import Place, place_state
from tencache_ds.planning.chunks import Chunk, cut_sub_group
from tencache_ds.tensors import Scratch, empty
from tencache_ds.tiers.mover import Mover
from tencache_ds.tiers.relocation import StateRelocation
from tencache_ds.tiers.split_master import SplitMasters, split_layout
from tencache_ds.tiers.state_chunks import ResidentChunks, StoredChunks
from tencache_ds.tiers.sub_group import MASTER, ChunkInUse, SubGroup, SubGroupSpec


class OptimizerStateTier:
    """Optimizer state of one rank. One thread at a time calls it."""

    def __init__(
        self,
        specs: Sequence[SubGroupSpec],
        *,
        store: ExtentStore | None,
        pool: Callable[[], BufferPool],
        counters: Counters,
        chunk_nbytes: int,
        timeout_s: float,
        device: DeviceMemory | None = None,
        masters: SplitMasters | None = None,
        memory: HostArena | None = None,
    ) -> None:
        """
        Args:
            specs: the sub-groups in order.
            store: where stored sub-groups live; may be None when all are resident.
            pool: the pool of chunk buffers.
            counters: where bytes and stalls are counted.
            chunk_nbytes: wanted bytes per chunk.
            timeout_s: longest wait for one transfer or buffer.
            device: the compute device's memory; None where no chunk may live there.
            masters: splits master weights; None where they are always whole.
            memory: of chunks in host memory; None for plain memory of the tier's own.

        Raises:
            SpaceError: the store has no room for the state.
            MemoryLimitError: nor has the device.
        """
        self._device = device
        self._mover = Mover(store, counters, timeout_s)
        self._chunk_nbytes = chunk_nbytes
        self.version = 0
        """Grows whenever a chunk changes its place."""
        self.collected_nbytes = 0
        """Bytes of state, so far, whose device memory was taken back and that live in host memory since."""
        self._seen_taken_nbytes = 0
        # Not for children: a data loader's workers would have every chunk copied that is updated while they live.
        self._memory = memory or HostArena(None, Locking.NONE)
        self._owns_memory = memory is None
        self._groups: list[SubGroup] = []
        self._resident = ResidentChunks(self._groups, self._memory, masters)
        self._stored = StoredChunks(self._groups, self._mover, pool, masters)
        self._relocation = StateRelocation(self._memory, self._resident, self._stored, device)
        self._groups += [self._make(index, spec) for index, spec in enumerate(specs)]

    def use_store(self, store: ExtentStore) -> None:
        """From now on chunks may go to NVMe; between two passes, of a tier that had no store."""
        self._mover.store = store

    # Shape

    def chunks(self, sub_group: int) -> tuple[Chunk, ...]:
        """The chunks of a sub-group in ascending order."""
        return self._groups[sub_group].chunks

    def numel(self, sub_group: int, kind: str = MASTER) -> int:
        """Elements of a sub-group, or values of one kind of its state."""
        return self._groups[sub_group].spec.numel_of(kind)

    def kinds(self, sub_group: int) -> tuple[str, ...]:
        """The kinds of state a sub-group keeps, ``master`` first, scales last."""
        return tuple(kind for kind, _ in self._groups[sub_group].spec.states)

    def whole(self, sub_group: int) -> bool:
        """Whether a sub-group's state is one tensor per kind in host memory."""
        return self._groups[sub_group].spec.whole

    def streamed(self, sub_group: int) -> bool:
        """Whether an update of a sub-group moves bytes from and to NVMe."""
        return bool(self._groups[sub_group].extents)

    @property
    def resident_nbytes(self) -> int:
        """Bytes of state that live in host memory."""
        return sum(group.resident_nbytes for group in self._groups)

    @property
    def chunk_nbytes(self) -> list[int]:
        """Bytes of every chunk, wherever it lives."""
        return [chunk.nbytes for group in self._groups for chunk in group.chunks]

    @property
    def in_memory_nbytes(self) -> int:
        """Bytes of host memory that all chunks would take, wherever they live."""
        return sum(self._resident.nbytes_of(group, chunk) for group in self._groups for chunk in group.chunks)

    @property
    def device_nbytes(self) -> int:
        """Bytes of state that live in device memory."""
        return sum(group.device_nbytes for group in self._groups)

    def places(self, sub_group: int) -> tuple[Place, ...]:
        """Where each chunk of a sub-group lives."""
        group = self._groups[sub_group]
        return tuple(group.place(chunk) for chunk in group.chunks)

    def nbytes_of(self, chunk: Chunk) -> int:
        """Bytes that a chunk takes where it lives: fewer than it has, where its master weights are split."""
        group = self._groups[chunk.sub_group]
        if chunk.index in group.device:
            return chunk.nbytes
        extent = group.extents.get(chunk.index)
        return self._resident.nbytes_of(group, chunk) if extent is None else extent.nbytes

    def host_nbytes_of(self, chunk: Chunk) -> int:
        """Bytes of host memory that a chunk takes, or would take there."""
        return self._resident.nbytes_of(self._groups[chunk.sub_group], chunk)

    def on_device(self, chunk: Chunk) -> bool:
        """Whether a chunk lives in device memory."""
        return chunk.index in self._groups[chunk.sub_group].device

    def device_views(self, chunk: Chunk) -> dict[str, torch.Tensor]:
        """A 1-D tensor per kind of a chunk that lives in device memory; changes are changes of the state."""
        group = self._groups[chunk.sub_group]
        return group.views_of(chunk, group.device[chunk.index].memory)

    @contextmanager
    def holding_device(self, chunk: Chunk | None = None) -> Iterator[None]:
        """Within the block chunks that live in device memory stay there, or one does; see [Note: loans] in
        :mod:`tencache_ds.memory.device_memory`. Those taken back before it live in host memory."""
        if self._device is None:
            yield
            return
        loan = None if chunk is None else self._groups[chunk.sub_group].device.get(chunk.index)
        if chunk is not None and loan is None:
            yield
            return
        with self._device.holding(loan):
            self._collect(self._device.taken_nbytes)
            yield

    def collect(self) -> None:
        """Houses chunks in host memory whose device memory was taken back. Between two passes."""
        with self.holding_device():
            pass

    def _collect(self, taken_nbytes: int) -> None:
        if taken_nbytes == self._seen_taken_nbytes:
            return
        self._seen_taken_nbytes = taken_nbytes
        for index, group in enumerate(self._groups):
            nbytes = self._relocation.collect(group)
            if nbytes:
                self.version += 1
                self.collected_nbytes += nbytes
                group.spec = replace(group.spec, places=self.places(index))

    # The update: a stream of chunks

    def begin_update(self, sub_groups: Sequence[int] | None = None) -> None:
        """Starts a pass over the stored chunks (of some sub-groups), ascending, and reads the first ones ahead."""
        groups = self._groups if sub_groups is None else [self._groups[index] for index in sub_groups]
        self.begin_pass(chunk for group in groups for chunk in group.chunks)

    def begin_pass(self, chunks: Iterable[Chunk]) -> None:
        """Starts a pass over chunks, and reads the first ones ahead."""
        self._stored.begin(chunks)

    def take(self, chunk: Chunk, *, split: bool = False, scratch: Scratch | None = None) -> ChunkInUse:
        """A chunk's state in host memory, read ahead in the order of the pass or read now.

        Args:
            chunk: which one.
            split: its master weights may be split, for an update that compares the weights and writes to them.
            scratch: for a copy of what lives on the device; None for new memory.

        Raises:
            StorageError: the read failed.
            TenCacheError: the master weights were split over weights that were changed since.
        """
        group = self._groups[chunk.sub_group]
        if chunk.index not in group.extents:
            self._stored.read_ahead()  # into buffers of writes that have ended since
            copy = self._copy_from_device(group, chunk, scratch)
            if copy is None:
                return self._resident.take(chunk, split=split)
            write_back = partial(self._write_back, group, chunk, copy)
            return ChunkInUse(chunk, group.views_of(chunk, copy), _write_back=write_back)
        lease, digest = self._stored.take(chunk, split=split)
        layout = split_layout(chunk) if digest else chunk
        return ChunkInUse(chunk, group.views_in(layout, lease), digest, _lease=lease)

    def ready(self, chunk: Chunk) -> bool:
        """Whether :meth:`take` has nothing to wait for."""
        return chunk.index not in self._groups[chunk.sub_group].extents or self._stored.ready(chunk)

    @property
    def n_buffers(self) -> int:
        """Staging buffers for chunks; 0 where none is stored."""
        return self._stored.n_buffers if any(group.extents for group in self._groups) else 0

    def put(self, used: ChunkInUse, *, changed: bool = True) -> None:
        """Ends the use of a chunk; a changed one goes to NVMe without waiting."""
        copied = used.copied
        lease = used.end(changed=changed)
        if lease is not None:
            self._stored.put(used.chunk, lease, changed=changed, digest=used.digest, fresh=used.fresh)
        elif changed and not copied:
            self._resident.put(used.chunk, used.digest)

    def drop(self, used: ChunkInUse) -> None:
        """Ends the use of a chunk after an error: its copy on NVMe, or in device memory, stays unchanged."""
        lease = used.end(changed=False)
        if lease is not None:
            lease.release()

    @contextmanager
    def using(self, chunk: Chunk) -> Iterator[ChunkInUse]:
        """A chunk to be changed, from :meth:`take` to :meth:`put`, or to :meth:`drop` after an error."""
        used = self.take(chunk)
        try:
            yield used
        except BaseException:
            self.drop(used)
            raise
        self.put(used)

    # Whole kinds of state of a sub-group

    def read(self, sub_group: int, kind: str, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """A copy of ``numel`` elements of one kind of state, beginning at element ``start``.

        Raises:
            KeyError: the sub-group keeps no such state (yet), or not per element.
        """
        group = self._groups[sub_group]
        self._require_elements(group, kind)
        numel = group.spec.numel - start if numel is None else numel
        result = empty(numel, group.dtype(kind))
        covering = group.covering(start, numel)
        self._stored.begin_within([chunk for chunk, _, _ in covering])
        for chunk, low, high in covering:
            used = self.take(chunk)
            result[low - start : high - start] = used.views[kind][low - chunk.start : high - chunk.start]
            self.put(used, changed=False)
        return result

    def borrow(self, sub_group: int) -> dict[str, torch.Tensor]:
        """Every kind of state of a sub-group as whole 1-D tensors to work on; :meth:`keep` takes them back.

        Those of a whole sub-group are the tier's own, so a change is a change of the state. Others are copies; each
        chunk is read once.

        Raises:
            StorageError: a read failed.
        """
        group = self._groups[sub_group]
        if group.spec.whole:
            return dict(group.tensors)
        result = {kind: empty(group.spec.numel_of(kind), dtype) for kind, dtype in group.spec.states}
        self.begin_update([sub_group])
        for chunk in group.chunks:
            used = self.take(chunk)
            for kind, view in used.views.items():
                result[kind][group.spec.values(kind, chunk.start, chunk.start + chunk.numel)] = view
            self.put(used, changed=False)
        return result

    def keep(self, sub_group: int, values: Mapping[str, torch.Tensor]) -> None:
        """Makes ``values`` the whole state of a sub-group. One that is whole keeps these very tensors.

        Args:
            sub_group: which one.
            values: 1-D tensor per kind of state, of the sub-group's length or as many as its scales have,
                ``master`` among them. Kinds and dtypes that are new, per element, get room: in chunks cut anew, of
                fewer elements where the pool's buffers ask for it. Kinds that are kept already and are missing here
                become zero.

        Raises:
            SpaceError: the store has no space for them; the state is unchanged.
            StorageError: an earlier write failed.
        """
        group = self._groups[sub_group]
        self._check_lengths(sub_group, values, {kind: group.spec.numel_of(kind) for kind in values})
        if MASTER not in values:
            raise TenCacheError(
                f"the state of sub-group {sub_group} cannot be replaced by {sorted(values)}: {MASTER!r} is missing"
            )
        dtypes = dict(group.spec.states) | {kind: value.dtype for kind, value in values.items()}
        scales = {kind: dtypes.pop(kind) for kind, _ in group.spec.scales}
        spec = replace(group.spec, kinds=tuple(dtypes.items()), scales=tuple(scales.items()))
        if spec.whole:
            zeroed = {kind: tensor.zero_() for kind, tensor in group.tensors.items() if kind not in values}
            tensors = {kind: values[kind].contiguous() if kind in values else zeroed[kind] for kind, _ in spec.states}
            chunks = group.chunks if spec == group.spec else self._cut(sub_group, spec)
            own = group.own and all(tensors[kind] is group.tensors.get(kind) for kind in tensors)
            self._groups[sub_group] = SubGroup(spec, chunks, tensors=tensors, own=own)
            return
        if spec != group.spec:
            self._relocate(sub_group, spec)
        for chunk in self._groups[sub_group].chunks:
            used = self.overwrite(chunk)
            for kind, value in values.items():
                used.views[kind].copy_(value[spec.values(kind, chunk.start, chunk.start + chunk.numel)])
            self.put(used)

    def replace(self, sub_group: int, values: Mapping[str, torch.Tensor]) -> None:
        """Like :meth:`keep`, for borrowed values: a whole sub-group copies them."""
        group = self._groups[sub_group]
        if group.spec.whole:
            self._check_lengths(sub_group, values, {kind: group.spec.numel_of(kind) for kind in values})
            values = {kind: self._copied(group.tensors.get(kind), value) for kind, value in values.items()}
        self.keep(sub_group, values)

    def scan(self, visit: Callable[[Chunk, Mapping[str, torch.Tensor]], None]) -> None:
        """Shows every chunk once, in ascending order, reading stored ones ahead; nothing may be changed.

        Args:
            visit: takes a chunk and a 1-D view per kind of state, which ends with the call.

        Raises:
            StorageError: a read failed, or its bytes are not those last written.
        """
        self.begin_update()
        scratch = Scratch()
        try:
            for group in self._groups:
                for chunk in group.chunks:
                    used = self.take(chunk, scratch=scratch)
                    try:
                        visit(chunk, used.views)
                    finally:
                        self.put(used, changed=False)
        finally:
            self._stored.abandon()

    def dtype(self, sub_group: int, kind: str) -> torch.dtype:
        """The dtype of one kind of state.

        Raises:
            KeyError: the sub-group keeps no such state (yet).
        """
        return self._groups[sub_group].dtype(kind)

    def write(self, sub_group: int, values: Mapping[str, torch.Tensor], start: int = 0) -> None:
        """Replaces elements of some kinds of state, beginning at element ``start``; all values have the same length.

        Chunks that are replaced whole are not read first.
        """
        group = self._groups[sub_group]
        numel = next(iter(values.values())).numel()
        self._check_lengths(sub_group, values, dict.fromkeys(values, numel))
        for kind in values:
            self._require_elements(group, kind)
        everything = {kind for kind, _ in group.spec.states} == set(values)
        covering = group.covering(start, numel)
        if not everything:
            self._stored.begin_within([chunk for chunk, _, _ in covering])
        for chunk, low, high in covering:
            whole = everything and high - low == chunk.numel
            used = self.overwrite(chunk) if whole else self.take(chunk)
            for kind, value in values.items():
                used.views[kind][low - chunk.start : high - chunk.start].copy_(value[low - start : high - start])
            self.put(used)

    def overwrite(self, chunk: Chunk, *, fresh: bool = False) -> ChunkInUse:
        """A chunk whose old state is of no interest: views of zeros; :meth:`put` has to follow.

        Args:
            chunk: which one.
            fresh: not written yet, and only its master weights will be. In host memory it is then zero, and its pages
                are first touched by their writers: the threads of the first update, in parallel. On NVMe nothing else
                is written, and there are no other views.
        """
        group = self._groups[chunk.sub_group]
        if chunk.index not in group.extents:
            if chunk.index in group.device:
                used = self.take(chunk)
            else:
                used = self._resident.blank(chunk)
                if fresh:
                    return used
            for view in used.views.values():
                view.zero_()
            return used
        lease = self._stored.blank(chunk, fresh=fresh)
        views = group.views_in(replace(chunk, pieces=chunk.pieces[:1]) if fresh else chunk, lease)
        return ChunkInUse(chunk, views, fresh=fresh, _lease=lease)

    def start_split(self, chunk: Chunk) -> bool:
        """Gives a chunk its state before the first update, with split master weights that equal the model's weights:
        instead of :meth:`overwrite` with their values. False, and nothing is changed, where they cannot be split."""
        return self._stored.start_split(chunk) or self._resident.start_split(chunk)

    # Places

    def join(self, chunks: Iterable[Chunk]) -> None:
        """Makes master weights whole where they are split: their weights are about to change, or to leave host memory.
        Between two passes.

        Raises:
            SpaceError: there is no room for them.
            StorageError: a read failed.
        """
        for chunk in chunks:
            self._resident.join(chunk)
            if self._stored.is_split(chunk):
                lease, _ = self._stored.take(chunk)
                self._stored.put(chunk, lease, changed=True, keep_whole=True)

    def split(self, chunk: Chunk) -> None:
        """Splits whole master weights in host memory, if it can: their weights have their values. Between two passes;
        on NVMe the next update does."""
        self._resident.split(chunk)

    def relocate(self, places: Mapping[int, Sequence[Place]]) -> None:
        """Moves chunks between the places where they live. Between two passes.

        An error leaves every chunk complete where it was or where it was to be. A sub-group that was whole is in chunks
        from then on.

        Args:
            places: of the sub-groups that change, where each chunk is to live.

        Raises:
            MemoryLimitError: not enough memory.
            SpaceError, StorageError: not enough space on NVMe, or a transfer failed.
            TenCacheError: there is no store.
        """
        self._stored.abandon()
        with self.holding_device():
            self._move_all(places)

    def _move_all(self, places: Mapping[int, Sequence[Place]]) -> None:
        for index, wanted in places.items():
            if self._groups[index].spec.whole and any(place is not Place.HOST for place in wanted):
                self._groups[index] = self._relocation.cut_whole(self._groups[index], wanted)
                self.version += 1
        moves = [
            (chunk, place)
            for index, wanted in sorted(places.items())
            for chunk, place in zip(self._groups[index].chunks, wanted, strict=True)
            if place is not self._groups[index].place(chunk)
        ]
        try:
            # Chunks that leave memory go first, to make room for the others.
            for chunk, place in sorted(moves, key=lambda move: -move[1]):
                self._relocation.move(self._groups[chunk.sub_group], chunk, place)
                self.version += 1
        finally:
            for index in places:
                group = self._groups[index]
                if not group.spec.whole:
                    group.spec = replace(group.spec, places=self.places(index))

    # Lifetime

    def drain(self) -> None:
        """Waits until everything written is on NVMe."""
        self._stored.abandon()
        self._mover.drain()

    def check(self) -> None:
        """Raises the error of an earlier asynchronous write, if one failed."""
        self._mover.check()

    def close(self) -> None:
        """Gives every buffer and all memory back. Idempotent; the store is closed by its owner."""
        self._stored.abandon()
        for group in self._groups:
            for loan in group.device.values():
                loan.end()  # before its image is freed
        self._groups.clear()
        if self._owns_memory:
            self._memory.disown()

    # Mechanics

    def _copy_from_device(self, group: SubGroup, chunk: Chunk, scratch: Scratch | None) -> torch.Tensor | None:
        """A copy of a chunk's bytes; None where it does not live in device memory (any more)."""
        if chunk.index not in group.device:
            return None
        copy = (scratch or Scratch()).take(chunk.nbytes, torch.uint8)
        with self.holding_device(chunk):
            if chunk.index not in group.device:
                return None
            self._require_device().read(copy, group.device[chunk.index].memory[: chunk.nbytes])
        return copy

    def _write_back(self, group: SubGroup, chunk: Chunk, copy: torch.Tensor) -> None:
        """Puts a changed copy where the chunk lives now."""
        with self.holding_device(chunk):
            if chunk.index in group.device:
                self._require_device().write(group.device[chunk.index].memory[: chunk.nbytes], copy)
            else:
                group.resident[chunk.index][: chunk.nbytes].copy_(copy)

    def _require_device(self) -> DeviceMemory:
        if self._device is None:
            raise TenCacheError("optimizer state is placed on a device, but there is none")
        return self._device

    def _make(self, index: int, spec: SubGroupSpec) -> SubGroup:
        if spec.whole:
            tensors = {kind: untouched_zeros(spec.numel_of(kind), dtype) for kind, dtype in spec.states}
            return SubGroup(spec, self._cut(index, spec), tensors=tensors, own=True)
        return self._relocation.house(spec, self._cut(index, spec))

    def _cut(self, index: int, spec: SubGroupSpec, largest_nbytes: int | None = None) -> tuple[Chunk, ...]:
        kinds, scales = ([(kind, dtype.itemsize) for kind, dtype in each] for each in (spec.kinds, spec.scales))
        chunk_nbytes = self._chunk_nbytes if largest_nbytes is None else min(self._chunk_nbytes, largest_nbytes)
        return cut_sub_group(index, spec.numel, kinds, chunk_nbytes, spec.apart, spec.cuts, scales)

    def _relocate(self, sub_group: int, spec: SubGroupSpec) -> None:
        """Gives a sub-group chunks for other kinds of state, to be written next; the old ones are given up.

        The pool stays as it is: chunks get as few elements as its buffers need. Without a store, all of them stay in
        host memory.
        """
        if self._mover.store is None:
            chunks = self._cut(sub_group, spec)
            self._replace(sub_group, replace(spec, places=(Place.HOST,) * len(chunks)), chunks)
            return
        store, largest = self._mover.store, self._stored.largest_nbytes
        chunks = self._cut(sub_group, spec, largest)
        needed = max((chunk.nbytes for chunk in chunks), default=0)
        if needed > largest:
            raise TenCacheError(
                f"{len(spec.states)} kinds of optimizer state of sub-group {sub_group} need buffers of {needed} bytes, "
                f'but those of the pool have {largest}. Raise "tencache.chunk_size".'
            )
        self._stored.abandon()
        store.drain()
        # What does not fit into the host memory that the sub-group had goes to NVMe.
        places = place_state([chunk.nbytes for chunk in chunks], self._groups[sub_group].resident_nbytes)
        self._replace(sub_group, replace(spec, places=places), chunks)

    def _replace(self, sub_group: int, spec: SubGroupSpec, chunks: tuple[Chunk, ...]) -> None:
        """Makes room for chunks, then gives up that of the sub-group's old ones."""
        old, self._groups[sub_group] = self._groups[sub_group], self._relocation.house(spec, chunks)
        self._relocation.vacate(old)
        self.version += 1

    @staticmethod
    def _require_elements(group: SubGroup, kind: str) -> None:
        if group.spec.is_scale(kind):
            raise KeyError(f"{kind!r} is not kept per element")

    @staticmethod
    def _check_lengths(sub_group: int, values: Mapping[str, torch.Tensor], expected: Mapping[str, int]) -> None:
        numels = {kind: value.numel() for kind, value in values.items()}
        if numels != expected:
            raise TenCacheError(f"states of sub-group {sub_group} have lengths {numels}, expected {expected}")

    @staticmethod
    def _copied(own: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
        """A copy of ``value``, in the tier's own tensor where that has the right dtype."""
        if own is None or own.dtype != value.dtype:
            return value.clone()
        return own if own is value else own.copy_(value)
