# SPDX-License-Identifier: Apache-2.0
"""How a sub-group's optimizer state is cut into chunks, and where each piece of a chunk lies in its extent.

Adam and its relatives are elementwise, so the unit of update can be any run of elements. A chunk's master weights and
moments are adjacent in one extent: one sequential read and one sequential write per chunk, whatever ``sub_group_size``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tencache_ds.layout import round_up

GRANULE_NUMEL = 4096
"""Chunks start at multiples of this many elements: every piece but a sub-group's last is then a whole number of pages
for 1-, 2- and 4-byte elements, and no vector loop of a CPU optimizer is cut in its middle, so that chunked updates are
bit-identical to whole ones."""

SCALE_NUMEL = 256
"""Consecutive elements of a sub-group that share one value of a scale; a granule has a whole number of them."""

STORED_CHUNK_NBYTES = 32 * 2**20
"""Large enough for any drive's best rate, small enough for a dozen buffers."""

RESIDENT_CHUNK_NBYTES = 128 * 2**20
"""Where no chunk passes through a buffer: a quarter of the Python for an update that goes on beside a forward pass."""

GAP_SHARE = 1 / 8
"""Share of a chunk: elements with a smaller gap between them are not worth chunks of their own."""

GRADIENT_BUFFER_NUMEL = 32 * 2**20
"""The gradients of at least so many elements share a buffer, which is freed as a whole: a dozen chunks, so that a cut
adds few."""

