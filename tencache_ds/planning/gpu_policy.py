# SPDX-License-Identifier: Apache-2.0
"""The contents of GPU memory: the items that save most seconds of a step per byte, as measured.

A weight that is in GPU memory saves what a step waits for its copies; most of that time may already be hidden behind
arithmetic. A chunk of optimizer state saves its part of the host's update, which takes as long as the slower of two
things that run side by side: the processor's arithmetic, and the transfers from and to NVMe. Where those limit the
step, whatever leaves host memory for the GPU saves twice its bytes, because what becomes free takes another chunk. Its
update on the GPU is counted as nothing: a GPU's memory is an order of magnitude faster than the host's. A gradient goes
where its state is, so it need not cross PCIe; and state goes there with its weights only, so neither do their new
values.

An activation that stays saves what a step waits for its copies out and back, in every micro-step, and the host memory
that it would be in. It takes its bytes at the peak of a pass, when most of them are there at the same time.

State goes there from the front, in the order of the update: then a sub-group is updated in one or two launches, and
gradients that follow their state do so as whole weights.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tencache_ds.layout import round_up

ALLOCATION_NBYTES = 512
"""torch's allocator rounds every tensor up to a multiple of this."""

Array = npt.NDArray[Any]

_TRIED = 16
"""Number of the most promising chunk counts that are evaluated exactly."""

_GRID = 64
"""With more chunk counts than this, a grid of this size is compared first, then the neighbours of the best."""

_SHARES_BEYOND = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Shares that are tried of the memory beyond what weights and gradients may take."""

_CORE = 12
"""Number of items around the point where a greedy choice runs out of memory whose combinations are all tried."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight's shard.

    Attributes:
        nbytes: of the shard.
        seconds: what a step takes longer because it is not in GPU memory.
        host_nbytes: host memory that optimizer state can take when it is.
    """

    nbytes: int
    seconds: float
    host_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class StateChunk:
    """A chunk of optimizer state with the gradients that it is updated with.

    Attributes:
        nbytes: of its state.
        gradient_nbytes: of its gradients.
        numel: parameters.
        weights: indices of the weights that they belong to.
        host_nbytes: host memory of gradients that optimizer state can take when this chunk and all before it in its
            sub-group are in GPU memory.
    """

    nbytes: int
    gradient_nbytes: int
    numel: int
    weights: tuple[int, ...] = ()
    host_nbytes: int = 0


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
    """

    params_per_s: float
    nvme_bytes_per_s: float | None = None
    host_nbytes: int = 0

    def seconds(self, numel: int, nbytes: int, freed_nbytes: int | Array = 0) -> Any:
        """Duration of the update of ``numel`` parameters with ``nbytes`` of state, when ``freed_nbytes`` more of host
        memory are free; per element, if that is an array."""
        arithmetic = numel / self.params_per_s
        if self.nvme_bytes_per_s is None:
            return arithmetic
        stored = np.maximum(nbytes - self.host_nbytes - freed_nbytes, 0)
        return np.maximum(arithmetic, 2 * stored / self.nvme_bytes_per_s)


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """The items that move to GPU memory.

    Attributes:
        weights: of each weight whether it does.
        chunks: of each sub-group how many of its chunks do, counted from its first.
        nbytes: of all of it, gradients included.
        seconds: what weights, updates and moved activations still add to a step.
        activations: of each block whether it stays there.
    """

    weights: tuple[bool, ...]
    chunks: tuple[int, ...]
    nbytes: int
    seconds: float
    activations: tuple[bool, ...] = ()


