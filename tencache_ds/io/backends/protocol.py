# SPDX-License-Identifier: Apache-2.0
"""The protocol of storage backends.

A backend moves bytes between a buffer and a file. It has no notion of weights or chunks; the extent store
(:mod:`tencache_ds.io.store`) decides their places and checks that they are read back unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tencache_ds.io.backends.counters import IoCounters
from tencache_ds.io.backends.ticket import Operation, Priority, Ticket


class StorageBackend(Protocol):
    """Moves bytes between 1-D buffers and files. Every method may be called from any thread.

    Attributes:
        name: one of the registry, which take host memory, or ``"gds"``, which takes GPU memory.
        alignment_nbytes: buffer address, length and offset must be multiples of this.
        counters: totals since the backend was opened.
    """

    name: str
    alignment_nbytes: int
    counters: IoCounters

    def submit(
        self,
        operation: Operation,
        path: str,
        offset: int,
        buffer: torch.Tensor,
        *,
        tag: str = "",
        priority: Priority = Priority.BACKGROUND,
        finish: Callable[[], None] | None = None,
    ) -> Ticket:
        """Queues one transfer of the whole buffer and returns at once.

        Args:
            operation: direction.
            path: the file, which was added or exists: a write to one that does not fails with ENOENT, as a read does.
            offset: first byte in the file, a multiple of the alignment.
            buffer: 1-D contiguous uint8 tensor; the caller keeps its bytes untouched until the ticket is done.
            tag: name of the data, for messages.
            priority: URGENT goes first, but does not starve BACKGROUND.
            finish: runs in a lane thread after the last byte has moved and before the ticket is done; its exception
                becomes the ticket's error. Not called when the transfer failed.

        Raises:
            ValueError: buffer, offset or length not as described.
            StorageError: the backend is closed, or this is a forked child of the process that opened it.
        """
        ...

    def add(self, path: str, fd: int) -> None:
        """From now on, and until :meth:`forget`, ``path`` means the file of ``fd``, which stays open, and no longer the
        one that has that name. The backend opens it anew as it needs.
        """
        ...

    def forget(self, path: str) -> None:
        """Drops the backend's state of a file (descriptors); call it before closing or removing the file."""
        ...

    def close(self) -> None:
        """Waits for all submitted requests, then joins the threads. Idempotent; returns at once in a forked child.

        Raises:
            RuntimeError: called from a callback of one of its requests, which cannot wait for itself.
            StorageTimeoutError: a backend that bounds this wait gave up on a device.
        """
        ...
