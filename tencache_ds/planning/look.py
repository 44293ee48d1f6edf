# SPDX-License-Identifier: Apache-2.0
"""How often memory is looked at within a pass."""

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
