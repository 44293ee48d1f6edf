# SPDX-License-Identifier: Apache-2.0
"""Transfers of a weight between NVMe, its staging buffer and device memory, with its state transitions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.io import Extent, Priority
from tencache_ds.observability.counters import Event, Stall
from tencache_ds.planning.budget import WRITES_BEHIND_NBYTES
from tencache_ds.tiers.mover import Mover
from tencache_ds.tiers.weight_record import CopyState, StagingBuffer, Weight
from tencache_ds.tiers.weight_staging import OrdinaryMemory


class WeightTransfers:
    """Guarded by its owner's lock.

    Args:
        mover: moves the bytes.
        ordinary: where buffers come from that no pool has.
        gone: called for a weight whose buffer was given up before its use.
    """

    def __init__(self, mover: Mover, ordinary: OrdinaryMemory, gone: Callable[[int], None]) -> None:
        self._mover = mover
        self._ordinary = ordinary
        self._gone = gone

    # NVMe to a staging buffer

    def start_reading(self, weight: Weight, buffer: StagingBuffer, priority: Priority) -> None:
        """Starts to read a stored weight; after an error the buffer is returned."""
        weight.ticket = self._mover.read(_extent(weight), buffer, priority)
        weight.buffer, weight.kept = buffer, False
        weight.move_to(CopyState.READING)

    def finish_reading(self, weight: Weight) -> None:
        """Waits until a weight that is being read is staged.

        Raises:
            StorageError: the read failed, or took too long.
        """
        assert weight.ticket is not None
        ticket = weight.ticket
        try:
            self._mover.wait(ticket, Stall.WEIGHT_READ)
        except BaseException:
            if ticket.done:  # a failed read leaves nothing worth keeping; after a time-out the device may still write
                self.end_buffer(weight)
                weight.move_to(CopyState.NONE)
            raise
        weight.ticket = None
        weight.move_to(CopyState.STAGED)

    def discard(self, weight: Weight) -> None:
        """Gives up the staged copy of a weight not in use yet."""
        self.end_buffer(weight)
        weight.move_to(CopyState.NONE)
        if not weight.kept:
            self._mover.counters.happened(Event.DISCARDED_READ)
        self._gone(weight.key)

    def end_buffer(self, weight: Weight) -> None:
        """Parts a weight from its buffer, which goes back now, or when the read into it has ended and not before."""
        buffer, weight.buffer = weight.buffer, None
        ticket, weight.ticket = weight.ticket, None
        reader, weight.reader = weight.reader, None
        if buffer is None:
            return
        if reader is not None:
            buffer.release_after(reader)
        elif ticket is None:
            buffer.release()
        else:
            ticket.cancel()  # the bytes are not needed any more
            buffer.release_with(ticket)

    def copy_of(self, weight: Weight) -> torch.Tensor:
        """A weight's value as last stored, regardless of the use of its staging buffer: 1-D, in host memory.

        Raises:
            StorageError: the read failed, or its bytes are not those last written.
        """
        if weight.home.memory is not None:
            return weight.home.memory.to("cpu", copy=True)
        extent = _extent(weight)
        with self._mover.reading(extent, self._ordinary.take(weight)) as stored:
            return stored[: weight.nbytes].view(weight.dtype).clone()

    # A staging buffer to NVMe

    def write_back(self, weight: Weight) -> StagingBuffer:
        """Writes the buffer to NVMe and then returns it; after an error the weight keeps both."""
        buffer = weight.buffer
        assert buffer is not None
        weight.extent = self._mover.relocate(_extent(weight))
        ticket = self._mover.write(weight.extent, buffer.buffer)
        weight.buffer = None
        weight.move_to(CopyState.NONE)
        buffer.release_with(ticket)
        return buffer

    def end_change(self, weight: Weight) -> None:
        """The new value in the buffer is complete: sends it to NVMe. Ordinary memory may have to be waited for."""
        if not self.write_back(weight).slot_nbytes:
            self._ordinary.settle(WRITES_BEHIND_NBYTES)

    # Device memory

    def to_device(self, weight: Weight, memory: torch.Tensor) -> None:
        """Makes a weight resident in device memory; see :meth:`WeightTier.to_device`."""
        if weight.unused:
            self.discard(weight)
        if weight.copy is not CopyState.NONE:
            raise TenCacheError(f"weight {weight.name} cannot change its place: it is {weight.copy.value}")
        weight.home.to_device(memory, lambda: self.copy_of(weight))

    def to_host(self, weight: Weight) -> torch.Tensor | None:
        """Takes a weight out of device memory; see :meth:`WeightTier.to_host`."""

        def write(value: torch.Tensor) -> None:
            weight.extent = self._mover.relocate(_extent(weight))
            buffer = self._ordinary.take(weight)
            buffer.buffer[: weight.nbytes].view(weight.dtype).copy_(value)
            self._mover.write_back(weight.extent, buffer).wait(self._mover.timeout_s)

        weight.home.leave_device(write)
        return weight.home.memory


def _extent(weight: Weight) -> Extent:
    if weight.extent is None:
        raise TenCacheError(f"weight {weight.name} has no place on NVMe: it is {weight.copy.value}")
    return weight.extent
