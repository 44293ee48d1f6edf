# SPDX-License-Identifier: Apache-2.0
"""Common base of backends whose lanes are Python threads: a pool of lanes, and files that stay open."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch

from tencache_ds.io.backends.lanes import LanePool
from tencache_ds.io.backends.open_files import OpenFiles
from tencache_ds.io.backends.ticket import Operation, Priority, StorageTimeoutError, Ticket
from tencache_ds.layout import PAGE_NBYTES


class LaneBackend(abc.ABC):
    """A :class:`tencache_ds.io.StorageBackend`, but for its name and for how one piece is moved.

    Args:
        files: owned, closed by :meth:`close`.
        n_lanes: threads.
        request_nbytes: longest piece in bytes.
        device_type: where buffers are.
        close_timeout_s: longest time in seconds that :meth:`close` waits for the device.
    """

    name: str
    alignment_nbytes = PAGE_NBYTES

    def __init__(
        self,
        files: OpenFiles[Any],
        n_lanes: int,
        request_nbytes: int,
        *,
        device_type: str = "cpu",
        close_timeout_s: float,
    ) -> None:
        self._files = files
        self._pool = LanePool(
            n_lanes, self._transfer, request_nbytes, device_type=device_type, close_timeout_s=close_timeout_s
        )
        self.counters = self._pool.counters

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
        """See :meth:`tencache_ds.io.StorageBackend.submit`."""
        return self._pool.submit(operation, path, offset, buffer, tag=tag, priority=priority, finish=finish)

    def add(self, path: str, fd: int) -> None:
        """See :meth:`tencache_ds.io.StorageBackend.add`."""
        self._files.add(path, fd)

    def forget(self, path: str) -> None:
        """Closes the descriptors of a file that is about to be, or has been, removed. Any thread."""
        self._files.forget(path)

    def close(self) -> None:
        """Waits for all submitted requests, joins the lanes, closes the files. Idempotent.

        Raises:
            RuntimeError: called from a callback of one of its requests; nothing is closed.
            StorageTimeoutError: the device still had requests after ``close_timeout_s``; they are given up.
        """
        try:
            self._pool.close()
        except StorageTimeoutError:
            self._files.close()
            raise
        self._files.close()

    @abc.abstractmethod
    def _transfer(self, lane: int, operation: Operation, path: str, offset: int, piece: torch.Tensor, tag: str) -> None:
        """Moves one piece, blocking, in a lane's thread; raises what went wrong."""
