# SPDX-License-Identifier: Apache-2.0
"""Medians, spreads and ratios over the runs of a configuration: the arithmetic of the report.

A ratio is a speed: the baseline's seconds per step over the other's, so more than 1 is faster than the baseline.
Everything is a pure function of the records, callable from any thread.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..record import Benchmark, Configuration, Placement, Run, Step


class Tier(StrEnum):
    """The lowest tier that a configuration may use: like is compared with like."""

    gpu = "GPU"
    ram = "RAM"
    nvme = "NVMe"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes of some values, in their unit."""

    median: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """The spread of ``values``; None when there is none."""
        known = list(values)
        return cls(statistics.median(known), min(known), max(known), len(known)) if known else None

    @property
    def half_spread(self) -> float:
        """Half of the distance between the extremes, as a fraction of the median."""
        return (self.most - self.least) / 2 / self.median if self.median else 0.0


@dataclass(frozen=True, slots=True)
class SpeedRatio:
    """How much faster than its baseline a configuration is.

    Attributes:
        of_medians: ratio of the medians over all measured steps.
        turns: the ratio of each turn of each round in which both have measured steps: machine drift cancels within it.
    """

    of_medians: float
    turns: tuple[float, ...]

    @property
    def over_turns(self) -> Spread | None:
        """Median and range of the ratios of the turns."""
        return Spread.of(self.turns)


@dataclass(frozen=True, slots=True)
class RatioComparison:
    """The same ratio of medians, measured twice."""

    first: float
    second: float

    @property
    def relative_difference(self) -> float:
        """Distance between the two, as a fraction of the first."""
        return abs(self.second - self.first) / self.first


def is_ours(configuration: Configuration) -> bool:
    """Whether it is TenCache: of the peer "tencache" or a variant of it, such as "tencache-ram"."""
    return configuration.peer.partition("-")[0] == "tencache"


def measured_steps(benchmark: Benchmark, name: str) -> list[Step]:
    """The measured steps of all runs of a configuration that ended well."""
    return [step for run in benchmark.runs_of(name) for step in run.measured]


def step_spread(benchmark: Benchmark, name: str, value: Callable[[Step], float]) -> Spread | None:
    """Spread of a figure of the measured steps of a configuration; None when nothing was measured."""
    return Spread.of(value(step) for step in measured_steps(benchmark, name))


def step_seconds(benchmark: Benchmark, name: str) -> Spread | None:
    """Seconds of a measured step of a configuration; None when nothing was measured."""
    return step_spread(benchmark, name, lambda step: step.seconds)


def step_mean(benchmark: Benchmark, name: str, value: Callable[[Step], float]) -> float | None:
    """Mean of a figure of the measured steps; None when nothing was measured.

    For bytes: a transfer counts in the step in which it happens, and reads ahead and late writes cross into another.
    """
    values = [value(step) for step in measured_steps(benchmark, name)]
    return statistics.fmean(values) if values else None


def run_median(benchmark: Benchmark, name: str, value: Callable[[Run], float | None]) -> float | None:
    """Median of a figure of the runs of a configuration that ended well and have it; None when none has."""
    known = [figure for run in benchmark.runs_of(name) if (figure := value(run)) is not None]
    return statistics.median(known) if known else None


def per_measured_step(run: Run, total: float | None) -> float | None:
    """A total over the measured steps of ``run`` as a figure of one step; None when either is unknown."""
    return total / len(run.measured) if total is not None and run.measured else None


def in_turns(benchmark: Benchmark) -> bool:
    """Whether the runs stayed in memory and alternated turn by turn."""
    return any(step.turn for run in benchmark.runs for step in run.steps)


def turn_medians(benchmark: Benchmark, name: str) -> dict[tuple[int, int], float]:
    """Median seconds of a measured step of a configuration, by round and turn."""
    seconds: dict[tuple[int, int], list[float]] = {}
    for run in benchmark.runs_of(name):
        for step in run.measured:
            seconds.setdefault((run.round, step.turn), []).append(step.seconds)
    return {when: statistics.median(values) for when, values in sorted(seconds.items())}


