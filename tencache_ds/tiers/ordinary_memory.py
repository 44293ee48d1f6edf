# SPDX-License-Identifier: Apache-2.0
"""Ordinary host memory for weights that have no staging buffer: before there is a pool, and when it is exhausted."""

from __future__ import annotations

import contextlib
from collections import deque

from tencache_ds.errors import StorageError
from tencache_ds.io import Ticket
from tencache_ds.memory.arena import HostArena
from tencache_ds.planning.chunks import align
from tencache_ds.tiers.weight_record import StagingBuffer, Weight

WRITES_BEHIND_NBYTES = 256 * 2**20
"""Bytes that may wait for their write at one time: of freshly initialised weights, above all."""


def wait_quietly(ticket: Ticket, timeout_s: float) -> None:
    """Waits for a request whose outcome no longer matters: its buffer is about to be reused or freed."""
    with contextlib.suppress(StorageError):
        ticket.wait(timeout_s)


class OrdinaryMemory:
    """Buffers outside the pool, and the writes that some of them still wait for. Guarded by its owner's lock.

    Args:
        arena: where the memory comes from.
        timeout_s: longest wait for one write.
    """

    def __init__(self, arena: HostArena, timeout_s: float) -> None:
        self._arena = arena
        self._timeout_s = timeout_s
        self._writes: deque[tuple[Ticket, StagingBuffer]] = deque()

    def take(self, weight: Weight) -> StagingBuffer:
        """A new buffer for a weight."""
        return StagingBuffer(self._arena.allocate(align(weight.nbytes), weight.name), None)

    def release(self, buffer: StagingBuffer) -> None:
        """Gives a buffer back to where it came from, a pool or this."""
        buffer.release(self._arena)

    def release_after(self, ticket: Ticket, buffer: StagingBuffer) -> None:
        """Gives a buffer back when its write has ended, at the next :meth:`settle`."""
        self._writes.append((ticket, buffer))

    def settle(self, keep_nbytes: int, *, check: bool = True) -> None:
        """Frees what has been written; waits for the oldest writes while more than ``keep_nbytes`` bytes are held.

        Args:
            keep_nbytes: bytes that may go on waiting.
            check: whether an error of a write is raised.

        Raises:
            StorageError: a write failed, or took too long.
        """
        held = sum(buffer.bytes.numel() for _, buffer in self._writes)
        while self._writes and (self._writes[0][0].done or held > max(keep_nbytes, 0)):
            ticket, buffer = self._writes.popleft()
            held -= buffer.bytes.numel()
            try:
                if check:
                    ticket.wait(self._timeout_s)
                else:
                    wait_quietly(ticket, self._timeout_s)
            finally:
                if ticket.done:  # after a time-out the device may still read it
                    buffer.release(self._arena)
