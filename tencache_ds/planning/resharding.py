# SPDX-License-Identifier: Apache-2.0
"""Which elements of a checkpoint's partitions make up the partition of a rank, where the number of ranks has changed.

ZeRO cuts each weight into as many partitions of one length as there are ranks; the end of the last ones is padding. A
rank's partitions of all weights lie one after another, whatever sub-groups they are divided into.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements that were saved by one rank.

    Attributes:
        saved_by: that rank.
        source: the first one, counted within the partitions of all weights that this rank saved.
        target: the first one, counted within those of the rank that loads them.
        numel: how many.
    """

    saved_by: int
    source: int
    target: int
    numel: int


def partition_numel(numel: int, n_ranks: int) -> int:
    """Elements of each rank's partition of a weight, padding included."""
    return -(-numel // n_ranks)


def pieces(numels: Sequence[int], n_saved: int, n_ranks: int, rank: int) -> list[Piece]:
    """The pieces of a rank's partitions, in order; what no piece fills is padding.

    Args:
        numels: of each weight.
        n_saved: ranks that saved the checkpoint.
        n_ranks: ranks that load it.
        rank: one of these.
    """
    found = []
    saved_start = start = 0
    for numel in numels:
        saved_length, length = partition_numel(numel, n_saved), partition_numel(numel, n_ranks)
        first, end = min(rank * length, numel), min((rank + 1) * length, numel)
        while first < end:
            saved_by, offset = divmod(first, saved_length)
            count = min(end - first, saved_length - offset)
            found.append(Piece(saved_by, saved_start + offset, start + first - rank * length, count))
            first += count
        saved_start += saved_length
        start += length
    return found
