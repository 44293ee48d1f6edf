# SPDX-License-Identifier: Apache-2.0
"""Random placements of weights, gradients and optimizer state, changed in mid-run, through save and load: the same
numbers, bit for bit, as stock CPU offload that never stops.

``TENCACHE_TEST_PLACEMENTS=20 pytest tests/integration/test_placements.py`` runs twenty of fifty steps each, on one rank
and on two; ``TENCACHE_TEST_PLACEMENTS=20:25`` those with these numbers. Without a GPU ordinary memory stands in for the
device's.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

WANTED = os.environ.get("TENCACHE_TEST_PLACEMENTS", "")
FIRST, END = (int(number) for number in (WANTED if ":" in WANTED else f"0:{WANTED or 1}").split(":"))
STEPS = 50 if WANTED else 10
TIMEOUT_S = 120 + 60 * (END - FIRST)

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)

PROGRAM = "placement_cases.py"
MODELS = ("llama", "post_norm", "mlp", "random_skip", "tied", "moe_leaf", "llama_reentrant", "unused")
RAM = {"offload_param": "cpu", "offload_optimizer": "cpu", "places": ["GPU", "HOST"]}


def case_of(number: int) -> dict[str, Any]:
    """A training whose settings depend on the number of its placement."""
    case = {
        "model": MODELS[number % len(MODELS)],
        "placement": number,
        "places": ["GPU", "HOST", "NVME"],
        "clipping": 0.1 if number % 2 else 0.0,
        "accumulation": 1 + number % 3,
        "tencache": {
            "chunk_size": (2**16, 2**18, 100_003, 2**20)[number % 4],
            "host_memory": ("3MiB", "24MiB", 0)[number % 3],
            "split_master": number % 4 < 2,
        },
        "steps": STEPS,
        "weights": True,
    }
    return case | (RAM if number % 5 == 4 else {})


CASES = {f"placement_{number}": case_of(number) for number in range(FIRST, END)}


@pytest.fixture(scope="module", params=[1, 2], ids=["one_rank", "two_ranks"])
def outcome(harness: Any, request: pytest.FixtureRequest) -> Any:
    cases = [(name, case, engine) for name, case in CASES.items() for engine in ("stock", "tencache")]
    return harness.run(cases, ranks=request.param, program=PROGRAM, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("name", CASES)
def test_the_same_numbers_wherever_things_are(outcome: Any, name: str) -> None:
    for rank in outcome.ranks:
        stock, ours = (outcome.result(name, engine, rank) for engine in ("stock", "tencache"))
        assert ours["losses"] == stock["losses"]
        assert len(set(stock["losses"])) > 1, "the case does not train"
        assert ours["weights"] == stock["weights"]
        assert min(ours["moved"][kind] for kind in ("weights", "gradients", "state")) >= STEPS // 5
