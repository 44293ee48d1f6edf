# SPDX-License-Identifier: Apache-2.0
"""Checkpoints go both ways between TenCache on NVMe and stock CPU offload, and resuming is exact."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(420)

ENGINES = ("stock", "tencache")
PAIRS = tuple(itertools.product(ENGINES, ENGINES))
PROGRAM = "checkpoint_cases.py"

KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"model": "mlp"},
    "adamw_accumulation": {"model": "mlp", "accumulation": 2, "clipping": 0.1, "scheduler": True},
    "lion": {"model": "mlp", "optimizer": "lion"},
    "torch_adamw": {"model": "mlp", "optimizer": "torch_adamw"},
    "two_groups": {"model": "gpt2", "optimizer": "two_groups"},
    "lora": {"model": "llama", "lora": True},
    "tied": {"model": "tied"},
    "before_the_first_step": {"model": "mlp", "before": 0},
    "into_a_trained_engine": {"model": "mlp", "trained_before_loading": True},
    "without_optimizer_states": {"model": "mlp", "load_options": {"load_optimizer_states": False}},
    "module_only": {"model": "mlp", "load_options": {"load_module_only": True}},
}
TWO_RANK_KINDS = ("adamw", "lora", "before_the_first_step")
SAVING_ONLY: dict[str, dict[str, Any]] = {
    "saved_twice": {"model": "mlp", "saves": 2},
    "saved_twice_lora": {"model": "llama", "lora": True, "saves": 2},
    "not_saved": {"model": "mlp", "only_train": True},
    "bit16": {"model": "gpt2", "save_16bit_model": True, "zero": {"stage3_gather_16bit_weights_on_model_save": True}},
}
RELOADS: dict[str, dict[str, Any]] = {
    "adamw": {"model": "mlp"},
    "torch_sgd": {"model": "mlp", "optimizer": "torch_sgd"},
    "torch_adamw_in_ram": {"model": "mlp", "optimizer": "torch_adamw", "offload_optimizer": "cpu"},
    "odd_states": {"model": "mlp", "optimizer": "odd_states"},
}
"""Go back to a checkpoint of before the first step, when SGD's momentum is not even zero: there is none."""
LOADS_SOMETHING_ELSE = ("without_optimizer_states", "module_only")
"""Kinds after which training differs from the run that was saved."""


def saving(kinds: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any], str]]:
    return [
        (f"save_{name}", case | {"action": "save", "checkpoint": f"{name}-{engine}"}, engine)
        for name, case in kinds.items()
        for engine in ENGINES
    ]


def loading(kinds: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any], str]]:
    cases = []
    for name, case in kinds.items():
        for saver, loader in PAIRS:
            case_here = case | {"action": "load", "checkpoint": f"{name}-{saver}"}
            cases.append((f"load_{name}_of_{saver}", case_here, loader))
        cases += [(f"fp32_{name}_of_{e}", {"action": "fp32", "checkpoint": f"{name}-{e}"}, "stock") for e in ENGINES]
    return cases


def reloading() -> list[tuple[str, dict[str, Any], str]]:
    """Each engine with its own checkpoints, then each with the other's."""
    cases = []
    for engine in ENGINES:
        for name, case in RELOADS.items():
            case_here = case | {"action": "reload", "checkpoint": f"{name}-reload-{engine}"}
            cases.append((f"reload_{name}", case_here, engine))
    for engine, other in (ENGINES, ENGINES[::-1]):
        case_here = RELOADS["adamw"] | {"action": "reload", "checkpoint": f"exchanged-{engine}"}
        cases.append(("reload_exchanged", case_here | {"loads": f"adamw-reload-{other}"}, engine))
    return cases


@pytest.fixture(scope="module")
def saved(harness: Any) -> Any:
    return harness.run(saving(KINDS | SAVING_ONLY) + reloading(), program=PROGRAM, timeout_s=200)


@pytest.fixture(scope="module")
def loaded(harness: Any, saved: Any) -> Any:
    return harness.run(loading(KINDS), program=PROGRAM, folder=saved.finished.folder, timeout_s=200)


@pytest.fixture(scope="module")
def saved_by_two(harness: Any) -> Any:
    cases = saving({name: KINDS[name] for name in TWO_RANK_KINDS})
    return harness.run(cases, ranks=2, program=PROGRAM, timeout_s=200)


