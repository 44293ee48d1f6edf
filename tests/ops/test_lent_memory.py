# SPDX-License-Identifier: Apache-2.0
"""Lent memory (``ops/csrc/lend/lent_memory.h``) under many threads, on a device of ordinary memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HEADERS = HERE.parent.parent / "ops" / "csrc" / "lend"


@pytest.mark.timeout(300)
def test_threads_neither_lose_bytes_nor_race(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX", "c++").split()
    if shutil.which(compiler[0]) is None:
        pytest.fail("no C++ compiler, which every op needs")
    program = tmp_path / "stress"
    command = [*compiler, "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=thread", "-pthread"]
    subprocess.run(
        [*command, f"-I{HEADERS}", str(HERE / "lent_memory_stress.cpp"), "-o", str(program)], check=True, timeout=200
    )
    ran = subprocess.run([str(program), "200"], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "taken back" in ran.stdout
