# SPDX-License-Identifier: Apache-2.0
"""How many cores of its host a rank may use for arithmetic."""

from __future__ import annotations

from collections.abc import Sequence, Set
from fractions import Fraction


def core_budget(
    own: Set[int], others: Sequence[Set[int]], *, quota_cores: float | None = None, quota_sharers: int = 1
) -> int:
    """Cores of one rank: each core it may run on, divided by the ranks that may run on it too.

    Args:
        own: cores that this rank may run on.
        others: the same of every other rank on its host.
        quota_cores: cores' worth of time that the tightest control group of this rank may use, if it has a quota.
        quota_sharers: ranks in that control group, this one included.

    Returns:
        At least 1. The budgets of ranks that share cores never add up to more than those cores, but for that 1.
    """
    share = sum((Fraction(1, 1 + sum(core in other for other in others)) for core in own), Fraction(0))
    if quota_cores is not None:
        share = min(share, Fraction(quota_cores) / max(quota_sharers, 1))
    return max(int(share), 1)
