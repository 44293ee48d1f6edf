# SPDX-License-Identifier: Apache-2.0
"""The staging memory of a stored weight: a pool's slot, one reclaimed from read-ahead, or ordinary host
memory, before there is a pool and when it is exhausted.

[Note: two kinds of staging] With GPUDirect Storage there is a second pool, in GPU memory. Weights exposed for the GPU
are read into that one. All host accesses (updates, overwriting, ``for_host``) go through the first; weights without a
slot in either pool are read into ordinary host memory. Every rank decides separately which pools it has: no collective
depends on where a shard is staged, because the set and order of exposed weights do not.

Transfers of a weight between NVMe, its staging buffer and device memory, with its state transitions.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tencache_ds.errors import StorageError, TenCacheError
from tencache_ds.io import Extent, Operation, Priority, Ticket
from tencache_ds.layout import round_up
from tencache_ds.memory.arena import HostArena
from tencache_ds.memory.lease import DeviceEvent
from tencache_ds.memory.pool import BufferPool, Lease, PoolTimeout
from tencache_ds.observability.counters import Event, Stall
from tencache_ds.planning.budget import WRITES_BEHIND_NBYTES
from tencache_ds.planning.lookahead import Walk, farthest_first
from tencache_ds.tiers.mover import Mover
from tencache_ds.tiers.weight_homes import CopyState, StagingBuffer, Weight

UPDATE_PATIENCE_S = 5.0
"""How long an update waits for a staging buffer before it takes ordinary memory (which is bounded too)."""


@dataclass(frozen=True, slots=True, eq=False)
class OrdinaryBuffer:
    """A :class:`~tencache_ds.tiers.weight_homes.StagingBuffer` outside the pool.

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

    def release_after(self, event: DeviceEvent) -> None:
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


@dataclass(frozen=True, slots=True, eq=False)
class PooledBuffer:
    """A :class:`~tencache_ds.tiers.weight_homes.StagingBuffer` of a pool.

    Attributes:
        lease: of its slot.
        for_gpu: as in :class:`StagingPool`.
    """

    lease: Lease
    for_gpu: bool

    @property
    def buffer(self) -> torch.Tensor:
        """See :attr:`Buffer.buffer`."""
        return self.lease.buffer

    @property
    def slot_nbytes(self) -> int:
        """See :attr:`StagingBuffer.slot_nbytes`."""
        return self.lease.slot.tensor.numel()

    def release(self) -> None:
        """See :meth:`Buffer.release`."""
        self.lease.release()

    def release_after(self, event: DeviceEvent) -> None:
        """See :meth:`StagingBuffer.release_after`."""
        self.lease.release_after(event)

    def release_with(self, ticket: Ticket) -> None:
        """See :meth:`Buffer.release_with`."""
        self.lease.release_with(ticket)


class StagingPool:
    """A pool of staging buffers for weights.

    Args:
        pool: where the buffers come from.
        for_gpu: they are memory of the compute device.
    """

    def __init__(self, pool: BufferPool, *, for_gpu: bool = False) -> None:
        self.pool = pool
        self.for_gpu = for_gpu
        self._largest_slot_nbytes = max((c.slot_nbytes for c in pool.stats().classes), default=0)

    def fits(self, nbytes: int) -> bool:
        """Whether there are slots of this size; not for a weight registered after the pool was planned."""
        return nbytes <= self._largest_slot_nbytes

    def try_lease(self, nbytes: int, owner: str, purpose: str) -> PooledBuffer | None:
        """A buffer, or None when every slot that fits is taken or none would fit."""
        lease = self.pool.try_lease(nbytes, owner, purpose) if self.fits(nbytes) else None
        return None if lease is None else PooledBuffer(lease, self.for_gpu)


