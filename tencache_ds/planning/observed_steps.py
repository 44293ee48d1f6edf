# SPDX-License-Identifier: Apache-2.0
"""The steps from which the length of later ones is predicted: which of the first ones, and how many.

The first two build what later steps find, and take up to twice as long. Those after them still vary, on a virtual
machine by a third in both directions. So the typical one counts, and where steps are short, more of them are observed.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, fields

WARM_UP_STEPS = 2
"""Steps before the first that is observed."""

LEAST_STEPS = 2
"""So many are always observed."""

MOST_STEPS = 6
"""No more than so many are."""

ENOUGH_SECONDS = 4.0
"""Once they have taken so long, fewer will do: what the plan gains is missing in each."""

LEAST_SETTLED_STEPS = 4
"""With so many, it no longer matters whether steps still become faster."""

STILL_FASTER = 0.9
"""A step that takes less than this share of the time of the one before it is still part of the warm-up."""

PASSES_STILL_FASTER = 0.5
"""So is one whose passes do, which may be a small part of it: an update that waits for a drive can be slower than the
one before while the passes are far from what they will be."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of one step, in seconds.

    Attributes:
        forward: of its first forward pass.
        other_passes: of what follows that until the update.
        update: of its update.
        arithmetic: of these, without waits for NVMe.
    """

    forward: float
    other_passes: float
    update: float
    arithmetic: float

    @property
    def passes(self) -> float:
        """Seconds of the step without its update."""
        return self.forward + self.other_passes

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.passes + self.update


class ObservedSteps:
    """Those after the warm-up, in order."""

    def __init__(self) -> None:
        self._steps: list[StepTimes] = []

    def add(self, step: StepTimes) -> None:
        """One more."""
        self._steps.append(step)

    @property
    def are_enough(self) -> bool:
        """Whether no more have to be observed."""
        n_steps = len(self._steps)
        if n_steps >= MOST_STEPS:
            return True
        if n_steps < LEAST_STEPS or sum(step.total for step in self._steps) < ENOUGH_SECONDS:
            return False
        return n_steps >= LEAST_SETTLED_STEPS or not self._become_faster

    @property
    def next_may_be_last(self) -> bool:
        """Whether the next one may be the last that has to be observed, if it takes as long as the one before."""
        n_steps = len(self._steps) + 1
        if n_steps >= MOST_STEPS:
            return True
        return n_steps >= LEAST_STEPS and sum(step.total for step in self._steps) + self.last.total >= ENOUGH_SECONDS

    @property
    def _become_faster(self) -> bool:
        before, last = self._steps[-2:]
        return last.total < STILL_FASTER * before.total or last.passes < PASSES_STILL_FASTER * before.passes

    @property
    def last(self) -> StepTimes:
        """The last one."""
        return self._steps[-1]

    @property
    def typical(self) -> StepTimes:
        """The median of each time by itself: what lengthens one part of a step leaves the others as they are."""
        times = {
            field.name: statistics.median(getattr(step, field.name) for step in self._steps)
            for field in fields(StepTimes)
        }
        return StepTimes(**times)
