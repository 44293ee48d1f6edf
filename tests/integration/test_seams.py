# SPDX-License-Identifier: Apache-2.0
"""The DeepSpeed versions accepted without a warning."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tencache_ds.integration import seams

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


def warnings_of(version: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(seams.logger, "warning", lambda text, *values: said.append(text % values))
    seams.warn_of_version(version, rank)
    return said


def test_the_range_is_the_one_the_package_declares() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (deepspeed,) = [Requirement(line) for line in declared if line.startswith("deepspeed")]
    assert str(deepspeed.specifier) == str(Requirement(f"deepspeed{seams.SUPPORTED_VERSIONS}").specifier)
    assert all(deepspeed.specifier.contains(version) for version in seams.TESTED_VERSIONS)


@pytest.mark.parametrize("version", ["0.19.8", "0.19.9", "0.19.9+a1b2c3d", "0.19.10.dev0"])
def test_a_version_in_the_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert warnings_of(version, 0, monkeypatch) == []


@pytest.mark.parametrize("version", ["0.19.7", "0.18.0", "0.20.0", "1.0", "unknown", ""])
def test_a_version_outside_is_named_on_rank_0(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (message,) = warnings_of(version, 0, monkeypatch)
    assert f"DeepSpeed {version} is outside the range" in message
    assert "deepspeed==0.19.8" in message
    assert warnings_of(version, 1, monkeypatch) == []