@pytest.fixture(scope="module")
def loaded_by_two(harness: Any, saved_by_two: Any) -> Any:
    cases = loading({name: KINDS[name] for name in TWO_RANK_KINDS})
    return harness.run(cases, ranks=2, program=PROGRAM, folder=saved_by_two.finished.folder, timeout_s=200)


def assert_resumes(saved: Any, loaded: Any, name: str) -> None:
    for rank in saved.ranks:
        uninterrupted = saved.result(f"save_{name}", "stock", rank)
        assert saved.result(f"save_{name}", "tencache", rank)["losses"] == uninterrupted["losses"]
        found = {pair: loaded.result(f"load_{name}_of_{pair[0]}", pair[1], rank) for pair in PAIRS}
        expected = found["stock", "stock"] if name in LOADS_SOMETHING_ELSE else uninterrupted
        for pair, result in found.items():
            assert result["weights"] == found["stock", "stock"]["weights"], pair
            assert result["losses"] == expected["losses"], pair
            assert result["final_weights"] == expected["final_weights"], pair


@pytest.mark.parametrize("name", KINDS)
def test_resume_is_exact_whoever_saved(saved: Any, loaded: Any, name: str) -> None:
    assert_resumes(saved, loaded, name)


@pytest.mark.parametrize("name", TWO_RANK_KINDS)
def test_resume_is_exact_on_two_ranks(saved_by_two: Any, loaded_by_two: Any, name: str) -> None:
    assert_resumes(saved_by_two, loaded_by_two, name)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "before_the_first_step"])
def test_zero_to_fp32_reads_the_same(loaded: Any, name: str) -> None:
    stock, ours = (loaded.result(f"fp32_{name}_of_{engine}", "stock") for engine in ENGINES)
    assert ours["fp32"] == stock["fp32"]
    assert ours["files"] == stock["files"]


@pytest.mark.parametrize("name", TWO_RANK_KINDS)
def test_zero_to_fp32_reads_the_same_of_two_ranks(loaded_by_two: Any, name: str) -> None:
    stock, ours = (loaded_by_two.result(f"fp32_{name}_of_{engine}", "stock") for engine in ENGINES)
    assert ours["fp32"] == stock["fp32"]
    assert ours["files"] == stock["files"]


@pytest.mark.parametrize("name", ["saved_twice", "saved_twice_lora", "not_saved"])
def test_training_goes_on_after_saving(saved: Any, name: str) -> None:
    stock, ours = (saved.result(f"save_{name}", engine) for engine in ENGINES)
    assert ours == stock


@pytest.mark.parametrize("name", [*RELOADS, "exchanged"])
def test_going_back_to_a_checkpoint_takes_all_of_its_state(saved: Any, name: str) -> None:
    stock, ours = (saved.result(f"reload_{name}", engine) for engine in ENGINES)
    assert ours == stock
    assert stock == saved.result("reload_adamw", "stock") or name != "exchanged"


def test_saving_does_not_change_training(saved: Any) -> None:
    assert saved.result("save_adamw", "tencache") == saved.result("save_not_saved", "tencache")


def test_16bit_model_is_the_same(saved: Any) -> None:
    stock, ours = (saved.result("save_bit16", engine) for engine in ENGINES)
    assert stock["bit16"]
    assert ours["bit16"] == stock["bit16"]


def test_universal_checkpoint(harness: Any, saved: Any) -> None:
    folder = saved.finished.folder
    cases = []
    for saver in ENGINES:
        source = folder / "checkpoints" / f"adamw-{saver}"
        target = folder / "checkpoints" / f"universal-{saver}"
        command = ["--input_folder", str(source / "save0"), "--output_folder", str(target / "save0")]
        module = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        harness.execute([*module, *command, "--num_extract_workers", "1", "--num_merge_workers", "1"]).succeeded()
        (target / "latest").write_text("save0")
        case = KINDS["adamw"] | {"config": {"checkpoint": {"load_universal": True}}}
        for loader in ENGINES:
            cases.append((saver, case | {"action": "load", "checkpoint": target.name}, loader))
    outcome = harness.run(cases, program=PROGRAM, folder=folder, timeout_s=120)
    expected = outcome.result("stock", "stock")
    for saver, loader in PAIRS:
        assert outcome.result(saver, loader) == expected, (saver, loader)
