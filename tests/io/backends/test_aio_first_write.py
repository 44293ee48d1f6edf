# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's op logs a warning at a process's first write, in a way that deadlocks two lanes; ours must not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

PROGRAM = """
import logging, mmap, sys, time
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder  # registers the builders
from deepspeed.utils import logger
from tencache_ds.io import Operation, Submission
from tencache_ds.io.backends.aio import AioBackend
from tencache_ds.memory.arena import HostArena, Locking

class Slow(logging.Handler):  # releases the GIL, as writing to a pipe or a file does def emit(self, record):
        time.sleep(1.0)

logger.addHandler(Slow())
arena = HostArena(None, Locking.MLOCK)
buffer = arena.allocate(2**20, "test").fill_(7)
backend = AioBackend(n_lanes=4, request_nbytes=2**16, block_nbytes=2**16)
path = sys.argv[1]
with open(path, "wb") as file:
    file.truncate(2**20)
backend.submit(Submission(Operation.WRITE, path, 0, buffer)).wait(60)
backend.close()
print("warned" if getattr(sys.modules["deepspeed.utils"], "_deepspeed_nvme_write_warning_emitted", False) else "silent")
"""


def test_lanes_survive_the_warning_of_the_first_write(tmp_path: Path) -> None:
    target = tmp_path / "data"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(target)], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "warned", "this DeepSpeed no longer warns: the workaround can go"
    assert target.read_bytes() == b"\x07" * 2**20
