# SPDX-License-Identifier: Apache-2.0
"""A sub-group's optimizer state: its kinds, its chunks, their places, and a chunk in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from tencache_ds.io import Extent
from tencache_ds.memory.device_memory import Loan
from tencache_ds.memory.pool import Lease
from tencache_ds.placement.places import Place
from tencache_ds.planning.chunks import SCALE_NUMEL, Chunk

# Kinds of state


MASTER, EXP_AVG, EXP_AVG_SQ = "master", "exp_avg", "exp_avg_sq"

MOMENTUM = "momentum_buffer"
"""Muon's state, which is kept apart from master weights."""

ADAM_IN_FP32 = dict.fromkeys((MASTER, EXP_AVG, EXP_AVG_SQ), torch.float32)
"""Dtypes of the state that can be split, and updated in files."""

MASTERS_ALONE = {MASTER: torch.float32}
"""Those of Muon's chunks."""

FIRST, FIRST_SCALE, SECOND, SECOND_SCALE = "state1", "absmax1", "state2", "absmax2"
"""The 8-bit moments of bitsandbytes' Adam, and the largest magnitude in each of their blocks."""

ADAM_IN_8_BITS = {MASTER: torch.float32, FIRST: torch.uint8, SECOND: torch.uint8}
SCALES_OF_8_BITS = {FIRST_SCALE: torch.float32, SECOND_SCALE: torch.float32}

REMAINDER = "remainder"
"""What a split master weight is beside its 16-bit weight: the lower half of their difference."""

MARKS = "marks"
"""A bit for each split master weight, the lowest of a byte first, where the moments have no sign to spare."""

SPLIT_DTYPES = {REMAINDER: torch.int16, MARKS: torch.uint8}


Pieces = Sequence[tuple[int, torch.Tensor]]
"""Weights that a chunk has elements of, ascending: ``(first element in the chunk, 1-D tensor)``."""