def plan_gpu(
    weights: Sequence[Weight],
    groups: Sequence[Sequence[StateChunk]],
    budget_nbytes: int,
    rates: UpdateRates,
    *,
    least: int = 0,
    activations: Sequence[SavedItem] = (),
) -> GpuPlan:
    """The weights, chunks and activations with which a step is shortest.

    For each number of chunks that fit with their weights, the rest of the budget goes to the weights and activations
    that save most per byte; for the best of these numbers, which of them are the last to get in is tried out.

    Args:
        weights: all of them.
        groups: the chunks of each sub-group that may go there, in the order of the update.
        budget_nbytes: for all of them and for gradients; not negative.
        rates: of updates elsewhere.
        least: number of chunks that are there and stay, whatever the budget and wherever their weights are.
        activations: those that may be moved.
    """
    items: list[Weight | SavedItem] = [*weights, *activations]  # no chunk needs an activation
    chunks = [chunk for group in groups for chunk in group]
    per_byte = 0.0 if rates.nvme_bytes_per_s is None else 2 / rates.nvme_bytes_per_s
    knapsacks = [_Knapsack(items, each) for each in sorted({0.0, per_byte})]
    knapsack = knapsacks[-1]
    needed_by = np.full(len(items), len(chunks) + 1)  # of each item the first chunk that needs it, from 1
    for number, chunk in reversed(list(enumerate(chunks, 1))):
        needed_by[list(chunk.weights)] = number
    sizes = np.array([0] + [_rounded(each.nbytes) + _rounded(each.gradient_nbytes) for each in chunks], np.int64)
    np.add.at(sizes, needed_by[needed_by <= len(chunks)], knapsack.sizes[needed_by <= len(chunks)])
    used = np.cumsum(sizes)
    numel, nbytes = _running([each.numel for each in chunks]), _running([each.nbytes for each in chunks])
    gradients = _running([each.host_nbytes for each in chunks])

    def seconds_of_update(n: int, freed_nbytes: int | Array) -> Any:
        left_numel, left_nbytes = int(numel[-1] - numel[n]), int(nbytes[-1] - nbytes[n])
        return rates.seconds(left_numel, left_nbytes, gradients[n] + freed_nbytes)

    def forced(n: int) -> Array:
        return needed_by <= n if used[n] <= budget_nbytes else np.zeros(len(items), bool)

    def left(n: int) -> int:
        there = int(used[n] if used[n] <= budget_nbytes else used[n] - knapsack.sizes[needed_by <= n].sum())
        return max(budget_nbytes - there, 0)

    def roughly(n: int) -> tuple[float, int]:
        # Of equally good ones, that with the most state there: less traffic, whatever it is hidden behind.
        seconds, freed_nbytes = knapsack.greedily(left(n), forced(n))
        return float(seconds_of_update(n, freed_nbytes)) + seconds, -n

    most = max(least, int(np.searchsorted(used, budget_nbytes, side="right")) - 1)
    stride = max((most - least) // _GRID, 1)
    compared = {n: roughly(n) for n in (*range(least, most + 1, stride), most)}
    middle = min(compared, key=compared.__getitem__)
    for n in range(max(middle - stride, least), min(middle + stride, most) + 1):
        compared[n] = roughly(n)
    plans = []
    for n in sorted(compared, key=compared.__getitem__)[:_TRIED]:
        state_nbytes = int(used[n] - knapsack.sizes[needed_by <= n].sum())
        for each in knapsacks:
            there = forced(n) | each.choose(left(n), forced(n), functools.partial(seconds_of_update, n))
            freed_nbytes = int(each.host[there].sum())
            plans.append(
                GpuPlan(
                    tuple(there[: len(weights)].tolist()),
                    _by_group(groups, n),
                    state_nbytes + int(each.sizes[there].sum()),
                    float(seconds_of_update(n, freed_nbytes)) + float(each.seconds[~there].sum()),
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
            lasting_nbytes: for weights and gradients; of what is beyond it as much is used as they allow.
            least: number of chunks that are there and stay.
        """
        lasting_nbytes = min(lasting_nbytes, budget_nbytes)
        activations = list(self.activations.values())
        for share in _SHARES_BEYOND:
            nbytes = lasting_nbytes + int(share * (budget_nbytes - lasting_nbytes))
            plan = plan_gpu(self.weights, chunks, nbytes, self.rates, least=least, activations=activations)
            if budget_nbytes == lasting_nbytes or self._lasting_nbytes(plan, chunks) <= lasting_nbytes:
                break
        return plan

    def _lasting_nbytes(self, plan: GpuPlan, chunks: Sequence[Sequence[StateChunk]]) -> int:
        weights = sum(
            _rounded(weight.nbytes) for weight, there in zip(self.weights, plan.weights, strict=True) if there
        )
        there = (chunk for group, count in zip(chunks, plan.chunks, strict=True) for chunk in group[:count])
        return weights + sum(_rounded(chunk.gradient_nbytes) for chunk in there)

    def fits(self, chunks: Sequence[Sequence[StateChunk]], budget_nbytes: int, lasting_nbytes: int) -> bool:
        """Whether everything fits, which takes no plan to know."""
        all_chunks = list(itertools.chain.from_iterable(chunks))
        lasting = [weight.nbytes for weight in self.weights] + [chunk.gradient_nbytes for chunk in all_chunks]
        others = [chunk.nbytes for chunk in all_chunks] + [each.nbytes for each in self.activations.values()]
        n_lasting = sum(map(_rounded, lasting))
        return n_lasting <= lasting_nbytes and n_lasting + sum(map(_rounded, others)) <= budget_nbytes

    def leaving(self, plan: GpuPlan) -> list[int]:
        """Positions of the activations that are to move."""
        return [position for position, stays in zip(self.activations, plan.activations, strict=True) if not stays]

    @property
    def seconds(self) -> list[float]:
        """Seconds saved by each weight and then by each activation."""
        return [weight.seconds for weight in self.weights] + [each.seconds for each in self.activations.values()]


class _Knapsack:
    """Which weights and activations to take with the remainder of a budget.

    Args:
        items: all of them.
        seconds_per_byte: what host memory that they free is taken to be worth.
    """

    def __init__(self, items: Sequence[Weight | SavedItem], seconds_per_byte: float) -> None:
        self.sizes = np.array([_rounded(item.nbytes) for item in items], np.int64)
        self.seconds = np.array([item.seconds for item in items], np.float64)
        self.host = np.array([item.host_nbytes for item in items], np.int64)
        worth = self.seconds + self.host * seconds_per_byte
        self._order = np.argsort(-worth / np.maximum(self.sizes, 1), kind="stable")

    def greedily(self, budget: int, taken: Array) -> tuple[float, int]:
        """After a greedy choice among those that are not taken: what the others still cost, and the host memory that is
        free."""
        order = self._order[~taken[self._order]]
        n = int(np.searchsorted(np.cumsum(self.sizes[order]), budget, side="right"))
        return float(self.seconds[order[n:]].sum()), int(self.host[taken].sum() + self.host[order[:n]].sum())

    def choose(self, budget: int, taken: Array, seconds_of_update: Callable[[Array], Any]) -> Array:
        """Whether each item is chosen beside those that are taken: greedily, but for those around the point
        where that ends.

        Args:
            budget: for them.
            taken: of each item whether it is.
            seconds_of_update: what an update takes when so much host memory is free (of each element).
        """
        order = self._order[~taken[self._order]]
        running = _running(self.sizes[order])
        start = int(np.searchsorted(running, budget, side="right")) - 1 - _CORE // 2
        start = max(0, min(start, len(order) - _CORE))
        core = order[start : start + _CORE]
        there = np.zeros(len(self.sizes), bool)
        there[order[:start]] = True
        left = budget - int(running[start])
        combinations = (np.arange(2 ** len(core))[:, None] >> np.arange(len(core))) & 1
        freed = int(self.host[taken].sum() + self.host[there].sum()) + combinations @ self.host[core]
        costs = seconds_of_update(freed) - combinations @ self.seconds[core]
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
