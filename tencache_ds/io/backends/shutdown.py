# SPDX-License-Identifier: Apache-2.0
"""The end of a process that has threads in native code, and buffers that a device may still write to."""

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
    """What has threads that must not outlive the interpreter."""

    def abandon(self, grace_s: float) -> None:
        """Fails what has not started, waits up to ``grace_s`` seconds for what has."""
        ...


def stop_at_exit(owner: Abandonable) -> Callable[[], None]:
    """Abandons ``owner`` at the interpreter's exit if it is alive then; returns what ``atexit.unregister`` takes."""
    reference = weakref.ref(owner)

    def stop() -> None:
        alive = reference()
        if alive is not None:
            alive.abandon(_EXIT_GRACE_S)

    return atexit.register(stop)