def views_of(chunk: Chunk, buffer: torch.Tensor, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """A 1-D tensor per kind in a buffer that holds a chunk.

    Args:
        chunk: whose pieces say where each kind is.
        buffer: 1-D uint8, at least up to the end of the last piece.
        dtypes: of all kinds but those of split master weights.

    Raises:
        KeyError: a kind has no dtype.
    """
    return {
        piece.kind: buffer[piece.offset : piece.offset + piece.nbytes].view(
            SPLIT_DTYPES.get(piece.kind) or dtypes[piece.kind]
        )
        for piece in chunk.pieces
    }


# Sub-groups


Kinds = tuple[tuple[str, torch.dtype], ...]
"""``(kind, dtype)`` of each state that is kept."""


@dataclass(frozen=True, slots=True)
class SubGroupSpec:
    """A sub-group as the tier sees it.

    Attributes:
        numel: elements of this rank's partition.
        kinds: of the states the optimizer keeps per element, ``master`` first.
        places: of each chunk; None for one whole tensor per kind in host memory.
        apart: ``(first element, end)`` of elements that get chunks of their own, ascending.
        cuts: elements where another chunk begins, ascending.
        scales: of the states with one value for :data:`SCALE_NUMEL` consecutive elements.
    """

    numel: int
    kinds: Kinds
    places: tuple[Place, ...] | None
    apart: tuple[tuple[int, int], ...] = ()
    cuts: tuple[int, ...] = ()
    scales: Kinds = ()

    @property
    def whole(self) -> bool:
        """Whether its state is one tensor per kind in host memory."""
        return self.places is None

    @property
    def states(self) -> Kinds:
        """All kinds: per element, then scales."""
        return self.kinds + self.scales

    def is_scale(self, kind: str) -> bool:
        """Whether one value of a kind is that of :data:`SCALE_NUMEL` elements."""
        return any(name == kind for name, _ in self.scales)

    def values(self, kind: str, start: int, end: int) -> slice:
        """The values of a kind for elements from ``start`` to ``end``; that of a scale begins with them."""
        return slice(start // SCALE_NUMEL, -(-end // SCALE_NUMEL)) if self.is_scale(kind) else slice(start, end)

    def numel_of(self, kind: str) -> int:
        """Values of one kind."""
        return self.values(kind, 0, self.numel).stop


@dataclass(slots=True)
class SubGroup:
    """A sub-group and its state.

    Attributes:
        spec: the states kept.
        chunks: in ascending order.
        extents: where chunks that live on NVMe are, by their index.
        split: of those whose master weights are split, on NVMe or in host memory, the hash of the weights that they are
            split over.
        fresh: those of which only the master weights were written, and nothing where these are split; the rest is zero.
        resident: bytes of chunks that live in host memory, by their index, laid out as in an extent; none of a whole
            sub-group.
        device: the same of chunks that live in device memory, unless it was taken back: then its image has them.
        tensors: of a whole sub-group, 1-D, by kind.
        own: whether these are in plain pages of the tier; else they were created by the optimizer.
    """

    spec: SubGroupSpec
    chunks: tuple[Chunk, ...]
    extents: dict[int, Extent] = field(default_factory=dict)
    split: dict[int, bytes] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    resident: dict[int, torch.Tensor] = field(default_factory=dict)
    device: dict[int, Loan] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    own: bool = False

    @property
    def resident_nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(tensor.nbytes for tensor in (*self.resident.values(), *self.tensors.values()))

    @property
    def device_nbytes(self) -> int:
        """Bytes in device memory."""
        return sum(loan.memory.nbytes for loan in self.device.values())

    def place(self, chunk: Chunk) -> Place:
        """Where one of the chunks lives."""
        if chunk.index in self.extents:
            return Place.NVME
        return Place.GPU if chunk.index in self.device else Place.HOST

    def covering(self, start: int, numel: int) -> list[tuple[Chunk, int, int]]:
        """``(chunk, first element, end)`` of the chunks that have some of ``numel`` elements from ``start``."""
        covering = []
        for chunk in self.chunks:
            low, high = max(start, chunk.start), min(start + numel, chunk.start + chunk.numel)
            if low < high:
                covering.append((chunk, low, high))
        return covering

    def dtype(self, kind: str) -> torch.dtype:
        """Dtype of one kind of state.

        Raises:
            KeyError: the state does not exist (yet).
        """
        for name, dtype in self.spec.states:
            if name == kind:
                return dtype
        raise KeyError(kind)

    def resident_views(self, chunk: Chunk) -> dict[str, torch.Tensor]:
        """A 1-D tensor per kind of a chunk that lives in host memory; changes are changes of the state."""
        if self.spec.whole:
            end = chunk.start + chunk.numel
            return {kind: self.tensors[kind][self.spec.values(kind, chunk.start, end)] for kind, _ in self.spec.states}
        return self.views_of(chunk, self.resident[chunk.index])

    def views_in(self, chunk: Chunk, lease: Lease) -> Mapping[str, torch.Tensor]:
        """:meth:`views_of` a staging buffer."""
        return lease.views((chunk.pieces, self.spec.states), partial(self.views_of, chunk))

    def views_of(self, chunk: Chunk, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """A 1-D tensor per kind in a buffer (uint8) that holds a chunk as its pieces say."""
        return views_of(chunk, buffer, dict(self.spec.states))


@dataclass(slots=True)
class ChunkInUse:
    """A chunk whose state is in host memory.

    Attributes:
        chunk: which one.
        views: 1-D tensor per kind of state, of ``chunk.numel`` elements, or their scales; of a fresh chunk, maybe only
            the first kind.
        digest: where the remainders of its master weights are there instead of these, the hash of the weights that they
            are remainders of, not yet compared; whoever changes the chunk replaces it. Empty: whole master weights.
        fresh: whether the kinds of state that are not in ``views`` are zero.
    """

    chunk: Chunk
    views: Mapping[str, torch.Tensor]
    digest: bytes = b""
    fresh: bool = False
    _lease: Lease | None = None
    _write_back: Callable[[], None] | None = None  # of a copy

    @property
    def staged(self) -> bool:
        """Whether it holds a staging buffer."""
        return self._lease is not None

    @property
    def copied(self) -> bool:
        """Whether its views are those of a copy."""
        return self._write_back is not None

    def end(self, *, changed: bool) -> Lease | None:
        """Invalidates the views. Changes in a copy are copied back; the lease of a staging buffer is
        returned, once, for the caller to release."""
        lease, self._lease = self._lease, None
        write_back, self._write_back = self._write_back, None
        self.views = {}
        if write_back is not None and changed:
            write_back()
        return lease
