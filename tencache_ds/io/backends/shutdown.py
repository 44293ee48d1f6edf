# SPDX-License-Identifier: Apache-2.0
"""Shutdown of a process with threads in native code, and buffers that a device may still write to."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

_EXIT_GRACE_S = 10.0
"""Longest time the interpreter's exit waits for running transfers; a device that hangs must not hang it too."""

_in_use_by_device: list[torch.Tensor] = []


def keep_for_the_device(buffer: torch.Tensor) -> None:
    """Never frees this buffer: a device that hangs may still write to it."""
    _in_use_by_device.append(buffer)


class Abandonable(Protocol):
    """An owner of threads that must not outlive the interpreter."""

    def abandon(self, grace_s: float) -> None:
        """Fails requests that have not started, waits up to ``grace_s`` seconds for the others."""
        ...


def stop_at_exit(owner: Abandonable) -> Callable[[], None]:
    """Abandons ``owner`` at the interpreter's exit if it is alive then; returns what ``atexit.unregister`` takes."""
    reference = weakref.ref(owner)

    def stop() -> None:
        alive = reference()
        if alive is not None:
            alive.abandon(_EXIT_GRACE_S)

    return atexit.register(stop)
