# SPDX-License-Identifier: Apache-2.0
"""Ordinary host memory for weights that have no staging buffer: before there is a pool, and when it is exhausted."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass

import torch

from tencache_ds.errors import StorageError
from tencache_ds.io import Operation, Ticket
from tencache_ds.layout import round_up
from tencache_ds.memory.arena import HostArena
from tencache_ds.tiers.weight_record import CopyEvent, Weight


@dataclass(frozen=True, slots=True, eq=False)
class OrdinaryBuffer:
    """A :class:`~tencache_ds.tiers.weight_record.StagingBuffer` outside the pool.

    Attributes:
        buffer: the memory.
        owner: where it goes back to.
    """

    buffer: torch.Tensor
    owner: OrdinaryMemory

    @property
    def slot_nbytes(self) -> int:
        """See :attr:`StagingBuffer.slot_nbytes`."""
        return 0

    @property
    def for_gpu(self) -> bool:
        """See :attr:`StagingBuffer.for_gpu`."""
        return False

    def release(self) -> None:
        """See :meth:`Buffer.release`."""
        self.owner.free(self)

    def release_after(self, event: CopyEvent) -> None:
        """Waits for the event: events of memory outside a pool are not polled later."""
        event.synchronize()
        self.owner.free(self)

    def release_with(self, ticket: Ticket) -> None:
        """See :meth:`OrdinaryMemory.free_with`."""
        self.owner.free_with(ticket, self)


class OrdinaryMemory:
    """Buffers outside the pool, and the requests that some of them still wait for. Guarded by its owner's lock.

    A buffer whose request has not ended stays mapped in any case: a late device must not write into memory that has
    been reused. See :meth:`tencache_ds.memory.arena.HostArena.keep`.

    Args:
        arena: where the memory comes from.
        timeout_s: longest wait for one request.
    """

    def __init__(self, arena: HostArena, timeout_s: float) -> None:
        self._arena = arena
        self._timeout_s = timeout_s
        self._busy: deque[tuple[Ticket, OrdinaryBuffer]] = deque()  # oldest first

    def take(self, weight: Weight) -> OrdinaryBuffer:
        """A new buffer for a weight."""
        return OrdinaryBuffer(self._arena.allocate(round_up(weight.nbytes), weight.name), self)

    def free(self, buffer: OrdinaryBuffer) -> None:
        """Frees a buffer that no request has."""
        self._arena.free(buffer.buffer)

    def free_with(self, ticket: Ticket, buffer: OrdinaryBuffer) -> None:
        """Frees a buffer when its request has ended: at a later :meth:`settle`.

        Of a read the outcome no longer matters; the error of a write is raised by :meth:`settle`.
        """
        if ticket.done and ticket.operation is Operation.READ:
            self._free(ticket, buffer)
        else:
            self._busy.append((ticket, buffer))

    def settle(self, keep_nbytes: int) -> None:
        """Frees the buffers that the device is done with; waits for the oldest while more than ``keep_nbytes`` bytes
        are held.

        Args:
            keep_nbytes: bytes that may keep waiting.

        Raises:
            StorageError: a write failed, or a request took too long.
        """
        held = sum(buffer.buffer.numel() for _, buffer in self._busy)
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
                    held -= buffer.buffer.numel()
                    self._free(ticket, buffer)

    def close(self) -> None:
        """Frees everything; buffers of requests that do not end within the time limit of one request are kept mapped.

        Errors of writes are left to the store, which has seen them too.
        """
        deadline_s = time.monotonic() + self._timeout_s  # one for all: a device that hangs does so for each of them
        while self._busy:
            ticket, buffer = self._busy.popleft()
            with contextlib.suppress(StorageError):
                ticket.wait_ended(max(0.0, deadline_s - time.monotonic()))
            self._free(ticket, buffer)

    def _free(self, ticket: Ticket, buffer: OrdinaryBuffer) -> None:
        if ticket.done and not ticket.given_up:
            self._arena.free(buffer.buffer)
        else:
            self._arena.keep(buffer.buffer, ticket.tag)
