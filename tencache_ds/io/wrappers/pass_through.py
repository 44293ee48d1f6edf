# SPDX-License-Identifier: Apache-2.0
"""Base class of wrappers: the whole protocol, passed through."""

from __future__ import annotations

from tencache_ds.io.backends.protocol import StorageBackend, Submission, Ticket


class PassThroughBackend:
    """Passes every call on to ``inner`` (satisfies :class:`tencache_ds.io.StorageBackend`).

    A wrapper derives from it and overrides the methods in which it has a part.

    Args:
        inner: moves the bytes; owned, closed by :meth:`close`.
    """

    def __init__(self, inner: StorageBackend) -> None:
        self.name = inner.name
        self.alignment_nbytes = inner.alignment_nbytes
        self.counters = inner.counters
        self._inner = inner

    def submit(self, request: Submission) -> Ticket:
        """See :meth:`tencache_ds.io.StorageBackend.submit`."""
        return self._inner.submit(request)

    def add(self, path: str, fd: int) -> None:
        """See :meth:`tencache_ds.io.StorageBackend.add`."""
        self._inner.add(path, fd)

    def forget(self, path: str) -> None:
        """See :meth:`tencache_ds.io.StorageBackend.forget`."""
        self._inner.forget(path)

    def close(self) -> None:
        """See :meth:`tencache_ds.io.StorageBackend.close`."""
        self._inner.close()
