# SPDX-License-Identifier: Apache-2.0
"""Ordinary host memory for weights that have no staging buffer: before there is a pool, and when it is exhausted."""

from __future__ import annotations

import contextlib
import time
from collections import deque

from tencache_ds.errors import StorageError
from tencache_ds.io import Operation, Ticket
from tencache_ds.layout import round_up
from tencache_ds.memory.arena import HostArena
from tencache_ds.tiers.weight_record import StagingBuffer, Weight

WRITES_BEHIND_NBYTES = 256 * 2**20
"""Bytes that may wait for their write at one time: of freshly initialised weights, above all."""


class OrdinaryMemory:
    """Buffers outside the pool, and the requests that some of them still wait for. Guarded by its owner's lock.

    A buffer whose request has not ended stays mapped, come what may: a device that answers late must not write into
    memory that is somebody else's by then. See :meth:`tencache_ds.memory.arena.HostArena.keep`.

    Args:
        arena: where the memory comes from.
        timeout_s: longest wait for one request.
    """

    def __init__(self, arena: HostArena, timeout_s: float) -> None:
        self._arena = arena
        self._timeout_s = timeout_s
        self._busy: deque[tuple[Ticket, StagingBuffer]] = deque()  # oldest first

    def take(self, weight: Weight) -> StagingBuffer:
        """A new buffer for a weight."""
        return StagingBuffer(self._arena.allocate(round_up(weight.nbytes), weight.name), None)

    def release(self, buffer: StagingBuffer) -> None:
        """Gives a buffer that no request has back to where it came from, a pool or this."""
        buffer.release(self._arena)

    def release_with(self, ticket: Ticket, buffer: StagingBuffer) -> None:
        """Gives a buffer back to where it came from when its request has ended; this one's at a later :meth:`settle`.

        Of a read the outcome no longer matters; the error of a write is raised by :meth:`settle`.
        """
        if buffer.lease is not None:
            buffer.lease.release_with(ticket)
        elif ticket.done and ticket.operation is Operation.READ:
            self._free(ticket, buffer)
        else:
            self._busy.append((ticket, buffer))

    def settle(self, keep_nbytes: int) -> None:
        """Frees what the device is done with; waits for the oldest while more than ``keep_nbytes`` bytes are held.

        Args:
            keep_nbytes: bytes that may go on waiting.

        Raises:
            StorageError: a write failed, or a request took too long.
        """
        held = sum(buffer.bytes.numel() for _, buffer in self._busy)
        while self._busy and (self._busy[0][0].done or held > max(keep_nbytes, 0)):
            ticket, buffer = self._busy[0]
            try:
                ticket.wait(self._timeout_s)
            except StorageError:
                if ticket.operation is Operation.WRITE or not ticket.done:
                    raise
            finally:
                if ticket.done:
                    self._busy.popleft()
                    held -= buffer.bytes.numel()
                    self._free(ticket, buffer)

    def close(self) -> None:
        """Frees everything; what the device has not ended within the time limit for one request is kept mapped.

        Errors of writes are left to the store, which has seen them too.
        """
        deadline_s = time.monotonic() + self._timeout_s  # one for all: a device that hangs does so for each of them
        while self._busy:
            ticket, buffer = self._busy.popleft()
            with contextlib.suppress(StorageError):
                ticket.wait_ended(max(0.0, deadline_s - time.monotonic()))
            self._free(ticket, buffer)

    def _free(self, ticket: Ticket, buffer: StagingBuffer) -> None:
        if ticket.done and not ticket.given_up:
            self._arena.free(buffer.bytes)
        else:
            self._arena.keep(buffer.bytes, ticket.tag)
