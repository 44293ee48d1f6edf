# SPDX-License-Identifier: Apache-2.0
"""How much of a GPU's memory may hold weights, gradients and optimizer state, also as the user limits it, and what
leaves it when training needs it. What goes there is decided in :mod:`tencache_ds.placement.gpu_policy`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tencache_ds.config import Share
from tencache_ds.layout import gib
from tencache_ds.placement.places import GpuUsage

LEAST_HEADROOM_NBYTES = 2**30
"""GPU memory that is left free at least, beside what the recorded step needed."""

LOST_SHARE = 0.1
"""Fragmentation, as a share of the memory that a pass or a step takes at its peak."""


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """GPU memory for weights, gradients and optimizer state.

    Attributes:
        nbytes: of this rank, for all of them.
        lasting_nbytes: for weights and gradients, which cannot leave within a pass.
        reason: where the figures come from.
    """

    nbytes: int
    lasting_nbytes: int
    reason: str


def gpu_budget(
    usage: GpuUsage,
    wanted_nbytes: int | None,
    there_nbytes: int = 0,
    room_elsewhere_nbytes: int | None = None,
    pool_nbytes: int = 0,
) -> GpuBudget:
    """The part of a GPU's memory that may hold weights, gradients and optimizer state between two uses.

    Args:
        usage: of the recorded step.
        wanted_nbytes: the user's ``gpu_memory``, or None for automatic.
        there_nbytes: what it holds of them already.
        room_elsewhere_nbytes: of state that can leave within an allocation; None where it cannot.
        pool_nbytes: the most that torch's allocator has held: more than tensors need at a time, as it keeps memory for
            the stream that has used it (of arithmetic, of gathers, of reductions). State would leave for it in the
            next step.

    Returns:
        Automatic: what the recorded step left free, less as much again as its activations and gradients took: they may
        double. State that can leave within an allocation takes most of that, too. A figure of the user is only limited
        by what that step left free.
    """
    left_nbytes = max(usage.available_nbytes - usage.transient_nbytes, 0) + there_nbytes
    if wanted_nbytes is not None:
        if wanted_nbytes <= left_nbytes:
            return GpuBudget(wanted_nbytes, wanted_nbytes, "tencache.gpu_memory")
        reason = f"tencache.gpu_memory, of which the recorded step left {gib(left_nbytes)} free"
        return GpuBudget(left_nbytes, left_nbytes, reason)
    lasting_nbytes = nbytes = max(left_nbytes - headroom(usage), 0)
    if room_elsewhere_nbytes is not None:
        beside_pool_nbytes = usage.free_nbytes - max(pool_nbytes - usage.pool_nbytes, 0) + there_nbytes
        most_nbytes = min(left_nbytes, beside_pool_nbytes) - headroom(usage, can_leave=True)
        nbytes = max(min(most_nbytes, lasting_nbytes + max(room_elsewhere_nbytes, 0)), lasting_nbytes)
    nbytes = max(nbytes, there_nbytes)
    return GpuBudget(
        nbytes,
        lasting_nbytes,
        f"the recorded step left {gib(left_nbytes)} free, of which {gib(max(left_nbytes - nbytes, 0))} stay free for a "
        "step that needs more",
    )


def headroom(usage: GpuUsage, *, can_leave: bool = False) -> int:
    """Bytes that are to stay free at the peak of a step like the recorded one.

    Args:
        usage: of the recorded step.
        can_leave: whether what is there leaves within an allocation that needs its memory: then only the difference
            between two such steps, and what is lost between allocations.
    """
    return max(int(LOST_SHARE * usage.transient_nbytes) if can_leave else usage.transient_nbytes, LEAST_HEADROOM_NBYTES)


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


def limit_nbytes(usage: GpuUsage, wanted: int | Share | None) -> int | None:
    """The user's ``gpu_memory`` in bytes: how many may hold what TenCache moves there; None for automatic.

    Args:
        usage: at present; a share is one of what this process has or may have.
        wanted: the user's ``gpu_memory``.
    """
    if isinstance(wanted, Share):
        return int(wanted.fraction * (usage.available_nbytes + usage.allocated_nbytes))
    return wanted
