# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps that continue during the next forward pass: the same numbers, bit for bit, as stock CPU offload."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.long_cases import marked, wanted

pytestmark = pytest.mark.timeout(840)

PROGRAM = "overlap_cases.py"
RAM = {"offload_param": "cpu", "offload_optimizer": "cpu"}
IN_MEMORY = {
    "model": "llama",
    "weights": True,
    "steps": 6,
    "nvme_path": "/dev/shm",
    "tencache": {"host_memory": "9MiB", "split_master": True},
}
"""A part of the state is in files in memory."""

TRAINING: dict[str, dict[str, Any]] = {
    name: {"model": name, "weights": True, "steps": 6}
    for name in ("mlp", "random_skip", "tied", "external", "moe_leaf", "llama_reentrant")
} | {
    "ram": {"model": "llama", "weights": True, "steps": 6} | RAM,
    "persistent": {"model": "llama", "weights": True, "steps": 6, "persistence": 1000},
    "state_on_nvme": {"model": "llama", "weights": True, "steps": 6, "tencache": {"host_memory": "9MiB"}},
    "state_in_memory": IN_MEMORY | {"accumulation": 2, "clipping": 0.1},
    "state_in_memory_whole": IN_MEMORY | {"tencache": {"host_memory": "9MiB", "split_master": False}},
    "weights_on_device": {"model": "llama", "offload_param": "none", "steps": 6},
    # So little is trained that nobody would wait for it otherwise.
    "lora": {"model": "llama", "lora": True, "weights": True, "steps": 6, "delay_s": 0.02},
    "accumulation_clipping": {"model": "llama", "accumulation": 2, "clipping": 0.1, "steps": 6},
    "accumulation_random_skip": {"model": "random_skip", "accumulation": 2, "steps": 6} | RAM,
    "fp32_gradients": {"model": "mlp", "grad_accum_dtype": "fp32", "accumulation": 2, "steps": 6},
    "two_groups_scheduler": {"model": "gpt2", "optimizer": "two_groups", "scheduler": True, "steps": 6},
}
EVERYTHING = {"model": "random_skip", "accumulation": 2, "clipping": 0.1, "scheduler": True, "persistence": 600}
MANY_STEPS: dict[str, dict[str, Any]] = {
    "long": EVERYTHING | {"weights": True, "steps": 40, "long": True, "tencache": {"host_memory": "9MiB"}},
}
"""Evaluation and checkpoints between steps, a part of the state on NVMe."""
ALONE: dict[str, dict[str, Any]] = {
    "weights_on_nvme": {"model": "llama", "steps": 6, "tencache": {"host_memory": 0}},
    "off": {"model": "llama", "steps": 6, "tencache": {"overlap_step": False}},
    "another_optimizer": {"model": "mlp", "optimizer": "lion", "steps": 6},
}
"""Every step is over when it returns."""

SCENARIOS = (
    "read_state",
    "write_full_state",
    "step_hooks",
    "forward_inside_gathered",
    "gather_everything",
    "gather_what_is_ahead",
    "average_of_shards",
    "evaluate_between",
    "two_engines",
    "train_destroy_train",
    "accumulation_unmanaged",
)
KILLED = {"model": "llama", "before": 3, "after": 4, "tencache": {"host_memory": "9MiB"}}
ON_TWO_RANKS = ("random_skip", "tied", "ram", "state_on_nvme", "state_in_memory", "accumulation_clipping")
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "ram": {"model": "mlp"} | RAM,
    "nvme": {"model": "mlp", "trained_before_loading": True},
}

LONG = {
    "llama_reentrant", "state_in_memory_whole", "weights_on_device", "accumulation_random_skip", "fp32_gradients",
    "long",
}  # fmt: skip
"""Others of these cases do the same with smaller models or in fewer steps; ``long`` is short on two ranks."""
LONG_SCENARIOS = {"step_hooks", "forward_inside_gathered", "two_engines", "train_destroy_train"}
LONG_ON_TWO_RANKS = {"random_skip", "ram", "state_on_nvme"}

RECOVERS: dict[str, dict[str, Any]] = {
    "recovers_ram": {"model": "llama", "recovers": True} | RAM,
    "recovers_nvme": {"model": "llama", "recovers": True, "tencache": {"host_memory": "9MiB"}},
}
DEEP = {"model": "deep", "max_live": 10**9, "prefetch": 1_000_000} | RAM
"""A bucket is four of its ten layers."""


def both(cases: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any], str]]:
    return [(name, case, engine) for name, case in cases.items() for engine in ("stock", "tencache")]


def checkpoints() -> list[tuple[str, dict[str, Any], str]]:
    cases = []
    for name, case in CHECKPOINTS.items():
        for engine in ("stock", "tencache"):
            cases.append((f"save_{name}", case | {"action": "save", "checkpoint": f"{name}-{engine}"}, engine))
        for saver, loader in (("stock", "stock"), ("tencache", "stock"), ("tencache", "tencache")):
            case_here = case | {"action": "load", "checkpoint": f"{name}-{saver}"}
            cases.append((f"load_{name}_of_{saver}", case_here, loader))
    return cases


@pytest.fixture(scope="module")
def folder(harness: Any) -> Any:
    return harness.folder()


