# SPDX-License-Identifier: Apache-2.0
"""The part of the report on the search: what was tried for each peer, and what won."""

from __future__ import annotations

from typing import Any

from ..record import Benchmark, Configuration, Outcome, Run
from .markdown import MISSING, details, gist, number, plain, table, without_paths


def tuning_section(benchmark: Benchmark) -> str:
    """The trials of the search for each configuration, and the winner, in collapsible parts."""
    parts, untuned = [], []
    for configuration in benchmark.configurations:
        trials = [run for run in benchmark.tuning if run.configuration == configuration.name]
        if trials:
            parts.append(details(_summary(configuration, trials), _body(configuration, trials)))
        else:
            untuned.append(configuration)
    if not parts:
        parts.append("No configuration was tuned.")
    if untuned:
        rows = [[plain(configuration.label), _knobs(configuration.knobs)] for configuration in untuned]
        parts.append(details("Settings of what was not tuned", table(("configuration", "settings"), rows, words=2)))
    return "\n\n".join(parts)


def _summary(configuration: Configuration, trials: list[Run]) -> str:
    count = f"{len(trials)} trial{'s' if len(trials) != 1 else ''}"
    return f"{plain(configuration.label)}: {count}; it runs with {_knobs(configuration.knobs)}"


def _body(configuration: Configuration, trials: list[Run]) -> str:
    parts = []
    if configuration.searched:
        rows = [
            [plain(knob), ", ".join(_value(value) for value in values), _value(configuration.knobs.get(knob))]
            for knob, values in configuration.searched.items()
        ]
        parts.append(table(("knob", "tried", "won"), rows, words=3))
    varied = [
        knob
        for knob in dict.fromkeys(knob for trial in trials for knob in trial.knobs)
        if len({repr(trial.knobs.get(knob)) for trial in trials}) > 1
    ]
    seconds = [trial.median_s if trial.outcome is Outcome.ok and trial.measured else None for trial in trials]
    best = min((known for known in seconds if known is not None), default=None)
    rows = []
    for index, (trial, median_s) in enumerate(zip(trials, seconds, strict=True), start=1):
        if median_s is None:
            ended = "no measured step" if trial.outcome is Outcome.ok else gist(trial.error, 120)
        else:
            ended = f"**{number(median_s)}**" if median_s == best else number(median_s)
        rows.append([str(index), *(_value(trial.knobs.get(knob)) for knob in varied), ended])
    parts.append(table(("trial", *(plain(knob) for knob in varied), "s/step"), rows))
    return "\n\n".join(parts)


def _knobs(knobs: dict[str, Any]) -> str:
    return ", ".join(f"{plain(knob)} = {_value(value)}" for knob, value in knobs.items()) or "its defaults"


def _value(value: Any) -> str:
    """A setting as a reader writes it: 200,000,000 and not 200000000."""
    if value is None:
        return MISSING
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return plain(without_paths(str(value)))
