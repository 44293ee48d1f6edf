# SPDX-License-Identifier: Apache-2.0
"""Parameters of several dtypes in one model have the dtypes, values and gradients that they have with stock CPU
offload, bit for bit, wherever they come from and wherever they are.

``TENCACHE_TEST_DTYPES=all pytest tests/integration/test_dtypes.py`` tries the whole matrix, on one rank and on two;
``TENCACHE_TEST_DTYPES=100:200`` those with these numbers.
"""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import pytest
import torch

WANTED = os.environ.get("TENCACHE_TEST_DTYPES", "")
PROGRAM = "dtype_cases.py"

ADDED = ("whole", "converted", "before", "inside", "after", "recast")
"""When adapters are made, by the time at which the base is partitioned."""

TIERS: dict[str, dict[str, Any]] = {
    "nvme": {"tencache": {"host_memory": 0}},
    "ram": {"tencache": {"host_memory": "1GiB"}},
    "some in ram": {"tencache": {"host_memory": "700KiB"}},
    "cpu": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "gpu": {"tencache": {"host_memory": 0}, "device_memory": "1GiB"},
}
ADAPTER_RANKS = (63, 64, 127, 128, 256)
"""With 256 elements to each: 64 KiB is reached by 64 in fp32 and by 128 in 16 bits."""


PRECISIONS = ("bf16", "bf16", "fp32") + (("fp16",) if torch.cuda.is_available() else ())
"""Precisions of training; the CPU accelerator may have no fp16."""


def matrix() -> list[dict[str, Any]]:
    """All cases. What is not one of the crossed dimensions depends on the number, so that both sides of each come."""
    crossed = itertools.product(
        ("bf16", "fp16", "fp32"),
        ("fp32", "bf16", "fp16", "uint8"),
        ADDED,
        ("adapters", "base", "both", "nothing"),
        TIERS,
    )
    cases = []
    for base, adapter, added, trains, tier in crossed:
        if adapter == "uint8" and trains in ("adapters", "both"):
            continue
        chosen = random.Random(f"{base} {adapter} {added} {trains} {tier}")
        case = {
            "base": base, "adapter": adapter, "added": added, "trains": trains, "groups": chosen.random() < 0.5,
            "first": chosen.choice(("base", "adapter")), "adapter_rank": chosen.choice(ADAPTER_RANKS),
            "precision": chosen.choice(PRECISIONS), "clipping": chosen.choice((0.0, 0.1)),
            "accumulation": chosen.choice((1, 2)), "persistence": chosen.choice((1000, 0, 20_000)),
            "sub_group_size": chosen.choice((50_000, 10**9)),
        }  # fmt: skip
        case |= {"grad_accum_dtype": "fp32"} if chosen.random() < 0.2 else {}
        optimizer, checkpoint = chosen.random(), chosen.choice((None, None, "own", "from stock", "to stock"))
        if trains != "nothing":
            case |= {"optimizer": "torch_adamw"} if optimizer < 0.1 else {}
            case |= {} if checkpoint is None else {"checkpoint": checkpoint}
        if tier != "cpu" and trains != "nothing" and chosen.random() < 0.2:
            case["offload_optimizer"] = "cpu"
        options = {"gpu_memory": 0, "chunk_size": chosen.choice((2**16, 2**20)), "split_master": chosen.random() < 0.5}
        where = TIERS[tier]
        case |= where | {"tencache": options | where.get("tencache", {})}
        cases.append(case)
    random.Random(393).shuffle(cases)  # the first ones have each value of each dimension
    return [case | {"number": number} for number, case in enumerate(cases)]


MATRIX = matrix()
FIRST, END = (int(n) for n in WANTED.split(":")) if ":" in WANTED else (0, len(MATRIX) if WANTED == "all" else 16)
CHOSEN = MATRIX[FIRST:END]
FEW = {1: len(CHOSEN), 2: len(CHOSEN) if WANTED else 6}
"""Number of cases by ranks: most of what is crossed is the same on each."""
TIMEOUT_S = 120 + 6 * len(CHOSEN)

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


def of_rank_count(case: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The same shards on more ranks."""
    return case | {"adapter_rank": case["adapter_rank"] * ranks}


def trained(harness: Any, ranks: int) -> Any:
    chosen = [of_rank_count(case, ranks) for case in CHOSEN[: FEW[ranks]]]
    cases = [(str(case["number"]), case, engine) for case in chosen for engine in ("stock", "tencache")]
    return harness.run(cases, ranks=ranks, program=PROGRAM, timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def one_rank(harness: Any) -> Any:
    return trained(harness, 1)


@pytest.fixture(scope="module")
def two_ranks(harness: Any) -> Any:
    return trained(harness, 2)


def assert_same(outcome: Any, case: dict[str, Any]) -> None:
    for rank in outcome.ranks:
        stock, ours = (outcome.result(str(case["number"]), engine, rank) for engine in ("stock", "tencache"))
        assert ours["at first"] == stock["at first"]
        assert ours["losses"] == stock["losses"]
        assert ours["at last"] == stock["at last"]
        assert len(set(stock["losses"])) == len(stock["losses"]), "the case does not train"
        if ours["facts"] and "offload_param" not in case:
            assert ours["facts"]["in the tier"] >= 3, "the base is"


@pytest.mark.parametrize("case", CHOSEN[: FEW[1]], ids=lambda case: str(case["number"]))
def test_as_with_stock(one_rank: Any, case: dict[str, Any]) -> None:
    assert_same(one_rank, case)


@pytest.mark.parametrize("case", CHOSEN[: FEW[2]], ids=lambda case: str(case["number"]))
def test_as_with_stock_on_two_ranks(two_ranks: Any, case: dict[str, Any]) -> None:
    assert_same(two_ranks, case)
