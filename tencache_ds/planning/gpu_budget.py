# SPDX-License-Identifier: Apache-2.0
"""How much of a GPU's memory may hold weights, gradients and optimizer state, and what leaves it when training needs
it. What goes there is decided in :mod:`tencache_ds.planning.gpu_policy`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tencache_ds.items import GpuUsage
from tencache_ds.layout import gib

LEAST_HEADROOM_NBYTES = 2**30
"""GPU memory that is left free at least, beside what the recorded step needed."""


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """GPU memory for weights, gradients and optimizer state.

    Attributes:
        nbytes: of this rank.
        reason: where the figure comes from.
    """

    nbytes: int
    reason: str


def gpu_budget(usage: GpuUsage, wanted_nbytes: int | None, there_nbytes: int = 0) -> GpuBudget:
    """The part of a GPU's memory that may hold weights, gradients and optimizer state between two uses.

    Args:
        usage: of the recorded step.
        wanted_nbytes: the user's ``gpu_memory``, or None for automatic.
        there_nbytes: what it holds of them already.

    Returns:
        Automatic: what the recorded step left free, less as much again as its activations and gradients took: they may
        double. A figure of the user is only limited by what that step left free.
    """
    left_nbytes = max(usage.available_nbytes - usage.transient_nbytes, 0) + there_nbytes
    if wanted_nbytes is not None:
        if wanted_nbytes <= left_nbytes:
            return GpuBudget(wanted_nbytes, "tencache.gpu_memory")
        return GpuBudget(left_nbytes, f"tencache.gpu_memory, of which the recorded step left {gib(left_nbytes)} free")
    headroom_nbytes = headroom(usage)
    return GpuBudget(
        max(left_nbytes - headroom_nbytes, there_nbytes),
        f"the recorded step left {gib(left_nbytes)} free, of which {gib(headroom_nbytes)} stay free for a step that "
        "needs more",
    )


def headroom(usage: GpuUsage) -> int:
    """Bytes that are to stay free at the peak of a step like the recorded one."""
    return max(usage.transient_nbytes, LEAST_HEADROOM_NBYTES)


def chunks_to_release(chunk_nbytes: Sequence[Sequence[int]], chunks: Sequence[int], nbytes: int) -> tuple[int, ...]:
    """How many chunks of each sub-group stay in GPU memory when at least ``nbytes`` of state have to leave it.

    Args:
        chunk_nbytes: of each chunk of each sub-group.
        chunks: of each sub-group how many are there, counted from its first.
        nbytes: to be freed.
    """
    left, freed = list(chunks), 0
    for index in reversed(range(len(left))):
        while left[index] and freed < nbytes:
            left[index] -= 1
            freed += chunk_nbytes[index][left[index]]
    return tuple(left)
