# SPDX-License-Identifier: Apache-2.0
"""Blocks on NVMe: written from staging buffers once their copy has arrived there, and read into them again."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

from tencache_ds.activations.blocks import Block
from tencache_ds.activations.dropped_blocks import DroppedBlocks
from tencache_ds.activations.host_buffers import HostBuffers
from tencache_ds.errors import TenCacheError
from tencache_ds.io import Extent, ExtentStore, Priority, Ticket
from tencache_ds.observability.counters import Counters, Link, Stall


class StoredBlocks:
    """Guarded by its owner's lock.

    Args:
        open_store: opens storage on NVMe at its first use; None if there is none.
        staging: host memory that blocks pass through on their way to and from NVMe.
        counters: where bytes and stalls are counted.
        timeout_s: longest wait for a request.
        dropped: blocks that are gone.
        collect: frees what these have left, as far as nothing accesses it.
    """

    def __init__(
        self,
        open_store: Callable[[], ExtentStore] | None,
        staging: HostBuffers,
        counters: Counters,
        timeout_s: float,
        dropped: DroppedBlocks,
        collect: Callable[[], None],
    ) -> None:
        self._open_store = open_store
        self._store: ExtentStore | None = None
        self._staging = staging
        self._counters = counters
        self._timeout_s = timeout_s
        self._dropped = dropped
        self._collect = collect
        self._unwritten: deque[weakref.ref[Block]] = deque()
        self._writing: deque[tuple[weakref.ref[Block], Ticket]] = deque()

    @property
    def available(self) -> bool:
        """Whether there is NVMe storage."""
        return self._open_store is not None

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of staging buffers, used and free."""
        return self._staging.allocated_nbytes

    def take_buffer(self, block: Block) -> None:
        """Gives a block a staging buffer, after waiting for writes if none is free.

        Raises:
            MemoryLimitError, LockedMemoryError: the system has no such memory.
            StorageError: a write failed.
        """
        block.buffers, block.host = self._staging, self._staging.take(block.nbytes)
        while block.host is None:
            waited = self._wait_for_a_write()
            block.host = self._staging.take(block.nbytes, regardless=not waited)

    def write(self, block: Block) -> None:
        """Has a block written by :meth:`proceed`, once its copy to the staging buffer is over."""
        self._unwritten.append(weakref.ref(block))

    def proceed(self) -> None:
        """Submits the writes of blocks that are in host memory by now, and gives up the buffers of those written.

        Raises:
            StorageError: a write failed.
        """
        while self._unwritten:
            block = self._unwritten[0]()
            if block is not None and block.left is not None and not block.left.query():
                break
            self._unwritten.popleft()
            if block is not None:
                self._submit(block)
            del block
        while self._writing and self._writing[0][1].done:
            reference, ticket = self._writing.popleft()
            ticket.wait(0)
            block = reference()
            if block is not None and block.written is ticket:
                block.leave_buffer()
            del block
        self._collect()

    def begin_read(self, block: Block, priority: Priority) -> bool:
        """Begins to read a block into a staging buffer; False if there is none and nobody waits for it.

        Raises:
            MemoryLimitError, LockedMemoryError: the system has no such memory.
            StorageError: no request is accepted any more.
        """
        host = self._staging.take(block.nbytes, regardless=priority is Priority.URGENT)
        if host is None:
            return False
        block.buffers, block.host = self._staging, host
        extent = block.extent
        if extent is None:
            raise TenCacheError(f"{block.name} is neither in host memory nor on NVMe")
        self._counters.moved(Link.NVME_READ, extent.allocated_nbytes)
        block.reading = self._require_store().read(extent, host[: extent.allocated_nbytes], priority=priority)
        return True

    def finish_read(self, block: Block) -> None:
        """Waits until a block that is being read is in host memory.

        Raises:
            StorageError: the read failed, or the write before it.
        """
        ticket = block.reading
        if ticket is None:
            return
        try:
            if ticket.done:
                ticket.wait(0)
            else:
                with self._counters.stall(Stall.ACTIVATION_READ, block.name, block.nbytes):
                    ticket.wait(self._timeout_s)
        except BaseException:
            block.leave_buffer()
            block.reading = None
            raise
        block.reading = None

    def free(self, extent: Extent) -> None:
        """Takes back the space of a block that is gone."""
        if self._store is not None:
            self._store.free(extent)

    def check(self) -> None:
        """
        Raises:
            StorageError: a write failed that nobody has read.
        """
        if self._store is not None:
            self._store.check()

    def close(self) -> None:
        """Forgets what is still to be written; the store is closed by its owner."""
        self._open_store = None
        self._unwritten.clear()
        self._writing.clear()

    def _submit(self, block: Block) -> None:
        if block.host is None:
            raise TenCacheError(f"{block.name} has lost its staging buffer")
        store = self._require_store()
        block.extent = store.allocate(block.nbytes, block.name)
        nbytes = block.extent.allocated_nbytes
        self._counters.moved(Link.NVME_WRITE, nbytes)
        block.written = store.write(block.extent, block.host[:nbytes])
        self._writing.append((weakref.ref(block), block.written))

    def _wait_for_a_write(self) -> bool:
        """Waits until a staging buffer may have come back; False if none is on its way to NVMe."""
        self.proceed()
        if not self._writing and self._unwritten:
            block = self._unwritten[0]()
            if block is not None and block.left is not None:
                with self._counters.stall(Stall.ACTIVATION_WRITE, block.name, block.nbytes):
                    block.left.synchronize()
            del block
            self.proceed()
        # The second kind is written for nobody: a graph was dropped.
        ticket = self._writing[0][1] if self._writing else next(self._dropped.tickets(), None)
        if ticket is None:
            return False
        with self._counters.stall(Stall.ACTIVATION_WRITE, ticket.tag, ticket.nbytes):
            ticket.wait(self._timeout_s)
        self.proceed()
        return True

    def _require_store(self) -> ExtentStore:
        if self._store is None:
            if self._open_store is None:
                raise TenCacheError("an activation is to go to NVMe, but there is no store")
            self._store = self._open_store()
        return self._store
