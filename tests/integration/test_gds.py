# SPDX-License-Identifier: Apache-2.0
"""Weights read from NVMe into memory of the device: the same numbers, bit for bit, as stock CPU offload."""

from __future__ import annotations

from typing import Any

import pytest

from tests.long_cases import marked, wanted

pytestmark = pytest.mark.timeout(400)

PROGRAM = "gds_cases.py"
ON_CPU = {"DS_ACCELERATOR": "cpu"}

LEAST = {"least_gds_memory": True, "weights": True, "steps": 6}
CASES: dict[str, dict[str, Any]] = {
    "mlp": {"model": "mlp"} | LEAST,
    "random_skip": {"model": "random_skip"} | LEAST,
    "tied": {"model": "tied"} | LEAST,
    "external": {"model": "external"} | LEAST,
    "moe_leaf": {"model": "moe_leaf"} | LEAST,
    "llama": {"model": "llama"} | LEAST,
    "llama_reentrant": {"model": "llama_reentrant"} | LEAST,
    "lora": {"model": "llama", "lora": True} | LEAST,
    "all_in_gpu_staging": {"model": "llama", "weights": True, "steps": 6},
    "accumulation_clipping": {"model": "llama", "accumulation": 2, "clipping": 0.1} | LEAST,
    "initialized_whole": {"model": "gpt2", "zero_init": False} | LEAST,
    "everything_live": {"model": "llama", "max_live": 10**9, "prefetch": 10**9} | LEAST,
    "two_paths": {"model": "llama", "tencache": {"nvme_paths": ["second"]}} | LEAST,
}
FEW = ("mlp", "tied", "llama", "accumulation_clipping", "all_in_gpu_staging")
ON_A_GPU = ("mlp", "llama", "all_in_gpu_staging")
STAGED_BY_HOST = {"model": "llama", "steps": 6, "tencache": {"gds": "off"}}
SCENARIOS = (
    "read_state",
    "write_full_state",
    "gather_before_and_between",
    "gather_everything",
    "evaluate_between",
    "two_engines",
    "parts_of_two_zero_inits",
    "evaluation_without_optimizer",
)
LONG = {"external", "moe_leaf", "lora", "everything_live", "initialized_whole", "two_engines", "evaluate_between"}
"""Weights are read, verified and lent as in the others, whatever uses them; these are compared elsewhere too."""
LONG_ON_TWO_RANKS = {"mlp", "tied", "llama", "write_full_state", "gather_before_and_between"}


def cases(names: Any, scenarios: Any = ()) -> list[tuple[str, dict[str, Any], str]]:
    all_cases = {name: CASES[name] for name in names} | {name: {"scenario": name} for name in scenarios}
    both = [(name, case, engine) for name, case in all_cases.items() for engine in ("stock", "tencache")]
    return [*both, ("staged_by_host", STAGED_BY_HOST, "tencache")]


@pytest.fixture(scope="module")
def one_rank(harness: Any, pytestconfig: pytest.Config) -> Any:
    chosen = [wanted(pytestconfig, names, LONG) for names in (CASES, SCENARIOS)]
    return harness.run(cases(*chosen), program=PROGRAM, env=ON_CPU, timeout_s=380)


@pytest.fixture(scope="module")
def two_ranks(harness: Any, pytestconfig: pytest.Config) -> Any:
    chosen = [wanted(pytestconfig, names, LONG_ON_TWO_RANKS) for names in (FEW, SCENARIOS[:4])]
    return harness.run(cases(*chosen), ranks=2, program=PROGRAM, env=ON_CPU, timeout_s=380)


@pytest.fixture(scope="module")
def gpu(harness: Any) -> Any:
    return harness.run(cases(ON_A_GPU), program=PROGRAM, timeout_s=120)


def assert_same(outcome: Any, name: str) -> None:
    for rank in outcome.ranks:
        stock, ours = (outcome.result(name, engine, rank) for engine in ("stock", "tencache"))
        assert ours["losses"] == stock["losses"]
        assert len(set(stock["losses"])) > 1, "the case does not train"
        assert ours["weights"] == stock["weights"]
        assert ours["stats"]["gpu_staging_nbytes"] > 0, "weights were not staged in memory of the device"
        assert ours["stats"]["last_step"]["nbytes"]["nvme_read"] > 0


def assert_never_in_host_memory(outcome: Any) -> None:
    """Every weight that was read came straight from NVMe. Host memory keeps some of them for their next use, so that
    they are read less often there."""
    direct, staged = (outcome.result(name, "tencache")["stats"] for name in ("all_in_gpu_staging", "staged_by_host"))
    assert staged["gpu_staging_nbytes"] == 0
    moved, moved_by_host = (stats["total"]["nbytes"] for stats in (direct, staged))
    assert moved["h2d"] == 0 < moved_by_host["h2d"]
    assert moved_by_host["nvme_read"] < moved["nvme_read"] < 1.2 * moved_by_host["nvme_read"]
    assert direct["total"]["events"]["overflow_buffer"] == 0


@pytest.mark.parametrize("name", marked(CASES, LONG))
def test_one_rank(one_rank: Any, name: str) -> None:
    assert_same(one_rank, name)


@pytest.mark.parametrize("name", marked(FEW, LONG_ON_TWO_RANKS))
def test_two_ranks(two_ranks: Any, name: str) -> None:
    assert_same(two_ranks, name)


@pytest.mark.parametrize("name", marked(SCENARIOS, LONG))
def test_what_scripts_do_besides_training(one_rank: Any, name: str) -> None:
    assert one_rank.result(name, "tencache") == one_rank.result(name, "stock")


@pytest.mark.parametrize("name", marked(SCENARIOS[:4], LONG_ON_TWO_RANKS))
def test_what_scripts_do_besides_training_on_two_ranks(two_ranks: Any, name: str) -> None:
    for rank in two_ranks.ranks:
        assert two_ranks.result(name, "tencache", rank) == two_ranks.result(name, "stock", rank)


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_weights_never_pass_through_host_memory(ranks: str, request: pytest.FixtureRequest) -> None:
    assert_never_in_host_memory(request.getfixturevalue(ranks))


def test_injected_faults_hit_these_reads_too(harness: Any) -> None:
    rule = {"TENCACHE_FAULTS": "op=read,kind=eio,match=weight,after=40"}
    outcome = harness.run([("mlp", CASES["mlp"], "tencache")], program=PROGRAM, env=ON_CPU | rule, timeout_s=200)
    error = outcome.per_rank[0]["mlp/tencache"]["error"]
    assert "read of weight" in error
    assert "injected by TENCACHE_FAULTS" in error


@pytest.mark.gpu
@pytest.mark.gds
@pytest.mark.parametrize("name", ON_A_GPU)
def test_on_a_gpu(gpu: Any, name: str) -> None:
    assert_same(gpu, name)
    assert "COMPATIBILITY MODE" in gpu.finished.log or "compatibility mode" not in gpu.finished.log


@pytest.mark.gpu
@pytest.mark.gds
def test_on_a_gpu_weights_never_pass_through_host_memory(gpu: Any) -> None:
    assert_never_in_host_memory(gpu)
