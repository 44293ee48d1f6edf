# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.layout import PAGE_NBYTES, round_up
from tencache_ds.planning.chunks import GRANULE_NUMEL, Chunk, Overlap, cut_sub_group, gradient_cuts, overlaps

KINDS = st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4).map(
    lambda sizes: [(f"kind{index}", size) for index, size in enumerate(sizes)]
)
NUMEL = st.one_of(st.integers(0, 30 * GRANULE_NUMEL), st.integers(0, 30).map(lambda n: n * GRANULE_NUMEL))
CHUNK_NBYTES = st.one_of(st.integers(0, 2**17), st.integers(0, 2**20))


@given(NUMEL, KINDS, CHUNK_NBYTES)
def test_chunks_cover_exactly_once_from_granule_to_granule(numel, kinds, chunk_nbytes):
    chunks = cut_sub_group(7, numel, kinds, chunk_nbytes)
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert all(chunk.sub_group == 7 for chunk in chunks)
    position = 0
    for chunk in chunks:
        assert chunk.start == position
        assert chunk.start % GRANULE_NUMEL == 0
        assert chunk.numel > 0
        position += chunk.numel
    assert position == numel


@given(NUMEL, KINDS, CHUNK_NBYTES)
def test_chunks_are_as_large_as_wanted(numel, kinds, chunk_nbytes):
    chunks = cut_sub_group(0, numel, kinds, chunk_nbytes)
    granule_nbytes = GRANULE_NUMEL * sum(itemsize for _, itemsize in kinds)
    full = max(chunk_nbytes // granule_nbytes, 1) * granule_nbytes
    assert all(chunk.nbytes == full for chunk in chunks[:-1])
    assert all(0 < chunk.nbytes <= full for chunk in chunks)


@given(NUMEL, KINDS, CHUNK_NBYTES, CHUNK_NBYTES)
def test_chunks_are_keys(numel, kinds, chunk_nbytes, other_nbytes):
    """Equal ones are found, however they were cut, and no others."""
    chunks, again = (cut_sub_group(0, numel, kinds, chunk_nbytes) for _ in range(2))
    found = {chunk: chunk.index for chunk in chunks}
    assert [found[chunk] for chunk in again] == list(range(len(chunks)))
    others = cut_sub_group(0, numel, [("kind", 2), *kinds], other_nbytes)
    assert not any(chunk in found for chunk in (*others, *cut_sub_group(1, numel, kinds, chunk_nbytes)))


@given(NUMEL, KINDS, CHUNK_NBYTES)
def test_pieces_are_aligned_adjacent_and_whole_pages_but_for_the_last_chunk(numel, kinds, chunk_nbytes):
    chunks = cut_sub_group(0, numel, kinds, chunk_nbytes)
    for chunk in chunks:
        position = 0
        for piece, (kind, itemsize) in zip(chunk.pieces, kinds, strict=True):
            assert piece.kind == kind
            assert piece.nbytes == chunk.numel * itemsize
            assert piece.offset == position
            assert piece.offset % PAGE_NBYTES == 0
            assert chunk is chunks[-1] or piece.nbytes % PAGE_NBYTES == 0
            assert chunk.piece(kind) is piece
            position += round_up(piece.nbytes)
        assert chunk.nbytes == position


APART = st.lists(st.integers(0, 30 * GRANULE_NUMEL), max_size=12).map(
    lambda places: list(zip(sorted(places)[::2], sorted(places)[1::2], strict=False))
)


@given(NUMEL, KINDS, CHUNK_NBYTES, APART)
def test_elements_apart_share_no_chunk_with_others_that_are_far_from_them(numel, kinds, chunk_nbytes, apart):
    apart = [(min(first, numel), min(end, numel)) for first, end in apart]
    chunks = cut_sub_group(3, numel, kinds, chunk_nbytes, apart)
    step = max(chunk_nbytes // (GRANULE_NUMEL * sum(size for _, size in kinds)), 1) * GRANULE_NUMEL
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    position = 0
    for chunk in chunks:
        assert chunk.start == position
        assert chunk.start % GRANULE_NUMEL == 0
        assert 0 < chunk.numel <= step
        assert chunk is chunks[-1] or chunk.numel % GRANULE_NUMEL == 0
        position += chunk.numel
    assert position == numel
    ranges = [(first, end) for first, end in apart if first < end]
    for chunk in chunks:
        end = chunk.start + chunk.numel
        near = [each for each in ranges if each[0] < end and chunk.start < each[1]]
        if not near:
            continue
        # Every element of it is within a granule of one of them, or between two that are close to each other.
        reach = step // 8 + 2 * GRANULE_NUMEL
        for element in (chunk.start, end - 1):
            assert any(first - reach < element < last + reach for first, last in ranges)
    # With none, or with all of them, nothing changes.
    assert cut_sub_group(3, numel, kinds, chunk_nbytes, [(5, 5)]) == cut_sub_group(3, numel, kinds, chunk_nbytes)
    assert cut_sub_group(3, numel, kinds, chunk_nbytes, [(0, numel)]) == cut_sub_group(3, numel, kinds, chunk_nbytes)


@given(NUMEL, KINDS, CHUNK_NBYTES, APART, st.lists(st.integers(0, 30), max_size=4, unique=True))
def test_a_chunk_begins_at_every_cut(numel, kinds, chunk_nbytes, apart, granules):
    apart = [(min(first, numel), min(end, numel)) for first, end in apart]
    cuts = sorted(granule * GRANULE_NUMEL for granule in granules if granule * GRANULE_NUMEL < numel)
    chunks = cut_sub_group(3, numel, kinds, chunk_nbytes, apart, cuts)
    assert {chunk.start for chunk in chunks} >= set(cuts)
    ends = [chunk.start + chunk.numel for chunk in chunks]
    assert [chunk.start for chunk in chunks] == [0, *ends[:-1]][: len(chunks)]
    assert ends[-1:] == ([numel] if numel else [])
    assert all(chunk.nbytes > 0 for chunk in chunks)
    without = cut_sub_group(3, numel, kinds, chunk_nbytes, apart)
    assert max((chunk.numel for chunk in chunks), default=0) <= max((chunk.numel for chunk in without), default=0)


@given(st.lists(st.integers(0, 9).map(lambda n: n * GRANULE_NUMEL // 2), max_size=30), st.integers(1, 20))
def test_buffers_of_gradients_begin_with_a_weight_and_a_granule(numels, least_granules):
    least = least_granules * GRANULE_NUMEL
    cuts = gradient_cuts(numels, least)
    starts = [sum(numels[:index]) for index in range(len(numels))]
    assert set(cuts) <= set(starts)
    assert all(cut % GRANULE_NUMEL == 0 for cut in cuts)
    edges = [0, *cuts, sum(numels)]
    assert not cuts or all(end - start >= least for start, end in zip(edges, edges[1:], strict=False))
    for start, end in zip(edges, edges[1:], strict=False):
        between = [each for each in starts if each - start >= least and end - each >= least]
        assert not any(each % GRANULE_NUMEL == 0 for each in between), "it could have been cut there"


def test_small_weights_between_large_ones_get_small_chunks():
    granule, large = GRANULE_NUMEL, 100 * GRANULE_NUMEL
    kinds = [("master", 4), ("exp_avg", 4), ("exp_avg_sq", 4)]
    norms = [(large + 7, large + 2055), (large + 2055, large + 4103), (3 * large, 3 * large + 2048)]
    chunks = cut_sub_group(0, 4 * large, kinds, 12 * 64 * granule, norms)
    assert [(chunk.start // granule, chunk.numel // granule) for chunk in chunks] == [
        (0, 64), (64, 36), (100, 2), (102, 64), (166, 64), (230, 64), (294, 6), (300, 1), (301, 64), (365, 35),
    ]  # fmt: skip


def test_a_piece_that_is_not_there():
    (chunk,) = cut_sub_group(0, 5, [("master", 4)], 1)
    with pytest.raises(KeyError, match="exp_avg"):
        chunk.piece("exp_avg")


@given(st.integers(0, 2**50))
def test_align(nbytes):
    assert round_up(nbytes) % PAGE_NBYTES == 0
    assert 0 <= round_up(nbytes) - nbytes < PAGE_NBYTES


@st.composite
def segments(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Ascending segments with gaps, some of them empty."""
    starts, numels, position = [], [], 0
    for _ in range(draw(st.integers(0, 12))):
        position += draw(st.integers(0, 3))
        starts.append(position)
        numels.append(draw(st.integers(0, 9)))
        position += numels[-1]
    return starts, numels


@given(segments(), st.integers(0, 60), st.integers(0, 40))
def test_overlaps_against_brute_force(given_segments, start, numel):
    starts, numels = given_segments
    chunk = Chunk(0, 0, start, numel, (), 0)
    expected = []
    for index, (low, length) in enumerate(zip(starts, numels, strict=True)):
        shared = sorted(set(range(low, low + length)) & set(range(start, start + numel)))
        if shared:
            last = low + length - 1 in shared
            expected.append(Overlap(index, shared[0] - start, shared[0] - low, len(shared), last))
    assert overlaps(chunk, starts, numels) == expected


@given(segments(), st.integers(1, 10))
def test_every_segment_ends_in_exactly_one_of_the_chunks(given_segments, step):
    starts, numels = given_segments
    end = max((s + n for s, n in zip(starts, numels, strict=True)), default=0)
    chunks = [Chunk(0, i, s, min(step, end - s), (), 0) for i, s in enumerate(range(0, end, step))]
    actual = [overlap for chunk in chunks for overlap in overlaps(chunk, starts, numels)]
    filled = [index for index, n in enumerate(numels) if n]
    assert sorted(overlap.segment for overlap in actual if overlap.last) == filled
    for index in filled:
        assert sum(overlap.numel for overlap in actual if overlap.segment == index) == numels[index]


def test_segments_of_another_length_than_their_starts():
    with pytest.raises(ValueError, match="zip"):
        overlaps(Chunk(0, 0, 0, 5, (), 0), [0, 1], [1])
