# SPDX-License-Identifier: Apache-2.0
"""The steps before those that are measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST_MORE_STEPS = 12
"""Steps by which the warm-up is extended at most where a system has not settled."""

STEPS_AFTER_SETTLING = 2
"""Steps of the warm-up after a system has settled: the first one compiles what the later ones need."""


def has_settled(session: Any) -> bool:
    """Whether TenCache has made its plan, so that steps are as they will be; True of None, without TenCache."""
    return session is None or bool(session.look().settled)


def warm_up(n_steps: int, step: Callable[[], object], settled: Callable[[], bool]) -> int:
    """Takes as many steps as requested, or as it takes to settle.

    Args:
        n_steps: how many are requested; with 0, none are taken.
        step: takes one.
        settled: whether steps are as they will be.

    Returns:
        How many were taken.
    """
    n_taken, n_left = 0, n_steps
    while n_left > 0:
        step()
        n_taken, n_left = n_taken + 1, n_left - 1
        if not settled():  # the next one may be the one that does it
            n_left = min(max(n_left, 1 + STEPS_AFTER_SETTLING), n_steps + MOST_MORE_STEPS - n_taken)
    return n_taken
