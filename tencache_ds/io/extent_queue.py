# SPDX-License-Identifier: Apache-2.0
"""The requests of one extent, in order. Not thread-safe: the store locks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tencache_ds.errors import StorageError
from tencache_ds.io.backends.protocol import Operation, Priority, Ticket
from tencache_ds.io.extents import Extent
from tencache_ds.io.integrity import Witness
from tencache_ds.observability import spans


class ExtentTicket(Ticket):
    """A store's ticket: ``explain`` sees each error before a waiter does, and may add a note to it."""

    __slots__ = ("_explain",)

    def __init__(
        self,
        operation: Operation,
        extent: Extent,
        nbytes: int,
        default_timeout_s: float,
        explain: Callable[[StorageError], None] | None,
    ) -> None:
        super().__init__(operation, extent.file, extent.offset, nbytes, extent.tag, default_timeout_s=default_timeout_s)
        self._explain = explain

    def wait(self, timeout_s: float | None = None) -> None:
        """See :meth:`tencache_ds.io.Ticket.wait`."""
        try:
            super().wait(timeout_s)
        except StorageError as error:
            if self._explain is not None:
                self._explain(error)
            raise


@dataclass(slots=True, eq=False)
class Request:
    """One read or write of an extent, before and while the backend has it."""

    operation: Operation
    buffer: torch.Tensor
    priority: Priority
    ticket: Ticket
    witness: Witness | None = None  # of this write, or of the one that is read; None: nothing is compared
    inner: Ticket | None = None


@dataclass(slots=True, eq=False)
class ExtentQueue:
    """Everything the store knows about an extent."""

    extent: Extent
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    n_writes: int = 0  # accepted so far, the next write's generation
    written_nbytes: int = 0  # by the last one that was accepted
    witness: Witness | None = None  # of the last write that started
    poison: BaseException | None = None  # why that write failed
    freed: bool = False

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self.running and not self.waiting

    def take_ready(self) -> list[Request]:
        """Moves what may start now from waiting to running: one write alone, or reads together."""
        ready: list[Request] = []
        while self.waiting:
            request = self.waiting[0]
            if request.operation is Operation.WRITE:
                if self.running:
                    break
                self.witness = request.witness
                self.poison = None
            else:
                if self.running and self.running[0].operation is Operation.WRITE:
                    break
                request.witness = self.witness
            self.running.append(self.waiting.popleft())
            ready.append(request)
        return ready


def record(recorder: spans.Recorder, request: Request, inner: Ticket) -> None:
    """Adds a request to a trace, with the time for which it had to wait for others of its extent."""
    operation = inner.operation.value
    arguments = {
        "path": inner.path,
        "offset": inner.offset,
        "priority": request.priority.name.lower(),
        "waited_for_extent_us": (inner.t_submit_ns - request.ticket.t_submit_ns) // 1000,
    }
    if inner.error is not None:
        arguments["error"] = str(inner.error)
    recorder.add(
        spans.Category.NVME,
        f"tencache::nvme::{operation}",
        f"NVMe {operation}",
        inner.t_submit_ns,
        inner.t_done_ns,
        inner.tag,
        inner.nbytes,
        arguments,
    )
