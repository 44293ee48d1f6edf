# SPDX-License-Identifier: Apache-2.0
"""The interpreter's exit while something is still being closed."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHIN_A_SECOND = """
import time
from tencache_ds.io.backends import lanes
lanes.run_before_exit(lambda: (time.sleep(1), print("closed", flush=True)), "closing")
"""

NEVER = """
import threading
from tencache_ds.io.backends import lanes
lanes._EXIT_GRACE_S = 0.2
lanes.run_before_exit(threading.Event().wait, "closing")
"""

# On threads that return from native code without the interpreter's lock, and would take it to continue.
IN_NATIVE_CODE = """
import torch
from tencache_ds.io.backends import lanes
from tencache_ds.ops.tencache_update import load_tencache_update
op = load_tencache_update()
team = op.Team(1)
memory = torch.zeros(2**29, dtype=torch.uint8)

def close():
    half = memory.nbytes // 2
    jobs = [team.copy(memory.data_ptr(), memory.data_ptr() + half, half) for _ in range(16)]
    print(jobs[-1].wait(60), flush=True)
    team.close()

lanes.run_before_exit(close, "closing")
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("program", "output"), [(WITHIN_A_SECOND, "closed"), (NEVER, ""), (IN_NATIVE_CODE, "True")])
def test_exit_waits_for_what_is_being_closed_but_not_for_good(program: str, output: str) -> None:
    done = run(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == output
