# SPDX-License-Identifier: Apache-2.0
"""A result of stock is kept while nothing changes that it depends on, and not a moment longer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integration import oracle
from tests.integration.oracle import HERE, KeptResults, circumstances, programs, remove_unused

CASE: dict[str, Any] = {"model": "mlp", "steps": 2, "weights": True, "zero": {"stage3_max_reuse_distance": 0}}
RESULT = {"losses": ["0x1.8p+0", "0x1.4p+0"], "weights": {"layers.0.weight": "ab"}}
ON = {"programs": "1", "packages": "2", "environment": "3"}


def kept_in(folder: Path, *, place: tuple[int, int] = (0, 1), **changes: str) -> KeptResults:
    return KeptResults(folder, "training", place, ON | changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    kept_in(tmp_path).keep("mlp", CASE, RESULT)
    return tmp_path


def test_the_same_is_found(folder: Path) -> None:
    assert kept_in(folder).find("mlp", CASE) == RESULT


@pytest.mark.parametrize("changed", ON)
def test_not_when_something_it_depends_on_is_different(folder: Path, changed: str) -> None:
    assert kept_in(folder, **{changed: "another"}).find("mlp", CASE) is None
    kept_in(folder, **{changed: "another"}).keep("mlp", CASE, {"losses": []})
    assert kept_in(folder).find("mlp", CASE) is None, "the newer one has taken its place"


def test_not_for_another_config_name_rank_or_number_of_ranks(folder: Path) -> None:
    for case in (CASE | {"steps": 3}, CASE | {"zero": {"stage3_max_reuse_distance": 1}}, CASE | {"seed": 7}):
        assert kept_in(folder).find("mlp", case) is None
    assert kept_in(folder).find("tied", CASE) is None
    for place in ((0, 2), (1, 2)):
        assert kept_in(folder, place=place).find("mlp", CASE) is None
    assert KeptResults(folder, "gds_cases", (0, 1), ON).find("mlp", CASE) is None


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "not_an_object", "gone"])
def test_not_when_it_is_damaged(folder: Path, damage: str) -> None:
    (path,) = (folder / "training").iterdir()
    text = path.read_text()
    damaged = {"cut": text[:-20], "empty": "", "changed": text.replace("0x1.8p+0", "0x1.9p+0"), "not_an_object": "[1]"}
    if damage == "gone":
        path.unlink()
    else:
        path.write_text(damaged[damage])
    assert kept_in(folder).find("mlp", CASE) is None
    kept_in(folder).keep("mlp", CASE, RESULT)
    assert kept_in(folder).find("mlp", CASE) == RESULT


def test_every_program_counts(tmp_path: Path) -> None:
    for path in HERE.glob("*.py"):
        shutil.copy(path, tmp_path)
    before = programs(tmp_path)
    assert before == programs()
    assert {"training.py", "models.py", "user_api_cases.py", "warm_parent.py", "conftest.py"} <= before.keys()
    with open(tmp_path / "models.py", "a") as models:
        models.write("\n")
    assert programs(tmp_path) != before
    shutil.copy(HERE / "models.py", tmp_path)
    assert programs(tmp_path) == before
    (tmp_path / "another_program.py").touch()
    assert programs(tmp_path) != before


@pytest.mark.parametrize(
    ("function", "name"),
    [("packages", "packages"), ("deepspeed_files", "files of DeepSpeed"), ("compiled_ops", "compiled ops"),
     ("processor", "processor"), ("programs", "programs"), ("imported", "imported of TenCache")],
)  # fmt: skip
def test_what_is_around_the_case_counts(monkeypatch: pytest.MonkeyPatch, function: str, name: str) -> None:
    circumstances({})  # whatever it imports is imported
    before = circumstances({})
    monkeypatch.setattr(oracle, function, lambda *_: "another")
    after = circumstances({})
    assert {key for key in before if before[key] != after[key]} == {name}


def test_the_environment_counts_but_not_the_port_of_a_job() -> None:
    before = circumstances({"OMP_NUM_THREADS": "1", "MASTER_PORT": "1", "PATH": "a"})
    assert circumstances({"OMP_NUM_THREADS": "1", "MASTER_PORT": "2", "PATH": "b"}) == before
    for more in ({"OMP_NUM_THREADS": "2"}, {"DS_ACCELERATOR": "cpu"}, {"LD_PRELOAD": "x.so"}):
        assert circumstances({"OMP_NUM_THREADS": "1"} | more) != before


def test_packages_and_processor_are_known() -> None:
    found = oracle.packages()
    assert found["torch"].startswith(__import__("torch").__version__)
    assert all(found[name] for name in ("deepspeed", "transformers", "accelerate", "numpy"))
    assert any("model name" in line or "CPU part" in line for line in oracle.processor())
    assert any(name.startswith("cpu_adam") for name in oracle.compiled_ops())


def test_what_nobody_wants_any_more_is_removed(folder: Path) -> None:
    kept_in(folder).keep("tied", CASE, RESULT)
    (old,) = (folder / "training").glob("mlp-*")
    os.utime(old, (0, 0))
    remove_unused(folder)
    assert kept_in(folder).find("mlp", CASE) is None
    assert kept_in(folder).find("tied", CASE) == RESULT


@pytest.mark.timeout(200)
def test_a_training_is_not_repeated_until_its_config_changes(
    harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "_oracle", tmp_path)
    (first,) = trained(harness, CASE, n_kept=0)
    assert trained(harness, CASE, n_kept=1) == [first]
    assert trained(harness, CASE | {"weight_decay": 0.5}, n_kept=0) != [first]


@pytest.mark.timeout(200)
def test_a_rank_that_has_nothing_makes_all_train(harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_oracle", tmp_path)
    first = trained(harness, CASE, n_kept=0, ranks=2)
    assert trained(harness, CASE, n_kept=1, ranks=2) == first
    path = tmp_path / "training" / f"mlp-{oracle.digest(CASE)[:8]}-1-of-2.json"
    path.write_text(path.read_text()[:100])
    assert trained(harness, CASE, n_kept=0, ranks=2) == first


def trained(harness: Any, case: dict[str, Any], n_kept: int, ranks: int = 1) -> list[Any]:
    """The results of stock on every rank, of which so many were kept."""
    outcome = harness.run([("mlp", case, "stock")], ranks=ranks)
    assert outcome.finished.succeeded().log.count(f"kept results of stock: {n_kept} of 1") == ranks
    return [outcome.result("mlp", "stock", rank) for rank in outcome.ranks]
