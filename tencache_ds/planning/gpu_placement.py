# SPDX-License-Identifier: Apache-2.0
"""What lives in the GPU memory that training leaves free.

A byte of a weight there saves two copies from host memory in each step, a byte of optimizer state its share of the
host's update. Measured on an H200 host (1.3 B parameters), 2.7 GB of weights and their gradients save 0.2 s of a step
and 21 GB of state 0.4 s: per byte, weights first. So state goes there once all weights are there. A gradient follows
the state that it updates, because it need not cross PCIe then.

State is taken from the front, in the order of the update. What it leaves in host memory is given to chunks that are on
NVMe (:func:`tencache_ds.planning.placement.place_state`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tencache_ds.items import GpuUsage
from tencache_ds.layout import gib, round_up

LEAST_HEADROOM_NBYTES = 2**30
"""GPU memory that is left free at least, beside what the recorded step needed."""

ALLOCATION_NBYTES = 512
"""torch's allocator rounds every tensor up to a multiple of this."""


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """GPU memory for weights, gradients and optimizer state.

    Attributes:
        nbytes: of this rank.
        reason: where the figure comes from.
    """

    nbytes: int
    reason: str


def gpu_budget(usage: GpuUsage, wanted_nbytes: int | None) -> GpuBudget:
    """What of a GPU's memory may hold weights, gradients and optimizer state between two uses.

    Args:
        usage: of the recorded step.
        wanted_nbytes: the user's ``gpu_memory``, or None for automatic.

    Returns:
        Automatic: what the recorded step left free, less as much again as its activations and gradients took: they may
        double. A figure of the user is only limited by what that step left free.
    """
    left_nbytes = max(usage.available_nbytes - usage.transient_nbytes, 0)
    if wanted_nbytes is not None:
        if wanted_nbytes <= left_nbytes:
            return GpuBudget(wanted_nbytes, "tencache.gpu_memory")
        return GpuBudget(left_nbytes, f"tencache.gpu_memory, of which the recorded step left {gib(left_nbytes)} free")
    headroom_nbytes = headroom(usage)
    return GpuBudget(
        max(left_nbytes - headroom_nbytes, 0),
        f"the recorded step left {gib(left_nbytes)} free, of which {gib(headroom_nbytes)} stay free for a step that "
        "needs more",
    )


def headroom(usage: GpuUsage) -> int:
    """Bytes that are to stay free at the peak of a step like the recorded one."""
    return max(usage.transient_nbytes, LEAST_HEADROOM_NBYTES)


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """What goes to GPU memory.

    Attributes:
        weights: of each weight whether it does.
        chunks: of each sub-group how many of its chunks do, counted from its first.
        nbytes: of all of it, gradients included.
    """

    weights: tuple[bool, ...]
    chunks: tuple[int, ...]
    nbytes: int


def plan_gpu(
    weight_nbytes: Sequence[int],
    chunk_nbytes: Sequence[Sequence[int]],
    gradient_nbytes: Sequence[Sequence[int]],
    budget_nbytes: int,
) -> GpuPlan:
    """Fills a budget: weights in their order, then the state's chunks with their gradients in the order of the update.

    Args:
        weight_nbytes: of each weight's shard.
        chunk_nbytes: of each chunk of each sub-group.
        gradient_nbytes: of each chunk's gradients.
        budget_nbytes: for all of it.
    """
    left = budget_nbytes
    weights = []
    for nbytes in weight_nbytes:
        fits = _rounded(nbytes) <= left
        weights.append(fits)
        left -= _rounded(nbytes) if fits else 0
    chunks = [0] * len(chunk_nbytes)
    if all(weights):
        for index, (states, gradients) in enumerate(zip(chunk_nbytes, gradient_nbytes, strict=True)):
            for state, gradient in zip(states, gradients, strict=True):
                nbytes = _rounded(state) + _rounded(gradient)
                if nbytes > left:
                    return GpuPlan(tuple(weights), tuple(chunks), budget_nbytes - left)
                chunks[index] += 1
                left -= nbytes
    return GpuPlan(tuple(weights), tuple(chunks), budget_nbytes - left)


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


def _rounded(nbytes: int) -> int:
    return round_up(nbytes, ALLOCATION_NBYTES)
