# SPDX-License-Identifier: Apache-2.0
"""Chunks of optimizer state in host memory.

Their master weights may be split there (:mod:`tencache_ds.tiers.split_master`); only who asks for it sees them so, and
everybody else gets a copy. A chunk whose master weights are whole for once takes the memory for that, and gives it back
when they are split again: after the next update at the latest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from tencache_ds.memory.arena import HostArena
from tencache_ds.planning.chunks import Chunk
from tencache_ds.tensors import empty
from tencache_ds.tiers.split_master import SplitMasters, split_layout
from tencache_ds.tiers.sub_group import ChunkInUse, SubGroup

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
