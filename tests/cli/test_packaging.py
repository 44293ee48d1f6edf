# SPDX-License-Identifier: Apache-2.0
"""The source distribution and the wheel hold every module and data file, nothing else, and work anywhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED_FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")
FOLDERS = {"tencache_ds": "tencache_ds"} | {name: f"tencache_ds/{name}" for name in ("ops", "configs", "benchmarks")}
INSTALLED_SUFFIXES = {".py", ".j2", ".json", ".cpp", ".h", ".inc", ".cu", ".cuh", ".typed"}


def installed_files(folder: str) -> set[str]:
    """What of a folder of the checkout is installed, relative to it. In a worktree the packages that are mapped into
    another may also be there as links."""
    files = {
        Path(base, name).relative_to(ROOT / folder)
        for base, _, names in os.walk(ROOT / folder)
        for name in names
        if Path(name).suffix in INSTALLED_SUFFIXES
    }
    return {file.as_posix() for file in files}


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Output of a command that has to succeed."""
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, from a copy, so that nothing is left in the checkout; it has a test in it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("sdist")
    for name in NEEDED_FILES:
        shutil.copy(ROOT / name, source)
    for folder in FOLDERS:
        links = [path.name for path in (ROOT / folder).iterdir() if path.is_symlink()]
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", *links))
    (source / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "test_errors.py", source / "tests")
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(out)!r}))"
    run([sys.executable, "-c", code], source)
    (built,) = out.glob("*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution, as for those who install that."""
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(sdist),
    ]
    run(command, out)
    (built,) = out.glob("*.whl")
    return built


def test_the_source_distribution_has_the_package_and_nothing_else(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive if member.isfile()}
    expected = {f"{folder}/{file}" for folder in FOLDERS for file in installed_files(folder)} | set(NEEDED_FILES)
    generated = {name for name in packed if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert packed - generated == expected


def test_every_file_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {f"{target}/{file}" for folder, target in FOLDERS.items() for file in installed_files(folder)}
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


def test_ops_cannot_be_compiled_at_installation_without_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("raise ModuleNotFoundError(name='deepspeed')")
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "TENCACHE_BUILD_OPS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "deepspeed cannot be imported: install both first" in done.stderr


def test_versions_agree() -> None:
    written = {
        re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)[1]
        for file, pattern in (
            ("pyproject.toml", r'^version = "(.+)"'),
            ("tencache_ds/__init__.py", r'^__version__ = "(.+)"'),
            ("CITATION.cff", r"^version: (.+)"),
        )
    }
    assert len(written) == 1


@pytest.mark.skipif("TENCACHE_TEST_INSTALL" not in os.environ, reason="minutes: set TENCACHE_TEST_INSTALL=1")
@pytest.mark.timeout(3600)
def test_the_wheel_trains_in_a_new_environment(wheel: Path, tmp_path: Path) -> None:
    """With packages from the index, and the version of torch that runs this test."""
    constraints = [line for line in (ROOT / ".ci/constraints.txt").read_text().splitlines() if "torch==" not in line]
    (tmp_path / "constraints.txt").write_text("\n".join([*constraints, f"torch=={metadata.version('torch')}"]))
    run([sys.executable, "-m", "venv", str(tmp_path / "venv")], tmp_path)
    programs = tmp_path / "venv" / "bin"
    target = [f"{wheel}[bench]", "ninja", "setuptools>=77"]
    run([str(programs / "pip"), "install", "-q", "-c", str(tmp_path / "constraints.txt"), *target], tmp_path)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": "",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
    }
    assert "No problems found." in run([str(programs / "tencache"), "doctor"], tmp_path, **environment)
    config = json.loads((ROOT / "configs" / "cpu_offload.json").read_text())
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    script = [str(ROOT / "examples" / "train_bytes.py"), "--steps", "3", "--deepspeed", "--deepspeed_config"]
    launcher = [str(programs / "deepspeed"), "--num_accelerators", "1"]
    output = run([*launcher, *script, "ds_config.json"], tmp_path, **environment)
    assert "is active with DeepSpeed" in output
    assert '"step": 3' in output
