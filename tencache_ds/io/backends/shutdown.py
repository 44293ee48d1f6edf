# SPDX-License-Identifier: Apache-2.0
"""Shutdown of a process with threads in native code, and buffers that a device may still write to."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

import torch

_EXIT_GRACE_S = 10.0
"""Longest time the interpreter's exit waits for running transfers; a device that hangs must not hang it too."""

_in_use_by_device: list[torch.Tensor] = []


def keep_for_the_device(buffer: torch.Tensor) -> None:
    """Never frees this buffer: a device that hangs may still write to it."""
    _in_use_by_device.append(buffer)


def stop_at_exit(abandon: Callable[[float], None]) -> Callable[[], None]:
    """Calls a method at the interpreter's exit, if its object is alive then, for threads that must not outlive it.

    Args:
        abandon: fails requests that have not started, and waits up to this number of seconds for the others.

    Returns:
        What ``atexit.unregister`` takes.
    """
    reference = weakref.WeakMethod(abandon)

    def stop() -> None:
        alive = reference()
        if alive is not None:
            alive(_EXIT_GRACE_S)

    return atexit.register(stop)


class _AwaitedAtExit(threading.Thread):
    """A thread that the interpreter's exit waits for, for a limited time."""


def run_before_exit(task: Callable[[], None], name: str) -> None:
    """Runs ``task`` on its own thread. The interpreter's exit waits for it, though not for a device that hangs. Without
    that, a daemon thread that returns from native code while the interpreter is torn down can abort the process.

    Args:
        task: what to run.
        name: of the thread.
    """
    _AwaitedAtExit(target=task, name=name, daemon=True).start()


@atexit.register
def _wait_for_threads() -> None:
    t_end_s = time.monotonic() + _EXIT_GRACE_S
    for thread in threading.enumerate():
        if isinstance(thread, _AwaitedAtExit) and thread.is_alive():
            thread.join(max(t_end_s - time.monotonic(), 0.0))
