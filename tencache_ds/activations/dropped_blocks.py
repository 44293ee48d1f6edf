# SPDX-License-Identifier: Apache-2.0
"""Host buffers and extents of blocks that are gone, until no copy or request accesses them any more.

See [Note: lifetimes] in :mod:`tencache_ds.activations.blocks`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch

from tencache_ds.activations.blocks import Remains
from tencache_ds.io import Extent, Ticket
from tencache_ds.memory.lease import Event


class DroppedBlocks:
    """Guarded by its owner's lock, except for :attr:`queue`, to which any thread appends."""

    def __init__(self) -> None:
        self.queue: deque[Remains] = deque()
        """What blocks have left since the last :meth:`collect`."""
        self._busy: list[Remains] = []

    def collect(self, free: Callable[[Extent], None]) -> int:
        """Frees what nothing accesses any more.

        Args:
            free: takes back space on NVMe.

        Returns:
            Bytes of blocks newly found that were on their way to the device.
        """
        arriving_nbytes = 0
        while self.queue:
            remains = self.queue.popleft()
            arriving_nbytes += remains.arriving_nbytes
            self._busy.append(remains)
        still_busy = []
        for remains in self._busy:
            if not remains.idle:
                still_busy.append(remains)
                continue
            # A device that never answered may still write to the buffer.
            lost = any(ticket.given_up for ticket in remains.tickets)
            if remains.buffers is not None and remains.buffer is not None and not lost:
                remains.buffers.give(remains.buffer)
            if remains.extent is not None:
                free(remains.extent)
        self._busy = still_busy
        return arriving_nbytes

    def tickets(self) -> Iterator[Ticket]:
        """Tickets of requests that are not over yet, as far as :meth:`collect` has seen them."""
        return (ticket for remains in self._busy for ticket in remains.tickets if not ticket.done)

    def requests(self) -> Iterator[tuple[torch.Tensor, Ticket]]:
        """All of which no end was seen, with their buffers."""
        for remains in (*self.queue, *self._busy):
            if remains.buffer is not None:
                for ticket in remains.tickets:
                    yield remains.buffer, ticket

    def events(self) -> Iterator[Event]:
        """Events of copies whose end was not seen."""
        return (event for remains in (*self.queue, *self._busy) for event in remains.events)

    def forget(self) -> None:
        """Leaves everything as it is: its memory and storage are closed by their owners."""
        self.queue.clear()
        self._busy.clear()
