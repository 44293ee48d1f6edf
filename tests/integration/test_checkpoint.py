# SPDX-License-Identifier: Apache-2.0
"""Checkpoints go both ways between TenCache on NVMe and stock CPU offload, and resuming is exact."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.long_cases import marked, wanted

pytestmark = pytest.mark.timeout(420)

ENGINES = ("stock", "tencache")
PAIRS = tuple(itertools.product(ENGINES, ENGINES))
PROGRAM = "checkpoint_cases.py"

IN_TWO_PLACES = {"host_memory": "10MiB", "chunk_size": 2**18}
"""Weights in RAM, of the optimizer's state about half."""
ONE_CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 2e-3, "cycle_first_step_size": 7, "cycle_min_mom": 0.8}
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"model": "mlp"},
    "adamw_accumulation": {"model": "mlp", "accumulation": 2, "clipping": 0.1, "scheduler": True},
    "lion": {"model": "mlp", "optimizer": "lion"},
    "torch_adamw": {"model": "mlp", "optimizer": "torch_adamw"},
    "two_groups": {"model": "gpt2", "optimizer": "two_groups", "tencache": IN_TWO_PLACES | {"host_memory": "20MiB"}},
    "lora": {"model": "llama", "lora": True},
    "tied": {"model": "tied"},
    "before_the_first_step": {"model": "mlp", "before": 0},
    "into_a_trained_engine": {"model": "mlp", "trained_before_loading": True, "tencache": IN_TWO_PLACES},
    "without_optimizer_states": {"model": "mlp", "load_options": {"load_optimizer_states": False}},
    "module_only": {"model": "mlp", "load_options": {"load_module_only": True}},
    "late": {"model": "mlp", "before": 40},
    "late_groups": {"model": "mlp", "optimizer": "two_groups", "before": 12, "sub_group_size": 50_000},
    "late_amsgrad": {"model": "mlp", "optimizer": "torch_groups", "before": 12},
    "late_cycled": {
        "model": "mlp",
        "before": 12,
        "config": {"scheduler": {"type": "OneCycle", "params": ONE_CYCLE}},
    },
    "late_varied": {"model": "mlp", "optimizer": "two_groups", "varied": True, "before": 15},
    "eight_bit": {
        "model": "mlp",
        "optimizer": "bitsandbytes.optim.AdamW8bit",
        "sub_group_size": 10**9,
        "tencache": {"host_memory": "6MiB", "chunk_size": 2**16},
    },
    "muon": {"model": "mlp", "muon": True},
    "late_watched": {"model": "mlp", "optimizer": "two_groups", "varied": True, "watched": True, "before": 15},
}
LATE = ("late", "late_groups", "late_amsgrad", "late_cycled", "late_varied", "late_watched")
"""Resumed where a power of a beta depends on how it was calculated. Stock's own resume does not know, and its files do
not say."""
CHANGED_BETAS = ("late_cycled", "late_varied", "late_watched")
"""A checkpoint of stock's does not tell that they did."""
TWO_RANK_KINDS = ("adamw", "lora", "eight_bit", "muon", "late_groups", "before_the_first_step", "into_a_trained_engine")
LONG = {"adamw_accumulation", "lora", "late_amsgrad", "late_varied", "tied"}
"""The first two are those of the core; ``late_watched`` varies too, and a tied weight is one weight."""
LONG_ON_TWO_RANKS = {"lora", "before_the_first_step"}
SAVED_ALL_THE_SAME = {"lora"}
"""Since it is loaded otherwise."""
SAVING_ONLY: dict[str, dict[str, Any]] = {
    "saved_twice": {"model": "mlp", "saves": 2},
    "saved_twice_lora": {"model": "llama", "lora": True, "saves": 2},
    "not_saved": {"model": "mlp", "only_train": True},
    "bit16": {"model": "gpt2", "save_16bit_model": True, "zero": {"stage3_gather_16bit_weights_on_model_save": True}},
}
RELOADS: dict[str, dict[str, Any]] = {
    "adamw": {"model": "mlp", "before": 12},
    "groups": {"model": "mlp", "optimizer": "two_groups", "before": 12},
    "adamw_in_two_places": {"model": "mlp", "tencache": IN_TWO_PLACES},
    "torch_sgd": {"model": "mlp", "optimizer": "torch_sgd"},
    "torch_adamw_in_ram": {"model": "mlp", "optimizer": "torch_adamw", "offload_optimizer": "cpu"},
    "odd_states": {"model": "mlp", "optimizer": "odd_states"},
    "eight_bit": {"model": "mlp", "optimizer": "bitsandbytes.optim.AdamW8bit", "sub_group_size": 10**9},
    "eight_bit_whole": {"model": "mlp", "optimizer": "bitsandbytes.optim.AdamW8bit"},
}
"""Go back to a checkpoint of before the first step, when SGD's momentum is not even zero: there is none."""
WITHOUT = {"load_options": {"load_optimizer_states": False}}
MODULE_ONLY = {"load_options": {"load_module_only": True}}
ON_THE_DEVICE = {"offload_optimizer": "none"}
LOADED_OTHERWISE: dict[str, tuple[str, dict[str, Any]]] = {
    "frozen_without_optimizer_states": ("lora", WITHOUT),
    "frozen_module_only": ("lora", MODULE_ONLY),
    "optimizer_on_the_device": ("torch_adamw", ON_THE_DEVICE),
    "optimizer_on_the_device_without_states": ("torch_adamw", ON_THE_DEVICE | WITHOUT),
    "optimizer_on_the_device_module_only": ("torch_adamw", ON_THE_DEVICE | MODULE_ONLY),
}
"""Kinds whose checkpoint is loaded in part, or into an engine that keeps it elsewhere."""
TWO_RANK_LOADED_OTHERWISE = ("frozen_without_optimizer_states",)
UNIVERSAL_LOADS: dict[str, dict[str, Any]] = {
    "everything": {},
    "without_optimizer_states": WITHOUT,
    "rounded_without_optimizer_states": WITHOUT | {"zero": {"load_from_fp32_weights": False}},
    "module_only": MODULE_ONLY,
    "everything_in_ram": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "in_ram_without_optimizer_states": {"offload_param": "cpu", "offload_optimizer": "cpu"} | WITHOUT,
    "optimizer_in_ram_without_states": {"offload_optimizer": "cpu"} | WITHOUT,
}
LONG_UNIVERSAL_LOADS = {"in_ram_without_optimizer_states", "optimizer_in_ram_without_states"}
LOADS_SOMETHING_ELSE = ("without_optimizer_states", "module_only")
"""Kinds after which training differs from the run that was saved."""


