# SPDX-License-Identifier: Apache-2.0
"""When to look at memory again, and when to try again what had to be undone."""

from __future__ import annotations

LOOK_EVERY_S = 0.002
"""Memory is looked at no more often than this."""

LOOK_SHARE = 0.01
"""Share of the time that looking at memory may take: most looks take 10 microseconds, with some virtual GPUs 200."""

LONGEST_PAUSE_S = 0.02
"""Between two looks, whatever they take: one that was interrupted must not hide the rest of the pass."""


def pause_s(cost_s: float) -> float:
    """Seconds until the next look, after one that took ``cost_s``."""
    return min(max(LOOK_EVERY_S, cost_s / LOOK_SHARE), LONGEST_PAUSE_S)


class Patience:
    """Counts quiet steps. What had to be undone soon after it was tried again is waited for twice as long next time.

    Args:
        first: steps before the first new try.
        longest: steps before any.
    """

    def __init__(self, first: int, longest: int) -> None:
        self._needed = first
        self._longest = longest
        self._quiet = 0
        self._disturbed = self._tried = False

    def undone(self) -> None:
        """It had to be undone, in the step under way."""
        self._disturbed = True
        if self._tried:
            self._tried = False
            self._needed = min(2 * self._needed, self._longest)

    def tried(self) -> None:
        """It was tried again."""
        self._tried = True

    def step_done(self) -> bool:
        """Ends a step; returns whether it was disturbed, in which case counting begins anew."""
        disturbed, self._disturbed = self._disturbed, False
        self._quiet = 0 if disturbed else self._quiet + 1
        return disturbed

    @property
    def over(self) -> bool:
        """Whether enough quiet steps have passed."""
        return self._quiet >= self._needed

    def begin_again(self) -> None:
        """Counts anew: it is about to be tried, or cannot be."""
        self._quiet = 0
