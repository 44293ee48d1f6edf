# SPDX-License-Identifier: Apache-2.0
"""What the benchmark does before the first run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.comparison import machine

pytestmark = pytest.mark.timeout(60)

WAIT = "import sys; from torch.utils.file_baton import FileBaton; FileBaton(sys.argv[1]).wait()"


def test_a_build_that_waits_at_a_lock_is_not_waited_for_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "async_io" / "lock"
    lock.parent.mkdir()
    lock.touch()
    said: list[str] = []

    def user(text: str) -> None:
        said.append(text)
        lock.unlink()

    monkeypatch.setattr(machine.tqdm, "write", user)
    builds = [subprocess.Popen([sys.executable, "-c", WAIT, str(lock)]) for _ in range(2)]
    machine.wait_for_builds(builds, patience_s=0.2)
    assert [build.returncode for build in builds] == [0, 0]
    assert len(said) == 1
    assert f"rm {lock}" in said[0]


def test_operators_that_few_configurations_use_are_built_for_these(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(machine.subprocess, "Popen", lambda command, **_: started.append(command[-1]))
    monkeypatch.setattr(machine, "wait_for_builds", lambda builds: None)
    machine.Machine().build_operators()
    assert started == list(machine.OPERATORS)
    machine.Machine().build_operators(["FusedAdamBuilder"])
    assert started == [*machine.OPERATORS, *machine.OPERATORS, "FusedAdamBuilder"]