LEAST_SLOT_NBYTES = 8 * 4 * GRANULE_NUMEL
"""A buffer for chunks has room for a granule of eight fp32 kinds at least: kinds that an optimizer makes at its first
step find room in the pool there is, however small the sub-groups are."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One kind of state within a chunk's extent.

    Attributes:
        kind: "master" or the optimizer's name of the state ("exp_avg", ...).
        offset: first byte in the extent, a multiple of the page size.
        nbytes: payload in bytes (the space up to the next piece is padding).
    """

    kind: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of elements of one sub-group.

    Attributes:
        sub_group: index of the sub-group.
        index: index of the chunk in its sub-group.
        start: first element in the sub-group.
        numel: number of elements.
        pieces: where each kind of state lies in the extent.
        nbytes: bytes of the extent, padding included.
    """

    sub_group: int
    index: int
    start: int
    numel: int
    pieces: tuple[Piece, ...]
    nbytes: int

    def __hash__(self) -> int:
        return hash((self.sub_group, self.index, self.numel))  # chunks are keys, and pieces take long to hash

    def piece(self, kind: str) -> Piece:
        """The piece of that kind; KeyError if the chunk has none."""
        for piece in self.pieces:
            if piece.kind == kind:
                return piece
        raise KeyError(kind)


def automatic_chunk_nbytes(*, may_be_stored: bool) -> int:
    """The size of chunks where the user gives none.

    Args:
        may_be_stored: whether optimizer state may go to NVMe.
    """
    return STORED_CHUNK_NBYTES if may_be_stored else RESIDENT_CHUNK_NBYTES


def cut_sub_group(
    sub_group: int,
    numel: int,
    kinds: Sequence[tuple[str, int]],
    chunk_nbytes: int,
    apart: Iterable[tuple[int, int]] = (),
    cuts: Sequence[int] = (),
    scales: Sequence[tuple[str, int]] = (),
) -> tuple[Chunk, ...]:
    """Chunks of a sub-group.

    Args:
        sub_group: index of the sub-group.
        numel: elements of this rank's partition of it.
        kinds: ``(kind, bytes per element)`` in the order they lie in the extent.
        chunk_nbytes: wanted bytes of a full chunk; rounded down to whole granules, at least one.
        apart: ascending ``(first element, end)`` of elements that get chunks of their own, so that updating them early
            updates few others. Those with less than :data:`GAP_SHARE` of a chunk between them are together.
        cuts: ascending elements where another chunk begins, of :func:`gradient_cuts`.
        scales: ``(kind, bytes per value)`` of state with one value for :data:`SCALE_NUMEL` elements; behind ``kinds``.

    Returns:
        Chunks in ascending order that cover ``[0, numel)`` exactly once.
    """
    per_granule = GRANULE_NUMEL * sum(itemsize for _, itemsize in kinds)
    per_granule += GRANULE_NUMEL // SCALE_NUMEL * sum(itemsize for _, itemsize in scales)
    step = max(chunk_nbytes // max(per_granule, 1), 1) * GRANULE_NUMEL
    chunks: list[Chunk] = []
    for first, end in _cut(_regions(numel, apart, int(GAP_SHARE * step)), cuts):
        for start in range(first, end, step):
            length = min(step, end - start)
            chunks.append(Chunk(sub_group, len(chunks), start, length, *pieces_of(length, tuple(kinds), tuple(scales))))
    return tuple(chunks)


@lru_cache(maxsize=1 << 12)
def pieces_of(
    numel: int, kinds: tuple[tuple[str, int], ...], scales: tuple[tuple[str, int], ...] = ()
) -> tuple[tuple[Piece, ...], int]:
    """The pieces of a chunk of so many elements, and the bytes of its extent. Chunks of one layout share them.

    Args:
        numel: elements of the chunk.
        kinds: ``(kind, bytes per element)``.
        scales: ``(kind, bytes per value)`` of those with one value for :data:`SCALE_NUMEL` elements.
    """
    sizes = [(kind, numel * itemsize) for kind, itemsize in kinds]
    sizes += [(kind, -(-numel // SCALE_NUMEL) * itemsize) for kind, itemsize in scales]
    pieces, offset = [], 0
    for kind, nbytes in sizes:
        pieces.append(Piece(kind, offset, nbytes))
        offset += round_up(nbytes)
    return tuple(pieces), offset


def _regions(numel: int, apart: Iterable[tuple[int, int]], gap_numel: int) -> Iterator[tuple[int, int]]:
    """``(first element, end)`` of what is cut separately: elements apart and those between them, in whole granules."""
    together: list[list[int]] = []
    for first, end in apart:
        if first >= end:
            continue
        low = first // GRANULE_NUMEL * GRANULE_NUMEL
        high = min(-(-end // GRANULE_NUMEL) * GRANULE_NUMEL, numel)
        if together and low - together[-1][1] <= gap_numel:
            together[-1][1] = max(high, together[-1][1])
        else:
            together.append([low, high])
    position = 0
    for low, high in together:
        if low > position:
            yield position, low
        yield low, high
        position = high
    if position < numel:
        yield position, numel


def _cut(regions: Iterable[tuple[int, int]], cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
    for first, end in regions:
        within = [cut for cut in cuts if first < cut < end]
        yield from zip([first, *within], [*within, end], strict=True)


def gradient_cuts(numels: Sequence[int], least_numel: int) -> list[int]:
    """The elements of a sub-group where another buffer of gradients begins.

    Every buffer has whole weights, so that a gradient is one tensor, and a chunk has the gradients of one buffer.

    Args:
        numels: elements of each weight's shard, in the order of the sub-group.
        least_numel: elements of a buffer at least.

    Returns:
        First elements of weights, ascending, that are multiples of :data:`GRANULE_NUMEL`.
    """
    cuts, position, last, total = [], 0, 0, sum(numels)
    for numel in numels:
        long_enough = position - last >= least_numel and total - position >= least_numel
        if long_enough and position % GRANULE_NUMEL == 0:
            cuts.append(position)
            last = position
        position += numel
    return cuts


@dataclass(frozen=True, slots=True)
class Overlap:
    """Elements that a chunk and a segment (a weight's shard) share.

    Attributes:
        segment: index of the segment.
        in_chunk: first shared element, counted from the chunk's start.
        in_segment: first shared element, counted from the segment's start.
        numel: number of shared elements.
        last: whether the segment ends in this chunk.
    """

    segment: int
    in_chunk: int
    in_segment: int
    numel: int
    last: bool


def overlaps(chunk: Chunk, segment_starts: Sequence[int], segment_numels: Sequence[int]) -> list[Overlap]:
    """The segments a chunk shares elements with, in ascending order.

    Args:
        chunk: the chunk.
        segment_starts: first element of each segment in the sub-group, ascending.
        segment_numels: elements of each segment; empty ones are never returned.
    """
    end = chunk.start + chunk.numel
    overlapping = []
    for index, (start, numel) in enumerate(zip(segment_starts, segment_numels, strict=True)):
        if start >= end:
            break
        low, high = max(start, chunk.start), min(start + numel, end)
        if low < high:
            overlapping.append(Overlap(index, low - chunk.start, low - start, high - low, high == start + numel))
    return overlapping