class WeightStaging:
    """Finds staging buffers. Before there is a pool, ordinary memory serves. Guarded by its owner's lock.

    Args:
        weights: all weights of the tier, in the order of registration; kept up to date by the tier.
        ordinary: where buffers come from that no pool has.
        discard: gives up the buffer of a weight not in use yet.
        mover: waits for buffers; overflows are counted where it counts.

    Attributes:
        orders: the eviction order of every training that these weights are part of.
    """

    def __init__(
        self,
        weights: dict[int, Weight],
        ordinary: OrdinaryMemory,
        discard: Callable[[Weight], None],
        mover: Mover,
    ) -> None:
        self._weights = weights
        self._ordinary = ordinary
        self._discard = discard
        self._mover = mover
        self.orders: list[Walk[int]] = []
        self._host: StagingPool | None = None
        self._gpu: StagingPool | None = None

    def use(self, pool: BufferPool, gpu_pool: BufferPool | None) -> None:
        """Takes buffers from ``pool`` from now on; from ``gpu_pool``, if there is one, those for the GPU."""
        self._host = StagingPool(pool)
        self._gpu = StagingPool(gpu_pool, for_gpu=True) if gpu_pool is not None else None

    @property
    def read_ahead_nbytes(self) -> int:
        """Bytes of the pool that weights for the compute device are read into."""
        pool = self._pool(for_host=False)
        return 0 if pool is None else pool.pool.stats().nbytes_total

    def ever(self, weight: Weight, *, for_host: bool) -> bool:
        """Whether there are, or will be, buffers for a weight; not if it is larger than each of them."""
        pool = self._pool(for_host)
        return pool is None or pool.fits(round_up(weight.nbytes))

    def ahead(self, weight: Weight, *, for_host: bool) -> StagingBuffer | None:
        """A buffer for a weight without waiters, if one is free."""
        pool = self._pool(for_host)
        return None if pool is None else pool.try_lease(round_up(weight.nbytes), weight.name, "read-ahead")

    def now(self, weight: Weight, kept: set[int], *, for_host: bool) -> StagingBuffer:
        """A buffer for a weight that is being waited for: free, or reclaimed from read-ahead, or ordinary memory.

        Args:
            weight: which.
            kept: weights whose buffers stay.
            for_host: the host will access it.
        """
        buffer = self._by_eviction(weight, kept, self._pool(for_host))
        return self._overflow(weight) if buffer is None else buffer

    def for_update(self, weight: Weight) -> StagingBuffer:
        """A buffer for a new value: waits for writes in flight to return theirs, which bounds memory by the pool.

        Raises:
            StorageTimeoutError: one of them is overdue.
        """
        pool = self._host
        buffer = self._by_eviction(weight, {weight.key}, pool)
        if buffer is None and pool is not None and pool.fits(round_up(weight.nbytes)):
            self._discard_one_reading(weight)
            # Where it waits in vain, something that waits for us has them, such as an open GatheredParameters.
            with contextlib.suppress(PoolTimeout):
                lease = self._mover.lease(
                    pool.pool, round_up(weight.nbytes), weight.name, "update", patience_s=UPDATE_PATIENCE_S
                )
                buffer = PooledBuffer(lease, pool.for_gpu)
        return self._overflow(weight) if buffer is None else buffer

    def _pool(self, for_host: bool) -> StagingPool | None:
        return self._host if for_host or self._gpu is None else self._gpu

    def _by_eviction(self, weight: Weight, kept: set[int], pool: StagingPool | None) -> StagingBuffer | None:
        nbytes = round_up(weight.nbytes)
        if pool is None or not pool.fits(nbytes):
            return None
        buffer = pool.try_lease(nbytes, weight.name, "needed now")
        if buffer is None:
            for victim in self._given_up_first(nbytes, pool.for_gpu):
                if not victim.evictable or victim.key in kept:
                    continue
                self._discard(victim)
                buffer = pool.try_lease(nbytes, weight.name, "needed now")
                if buffer is not None:
                    break
        return buffer

    def _discard_one_reading(self, weight: Weight) -> None:
        """Makes sure that a wait for a buffer ends, even if weights that are still being read have all of them."""
        for other in self._given_up_first(weight.nbytes, for_gpu=False):
            if other.copy is CopyState.READING:
                self._discard(other)
                return

    def _given_up_first(self, nbytes: int, for_gpu: bool) -> list[Weight]:
        """Weights not in use yet, in buffers of one pool that hold ``nbytes``: farthest next use first."""
        keys = []
        for weight in self._weights.values():
            buffer = weight.buffer
            if buffer is None or buffer.for_gpu is not for_gpu or not weight.unused:
                continue
            if nbytes <= buffer.slot_nbytes:
                keys.append(weight.key)
        return [self._weights[key] for key in farthest_first(keys, self._next_use)]

    def _next_use(self, key: int) -> int | None:
        uses = [use for order in self.orders if (use := order.next_use(key)) is not None]
        return min(uses, default=None)

    def _overflow(self, weight: Weight) -> StagingBuffer:
        if self._host is not None:
            self._mover.counters.happened(Event.OVERFLOW_BUFFER)
        return self._ordinary.take(weight)


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
