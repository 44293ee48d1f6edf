# SPDX-License-Identifier: Apache-2.0
"""Partitions of any number of ranks, put together from those of any other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.planning.resharding import Piece, partition_numel, pieces

pytestmark = pytest.mark.timeout(60)

RANKS = st.integers(1, 9)


def partitions(weights: list[np.ndarray], n_ranks: int) -> list[np.ndarray]:
    """What each rank has of the weights, padded with -1."""
    shards: list[list[np.ndarray]] = [[] for _ in range(n_ranks)]
    for weight in weights:
        length = partition_numel(len(weight), n_ranks)
        padded = np.full(length * n_ranks, -1)
        padded[: len(weight)] = weight
        for rank, shard in enumerate(shards):
            shard.append(padded[rank * length : (rank + 1) * length])
    return [np.concatenate(shard) if shard else np.zeros(0, int) for shard in shards]


@given(st.lists(st.integers(1, 40), max_size=6), RANKS, RANKS)
def test_every_partition_is_put_together_from_those_that_were_saved(numels, n_saved, n_ranks):
    ends = np.cumsum([0, *numels])
    weights = [np.arange(start, end) for start, end in zip(ends, ends[1:], strict=False)]
    saved, expected = partitions(weights, n_saved), partitions(weights, n_ranks)
    for rank in range(n_ranks):
        found = np.full(len(expected[rank]), -1)
        for piece in pieces(numels, n_saved, n_ranks, rank):
            values = saved[piece.saved_by][piece.source : piece.source + piece.numel]
            assert len(values) == piece.numel > 0
            assert (found[piece.target : piece.target + piece.numel] == -1).all()
            found[piece.target : piece.target + piece.numel] = values
        assert (found == expected[rank]).all()


def test_with_the_same_number_of_ranks_each_weight_is_one_piece():
    assert pieces([10, 4], 2, 2, 1) == [Piece(1, 0, 0, 5), Piece(1, 5, 5, 2)]


def test_ranks_without_elements_have_padding_only():
    assert pieces([2], 1, 4, 3) == []
    assert pieces([2], 4, 1, 0) == [Piece(0, 0, 0, 1), Piece(1, 0, 1, 1)]
