# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.comparison.conditions import busy_cores


def children(before: list[psutil.Process]) -> list[psutil.Process]:
    """Those of this process that were not there before: the tests of training keep one for their programs."""
    return [each for each in psutil.Process().children() if each not in before]


def wait_until_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    return psutil.wait_procs(processes, timeout=10)[1]


def test_cores_are_busy_until_the_end() -> None:
    before = psutil.Process().children()
    with busy_cores(2):
        loops = children(before)
        t_end = time.monotonic() + 20
        while min(sum(loop.cpu_times()[:2]) for loop in loops) < 0.1 and time.monotonic() < t_end:
            time.sleep(0.05)
        assert [sum(loop.cpu_times()[:2]) >= 0.1 for loop in loops] == [True, True]
    assert wait_until_gone(loops) == []


def test_they_end_with_an_error() -> None:
    before = psutil.Process().children()
    loops = []

    def fail() -> None:
        with busy_cores(1):
            loops.extend(children(before))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert len(loops) == 1
    assert wait_until_gone(loops) == []


def test_they_end_with_a_measurement_that_is_killed() -> None:
    program = (
        "from benchmarks.comparison.conditions import busy_cores\nwith busy_cores(1): print('on', flush=True); input()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "on\n"
    loops = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    assert len(loops) == 1
    assert wait_until_gone(loops) == []
