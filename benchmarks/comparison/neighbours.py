# SPDX-License-Identifier: Apache-2.0
"""Other programs on the machine: processes that do nothing but keep cores busy while runs are measured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Ends with its parent too: who measures may be killed, and nothing would stop it then.
_LOOP = """
import os, sys, time
parent = int(sys.argv[1])
while os.getppid() == parent:
    t_end = time.monotonic() + 0.5
    while time.monotonic() < t_end:
        pass
"""


@contextmanager
def busy_cores(number: int) -> Iterator[None]:
    """Keeps this number of cores busy, chosen by the scheduler."""
    loops = [subprocess.Popen([sys.executable, "-c", _LOOP, str(os.getpid())]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
