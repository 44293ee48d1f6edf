# SPDX-License-Identifier: Apache-2.0
"""The part of the report on a second measurement: do the speeds repeat?"""

from __future__ import annotations

from dataclasses import dataclass

from ..record import Benchmark
from .markdown import joined, number, percent, plain, table
from .spread import RatioComparison, baseline_for, compare_ratios, step_seconds

REPEATABLE = 0.05
"""Two measurements of a speed that differ by no more than this fraction count as the same."""


@dataclass(frozen=True, slots=True)
class RepeatedRatio:
    """A speed that both benchmarks have. The names are those of the configurations."""

    other: str
    baseline: str
    comparison: RatioComparison


def repeated_ratios(first: Benchmark, second: Benchmark, baseline: str | None = None) -> list[RepeatedRatio]:
    """Every speed of ``first`` that ``second`` has too, each relative to the baseline it has in ``first``."""
    repeated = []
    for configuration in first.configurations:
        against = baseline_for(first, configuration, baseline)
        if against is None or against == configuration.name:
            continue
        comparison = compare_ratios(first, second, against, configuration.name)
        if comparison is not None:
            repeated.append(RepeatedRatio(configuration.name, against, comparison))
    return repeated


def repeat_sentence(first: Benchmark, second: Benchmark, baseline: str | None = None) -> str:
    """The difference in speed between two measurements."""
    repeated = repeated_ratios(first, second, baseline)
    if not repeated:
        return "**Nothing was measured twice**: the second measurement has no speed in common with the first."
    worst = max(repeated, key=lambda ratio: ratio.comparison.relative_difference)
    difference = worst.comparison.relative_difference
    if difference <= REPEATABLE:
        return f"Measured twice, all speeds agree within {percent(difference, 1)}."
    label = next(plain(c.label) for c in first.configurations if c.name == worst.other)
    return f"**Measured twice, the speeds differ** by up to {percent(difference, 1)} ({label})."


def repeatability_section(first: Benchmark, second: Benchmark, baseline: str | None = None) -> str:
    """Each speed in both measurements, and their relative difference."""
    labels = {configuration.name: plain(configuration.label) for configuration in first.configurations}
    rows = []
    for ratio in repeated_ratios(first, second, baseline):
        seconds = [step_seconds(benchmark, ratio.other) for benchmark in (first, second)]
        compared = ratio.comparison
        difference = percent(compared.relative_difference, 1)
        rows.append(
            [
                f"{labels[ratio.other]} against {labels[ratio.baseline]}",
                " / ".join(number(spread.median) for spread in seconds if spread is not None),
                f"{compared.first:.2f}x",
                f"{compared.second:.2f}x",
                difference if compared.relative_difference <= REPEATABLE else f"**{difference}**",
            ]
        )
    header = ("configuration", "s/step, first / second", "speed, first", "speed, second", "difference")
    parts = [repeat_sentence(first, second, baseline), *([table(header, rows)] if rows else [])]
    parts.append(
        f"The second measurement started {plain(second.started_at)}. A difference is a fraction of the first; more "
        f"than {percent(REPEATABLE)} is in bold."
    )
    unlike = _unlike(first, second)
    if unlike:
        parts.append(f"**The two are not the same benchmark**: they differ in {joined(unlike)}.")
    return "\n\n".join(parts)


def _unlike(first: Benchmark, second: Benchmark) -> list[str]:
    """Differences that make this no repetition. Rates vary from probe to probe and are left out."""
    pairs = {
        "workload": (first.workload, second.workload),
        "storage": (first.storage, second.storage),
        "versions": (first.versions, second.versions),
        "CPU": ((first.hardware.cpu, first.hardware.cores), (second.hardware.cpu, second.hardware.cores)),
        "GPU": ((first.hardware.gpu, first.hardware.gpus), (second.hardware.gpu, second.hardware.gpus)),
    }
    return [what for what, (one, other) in pairs.items() if one != other]
