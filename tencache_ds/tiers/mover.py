# SPDX-License-Identifier: Apache-2.0
"""Transfers between NVMe and staging buffers: lease, read, wait, write and release.

The tiers differ in the contents and lifetime of their buffers, and in their eviction order. The common part is here:
every byte and every wait is counted, an empty pool means waiting, and a buffer is returned when its last request has
ended, after errors too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.io import Extent, ExtentStore, Priority, Ticket
from tencache_ds.memory.pool import BufferPool, Lease, PoolTimeout
from tencache_ds.observability.counters import Counters, Link, Stall


class Buffer(Protocol):
    """Memory for one transfer at a time, released exactly once; a :class:`~tencache_ds.memory.pool.Lease` is one."""

    @property
    def buffer(self) -> torch.Tensor:
        """The memory: uint8, 1-D, page aligned."""

    def release(self) -> None:
        """Gives it back now: nothing reads or writes it any more."""

    def release_with(self, ticket: Ticket, /) -> None:
        """Gives it back when a request has ended, failed or not."""


class Mover:
    """Transfers of one tier. The tier sees to it that one thread at a time calls it.

    Args:
        store: where the extents are; None as long as the tier keeps nothing on NVMe.
        counters: where bytes and stalls are counted.
        timeout_s: longest wait for one transfer or buffer.

    Attributes:
        store, counters, timeout_s: as given; they may be changed between two calls.
    """

    def __init__(self, store: ExtentStore | None, counters: Counters, timeout_s: float) -> None:
        self.store = store
        self.counters = counters
        self.timeout_s = timeout_s

    # Buffers

    def lease(
        self, pool: BufferPool, nbytes: int, owner: str, purpose: str, *, patience_s: float | None = None
    ) -> Lease:
        """A buffer that a thread is waiting for: takes priority over read-ahead.

        Args:
            pool: where from.
            nbytes, owner, purpose: as for :meth:`BufferPool.lease`.
            patience_s: wait no longer than this, if it is shorter than the longest wait.

        Raises:
            StorageTimeoutError: none came back because a transfer is overdue, which says more than who has them.
            PoolTimeout: none came back in time.
        """
        lease = pool.try_lease(nbytes, owner, purpose)
        if lease is not None:
            return lease
        limit_s = self.timeout_s if patience_s is None else min(patience_s, self.timeout_s)
        try:
            with self.counters.stall(Stall.BUFFER, owner, nbytes):
                return pool.lease(nbytes, owner, purpose, urgent=True, timeout_s=limit_s)
        except PoolTimeout:
            self.raise_overdue()
            raise

    # NVMe to memory

    def read(self, extent: Extent, buffer: Buffer, priority: Priority, *, nbytes: int | None = None) -> Ticket:
        """Starts to read an extent into a buffer; after an error the buffer is returned.

        Args:
            extent: where from.
            buffer: where to.
            priority: of the request.
            nbytes: as many as were written; None: all of the extent.

        Raises:
            StorageError: the store is closed.
        """
        try:
            store = self._require_store()
            nbytes = extent.allocated_nbytes if nbytes is None else nbytes
            self.counters.moved(Link.NVME_READ, nbytes)
            return store.read(extent, buffer.buffer[:nbytes], priority=priority)
        except BaseException:
            buffer.release()
            raise

    def wait(self, ticket: Ticket, cause: Stall, buffer: Buffer | None = None) -> None:
        """Waits for a transfer; waiting time is counted as a stall.

        Args:
            ticket: of the transfer.
            cause: of the stall.
            buffer: after an error it is returned, once the request has ended.

        Raises:
            StorageError: the transfer failed, or took too long.
        """
        try:
            if ticket.done:
                ticket.wait(0)
            else:
                with self.counters.stall(cause, ticket.tag, ticket.nbytes):
                    ticket.wait(self.timeout_s)
        except BaseException:
            if buffer is not None:
                buffer.release_with(ticket)
            raise

    @contextmanager
    def reading(self, extent: Extent, buffer: Buffer) -> Iterator[torch.Tensor]:
        """An extent's bytes, after waiting for them, in a buffer that is returned at the end of the block.

        Raises:
            StorageError: the read failed, or took too long.
        """
        ticket = self.read(extent, buffer, Priority.URGENT)
        try:
            ticket.wait(self.timeout_s)
            yield buffer.buffer
        finally:
            buffer.release_with(ticket)

    # Memory to NVMe

    def relocate(self, extent: Extent) -> Extent:
        """Where the write that is about to replace all of an extent goes; see :meth:`ExtentStore.relocate`."""
        return self._require_store().relocate(extent)

    def write(self, extent: Extent, memory: torch.Tensor, *, nbytes: int | None = None) -> Ticket:
        """Starts to write an extent.

        Args:
            extent: where.
            memory: the bytes, from the first; untouched until the request has ended.
            nbytes: how many of them, in whole pages; None: as many as the extent has.
        """
        nbytes = extent.allocated_nbytes if nbytes is None else nbytes
        self.counters.moved(Link.NVME_WRITE, nbytes)
        return self._require_store().write(extent, memory[:nbytes], priority=Priority.BACKGROUND)

    def write_back(self, extent: Extent, buffer: Buffer, *, nbytes: int | None = None) -> Ticket:
        """Starts to write an extent and returns the buffer once that has ended; at once after an error."""
        try:
            ticket = self.write(extent, buffer.buffer, nbytes=nbytes)
        except BaseException:
            buffer.release()
            raise
        buffer.release_with(ticket)
        return ticket

    # The store

    def raise_overdue(self) -> None:
        """Raises for a transfer that has been under way for longer than one may take.

        Raises:
            StorageTimeoutError: that transfer.
        """
        if self.store is not None:
            self.store.raise_overdue(self.timeout_s)

    def check(self) -> None:
        """Raises the error of an earlier asynchronous write, if one failed."""
        if self.store is not None:
            self.store.check()

    def drain(self) -> None:
        """Waits until everything written is on NVMe.

        Raises:
            StorageError: a write failed.
        """
        if self.store is not None:
            with self.counters.stall(Stall.WRITE_BACK):
                self.store.drain()

    def _require_store(self) -> ExtentStore:
        if self.store is None:
            raise TenCacheError("a transfer from or to NVMe was requested, but there is no store")
        return self.store