def saving(kinds: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any], str]]:
    return [
        (f"save_{name}", case | {"action": "save", "checkpoint": f"{name}-{engine}"}, engine)
        for name, case in kinds.items()
        for engine in ENGINES
    ]


def loading_otherwise(names: Iterable[str]) -> list[tuple[str, dict[str, Any], str]]:
    cases = []
    for name in names:
        kind, more = LOADED_OTHERWISE[name]
        case = KINDS[kind] | more | {"action": "load", "checkpoint": f"{kind}-tencache"}
        cases += [(f"load_{name}", case, loader) for loader in ENGINES]
    return cases


def loading(kinds: Iterable[str]) -> list[tuple[str, dict[str, Any], str]]:
    cases = []
    for name in kinds:
        for saver, loader in PAIRS:
            case_here = KINDS[name] | {"action": "load", "checkpoint": f"{name}-{saver}"}
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
    return [*cases, ("reload_own", case_here | {"loads": "adamw-reload-stock"}, "stock")]


@pytest.fixture(scope="module")
def saved(harness: Any, pytestconfig: pytest.Config) -> Any:
    kinds = {name: KINDS[name] for name in wanted(pytestconfig, KINDS, LONG - SAVED_ALL_THE_SAME)}
    return harness.run(saving(kinds | SAVING_ONLY) + reloading(), program=PROGRAM, timeout_s=200)


@pytest.fixture(scope="module")
def loaded(harness: Any, saved: Any, pytestconfig: pytest.Config) -> Any:
    cases = [*loading(wanted(pytestconfig, KINDS, LONG)), *loading_otherwise(LOADED_OTHERWISE)]
    return harness.run(cases, program=PROGRAM, folder=saved.finished.folder, timeout_s=200)


