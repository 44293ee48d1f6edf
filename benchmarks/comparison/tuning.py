# SPDX-License-Identifier: Apache-2.0
"""The search for a peer's best settings: one knob after another, in the order given, each at its best so far.

A pure function of the trials so far, so that an interrupted search continues where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Trial:
    """One point that was tried."""

    knobs: Mapping[str, Any]  # value of every knob
    seconds: float  # median seconds of a step; infinity when the run failed


MARGIN = 0.03
"""A setting is better when it is faster by this fraction. Trials are short, and the fastest of several that are all
alike is the one that was lucky."""


@dataclass(frozen=True, slots=True)
class Search:
    """The rules of a search."""

    space: Mapping[str, Sequence[Any]]  # values of each knob, the starting one first; earlier knobs are settled first
    fixed: Mapping[str, Any]  # knobs whose value the caller has chosen
    most: float = math.inf  # points to try at most; trying two of them again comes on top
    confirm: bool = True  # whether the winner has to win twice

    @property
    def start(self) -> dict[str, Any]:
        """The point where the search starts."""
        return {knob: values[0] for knob, values in self.space.items()} | dict(self.fixed)

    def next_trial(self, trials: Sequence[Trial]) -> dict[str, Any] | None:
        """The point to try next, or None when the search is done.

        The winner and the starting point are tried once more: the winner has to win again.
        """
        if self.most < 1 or not any(len(values) > 1 for knob, values in self.space.items() if knob not in self.fixed):
            return None  # nothing to choose: the measured runs themselves will show it
        winner, untried = self._climb(trials)
        points = {repr(sorted(trial.knobs.items())) for trial in trials}
        if untried is not None and len(points) < self.most:
            return untried
        if self.confirm and winner != self.start and math.isfinite(_tried(self.start, trials)[0]):
            return next((point for point in (self.start, winner) if len(_tried(point, trials)) < 2), None)
        return None

    def best(self, trials: Sequence[Trial]) -> dict[str, Any]:
        """The point that was better than the starting point, twice where it had to be; else the starting point."""
        winner, _ = self._climb(trials)
        before, now = _tried(self.start, trials), _tried(winner, trials)
        if winner == self.start or not self.confirm or math.isinf(before[0]):
            return winner
        again = min(len(before), len(now)) > 1
        return winner if again and _is_better(now[1], before[1]) else self.start

    def _climb(self, trials: Sequence[Trial]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The best point so far by first trials, and the next one to try; None when all were."""
        point = self.start
        if not _tried(point, trials):
            return point, point
        for knob, values in self.space.items():
            if knob in self.fixed:
                continue
            candidates = [point | {knob: value} for value in values]
            known = [candidate for candidate in candidates if _tried(candidate, trials)]
            fastest = min(known, key=lambda candidate: _tried(candidate, trials)[0])
            if _is_better(_tried(fastest, trials)[0], _tried(point, trials)[0]):
                point = fastest
            if len(known) < len(candidates):
                return point, next(candidate for candidate in candidates if candidate not in known)
        return point, None


def _is_better(seconds: float, than: float) -> bool:
    return seconds < (1 - MARGIN) * than


def _tried(point: Mapping[str, Any], trials: Sequence[Trial]) -> list[float]:
    """Seconds of each trial of a point, in order."""
    return [trial.seconds for trial in trials if dict(trial.knobs) == dict(point)]
