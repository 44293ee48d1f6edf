# SPDX-License-Identifier: Apache-2.0
"""Failures at random moments of random sequences of user actions: what comes to its end is right, everything else is an
error, and after a step that failed half-way nothing works but a load.

A few of them; ``TENCACHE_TEST_FAILURES=500`` runs as many (three quarters on one rank), about a second each.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

PROGRAM = "failure_sequences.py"
N_SEQUENCES = int(os.environ.get("TENCACHE_TEST_FAILURES", "8"))
FIRST = int(os.environ.get("TENCACHE_TEST_FAILURES_FROM", "0"))
N_ON_TWO = N_SEQUENCES // 4
SECONDS_EACH = 15.0
FOUND_WITHIN_S = 30.0

pytestmark = pytest.mark.timeout(int(120 + SECONDS_EACH * N_SEQUENCES))


def cases_of(n: int, **more: Any) -> list[tuple[str, dict[str, Any], str]]:
    return [(f"seed_{seed}", {"seed": seed, **more}, "tencache") for seed in range(FIRST, FIRST + n)]


@pytest.mark.parametrize(("ranks", "n"), [(1, N_SEQUENCES - N_ON_TWO), (2, N_ON_TWO)])
def test_what_comes_to_its_end_is_right(harness: Any, ranks: int, n: int) -> None:
    cases = cases_of(n)
    outcome = harness.run(cases, ranks=ranks, program=PROGRAM, timeout_s=100 + SECONDS_EACH * n)
    ended = 0
    for name, case, _ in cases:
        for rank in range(ranks):
            result = outcome.result(name, "tencache", rank)
            if result["ended"]:  # with an error that a load did not end, as of a device that has failed
                ended += 1
            else:
                assert result["right"], (case, result["log"])
    assert ended <= len(cases) * ranks // 4


def test_a_rank_whose_peer_fails_within_a_collective_gets_an_error(harness: Any) -> None:
    """The process of the one that fails ends. Gloo notices that; with NCCL the launcher ends the other one."""
    with_nccl = torch.cuda.is_available()
    cases = cases_of(1, alone=True)
    outcome = harness.run(cases, ranks=2, program=PROGRAM, launcher=with_nccl, timeout_s=100)
    results = [results.get(f"seed_{FIRST}/tencache", {}) for results in outcome.per_rank]
    errors = [result.get("error", result.get("failed", "")) for result in results]
    found = [float(match[1]) for error in errors if (match := re.search(r" after ([\d.]+) s", error))]
    assert len(found) == 2 or (with_nccl and found), errors
    assert max(found) < FOUND_WITHIN_S