@pytest.fixture(scope="module")
def saved_by_two(harness: Any, pytestconfig: pytest.Config) -> Any:
    names = wanted(pytestconfig, TWO_RANK_KINDS, LONG_ON_TWO_RANKS - SAVED_ALL_THE_SAME)
    cases = saving({name: KINDS[name] for name in names})
    return harness.run(cases, ranks=2, program=PROGRAM, timeout_s=200)


@pytest.fixture(scope="module")
def loaded_by_two(harness: Any, saved_by_two: Any, pytestconfig: pytest.Config) -> Any:
    cases = loading(wanted(pytestconfig, TWO_RANK_KINDS, LONG_ON_TWO_RANKS))
    cases += loading_otherwise(TWO_RANK_LOADED_OTHERWISE)
    return harness.run(cases, ranks=2, program=PROGRAM, folder=saved_by_two.finished.folder, timeout_s=200)


def assert_loads_as_stock(loaded: Any, name: str) -> None:
    for rank in loaded.ranks:
        stock, ours = (loaded.result(f"load_{name}", loader, rank) for loader in ENGINES)
        assert ours == stock


def assert_resumes(saved: Any, loaded: Any, name: str) -> None:
    for rank in saved.ranks:
        uninterrupted = saved.result(f"save_{name}", "stock", rank)
        assert saved.result(f"save_{name}", "tencache", rank)["losses"] == uninterrupted["losses"]
        actual = {pair: loaded.result(f"load_{name}_of_{pair[0]}", pair[1], rank) for pair in PAIRS}
        for pair, result in actual.items():
            assert result["weights"] == actual["stock", "stock"]["weights"], pair
            of_stock = name in LOADS_SOMETHING_ELSE or (name in LATE and pair[1] == "stock")
            if name in CHANGED_BETAS and pair == ("stock", "tencache"):
                continue
            expected = actual["stock", "stock"] if of_stock else uninterrupted
            assert result["losses"] == expected["losses"], pair
            assert result["final_weights"] == expected["final_weights"], pair


@pytest.mark.parametrize("name", marked(KINDS, LONG))
def test_resume_is_exact_whoever_saved(saved: Any, loaded: Any, name: str) -> None:
    assert_resumes(saved, loaded, name)


@pytest.mark.parametrize("name", marked(TWO_RANK_KINDS, LONG_ON_TWO_RANKS))
def test_resume_is_exact_on_two_ranks(saved_by_two: Any, loaded_by_two: Any, name: str) -> None:
    assert_resumes(saved_by_two, loaded_by_two, name)


@pytest.mark.parametrize("name", marked([name for name in KINDS if name != "before_the_first_step"], LONG))
def test_zero_to_fp32_reads_the_same(loaded: Any, name: str) -> None:
    stock, ours = (loaded.result(f"fp32_{name}_of_{engine}", "stock") for engine in ENGINES)
    assert ours["fp32"] == stock["fp32"]
    assert ours["files"] == stock["files"]


@pytest.mark.parametrize("name", marked(TWO_RANK_KINDS, LONG_ON_TWO_RANKS))
def test_zero_to_fp32_reads_the_same_of_two_ranks(loaded_by_two: Any, name: str) -> None:
    stock, ours = (loaded_by_two.result(f"fp32_{name}_of_{engine}", "stock") for engine in ENGINES)
    assert ours["fp32"] == stock["fp32"]
    assert ours["files"] == stock["files"]


@pytest.mark.parametrize("name", ["saved_twice", "saved_twice_lora", "not_saved"])
def test_training_goes_on_after_saving(saved: Any, name: str) -> None:
    stock, ours = (saved.result(f"save_{name}", engine) for engine in ENGINES)
    assert ours == stock


@pytest.mark.parametrize("name", RELOADS)
def test_going_back_to_a_checkpoint_takes_all_of_its_state(saved: Any, name: str) -> None:
    stock, ours = (saved.result(f"reload_{name}", engine) for engine in ENGINES)
    assert ours == stock


def test_going_back_to_checkpoints_of_the_other(saved: Any) -> None:
    stock, ours = (saved.result("reload_exchanged", engine) for engine in ENGINES)
    assert ours == saved.result("reload_adamw", "stock")
    assert stock == saved.result("reload_own", "stock")


def test_saving_does_not_change_training(saved: Any) -> None:
    assert saved.result("save_adamw", "tencache") == saved.result("save_not_saved", "tencache")


