# SPDX-License-Identifier: Apache-2.0
"""How many cores of its host a rank may use for arithmetic, and how many threads its I/O takes, with what blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from fractions import Fraction

LANES = 8
"""Enough for the fastest drives: the device works while a lane waits for it."""

MOST_LANES_IN_MEMORY = 32

FEW_CORES = 8
"""A rank with fewer leaves one core to training instead of two, one with two cores or less leaves none."""


def core_budget(own: Set[int], others: Sequence[Set[int]], quotas: Iterable[tuple[float, int]] = ()) -> int:
    """Cores of one rank: each core it may run on, divided by the ranks that may run on it too.

    Args:
        own: cores that this rank may run on.
        others: the same of every other rank on its host.
        quotas: of each control group of this rank that has a quota: the cores' worth of time that it may use, and how
            many ranks are in it, this one included.

    Returns:
        At least 1. The budgets of ranks that share cores never add up to more than those cores, but for that 1.
    """
    share = sum((Fraction(1, 1 + sum(core in other for other in others)) for core in own), Fraction(0))
    return max(int(min([share, *(Fraction(cores) / sharers for cores, sharers in quotas)])), 1)


def cores_beside_training(cores: int, *, on_gpu: bool) -> int:
    """How many of a rank's cores the optimizer's update and copies may keep busy while a pass runs.

    Where a GPU computes, a pass is Python and kernel launches on one thread. With the update on every core of 16, that
    thread waited for a core during 0.09 s of a forward pass of 0.4 s; with the update on 14, not at all, and the update
    was 3 % slower. On a machine without a GPU the passes' own arithmetic takes all cores in any case.

    Args:
        cores: of this rank.
        on_gpu: whether a GPU computes.
    """
    if not on_gpu or cores <= 2:
        return cores
    return cores - (1 if cores < FEW_CORES else 2)


def lane_count(cores: int, *, in_memory: bool) -> int:
    """I/O threads for one path.

    On a file system in memory each transfer is a copy by the lane itself, at 3 to 5 GB/s: eight lanes reach a third of
    what the memory of a host with 16 cores gives.

    Args:
        cores: of this rank, as far as copies may keep them busy.
        in_memory: whether the path is on such a file system.
    """
    return max(LANES, min(cores, MOST_LANES_IN_MEMORY)) if in_memory else LANES


def block_nbytes(*, in_memory: bool) -> int:
    """Bytes of one request to the kernel.

    As in DeepSpeed on a drive, which works on many requests at a time. On a file system in memory a lane with larger
    ones asks for work less often: a step with state on tmpfs took 10 % less than with blocks of 1 MiB.

    Args:
        in_memory: whether the path is on such a file system.
    """
    return 4 * 2**20 if in_memory else 2**20
