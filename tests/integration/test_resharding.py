# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are resumed on another number of ranks: a run that goes on with as many as at first, from a checkpoint
that others have loaded and saved, is the run that never stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(420)

PROGRAM = "checkpoint_cases.py"
TWO_PLACES = {"host_memory": "10MiB", "chunk_size": 2**18}
RAM = {"offload_param": "cpu", "offload_optimizer": "cpu"}
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"model": "mlp", "tencache": TWO_PLACES},
    "accumulation": {"model": "mlp", "accumulation": 2, "clipping": 0.1, "scheduler": True} | RAM,
    "groups": {"model": "gpt2", "optimizer": "two_groups", "before": 12, "sub_group_size": 50_000},
    "lora": {"model": "llama", "lora": True},
    "torch_adamw": {"model": "mlp", "optimizer": "torch_adamw"} | RAM,
    "muon": {"model": "llama", "muon": True},
    "before_the_first_step": {"model": "mlp", "before": 0},
}
WAYS = {"two_by_one": (2, 1), "one_by_two": (1, 2), "one_by_three": (1, 3)}
"""Ranks that train, and those that pass their checkpoint on."""
KINDS_OF = {
    "two_by_one": tuple(KINDS),
    "one_by_two": ("adamw", "groups", "lora"),
    "one_by_three": ("groups", "lora", "muon"),  # weights whose partitions are of another length on each rank
}
PAIRS = [(way, name) for way, names in KINDS_OF.items() for name in names]


@pytest.fixture(scope="module")
def passed_on(harness: Any) -> Any:
    """Results of the run that never stopped, of those that passed it on, and of the resumed ones, by way."""
    results = {}
    for way, (n_ranks, n_others) in WAYS.items():
        names = KINDS_OF[way]
        saving = [(name, KINDS[name] | {"action": "save", "checkpoint": name}, "tencache") for name in names]
        passing = [
            (name, KINDS[name] | {"action": "pass_on", "loads": name, "checkpoint": f"{name}-passed"}, "tencache")
            for name in names
        ]
        loading = [
            (name, KINDS[name] | {"action": "load", "checkpoint": f"{name}-passed"}, "tencache") for name in names
        ]
        if "adamw" in names:  # stock needs one that was saved by as many
            back = {"action": "pass_on", "loads": "adamw-passed", "checkpoint": "adamw-back"}
            loading.append(("back", KINDS["adamw"] | back, "tencache"))
            for checkpoint in ("adamw", "adamw-back"):
                loading.append((checkpoint, KINDS["adamw"] | {"action": "load", "checkpoint": checkpoint}, "stock"))
        if way == "two_by_one":
            saving.append(("adamw", KINDS["adamw"] | {"action": "save", "checkpoint": "of_stock"}, "stock"))
            more = {"action": "pass_on", "loads": "of_stock", "checkpoint": "of_stock-passed"}
            passing.append(("of_stock", KINDS["adamw"] | more, "tencache"))
            loading.append(
                ("of_stock", KINDS["adamw"] | {"action": "load", "checkpoint": "of_stock-passed"}, "tencache")
            )
        saved = harness.run(saving, ranks=n_ranks, program=PROGRAM, timeout_s=200)
        folder = saved.finished.folder
        passed = harness.run(passing, ranks=n_others, program=PROGRAM, folder=folder, timeout_s=200)
        results[way] = saved, passed, harness.run(loading, ranks=n_ranks, program=PROGRAM, folder=folder, timeout_s=200)
    return results


def assert_goes_on(passed_on: Any, way: str, name: str, *, of: str = "") -> None:
    saved, passed, resumed = passed_on[way]
    for rank in saved.ranks:
        expected, actual = saved.result(name, "tencache", rank), resumed.result(of or name, "tencache", rank)
        assert actual["losses"] == expected["losses"]
        assert actual["final_weights"] == expected["final_weights"]
        assert actual["weights"] == passed.result(of or name, "tencache")["weights"]


@pytest.mark.parametrize(("way", "name"), PAIRS)
def test_a_resumed_run_is_the_one_that_never_stopped(passed_on: Any, way: str, name: str) -> None:
    assert_goes_on(passed_on, way, name)


@pytest.mark.parametrize("way", ["two_by_one", "one_by_two"])
def test_stock_resumes_what_was_passed_on_and_back(passed_on: Any, way: str) -> None:
    """As it resumes one that never went anywhere; before 0.19.8 that is not the run that never stopped."""
    resumed = passed_on[way][2]
    for rank in resumed.ranks:
        assert resumed.result("adamw-back", "stock", rank) == resumed.result("adamw", "stock", rank)


def test_what_stock_has_saved_is_passed_on(passed_on: Any) -> None:
    assert_goes_on(passed_on, "two_by_one", "adamw", of="of_stock")


def test_other_models_and_missing_files_are_refused(harness: Any, passed_on: Any) -> None:
    folder: Path = passed_on["two_by_one"][0].finished.folder
    checkpoints = folder / "checkpoints"
    shutil.copytree(checkpoints / "adamw", checkpoints / "incomplete")
    (incomplete,) = (checkpoints / "incomplete" / "save0").glob("*zero_pp_rank_1_*optim_states.pt")
    incomplete.unlink()
    cases = []
    for name, kind, model in (("incomplete", "adamw", "mlp"), ("torch_adamw", "torch_adamw", "mlp_deep")):
        case = KINDS[kind] | {"model": model, "action": "pass_on", "loads": name, "checkpoint": "x"}
        cases.append((name, case, "tencache"))
    outcome = harness.run(cases, program=PROGRAM, folder=folder, timeout_s=200)
    refused = outcome.result("incomplete", "tencache")["refused"]
    assert refused.startswith(f"CheckpointError: {incomplete} is missing")
    assert not (checkpoints / "x").exists()
    assert "Error" in outcome.result("torch_adamw", "tencache")["refused"]
