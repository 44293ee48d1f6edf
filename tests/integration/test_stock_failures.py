# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's own NVMe offload does where TenCache trains exactly, or stops.

What DeepSpeed did is printed and not asserted: a later version may well do better. The settings are those of DeepSpeed
issues #4072 ("already assigned swap buffer") and #3062 ("Not enough buffers").
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.long_cases import marked, wanted

pytestmark = pytest.mark.timeout(240)

WIDE: dict[str, Any] = {"steps": 3, "sub_group_size": 10**9, "prefetch": 10**6, "buffer_size": 2_500_000}
CASES: dict[str, dict[str, Any]] = {
    "llama_checkpointing": WIDE | {"model": "llama_checkpointed_wide", "max_live": 1},
    "gpt2_checkpointing": WIDE | {"model": "gpt2_checkpointed_wide", "max_live": 1},
    "vit_checkpointing": WIDE | {"model": "vit_checkpointed_wide", "max_live": 10**6},
    "llama_one_buffer": WIDE | {"model": "llama_checkpointed_wide", "max_live": 10**9, "buffer_count": 1},
}

LONG = {"gpt2_checkpointing", "vit_checkpointing"}


@pytest.fixture(scope="module")
def outcome(harness: Any, pytestconfig: pytest.Config) -> Any:
    cases = []
    chosen = {name: CASES[name] for name in wanted(pytestconfig, CASES, LONG)}
    for name, case in chosen.items():
        # One buffer is little memory: TenCache has to do with the least that it accepts.
        least = {"smallest_staging": True} if case.get("buffer_count") == 1 else {}
        cases += [(name, case, "stock"), (name, case | least, "tencache")]
    cases += [(name, case, "stock_nvme") for name, case in chosen.items()]
    return harness.run(cases, timeout_s=200)


@pytest.mark.parametrize("name", marked(CASES, LONG))
def test_trains_exactly_where_stock_nvme_stops(outcome: Any, name: str) -> None:
    stock_nvme = outcome.per_rank[0].get(f"{name}/stock_nvme", {"error": "the process ended"})
    print(f"{name}: stock NVMe offload: {stock_nvme.get('error', 'trained')}")
    ours = outcome.result(name, "tencache")
    assert ours["losses"] == outcome.result(name, "stock")["losses"]
    assert ours["stats"]["stored_nbytes"] > 14 * 10**6


@pytest.mark.long
def test_the_fault_table_shows_what_stock_does_with_a_read_that_fails(harness: Any) -> None:
    """``test_faults.py`` has TenCache's outcome of the same fault."""
    folder = harness.folder()
    script, outcomes = Path(__file__).with_name("fault_table.py"), folder / "outcomes.json"
    chosen = ["--engines", "stock", "--rows", "no fault", "EIO on read", "--kinds", "optimizer"]
    command = [sys.executable, str(script), *chosen, "--folder", str(folder), "--json", str(outcomes)]
    harness.execute(command, folder=folder, timeout_s=200).succeeded()
    result = {name: of["stock"] for name, of in json.loads(outcomes.read_text()).items()}
    print(f"stock NVMe offload, reads of optimizer state that fail: {result['EIO on read, optimizer']}")
    assert result["no fault, optimizer"] == "continues, same losses and weights"