def speed_ratio(benchmark: Benchmark, baseline: str, other: str) -> SpeedRatio | None:
    """How much faster ``other`` is than ``baseline``; None when one of them has no measured step."""
    slow, fast = step_seconds(benchmark, baseline), step_seconds(benchmark, other)
    if slow is None or fast is None or not fast.median:
        return None
    slow_turns, fast_turns = turn_medians(benchmark, baseline), turn_medians(benchmark, other)
    shared = [when for when in slow_turns if fast_turns.get(when)]
    return SpeedRatio(slow.median / fast.median, tuple(slow_turns[when] / fast_turns[when] for when in shared))


def bound_fraction(benchmark: Benchmark, name: str) -> float | None:
    """Shortest possible step over the median step of a configuration; None when one of them is unknown."""
    bound_s, seconds = benchmark.bounds_s.get(name), step_seconds(benchmark, name)
    return bound_s / seconds.median if bound_s is not None and seconds is not None and seconds.median else None


def compare_ratios(first: Benchmark, second: Benchmark, baseline: str, other: str) -> RatioComparison | None:
    """The ratio of medians of one pair of configurations in two benchmarks: does a comparison repeat?

    Args:
        first: a benchmark with both configurations.
        second: the same, measured again on the same machine.
        baseline: name of the configuration that the speed is relative to.
        other: name of the configuration whose speed it is.

    Returns:
        Both ratios, or None when one of the benchmarks has no measured step of one of the two.
    """
    ratios = [speed_ratio(benchmark, baseline, other) for benchmark in (first, second)]
    if ratios[0] is None or ratios[1] is None:
        return None
    return RatioComparison(ratios[0].of_medians, ratios[1].of_medians)


def tier_of(benchmark: Benchmark, configuration: Configuration) -> Tier | None:
    """The lowest tier a configuration may use; None when neither its placement nor its DeepSpeed config says.

    Of TenCache the config counts: ``offload_*.device`` is what it may use, whatever it then puts there. Of a peer the
    placement: not every peer reads DeepSpeed's offload section.
    """
    placed = _tier_of_placement(benchmark.placements.get(configuration.name))
    configs = (run.deepspeed_config for run in benchmark.runs if run.configuration == configuration.name)
    configured = next((tier for config in configs if (tier := _tier_of_config(config)) is not None), None)
    first, second = (configured, placed) if is_ours(configuration) else (placed, configured)
    return first if first is not None else second


def _tier_of_config(config: dict[str, Any]) -> Tier | None:
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        return None
    devices = {(zero.get(key) or {}).get("device") for key in ("offload_param", "offload_optimizer")}
    return Tier.nvme if "nvme" in devices else Tier.ram if "cpu" in devices else Tier.gpu


def _tier_of_placement(placement: Placement | None) -> Tier | None:
    if placement is None:
        return None
    if placement.weights_nvme > 0 or placement.optimizer_nvme > 0:
        return Tier.nvme
    return Tier.gpu if placement.weights_gpu >= 1 and placement.optimizer_gpu >= 1 else Tier.ram


def best_peer(benchmark: Benchmark, tier: Tier) -> str | None:
    """Name of the fastest configuration in ``tier`` that is not TenCache's and trains with the same semantics."""
    medians = {
        configuration.name: seconds.median
        for configuration in benchmark.configurations
        if not is_ours(configuration)
        and not configuration.semantics
        and tier_of(benchmark, configuration) is tier
        and (seconds := step_seconds(benchmark, configuration.name)) is not None
    }
    return min(medians, key=medians.__getitem__) if medians else None


def baseline_for(benchmark: Benchmark, configuration: Configuration, chosen: str | None = None) -> str | None:
    """Name of what the speed of ``configuration`` is relative to.

    Args:
        benchmark: where it was measured.
        configuration: whose speed it is.
        chosen: name of the baseline of all; None for the fastest peer in the same tier.

    Returns:
        The name, or None: for a configuration with other semantics, or when its tier has no peer that was measured.
    """
    if configuration.semantics:
        return None
    if chosen is not None:
        return chosen
    tier = tier_of(benchmark, configuration)
    return best_peer(benchmark, tier) if tier is not None else None
