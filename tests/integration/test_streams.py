# SPDX-License-Identifier: Apache-2.0
"""Streams milliseconds apart: training and evaluation give what stock gives, and without their order they do not."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(400)

IN_RAM = {"offload_param": "cpu", "offload_optimizer": "cpu", "tencache": {"gpu_memory": 0}}
ON_NVME = {"tencache": {"gpu_memory": 0, "host_memory": 0}}
CASES: dict[str, dict[str, Any]] = {
    f"{late}_{where}": {"model": model, "steps": 5, "late": late} | places
    for late in ("gathers", "arithmetic", "reductions")
    for where, model, places in (("ram", "mlp", IN_RAM), ("nvme", "mlp", ON_NVME), ("llama", "llama", IN_RAM))
}
# DeepSpeed's timer of throughput waits for the device before each forward pass.
ON_GPU = {"offload_param": "none", "persistence": 0, "sub_group_size": 10**9, "tencache": {"gpu_memory": 0},
          "config": {"timers": {"throughput": {"enabled": False}}}}  # fmt: skip
CASES["updates_nvme"] = {"model": "mlp", "steps": 5, "late": "updates"} | ON_GPU
CASES["updates_gpu"] = CASES["updates_nvme"] | {"offload_optimizer": "cpu"}
CASES |= {
    f"muon_{late}_{where}": {"model": "llama", "muon": True, "steps": 6, "late": late} | IN_RAM | {"tencache": options}
    for late in ("arithmetic", "reductions", "turns")
    for where, options in (("ram", {"gpu_memory": 0}), ("gpu", {"gpu_memory": None}))
}
# Weights take 4.4 MiB: they are in GPU memory after some steps, and nearly all of their state is not.
CASES |= {
    f"weights_{late}": {"model": "llama", "steps": 10, "late": late} | IN_RAM | {"tencache": {"gpu_memory": "5MiB"}}
    for late in ("updates", "arithmetic", "gathers")
}
UNORDERED = {"unordered_gathers": "gathers_ram", "unordered_updates": "updates_gpu"}
CASES |= {name: CASES[ordered] | {"unordered": True} for name, ordered in UNORDERED.items()}


@pytest.fixture(scope="module")
def outcome(harness: Any) -> Any:
    cases = [(name, case, engine) for name, case in CASES.items() for engine in ("stock", "tencache")]
    return harness.run(cases, program="stream_cases.py", timeout_s=300)


@pytest.fixture(scope="module")
def two_ranks(harness: Any) -> Any:
    cases = [(name, case, engine) for name, case in CASES.items() for engine in ("stock", "tencache")]
    return harness.run(cases, ranks=2, program="stream_cases.py", timeout_s=380)


RANKS = [pytest.param("outcome", marks=pytest.mark.gpu), pytest.param("two_ranks", marks=pytest.mark.multigpu)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", [name for name in CASES if name not in UNORDERED])
def test_streams_far_apart(request: pytest.FixtureRequest, ranks: str, name: str) -> None:
    outcome = request.getfixturevalue(ranks)
    for rank in outcome.ranks:
        ours, stock = (outcome.result(name, engine, rank) for engine in ("tencache", "stock"))
        assert ours["losses"] == stock["losses"]
        assert ours["evaluated"] == stock["evaluated"] * 3


# On one rank a weight in GPU memory is its own gathered value: nothing is copied that could come too early.
NOTICED = [pytest.param("unordered_gathers", *each.values, marks=each.marks) for each in RANKS]
NOTICED.append(pytest.param("unordered_updates", "two_ranks", marks=pytest.mark.multigpu))


@pytest.mark.parametrize(("name", "ranks"), NOTICED)
def test_streams_without_order_are_noticed(request: pytest.FixtureRequest, ranks: str, name: str) -> None:
    outcome = request.getfixturevalue(ranks)
    assert outcome.result(name, "tencache")["losses"] != outcome.result(name, "stock")["losses"]