@pytest.fixture(scope="module")
def one_rank(harness: Any, folder: Any, pytestconfig: pytest.Config) -> Any:
    known = TRAINING | MANY_STEPS | ALONE | {name: {"scenario": name} for name in SCENARIOS}
    cases = both({name: known[name] for name in wanted(pytestconfig, known, LONG | LONG_SCENARIOS)})
    recovers = [(name, RECOVERS[name], "tencache") for name in RECOVERS]
    deep = [("deep", DEEP, "tencache"), ("groups_backwards", DEEP | {"optimizer": "groups_backwards"}, "tencache")]
    never_stopped = ("never_stopped", KILLED | {"action": "save", "checkpoint": "never_stopped"}, "stock")
    killed = ("killed", KILLED | {"action": "be_killed", "checkpoint": "killed"}, "tencache")
    return harness.run(
        [*cases, *checkpoints(), *recovers, *deep, never_stopped, killed],
        program=PROGRAM,
        folder=folder,
        timeout_s=800,
    )


@pytest.fixture(scope="module")
def resumed(harness: Any, one_rank: Any, folder: Any) -> Any:
    assert one_rank.finished.code == -signal.SIGKILL
    case = KILLED | {"action": "load", "checkpoint": "killed"}
    return harness.run([("resumed", case, "tencache")], program=PROGRAM, folder=folder)


@pytest.fixture(scope="module")
def two_ranks(harness: Any, pytestconfig: pytest.Config) -> Any:
    cases = {name: TRAINING[name] for name in wanted(pytestconfig, ON_TWO_RANKS, LONG_ON_TWO_RANKS)}
    cases["long"] = MANY_STEPS["long"] | {"steps": 20}
    return harness.run(both(cases), ranks=2, program=PROGRAM, timeout_s=380)


def assert_same(outcome: Any, name: str) -> None:
    for rank in outcome.ranks:
        stock, ours = (outcome.result(name, engine, rank) for engine in ("stock", "tencache"))
        assert ours["losses"] == stock["losses"]
        assert len(set(stock["losses"])) > 1, "the case does not train"
        assert ours.get("weights") == stock.get("weights")


@pytest.mark.parametrize("name", marked([*TRAINING, *MANY_STEPS, *ALONE], LONG))
def test_one_rank(one_rank: Any, name: str) -> None:
    assert_same(one_rank, name)


@pytest.mark.parametrize("name", marked([*ON_TWO_RANKS, *MANY_STEPS], LONG_ON_TWO_RANKS))
def test_two_ranks(two_ranks: Any, name: str) -> None:
    assert_same(two_ranks, name)


@pytest.mark.parametrize("name", marked(TRAINING, LONG))
def test_steps_went_on_in_the_background_and_were_waited_for(one_rank: Any, name: str) -> None:
    result = one_rank.result(name, "tencache")
    assert result["in_background"] >= 8
    assert result["waited_s"] > 0


@pytest.mark.parametrize("name", ["deep", "groups_backwards"])
def test_a_forward_pass_runs_behind_the_update_and_not_only_after_it(one_rank: Any, name: str) -> None:
    assert one_rank.result(name, "tencache")["in_the_middle"] == [True] * 5


def test_a_forward_pass_behind_the_update_gathers_whole_buckets(one_rank: Any) -> None:
    recorded, *behind = one_rank.result("deep", "tencache")["gathers"]
    assert recorded == 10  # nothing is known to prefetch
    assert behind == [4] * 4


@pytest.mark.parametrize("name", ALONE)
def test_steps_are_over_when_somebody_could_look(one_rank: Any, name: str) -> None:
    assert one_rank.result(name, "tencache")["in_background"] == 0


@pytest.mark.parametrize("name", marked(SCENARIOS, LONG_SCENARIOS))
def test_what_scripts_do_besides_training(one_rank: Any, name: str) -> None:
    assert one_rank.result(name, "tencache")["result"] == one_rank.result(name, "stock")["result"]
    if name != "step_hooks":
        assert one_rank.result(name, "tencache")["in_background"] > 0


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_have_the_finished_step(one_rank: Any, name: str) -> None:
    expected = one_rank.result(f"load_{name}_of_stock", "stock")["result"]
    for engine in ("stock", "tencache"):
        assert one_rank.result(f"load_{name}_of_tencache", engine)["result"] == expected
    assert one_rank.result(f"save_{name}", "tencache")["in_background"] > 0


def test_a_job_that_is_killed_in_the_middle_of_a_step_resumes(one_rank: Any, resumed: Any) -> None:
    expected = one_rank.result("never_stopped", "stock")["result"]
    actual = resumed.result("resumed", "tencache")["result"]
    assert actual["losses"] == expected["losses"]
    assert actual["final_weights"] == expected["final_weights"]


@pytest.mark.parametrize("name", RECOVERS)
def test_a_step_that_failed_is_in_the_way_until_a_checkpoint_is_loaded(one_rank: Any, name: str) -> None:
    result = one_rank.result(name, "tencache")
    assert len(result["errors"]) == 3
    assert all("made up" in error for error in result["errors"])
    assert "load_checkpoint" in result["errors"][-1]
    assert result["again"] == result["losses"]
    assert len(set(result["losses"])) == 3
