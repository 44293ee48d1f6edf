# SPDX-License-Identifier: Apache-2.0
"""What GPU memory holds: how many bytes, and which items.

A budget says how many bytes weights, gradients and optimizer state may take, also as the user limits it, and what
leaves when training needs them. They go to the items that save most seconds of a step per byte, as measured.

A weight that is in GPU memory saves what a step waits for its copies; most of that time may already be hidden behind
arithmetic. A chunk of optimizer state saves its part of the host's update, which takes as long as the slowest of three
things that run side by side: the processor's arithmetic, the transfers from and to NVMe, and the copies between host
and GPU memory for state that is in the latter without its weights. Where NVMe limits the step, whatever leaves host
memory for the GPU saves twice its bytes, because what becomes free takes another chunk. The arithmetic on the GPU is
counted as nothing: a GPU's memory is an order of magnitude faster than the host's.

State needs no weights beside it: 12 bytes per parameter save its update, 16 its copies too. Where a weight and all of
its state are there, its gradient is as well, and nothing crosses PCIe. Where the next forward pass is longer than the
update beside it, state saves next to nothing, and weights come first.

An activation that stays saves what a step waits for its copies out and back, in every micro-step, and the host memory
that it would be in. It takes its bytes at the peak of a pass, when most of them are there at the same time.

State goes there from the front, in the order of the update: those weights are needed first in the next pass, and are
ready while the host updates the others.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tencache_ds.config import Share
from tencache_ds.layout import gib, round_up
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


ALLOCATION_NBYTES = 512
"""torch's allocator rounds every tensor up to a multiple of this."""

Array = npt.NDArray[Any]

_TRIED = 16
"""Number of the most promising chunk counts that are evaluated exactly."""

_GRID = 64
"""With more chunk counts than this, a grid of this size is compared first, then the neighbours of the best."""

HIDDEN_GAIN = 0.95
"""Share of an update's time beside the next forward pass that costs the step nothing. The rest, which nobody has
measured for itself, prefers less work on the host among plans that are equally quick otherwise."""

_CORE = 12
"""Number of items around the point where a greedy choice runs out of memory whose combinations are all tried."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight's shard.

    Attributes:
        nbytes: of the shard.
        seconds: what a step takes longer because it is not in GPU memory.
        host_nbytes: host memory that optimizer state can take when it is.
        gradient_nbytes: of its gradient, which is there when the weight and all of its state are.
    """

    nbytes: int
    seconds: float
    host_nbytes: int = 0
    gradient_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class StateChunk:
    """A chunk of optimizer state.

    Attributes:
        nbytes: of its state.
        numel: parameters.
        weights: indices of the weights that they belong to.
    """

    nbytes: int
    numel: int
    weights: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SavedItem:
    """A block of tensors that a pass saves for backward.

    Attributes:
        nbytes: at the peak of a pass, if it stays.
        seconds: what a step takes longer because it is moved in each pass.
        host_nbytes: host memory that optimizer state can take when it stays.
    """

    nbytes: int
    seconds: float
    host_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class UpdateRates:
    """The cost of an update of state outside GPU memory.

    Attributes:
        params_per_s: of this rank's cores.
        nvme_bytes_per_s: of this rank's share of NVMe, reads and writes together; None where no state is there.
        host_nbytes: host memory for optimizer state; the rest is on NVMe.
        link_bytes_per_s: of copies between host and GPU memory, in either direction.
        hidden_share: of an update outside GPU memory, what may go on beside the next forward pass.
        forward_seconds: of that pass.
    """

    params_per_s: float
    nvme_bytes_per_s: float | None = None
    host_nbytes: int = 0
    link_bytes_per_s: float = math.inf
    hidden_share: float = 0.0
    forward_seconds: float = 0.0

    def exposed_seconds(self, update_seconds: Any) -> Any:
        """What an update adds to a step; see :meth:`seconds`."""
        return update_seconds - HIDDEN_GAIN * np.minimum(update_seconds * self.hidden_share, self.forward_seconds)

    def seconds(self, numel: int, nbytes: int, freed_nbytes: int | Array = 0, crossing_nbytes: int | Array = 0) -> Any:
        """Duration of an update; per element, if an argument is an array.

        Args:
            numel: parameters whose state is outside GPU memory.
            nbytes: of this state.
            freed_nbytes: so much more of host memory is free.
            crossing_nbytes: of gradients, or weights if these are more, that state in GPU memory needs from host memory
                and back.
        """
        seconds = np.maximum(numel / self.params_per_s, crossing_nbytes / self.link_bytes_per_s)
        if self.nvme_bytes_per_s is None:
            return seconds
        stored = np.maximum(nbytes - self.host_nbytes - freed_nbytes, 0)
        return np.maximum(seconds, 2 * stored / self.nvme_bytes_per_s)


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """The items that move to GPU memory.

    Attributes:
        weights: of each weight whether it does.
        chunks: of each sub-group how many of its chunks do, counted from its first.
        nbytes: of all of it, gradients included.
        seconds: what weights, updates and moved activations still add to a step.
        update_seconds: of the update, whatever of it is hidden.
        activations: of each block whether it stays there.
    """

    weights: tuple[bool, ...]
    chunks: tuple[int, ...]
    nbytes: int
    seconds: float
    update_seconds: float
    activations: tuple[bool, ...] = ()


