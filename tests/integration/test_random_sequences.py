# SPDX-License-Identifier: Apache-2.0
"""Random sequences of what scripts do give what stock CPU offload gives, on one rank and two: see
``random_sequences.py``.

A few of them; ``TENCACHE_TEST_SEQUENCES=100`` runs as many (a third on two ranks), some ten seconds each.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

N_SEQUENCES = int(os.environ.get("TENCACHE_TEST_SEQUENCES", "3"))
FIRST = int(os.environ.get("TENCACHE_TEST_SEQUENCES_FROM", "0"))
N_ON_TWO = N_SEQUENCES // 3
SECONDS_EACH = 40
NOT_COMPARED = "not compared"

pytestmark = pytest.mark.timeout(120 + SECONDS_EACH * N_SEQUENCES)


@pytest.mark.parametrize(("ranks", "n"), [(1, N_SEQUENCES - N_ON_TWO), (2, N_ON_TWO)])
def test_each_action_gives_what_stock_gives(harness: Any, ranks: int, n: int) -> None:
    names = [f"seed_{seed}" for seed in range(FIRST, FIRST + n)]
    cases = [(name, {"seed": int(name[5:])}, engine) for name in names for engine in ("stock", "tencache")]
    outcome = harness.run(cases, ranks=ranks, program="random_sequences.py", timeout_s=100 + SECONDS_EACH * n)
    n_compared = 0
    for name in names:
        for rank in outcome.ranks:
            stock, ours = (outcome.result(name, engine, rank) for engine in ("stock", "tencache"))
            expected, log = stock["log"], ours["log"]
            if len(log) < len(expected):
                raise AssertionError(f"{name} on rank {rank}: {ours['failed']} after {log}, with {ours['case']}")
            for place, ((action, value), (_, given)) in enumerate(zip(expected, log, strict=False)):
                assert given in (value, NOT_COMPARED), (name, place, action, ours["case"])
            n_compared += len(expected)
    assert n_compared >= 10 * n * ranks, "stock fails at most of it"
