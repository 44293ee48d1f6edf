# SPDX-License-Identifier: Apache-2.0
"""Which DeepSpeed is accepted, what of an older or an unknown one is made up for, and what it is told."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tencache_ds.errors import SeamError
from tencache_ds.integration import seams
from tencache_ds.integration.adapters import versions
from tencache_ds.integration.adapters.newest import Calls, NewestCoordinator, NewestOptimizer
from tencache_ds.integration.seams import SEAMS, Feature, Seam, mismatches

ROOT = Path(__file__).resolve().parents[2]
EVERY_CHANGE = versions.changes_after("0")

# Versions


def test_the_range_is_the_one_the_package_declares() -> None:
    dependencies = re.search(
        r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE
    )
    assert dependencies is not None
    (deepspeed,) = re.findall(r'"(deepspeed[^"]*)"', dependencies[1])
    assert Requirement(deepspeed).specifier == Requirement(f"deepspeed{versions.SUPPORTED}").specifier
    assert all(versions.is_supported(version) for version in versions.TESTED)
    assert sorted(versions.TESTED, key=Version) == list(versions.TESTED)
    assert versions.TESTED[0] == versions.OLDEST


def warnings_of(version: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(seams.logger, "warning", lambda text, *values: said.append(text % values))
    seams.warn_of_version(version, rank)
    return said


@pytest.mark.parametrize("version", ["0.16.4", "0.17.2", "0.19.8", "0.19.9", "0.19.9+a1b2c3d", "0.19.10.dev0"])
def test_a_version_in_the_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert warnings_of(version, 0, monkeypatch) == []


@pytest.mark.parametrize("version", ["0.16.3", "0.20.0", "1.0", "unknown", ""])
def test_a_version_outside_is_named_on_rank_0(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (message,) = warnings_of(version, 0, monkeypatch)
    assert f"DeepSpeed {version} is outside the range" in message
    assert f"deepspeed=={versions.nearest(version)}" in message
    assert warnings_of(version, 1, monkeypatch) == []


@pytest.mark.parametrize(
    ("version", "nearest"),
    [
        ("0.15.4", "0.16.4"),
        ("0.16.5", "0.16.4"),
        ("0.18.0", "0.17.6"),
        ("0.19.0", "0.19.0"),
        ("0.19.9", "0.19.8"),
        ("a fork", "0.19.8"),
    ],
)
def test_the_nearest_tested_version(version: str, nearest: str) -> None:
    assert versions.nearest(version) == nearest


# Changes


def test_an_older_version_lacks_more() -> None:
    counts = [len(versions.changes_after(version)) for version in versions.TESTED]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0
    assert versions.changes_after("a fork") == ()
    assert versions.changes_after("0.19.8+a1b2c3d") == ()
    since = [Version(change.since) for change in EVERY_CHANGE]
    assert since == sorted(since, reverse=True), "later changes come first"
    assert since[-1] > Version(versions.OLDEST)


def test_what_an_older_version_lacks_is_a_seam() -> None:
    names = {seam.name for seam in SEAMS}
    assert all(change.lacks <= names for change in EVERY_CHANGE)


@pytest.mark.parametrize(
    ("kind", "bases"),
    [
        ("calls", (Calls,)),
        ("optimizer", (NewestOptimizer, "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3")),
        (
            "coordinator",
            (NewestCoordinator, "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator"),
        ),
    ],
)
def test_adapters_define_what_the_newest_version_has(kind: str, bases: tuple[Any, ...]) -> None:
    """A name that nothing calls would be an adapter without effect."""
    by_instances = {"zenflow", "torch_autocast_gradscaler", "master_weights_and_grads_dtype"}  # set in constructors
    there = [resolved(base) for base in bases]  # a class that is collected loses its names
    for adapter in {each for change in EVERY_CHANGE if (each := getattr(change, kind)) is not None}:
        for name in vars(adapter):
            if not name.startswith("__") and name != "_backward_under_way":
                assert name in by_instances or any(name in vars(each) for each in there), f"{adapter.__name__}.{name}"


def resolved(base: Any) -> type:
    if not isinstance(base, str):
        return base
    module, _, name = base.rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return type("All", (), {name: None for each in found.__mro__ for name in vars(each)})


# Seams


def test_the_installed_version_has_every_seam() -> None:
    assert mismatches(seams.deepspeed_version()) == ()


def test_it_has_every_seam_where_tencache_is_active() -> None:
    script = "from tencache_ds.integration import activation, seams; activation.activate(); "
    script += "print('MISMATCHES', seams.mismatches(seams.deepspeed_version()))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "MISMATCHES ()" in done.stdout, done.stderr[-2000:]


def deepspeeds_names() -> Iterator[tuple[Path, str]]:
    """What this package imports of DeepSpeed, but for its adapters, of which each knows its version."""
    for path in sorted((ROOT / "tencache_ds").rglob("*.py")):
        if path.parent.name == "adapters":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed":
                yield from ((path, f"{node.module}.{alias.name}") for alias in node.names)


def test_whatever_is_imported_of_deepspeed_is_a_seam() -> None:
    declared = {seam.module + "." + seam.path for seam in SEAMS}
    declared |= {name.rpartition(".")[0] for name in declared}  # a class with its method, a module
    declared |= {"deepspeed.comm", *(seam.module for seam in SEAMS)}
    found = list(deepspeeds_names())
    assert len(found) > 50
    assert [(path.name, name) for path, name in found if name not in declared] == []


@pytest.fixture
def deepspeed_to_come(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with one function, by whose name seams are made."""
    module = ModuleType("deepspeed.to_come")
    exec("def function(first, second, third=None):\n    return first._known + second", module.__dict__)
    monkeypatch.setitem(importlib.sys.modules, module.__name__, module)  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("module", "signature", "uses", "problem"),
    [
        ("deepspeed.to_come", "function", (), ""),
        ("deepspeed.to_come", "function(first, second, third)", ("_known",), ""),
        ("deepspeed.to_come", "function(first, ...)", (), ""),
        ("deepspeed.to_come", "function(first, second)", (), "parameters are"),
        ("deepspeed.to_come", "function(second, ...)", (), "parameters are"),
        ("deepspeed.to_come", "function", ("_other",), "does not use '_other'"),
        ("deepspeed.to_come", "gone", (), "has no 'gone'"),
        ("deepspeed.no_such_module", "function", (), "no such module"),
    ],
)
def test_a_seam_that_differs(
    deepspeed_to_come: ModuleType, module: str, signature: str, uses: tuple[str, ...], problem: str
) -> None:
    seam = Seam(module, signature, Feature.TRAINING, "is tested", uses)
    assert (problem in seam.mismatch()) if problem else seam.mismatch() == ""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets the installed version and its seams."""

    def install(version: str, *differing: Feature) -> None:
        wanted = tuple(Seam("deepspeed", f"gone_{each.name}", each, "is tested") for each in differing)
        monkeypatch.setattr(seams, "deepspeed_version", lambda: version)
        monkeypatch.setattr(seams, "_installed", lambda: mismatches(version, wanted))
        seams.works.cache_clear()

    yield install
    seams.works.cache_clear()


def test_a_version_that_is_too_old_is_refused_by_its_number(installed: Any) -> None:
    installed("0.15.4", Feature.TRAINING)
    with pytest.raises(
        SeamError, match=r"DeepSpeed 0\.15\.4 is older .*pip install deepspeed==0\.16\.4.*offload_engine"
    ):
        seams.verify_seams()


@pytest.mark.parametrize("feature", [each for each in Feature if each.essential])
def test_a_difference_that_training_depends_on_is_an_error(installed: Any, feature: Feature) -> None:
    installed("0.19.9", Feature.LINEAR, feature)
    with pytest.raises(
        SeamError, match=f"DeepSpeed 0.19.9 differs at deepspeed.gone_{feature.name}.*deepspeed==0.19.8"
    ):
        seams.verify_seams()


@pytest.mark.parametrize("feature", [each for each in Feature if not each.essential])
def test_any_other_difference_leaves_its_feature_to_deepspeed(installed: Any, feature: Feature) -> None:
    installed("0.19.9", feature)
    seams.verify_seams()
    assert [each for each in Feature if not seams.works(each)] == [feature]
    assert seams.left_to_deepspeed() == ((feature.value[0],) if feature.value[0] else ())
    with pytest.raises(SeamError, match=f"gone_{feature.name}"):
        seams.require(feature)
    seams.require(Feature.TRAINING)


def test_every_optional_feature_is_asked_for_somewhere() -> None:
    """One that no code asks for would not be left to DeepSpeed, but missing."""
    rooms = (ROOT / "tencache_ds" / room for room in ("integration", "host_path"))
    code = "\n".join(path.read_text() for room in rooms for path in sorted(room.glob("*.py")))
    for feature in Feature:
        asked = re.search(rf"(works|require)\(Feature\.{feature.name}\)", code) is not None
        assert asked != feature.essential, feature.name


def test_versions_are_named_by_adapters_only() -> None:
    package = ROOT / "tencache_ds"
    named = [
        str(path.relative_to(package))
        for path in sorted(package.rglob("*.py"))
        if path.parent.name != "adapters" and re.search(r"\b0\.1[5-9]\.\d", path.read_text())
    ]
    assert named == ["planning/adam_scalars.py"], "the source of its arithmetic, and no other"


def test_of_an_older_version_nothing_is_imported_before_it_is_refused() -> None:
    """Names that it lacks would be the error instead."""
    for module in (seams, versions):
        assert not re.search(r"^(from|import) deepspeed", inspect.getsource(module), re.MULTILINE)