def plan_gpu(
    weights: Sequence[Weight],
    groups: Sequence[Sequence[StateChunk]],
    budget_nbytes: int,
    rates: UpdateRates,
    *,
    lasting_nbytes: int | None = None,
    least: int = 0,
    activations: Sequence[SavedItem] = (),
) -> GpuPlan:
    """The weights, chunks and activations with which a step is shortest.

    For each number of chunks, the rest of the budget goes to the weights and activations that save most per byte; for
    the best of these numbers, which of them are the last to get in is tried out.

    Args:
        weights: all of them.
        groups: the chunks of each sub-group that may go there, in the order of the update.
        budget_nbytes: for all of them and for gradients; not negative.
        rates: of updates elsewhere.
        lasting_nbytes: for all but state; None: no less than for everything.
        least: number of chunks that are there and stay, whatever the budget.
        activations: those that may be moved.
    """
    chunks = [chunk for group in groups for chunk in group]
    items = _Items(weights, activations, chunks)
    used = _running([_rounded(chunk.nbytes) for chunk in chunks])
    numel, nbytes = _running([chunk.numel for chunk in chunks]), _running([chunk.nbytes for chunk in chunks])
    per_byte = 0.0 if rates.nvme_bytes_per_s is None else 2 / rates.nvme_bytes_per_s

    def update_seconds(n: int, freed_nbytes: int | Array, crossing_nbytes: int | Array) -> Any:
        left = int(numel[-1] - numel[n]), int(nbytes[-1] - nbytes[n])
        return rates.seconds(*left, freed_nbytes, crossing_nbytes)

    def exposed(n: int, freed_nbytes: Array, crossing_nbytes: Array) -> Any:
        return rates.exposed_seconds(update_seconds(n, freed_nbytes, crossing_nbytes))

    def left(n: int) -> int:
        nbytes = max(budget_nbytes - int(used[n]), 0)
        return nbytes if lasting_nbytes is None else min(nbytes, lasting_nbytes)

    def seconds_of(n: int, knapsack: _Knapsack, there: Array) -> tuple[float, float]:
        update = float(update_seconds(n, *knapsack.effects(there)))
        return float(rates.exposed_seconds(update)) + float(items.seconds[~there].sum()), update

    def roughly(n: int) -> tuple[float, int]:
        # Of equally good ones, that with the most state there: less traffic, whatever it is hidden behind.
        knapsack = _Knapsack(items, n, per_byte)
        return seconds_of(n, knapsack, knapsack.greedily(left(n)))[0], -n

    most = max(least, int(np.searchsorted(used, budget_nbytes, side="right")) - 1)
    stride = max((most - least) // _GRID, 1)
    compared = {n: roughly(n) for n in (*range(least, most + 1, stride), most)}
    middle = min(compared, key=compared.__getitem__)
    for n in range(max(middle - stride, least), min(middle + stride, most) + 1):
        compared[n] = roughly(n)
    plans = []
    for n in sorted(compared, key=compared.__getitem__)[:_TRIED]:
        for worth in sorted({0.0, per_byte}):
            knapsack = _Knapsack(items, n, worth)
            there = knapsack.choose(left(n), functools.partial(exposed, n))
            plans.append(
                GpuPlan(
                    tuple(there[: len(weights)].tolist()),
                    _by_group(groups, n),
                    int(used[n]) + int(knapsack.sizes[there].sum()),
                    *seconds_of(n, knapsack, there),
                    tuple(there[len(weights) :].tolist()),
                )
            )
    return min(plans, key=lambda plan: plan.seconds)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The seconds that weights, updates and moved activations add to a step.

    Attributes:
        weights: all of them.
        rates: of updates outside GPU memory.
        activations: those that may be moved, by their position in a pass.
    """

    weights: list[Weight]
    rates: UpdateRates
    activations: dict[int, SavedItem]

    def plan(
        self, chunks: Sequence[Sequence[StateChunk]], budget_nbytes: int, lasting_nbytes: int, least: int = 0
    ) -> GpuPlan:
        """Chooses the GPU contents that minimize the step time.

        Args:
            chunks: of each sub-group those that may be there.
            budget_nbytes: for everything.
            lasting_nbytes: for all but state.
            least: number of chunks that are there and stay.
        """
        return plan_gpu(
            self.weights,
            chunks,
            budget_nbytes,
            self.rates,
            lasting_nbytes=lasting_nbytes,
            least=least,
            activations=list(self.activations.values()),
        )

    def fits(self, chunks: Sequence[Sequence[StateChunk]], budget_nbytes: int, lasting_nbytes: int) -> bool:
        """Whether everything fits, which takes no plan to know."""
        lasting = sum(_rounded(weight.nbytes) + _rounded(weight.gradient_nbytes) for weight in self.weights)
        lasting += sum(_rounded(each.nbytes) for each in self.activations.values())
        state = sum(_rounded(chunk.nbytes) for chunk in itertools.chain.from_iterable(chunks))
        return lasting <= lasting_nbytes and lasting + state <= budget_nbytes

    def leaving(self, plan: GpuPlan) -> list[int]:
        """Positions of the activations that are to move."""
        return [position for position, stays in zip(self.activations, plan.activations, strict=True) if not stays]

    @property
    def seconds(self) -> list[float]:
        """Seconds saved by each weight and then by each activation."""
        return [weight.seconds for weight in self.weights] + [each.seconds for each in self.activations.values()]


class _Items:
    """Weights, then activations, as arrays.

    Args:
        weights, activations: all of them.
        chunks: of state that may be in GPU memory, in order.
    """

    def __init__(
        self, weights: Sequence[Weight], activations: Sequence[SavedItem], chunks: Sequence[StateChunk]
    ) -> None:
        items: list[Weight | SavedItem] = [*weights, *activations]
        none = [0] * len(activations)
        self.sizes = np.array([_rounded(item.nbytes) for item in items], np.int64)
        self.seconds = np.array([item.seconds for item in items], np.float64)
        self.host = np.array([item.host_nbytes for item in items], np.int64)
        self.gradients = np.array([weight.gradient_nbytes for weight in weights] + none, np.int64)
        self.gradient_sizes = np.array([_rounded(weight.gradient_nbytes) for weight in weights] + none, np.int64)
        self.crossing = np.maximum(self.gradients, [item.nbytes for item in items])
        self.complete_with = np.full(len(items), len(chunks) + 1)  # of each weight the last chunk of its state, from 1
        for number, chunk in enumerate(chunks, 1):
            self.complete_with[list(chunk.weights)] = number


class _Knapsack:
    """Which weights and activations to take with the remainder of a budget.

    Args:
        items: all of them.
        n: chunks of state that are there.
        per_byte: seconds that host memory which they free is taken to be worth.
    """

    def __init__(self, items: _Items, n: int, per_byte: float) -> None:
        complete = items.complete_with <= n
        self.sizes = items.sizes + complete * items.gradient_sizes
        self._host = items.host + complete * items.gradients
        self._crossing = complete * items.crossing
        self._seconds = items.seconds
        worth = self._seconds + self._host * per_byte
        self._order = np.argsort(-worth / np.maximum(self.sizes, 1), kind="stable")

    def effects(self, there: Array) -> tuple[int, int]:
        """Of what is there: host memory that is free, and bytes that cross PCIe."""
        return int(self._host[there].sum()), int(self._crossing[~there].sum())

    def greedily(self, budget: int) -> Array:
        """Whether each item is chosen, greedily."""
        there = np.zeros(len(self.sizes), bool)
        there[self._order[: int(np.searchsorted(np.cumsum(self.sizes[self._order]), budget, side="right"))]] = True
        return there

    def choose(self, budget: int, seconds_of_update: Callable[[Array, Array], Any]) -> Array:
        """Whether each item is chosen: greedily, but for those around the point where that ends.

        Args:
            budget: for them.
            seconds_of_update: what an update adds to a step with such :meth:`effects` (of each element).
        """
        order = self._order
        running = _running(self.sizes[order])
        start = int(np.searchsorted(running, budget, side="right")) - 1 - _CORE // 2
        start = max(0, min(start, len(order) - _CORE))
        core = order[start : start + _CORE]
        there = np.zeros(len(self.sizes), bool)
        there[order[:start]] = True
        left = budget - int(running[start])
        combinations = (np.arange(2 ** len(core))[:, None] >> np.arange(len(core))) & 1
        freed, crossing = self.effects(there)
        costs = seconds_of_update(
            freed + combinations @ self._host[core],
            crossing - combinations @ self._crossing[core],
        )
        costs = costs - combinations @ self._seconds[core]
        costs = np.where(combinations @ self.sizes[core] <= left, costs, np.inf)
        best = combinations[int(costs.argmin())].astype(bool)
        there[core] = best
        left -= int(self.sizes[core][best].sum())
        for index in order[start:]:  # the smallest ones still fit
            if not there[index] and self.sizes[index] <= left:
                there[index] = True
                left -= int(self.sizes[index])
        return there


def _by_group(groups: Sequence[Sequence[StateChunk]], count: int) -> tuple[int, ...]:
    counts = []
    for group in groups:
        counts.append(min(len(group), count))
        count -= counts[-1]
    return tuple(counts)


def _running(values: Sequence[int] | Array) -> Array:
    """The sum of the first 0, 1, ... of the values."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(values, np.int64))])


def _rounded(nbytes: int) -> int:
    return round_up(nbytes, ALLOCATION_NBYTES)
