# SPDX-License-Identifier: Apache-2.0
"""Base class of wrappers: the whole protocol, passed through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tencache_ds.io.backends.protocol import Operation, Priority, StorageBackend, Ticket


@dataclass(frozen=True, slots=True, eq=False)
class Submission:
    """The arguments of one :meth:`tencache_ds.io.StorageBackend.submit`."""

    operation: Operation
    path: str
    offset: int
    buffer: torch.Tensor
    tag: str
    priority: Priority
    finish: Callable[[], None] | None

    def to(self, backend: StorageBackend) -> Ticket:
        """Submits it; raises what the backend raises."""
        return backend.submit(
            self.operation,
            self.path,
            self.offset,
            self.buffer,
            tag=self.tag,
            priority=self.priority,
            finish=self.finish,
        )


class PassThroughBackend:
    """Passes every call on to ``inner`` (satisfies :class:`tencache_ds.io.StorageBackend`).

    A wrapper derives from it and overrides what it changes: :meth:`_submit` for requests, and of the protocol's other
    methods those in which it has a part.

    Args:
        inner: moves the bytes; owned, closed by :meth:`close`.
    """

    def __init__(self, inner: StorageBackend) -> None:
        self.name = inner.name
        self.alignment_nbytes = inner.alignment_nbytes
        self.counters = inner.counters
        self._inner = inner

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
        return self._submit(Submission(operation, path, offset, buffer, tag, Priority(priority), finish))

    def add(self, path: str, fd: int) -> None:
        """See :meth:`tencache_ds.io.StorageBackend.add`."""
        self._inner.add(path, fd)

    def forget(self, path: str) -> None:
        """See :meth:`tencache_ds.io.StorageBackend.forget`."""
        self._inner.forget(path)

    def close(self) -> None:
        """See :meth:`tencache_ds.io.StorageBackend.close`."""
        self._inner.close()

    def _submit(self, request: Submission) -> Ticket:
        return request.to(self._inner)
