# SPDX-License-Identifier: Apache-2.0
"""The wheel holds every module and data file, and works where it is installed, without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED_FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
FOLDERS = {"tencache_ds": "tencache_ds"} | {name: f"tencache_ds/{name}" for name in ("ops", "configs", "benchmarks")}
INSTALLED_SUFFIXES = {".py", ".json", ".cpp", ".h", ".inc", ".cu", ".cuh", ".typed"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's wheel, built from a copy so that nothing is left in the checkout."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in NEEDED_FILES:
        shutil.copy(ROOT / name, source)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_every_file_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        f"{target}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for file in (ROOT / folder).rglob("*")
        if file.suffix in INSTALLED_SUFFIXES
    }
    assert packed == expected


def test_installed_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    code = (
        "import tencache_ds, tencache_ds.ops, tencache_ds.configs, tencache_ds.benchmarks\n"
        "print(tencache_ds.__file__, tencache_ds.ops.__file__, tencache_ds.configs.path('cpu_offload'), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert [Path(line).is_relative_to(target) for line in done.stdout.splitlines()] == [True] * 3


def test_import_is_light() -> None:
    code = "import sys, tencache_ds; print(sorted({'torch', 'deepspeed', 'pynvml', 'cpuinfo'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"
