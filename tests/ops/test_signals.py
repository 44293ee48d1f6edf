# SPDX-License-Identifier: Apache-2.0
"""Which signals the threads of the operators take."""

from __future__ import annotations

import ctypes
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tencache_ds.ops.tencache_aio import load_tencache_aio
from tencache_ds.ops.tencache_update import load_tencache_update

pytestmark = pytest.mark.timeout(60)

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
answer = FUNCTION(lambda argument: 0)
OF_A_FAULT = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
OF_PYTHON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD}


def lanes() -> tuple[Any, Callable[[], object]]:
    queue = load_tencache_aio().IoQueue(2, 4096, 8, 0)
    return queue, lambda: queue.close(10.0)


def team() -> tuple[Any, Callable[[], object]]:
    threads = load_tencache_update().Team(2)
    return threads, threads.close


def sampler() -> tuple[Any, Callable[[], object]]:
    call = ctypes.cast(answer, ctypes.c_void_p).value
    threads = load_tencache_update().Sampler(
        preparations=[], call=(call, 0), period_ns=1_000_000, lifetime_ns=10**12, capacity=100
    )
    return threads, threads.close


def blocked() -> dict[str, set[signal.Signals]]:
    """Signals that each thread of the operators blocks."""
    masks = {}
    for task in Path("/proc/self/task").iterdir():
        if not (task / "comm").read_text().startswith("tencache-"):
            continue
        line = next(line for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk:"))
        mask = int(line.split()[1], 16)
        masks[task.name] = {each for each in signal.valid_signals() if mask >> (each - 1) & 1}
    return masks


@pytest.mark.parametrize("start", [lanes, team, sampler])
def test_faults_of_a_thread_are_reported_and_all_else_is_for_the_main_thread(start):
    before = blocked()
    threads, close = start()
    time.sleep(0.1)  # the C library blocks all signals while a thread starts
    masks = [mask for thread, mask in blocked().items() if thread not in before]
    close()
    assert masks, f"no thread of {threads} was seen"
    for mask in masks:
        assert not mask & OF_A_FAULT, "the process would end without a word from faulthandler"
        assert mask >= OF_PYTHON
