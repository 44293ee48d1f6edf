# SPDX-License-Identifier: Apache-2.0
"""The search for a peer's best settings: one knob after the other, in the order given, each at its best so far.

A pure function of the trials so far, so that an interrupted search goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Trial:
    """One point that was tried.

    Attributes:
        knobs: value of every knob.
        seconds: median seconds of a step; infinity when the run failed.
    """

    knobs: Mapping[str, Any]
    seconds: float


def next_trial(
    space: Mapping[str, Sequence[Any]], trials: Sequence[Trial], fixed: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The point to try next, or None when the search is done.

    Args:
        space: values of each knob, the starting one first; earlier knobs are settled first.
        trials: what was tried so far, in any order.
        fixed: knobs whose value the caller has chosen.
    """
    point = {knob: values[0] for knob, values in space.items()} | dict(fixed)
    free = {knob: values for knob, values in space.items() if knob not in fixed and len(values) > 1}
    if not free:
        return None  # nothing to choose: the measured runs themselves will show it
    if _seconds_of(point, trials) is None:
        return point
    for knob, values in free.items():
        candidates = [point | {knob: value} for value in values]
        for candidate in candidates:
            if _seconds_of(candidate, trials) is None:
                return candidate
        point = min(candidates, key=lambda candidate: _seconds_of(candidate, trials) or math.inf)
    return None


def best(space: Mapping[str, Sequence[Any]], trials: Sequence[Trial], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The fastest point tried; the starting point when none ran."""
    start = {knob: values[0] for knob, values in space.items()} | dict(fixed)
    running = [trial for trial in trials if math.isfinite(trial.seconds)]
    return dict(min(running, key=lambda trial: trial.seconds).knobs) if running else start


def _seconds_of(point: Mapping[str, Any], trials: Sequence[Trial]) -> float | None:
    return next((trial.seconds for trial in trials if dict(trial.knobs) == dict(point)), None)