def test_16bit_model_is_the_same(saved: Any) -> None:
    stock, ours = (saved.result("save_bit16", engine) for engine in ENGINES)
    assert stock["bit16"]
    assert ours["bit16"] == stock["bit16"]


@pytest.mark.parametrize("name", LOADED_OTHERWISE)
def test_loading_only_a_part_or_to_another_place(loaded: Any, name: str) -> None:
    assert_loads_as_stock(loaded, name)


@pytest.mark.parametrize("name", TWO_RANK_LOADED_OTHERWISE)
def test_loading_only_a_part_on_two_ranks(loaded_by_two: Any, name: str) -> None:
    assert_loads_as_stock(loaded_by_two, name)


# Universal checkpoints


def make_universal(harness: Any, checkpoint: Path) -> None:
    command = ["--input_folder", str(checkpoint / "save0"), "--output_folder", str(checkpoint / "universal")]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    harness.python(["-m", "deepspeed.checkpoint.ds_to_universal", *command, *workers]).succeeded()


@pytest.fixture(scope="module")
def universal(harness: Any, saved: Any, saved_by_two: Any) -> Path:
    """The folder of universal checkpoints: of one rank by each engine, and of two ranks by ours."""
    folder = saved.finished.folder
    shutil.copytree(saved_by_two.finished.folder / "checkpoints" / "adamw-tencache", folder / "checkpoints" / "two")
    for checkpoint in ("adamw-stock", "adamw-tencache", "two", "late-tencache"):
        make_universal(harness, folder / "checkpoints" / checkpoint)
    return folder


def universal_case(checkpoint: str, **more: Any) -> dict[str, Any]:
    case = KINDS["adamw"] | {"config": {"checkpoint": {"load_universal": True}}}
    return case | {"action": "load", "checkpoint": checkpoint} | more


@pytest.fixture(scope="module")
def universal_loaded(harness: Any, universal: Path, pytestconfig: pytest.Config) -> Any:
    cases = [
        (f"{saver}_{name}", universal_case(f"adamw-{saver}", **UNIVERSAL_LOADS[name]), loader)
        for name in wanted(pytestconfig, UNIVERSAL_LOADS, LONG_UNIVERSAL_LOADS)
        for saver in (ENGINES if name == "everything" else ENGINES[1:])
        for loader in ENGINES
    ]
    cases += [("two", universal_case("two"), loader) for loader in ENGINES]
    cases.append(("late", universal_case("late-tencache", before=KINDS["late"]["before"]), "tencache"))
    return harness.run(cases, program=PROGRAM, folder=universal, timeout_s=200)


def test_universal_checkpoint(universal_loaded: Any) -> None:
    expected = universal_loaded.result("stock_everything", "stock")
    for saver, loader in PAIRS:
        assert universal_loaded.result(f"{saver}_everything", loader) == expected, (saver, loader)


def test_a_late_universal_checkpoint_has_the_powers_of_betas(saved: Any, universal_loaded: Any) -> None:
    expected, actual = saved.result("save_late", "stock"), universal_loaded.result("late", "tencache")
    assert (actual["losses"], actual["final_weights"]) == (expected["losses"], expected["final_weights"])


@pytest.mark.parametrize("name", marked(UNIVERSAL_LOADS, LONG_UNIVERSAL_LOADS))
def test_universal_checkpoint_in_part_or_elsewhere(universal_loaded: Any, name: str) -> None:
    stock, ours = (universal_loaded.result(f"tencache_{name}", loader) for loader in ENGINES)
    assert ours == stock


def test_universal_checkpoint_of_two_ranks_on_one(universal_loaded: Any) -> None:
    stock, ours = (universal_loaded.result("two", loader) for loader in ENGINES)
    assert ours == stock


def test_universal_checkpoints_on_two_ranks(harness: Any, universal: Path) -> None:
    cases = [
        (f"{source}_{name}", universal_case(source, **UNIVERSAL_LOADS[name]), loader)
        for source in ("two", "adamw-tencache")
        for name in ("everything", "without_optimizer_states")
        for loader in ENGINES
    ]
    outcome = harness.run(cases, ranks=2, program=PROGRAM, folder=universal, timeout_s=200)
    for name, _, _ in cases[::2]:
        for rank in outcome.ranks:
            assert outcome.result(name, "tencache", rank) == outcome.result(name, "stock", rank)
