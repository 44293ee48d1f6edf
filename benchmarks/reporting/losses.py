# SPDX-License-Identifier: Apache-2.0
"""Losses compared bit for bit: which runs trained the same, and where the others leave them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..record import Benchmark, Run


@dataclass(frozen=True, slots=True)
class Difference:
    """Where one sequence of losses leaves another.

    Attributes:
        step: first step with another loss, from 1, warm-up steps included.
        micro_step: first micro-step of it with another loss, from 1.
        relative: size of that difference as a fraction of the reference; None where a loss is not a number.
        largest_relative: the largest of any step; None where a loss is not a number.
    """

    step: int
    micro_step: int
    relative: float | None
    largest_relative: float | None


@dataclass(frozen=True, slots=True)
class LossGroup:
    """Runs whose losses are identical bit for bit.

    Attributes:
        rounds: rounds of each configuration's runs in the group, by the configuration's name.
        difference: from the first group; None for the first itself.
    """

    rounds: dict[str, tuple[int, ...]]
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class LossComparison:
    """All runs that ended well, by their losses.

    Attributes:
        steps: how many steps were compared: as many as every run has.
        groups: the group of the first configuration that trains with the usual semantics comes first.
        without: names of configurations with a run that recorded no losses.
    """

    steps: int
    groups: tuple[LossGroup, ...]
    without: tuple[str, ...]


def compare_losses(benchmark: Benchmark) -> LossComparison:
    """Groups the runs that ended well by their losses.

    Runs of different length are compared over the steps that all of them have.
    """
    # Sorting is stable: the usual semantics first, then the order of the configurations.
    ordered = sorted(benchmark.configurations, key=lambda configuration: bool(configuration.semantics))
    runs = [run for configuration in ordered for run in benchmark.runs_of(configuration.name)]
    with_losses = [run for run in runs if run.steps and all(step.losses for step in run.steps)]
    without = tuple(dict.fromkeys(run.configuration for run in runs if run not in with_losses))
    steps = min((len(run.steps) for run in with_losses), default=0)
    groups: dict[tuple[tuple[str, ...], ...], list[Run]] = {}
    for run in with_losses:
        groups.setdefault(tuple(tuple(step.losses) for step in run.steps[:steps]), []).append(run)
    reference = next(iter(groups), ())
    return LossComparison(
        steps,
        tuple(LossGroup(_rounds(members), _difference(reference, losses)) for losses, members in groups.items()),
        without,
    )


def _rounds(runs: list[Run]) -> dict[str, tuple[int, ...]]:
    rounds: dict[str, tuple[int, ...]] = {}
    for run in runs:
        rounds[run.configuration] = (*rounds.get(run.configuration, ()), run.round)
    return rounds


def _difference(reference: tuple[tuple[str, ...], ...], losses: tuple[tuple[str, ...], ...]) -> Difference | None:
    first: tuple[int, int] | None = None
    relatives: list[float | None] = []
    for step, (expected, found) in enumerate(zip(reference, losses, strict=True), start=1):
        for micro_step in range(1, max(len(expected), len(found)) + 1):
            both = micro_step <= min(len(expected), len(found))
            if both and expected[micro_step - 1] == found[micro_step - 1]:
                continue
            first = first or (step, micro_step)
            relatives.append(_relative(expected[micro_step - 1], found[micro_step - 1]) if both else None)
    if first is None:
        return None
    known = [relative for relative in relatives if relative is not None]
    return Difference(*first, relatives[0], max(known) if len(known) == len(relatives) else None)


def _relative(expected: str, found: str) -> float | None:
    a, b = float.fromhex(expected), float.fromhex(found)
    if not (math.isfinite(a) and math.isfinite(b)):
        return None
    return abs(b - a) / abs(a) if a else math.inf
