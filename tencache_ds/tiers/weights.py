# SPDX-License-Identifier: Apache-2.0
"""The weights of one model on one rank: some in memory, of the host or the device, the rest on NVMe and staged.

Residency is static (the access pattern is a cyclic scan, on which recency caching never hits). A stored weight's
staging buffer is clean at all times except between :meth:`WeightTier.begin_update` and
:meth:`WeightTier.finish_update` (or ``begin_overwrite`` and ``finish_overwrite``), so it can be dropped whenever a
buffer is needed for something more urgent: no order of requests can deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from tencache_ds.errors import StorageError, TenCacheError
from tencache_ds.io import Extent, ExtentStore, Priority
from tencache_ds.memory.arena import HostArena
from tencache_ds.memory.pool import BufferPool
from tencache_ds.observability.counters import Access, Counters, Event, Stall
from tencache_ds.tiers.mover import Mover
from tencache_ds.tiers.ordinary_memory import WRITES_BEHIND_NBYTES, OrdinaryMemory
from tencache_ds.tiers.resident_memory import ResidentMemory
from tencache_ds.tiers.weight_record import CopyEvent, StagingBuffer, Weight, WeightHome, WeightState
from tencache_ds.tiers.weight_staging import UseOrder, WeightStaging


class WeightTier:
    """Residency and movement of weight shards.

    Every public method may be called from any thread; an autograd thread waiting for a read blocks the others only when
    they ask for a weight too.
    """

    def __init__(
        self,
        *,
        store: Callable[[], ExtentStore],
        resident_arena: HostArena,
        transient_arena: HostArena,
        resident_budget_nbytes: Callable[[], int],
        counters: Counters,
        timeout_s: float,
    ) -> None:
        """
        Args:
            store: opens the weights' extent store; called when the first weight has to go to NVMe.
            resident_arena: memory of resident weights.
            transient_arena: unpinned memory for first writes and for more weights at once than the pool has buffers.
            resident_budget_nbytes: bytes of weights that may stay resident; asked once, at the first weight.
            counters: where accesses, bytes and stalls are counted.
            timeout_s: longest wait for one transfer.
        """
        self._open_store = store
        self._mover = Mover(None, counters, timeout_s)
        self._resident_memory = ResidentMemory(resident_arena)
        self._ordinary = OrdinaryMemory(transient_arena, timeout_s)
        self._resident_budget = resident_budget_nbytes
        self._resident_left: int | None = None
        self._weights: dict[int, Weight] = {}
        self._staging = self._new_staging()
        self._lock = threading.RLock()

    # Registration

    def register(self, key: int, name: str, numel: int, dtype: torch.dtype, *, always_resident: bool) -> torch.Tensor:
        """Makes room for a new weight shard and returns the zeroed 1-D tensor in which to put its first value.

        Resident memory is filled first, in the order of registration. For the others, :meth:`store_initial` has to
        follow once the value is there.
        """
        with self._lock:
            if key in self._weights:
                raise TenCacheError(f"weight {name} (id {key}) is registered twice")
            nbytes = numel * dtype.itemsize
            if self._resident_left is None:
                self._resident_left = self._resident_budget()
            if always_resident or nbytes <= self._resident_left:
                self._resident_left -= 0 if always_resident else nbytes
                weight = Weight(key, name, numel, dtype, WeightState.RESIDENT)
                weight.resident = self._resident_memory.take(nbytes).view(dtype)
                self._weights[key] = weight
                return weight.resident
            self._ordinary.settle(WRITES_BEHIND_NBYTES - nbytes)
            weight = Weight(key, name, numel, dtype, WeightState.INITIAL)
            weight.buffer = self._ordinary.take(weight)
            self._weights[key] = weight
            return weight.view()

    def is_resident(self, key: int) -> bool:
        """Whether the weight is in memory, of the host or the device, and nowhere else."""
        return self._weights[key].state is WeightState.RESIDENT

    def store_initial(self, key: int) -> None:
        """Sends a registered weight's first value to NVMe; returns before it is there."""
        with self._lock:
            weight = self._weights[key]
            if weight.state is not WeightState.INITIAL:
                return
            if self._mover.store is None:
                self._mover.store = self._open_store()
            weight.extent = self._mover.store.allocate(weight.nbytes, weight.name)
            self._write_back(weight)

    # Device memory

    def to_device(self, key: int, memory: torch.Tensor) -> None:
        """Makes a weight resident in device memory. Nobody uses it meanwhile.

        Args:
            key: which.
            memory: 1-D tensor of the shard's length and dtype; what becomes of a resident weight's host memory is that
                it is kept for :meth:`to_host`.

        Raises:
            StorageError: it could not be read.
            TenCacheError: it is in use.
        """
        with self._lock:
            weight = self._weights[key]
            if weight.unused:
                self._discard(weight)
            if weight.state not in (WeightState.RESIDENT, WeightState.STORED):
                raise TenCacheError(f"weight {weight.name} cannot change its place: it is {weight.state.value}")
            if weight.state is WeightState.STORED:
                memory.copy_(self.read(key))
                weight.move_to(WeightState.RESIDENT)
            else:
                assert weight.resident is not None
                memory.copy_(weight.resident)
                weight.host = weight.resident
            weight.resident, weight.on_device = memory, True

    def to_host(self, key: int) -> torch.Tensor | None:
        """Takes a weight out of device memory, to where it was before: host memory, or NVMe, which is waited for.

        Returns:
            Its host memory, or None if it has none.

        Raises:
            StorageError: it could not be written; it stays where it is.
        """
        with self._lock:
            weight = self._weights[key]
            assert weight.resident is not None
            if weight.host is not None:
                weight.host.copy_(weight.resident)
                weight.resident, weight.host, weight.on_device = weight.host, None, False
                return weight.resident
            weight.extent = self._mover.relocate(self._extent(weight))
            buffer = self._ordinary.take(weight)
            buffer.buffer[: weight.nbytes].view(weight.dtype).copy_(weight.resident)
            self._mover.write_back(weight.extent, buffer).wait(self._mover.timeout_s)
            weight.resident, weight.on_device = None, False
            weight.move_to(WeightState.STORED)
            return None

    def on_device(self, key: int) -> bool:
        """Whether the weight is resident in device memory."""
        return self._weights[key].on_device

    def keeps_host_memory(self, key: int) -> bool:
        """Whether a weight that is resident in device memory has host memory too."""
        return self._weights[key].host is not None

    def holds(self, key: int) -> bool:
        """Whether this weight is registered here."""
        return key in self._weights

    @property
    def keys(self) -> frozenset[int]:
        """All weights."""
        return frozenset(self._weights)

    def hand_over(self, keys: Iterable[int], other: WeightTier) -> None:
        """Gives weights to a tier with the same store and arenas. None of them may be in a pool's buffer.

        Raises:
            TenCacheError: a weight is in use.
        """
        with self._lock, other._lock:
            self._ordinary.settle(0)
            moved = [self._weights[key] for key in keys]
            for weight in moved:
                if weight.buffer is not None:
                    raise TenCacheError(f"weight {weight.name} cannot be handed over: it is {weight.state.value}")
            other._mover.store = self._mover.store
            for weight in moved:
                other._weights[weight.key] = self._weights.pop(weight.key)

    def begin_service(self, counters: Counters) -> None:
        """A training begins: what happens is counted for it. :meth:`use_pool` follows."""
        with self._lock:
            self._mover.counters = counters
            self._staging = self._new_staging()

    def _new_staging(self) -> WeightStaging:
        return WeightStaging(self._weights, self._ordinary, self._discard, self._mover)

    def end_service(self, counters: Counters) -> None:
        """The training ended: every staging buffer goes back to its pool, and ordinary memory serves as before; what
        happens from now on goes to ``counters``.

        Nobody looks at exposed shards any more. A weight whose update or overwriting has not come to its end keeps the
        value it has on NVMe.
        """
        with self._lock:
            for weight in self._weights.values():
                if weight.unused:
                    self._discard(weight)
                elif weight.buffer is not None and weight.state is not WeightState.INITIAL:
                    self._end_buffer(weight)
                    weight.move_to(WeightState.STORED)
            self.begin_service(counters)

    def use_pool(self, pool: BufferPool, gpu_pool: BufferPool | None = None) -> None:
        """Stages through ``pool`` from now on; before, ordinary memory serves. With ``gpu_pool``, weights are read into
        that one; the store must be able to."""
        with self._lock:
            self._ordinary.settle(0)
            self._staging.use(pool, gpu_pool)

    def set_trainable(self, keys: Iterable[int]) -> None:
        """Names the weights the optimizer will update; all others are never dropped as out of date."""
        wanted = set(keys)
        with self._lock:
            for weight in self._weights.values():
                weight.trainable = weight.key in wanted

    # Reading

    def read_ahead(self, keys: Iterable[int], *, for_host: bool = False) -> None:
        """Starts reading weights, nearest first, until there is no free staging buffer. Never blocks.

        Args:
            keys: which.
            for_host: they will be exposed for the host.
        """
        for key in keys:
            if not self.read_one_ahead(key, for_host=for_host):
                return

    def read_one_ahead(self, key: int, *, for_host: bool = False) -> bool:
        """Starts reading one weight, if it is on NVMe only; False when that takes a staging buffer and none is free.

        A weight larger than every staging buffer is left to whoever asks for it.
        """
        with self._lock:
            weight = self._weights.get(key)
            if weight is None or weight.state is not WeightState.STORED:
                return True
            if not self._staging.ever(weight, for_host=for_host):
                return True
            buffer = self._staging.ahead(weight, for_host=for_host)
            if buffer is None:
                return False
            self._start_reading(weight, buffer, Priority.BACKGROUND)
            weight.prefetched = True
            return True

    def follow(self, order: UseOrder) -> None:
        """From now on ``order`` says whose staging buffer is given up first, and hears of weights that were."""
        with self._lock:
            self._staging.orders.append(order)

    @property
    def read_ahead_nbytes(self) -> int:
        """Bytes of the staging buffers that weights for the compute device are read into; 0 before there is a pool."""
        return self._staging.read_ahead_nbytes

    def ready(self, key: int) -> bool:
        """Whether the weight can be exposed without waiting."""
        with self._lock:
            weight = self._weights[key]
            if weight.state is WeightState.READING and weight.ticket is not None and weight.ticket.done:
                self._finish_reading(weight)
            return weight.state in (WeightState.RESIDENT, WeightState.STAGED, WeightState.EXPOSED)

    def expose(self, keys: Sequence[int], *, for_host: bool = False) -> list[torch.Tensor]:
        """The shards of ``keys`` in memory, read from NVMe where they are not there yet.

        Args:
            keys: which.
            for_host: in host memory, to be read only; otherwise possibly in GPU memory, see :meth:`staged_for_gpu`.

        Returns:
            1-D tensors, valid until :meth:`give_back` of the same key.

        Raises:
            StorageError: a read failed.
            TenCacheError: a weight has no complete value to show: its first one was not stored yet, or an update or
                an overwriting of it has not ended.
        """
        with self._lock:
            weights = [self._weights[key] for key in keys]
            for weight in weights:
                if weight.incomplete:
                    raise TenCacheError(
                        f"weight {weight.name} is needed while it is {weight.state.value}: its new value is not "
                        "complete"
                    )
            kept = set(keys)
            for weight in weights:
                if for_host and weight.unused and weight.buffer is not None and weight.buffer.for_gpu:
                    self._discard(weight)
                if weight.state is WeightState.STORED:
                    self._start_reading(weight, self._staging.now(weight, kept, for_host=for_host), Priority.URGENT)
                    weight.prefetched = False
                elif weight.state is WeightState.INITIAL:
                    raise TenCacheError(f"weight {weight.name} is needed before its first value was stored")
            exposed = []
            for weight in weights:
                if weight.state is WeightState.RESIDENT:
                    assert weight.resident is not None
                    exposed.append(weight.resident.cpu() if for_host else weight.resident)
                    continue
                if weight.state is not WeightState.EXPOSED:
                    self._count_access(weight)
                if weight.state is WeightState.READING:
                    self._finish_reading(weight)
                if weight.state is WeightState.STAGED:
                    if weight.reader is not None:  # long done; whoever gets the buffer now may change it
                        weight.reader.synchronize()
                        weight.reader = None
                    weight.move_to(WeightState.EXPOSED)
                exposed.append(weight.view())
            return exposed

    def staged_for_gpu(self, key: int) -> bool:
        """Whether the weight's buffer is GPU memory. It is lent again soon: the exposed shard has to be copied."""
        with self._lock:
            buffer = self._weights[key].buffer
            return buffer is not None and buffer.for_gpu

    def give_back(self, key: int, event: CopyEvent | None = None, *, keep: bool = False) -> None:
        """Ends an exposure: the staging buffer is free once ``event`` (its last reader) is done, or now without one.

        With ``keep`` it is not free: the weight stays staged in it, unchanged as it is, for its next use. Only if there
        is no doubt that this use comes before those of all weights that wait for a buffer.
        """
        with self._lock:
            weight = self._weights[key]
            if weight.state is not WeightState.EXPOSED:
                return
            assert weight.buffer is not None
            if keep and weight.buffer.slot_nbytes:
                weight.reader, weight.kept, weight.prefetched = event, True, True
                weight.move_to(WeightState.STAGED)
                return
            buffer, weight.buffer = weight.buffer, None
            weight.move_to(WeightState.STORED)
            if event is None:
                buffer.release()
            else:
                buffer.release_after(event)

    def forget(self, key: int) -> None:
        """Gives up the staged copy of a weight, if it has one that nobody uses."""
        with self._lock:
            weight = self._weights[key]
            if weight.unused:
                self._discard(weight)

    def drop_stale(self) -> None:
        """Before an update: forgets the staged copies of trainable weights, which the update makes out of date."""
        with self._lock:
            for weight in self._weights.values():
                if weight.trainable and weight.unused:
                    self._discard(weight)

    # Writing

    def begin_overwrite(self, key: int) -> torch.Tensor:
        """A buffer for a new value of the weight (a 1-D tensor), without reading the old one: the buffer it is exposed
        in, as it is, or a zeroed one. An exposure ends with it.

        :meth:`finish_overwrite` or :meth:`abandon_overwrite` has to follow; until then the weight has no value to show.
        """
        with self._lock:
            weight = self._weights[key]
            if weight.state is WeightState.RESIDENT:
                assert weight.resident is not None
                return weight.resident
            if weight.unused:
                self._discard(weight)
            if weight.buffer is not None and weight.buffer.for_gpu:  # the host fills it
                self.give_back(key)
            weight.move_to(WeightState.OVERWRITING)
            if weight.buffer is None:
                weight.buffer = self._staging.now(weight, {key}, for_host=True)
                weight.view().zero_()
            return weight.view()

    def finish_overwrite(self, key: int) -> None:
        """The new value is complete: sends it to NVMe; returns before the bytes are there."""
        with self._lock:
            weight = self._weights[key]
            if weight.state is WeightState.RESIDENT:
                return
            if weight.state is not WeightState.OVERWRITING:
                raise TenCacheError(f"weight {weight.name} has no new value to write: it is {weight.state.value}")
            self._end_change(weight)

    def abandon_overwrite(self, key: int) -> None:
        """There will be no new value after all: the weight keeps the old one."""
        with self._lock:
            weight = self._weights[key]
            if weight.state is WeightState.OVERWRITING:
                self._end_buffer(weight)
                weight.move_to(WeightState.STORED)

    def begin_update(self, key: int) -> torch.Tensor:
        """The buffer that the optimizer fills with the weight's new value, all of it; waits for a free one.

        :meth:`finish_update` has to follow.

        Raises:
            StorageTimeoutError: a transfer that has a buffer is overdue.
        """
        with self._lock:
            weight = self._weights[key]
            if weight.state is WeightState.RESIDENT:
                assert weight.resident is not None
                return weight.resident
            if weight.state is WeightState.UPDATING:
                return weight.view()
            if weight.unused:
                self._discard(weight)
            if weight.state is WeightState.EXPOSED:
                self.give_back(key)
            weight.move_to(WeightState.UPDATING)
            try:
                weight.buffer = self._staging.for_update(weight)
            except StorageError:
                weight.move_to(WeightState.STORED)
                raise
            return weight.view()

    def finish_update(self, key: int) -> None:
        """The new value is complete: sends it to NVMe, without waiting."""
        with self._lock:
            weight = self._weights[key]
            if weight.state is WeightState.UPDATING:
                self._end_change(weight)

    # Whole-tier operations

    def check(self) -> None:
        """Raises the error of an earlier asynchronous write, if one failed."""
        self._mover.check()

    def drain(self) -> None:
        """Waits until everything written is on NVMe."""
        with self._lock:
            self._ordinary.settle(0)
            self._mover.drain()

    def read(self, key: int) -> torch.Tensor:
        """A copy of the shard as it was last stored, whatever its staging buffer is used for.

        Raises:
            StorageError: the read failed, or its bytes are not those last written.
        """
        with self._lock:
            weight = self._weights[key]
            if weight.state is WeightState.RESIDENT:
                assert weight.resident is not None
                return weight.resident.to("cpu", copy=True)
            extent = self._extent(weight)
            with self._mover.reading(extent, self._ordinary.take(weight)) as bytes_read:
                return bytes_read[: weight.nbytes].view(weight.dtype).clone()

    def scan(self, keys: Sequence[int], visit: Callable[[int, torch.Tensor], None]) -> None:
        """Shows shards that nobody uses, in the order of ``keys``, reading stored ones ahead; none may be changed.

        Args:
            keys: which; none of them exposed.
            visit: takes a key and the shard, 1-D in host memory, which ends with the call.

        Raises:
            StorageError: a read failed, or its bytes are not those last written.
        """
        for index, key in enumerate(keys):
            (shard,) = self.expose([key], for_host=True)
            try:
                self.read_ahead(keys[index + 1 :], for_host=True)
                visit(key, shard)
            finally:
                self.give_back(key)

    def overwrite(self, key: int, value: torch.Tensor) -> None:
        """Replaces a weight's value by ``value`` (1-D, the shard's length); returns before it is on NVMe."""
        target = self.begin_overwrite(key)
        try:
            target.copy_(value)
        except BaseException:
            self.abandon_overwrite(key)
            raise
        self.finish_overwrite(key)

    def stored_nbytes(self) -> list[int]:
        """Bytes of each shard that lives on NVMe, in the order of registration."""
        return [weight.nbytes for weight in self._weights.values() if weight.state is not WeightState.RESIDENT]

    def homes(self) -> list[WeightHome]:
        """Where each weight lives, in the order of registration."""
        with self._lock:
            return [
                WeightHome(weight.key, weight.name, weight.numel, weight.state is not WeightState.RESIDENT)
                for weight in self._weights.values()
            ]

    @property
    def allocated_nbytes(self) -> int:
        """Bytes that the weights take on NVMe."""
        return sum(w.extent.allocated_nbytes for w in self._weights.values() if w.extent is not None)

    @property
    def resident_nbytes(self) -> int:
        """Bytes of host memory that weights keep; those of weights that are in device memory for now among them."""
        kept = (w for w in self._weights.values() if w.state is WeightState.RESIDENT)
        return sum(w.nbytes for w in kept if not w.on_device or w.host is not None)

    def nbytes_of(self, key: int) -> int:
        """Bytes of one shard."""
        return self._weights[key].nbytes

    def close(self) -> None:
        """Gives back every buffer, those that a device is writing to once it is done, and the weights' places on NVMe.
        Idempotent; the store is closed by its owner."""
        with self._lock:
            for weight in self._weights.values():
                self._end_buffer(weight)
            self._ordinary.close()
            for weight in self._weights.values():
                if self._mover.store is not None and weight.extent is not None:
                    self._mover.store.free(weight.extent)
            self._weights.clear()

    # Mechanics, called with the lock held

    def _count_access(self, weight: Weight) -> None:
        if not weight.prefetched:
            self._mover.counters.accessed(Access.DEMAND)
        elif weight.ticket is not None and not weight.ticket.done:
            self._mover.counters.accessed(Access.LATE)
        else:
            self._mover.counters.accessed(Access.PREFETCHED)

    def _start_reading(self, weight: Weight, buffer: StagingBuffer, priority: Priority) -> None:
        weight.ticket = self._mover.read(self._extent(weight), buffer, priority)
        weight.buffer, weight.kept = buffer, False
        weight.move_to(WeightState.READING)

    def _finish_reading(self, weight: Weight) -> None:
        assert weight.ticket is not None
        ticket = weight.ticket
        try:
            self._mover.wait(ticket, Stall.WEIGHT_READ)
        except BaseException:
            if ticket.done:  # a failed read leaves nothing worth keeping; after a time-out the device may still write
                self._end_buffer(weight)
                weight.move_to(WeightState.STORED)
            raise
        weight.ticket = None
        weight.move_to(WeightState.STAGED)

    def _discard(self, weight: Weight) -> None:
        self._end_buffer(weight)
        weight.move_to(WeightState.STORED)
        if not weight.kept:
            self._mover.counters.happened(Event.DISCARDED_READ)
        for order in self._staging.orders:
            order.gone(weight.key)

    def _end_buffer(self, weight: Weight) -> None:
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
            ticket.cancel()  # nobody wants the bytes any more
            buffer.release_with(ticket)

    @staticmethod
    def _extent(weight: Weight) -> Extent:
        if weight.extent is None:
            raise TenCacheError(f"weight {weight.name} has no place on NVMe: it is {weight.state.value}")
        return weight.extent

    def _write_back(self, weight: Weight) -> StagingBuffer:
        """Sends what the buffer holds to NVMe, and the buffer back after it; after an error the weight keeps both."""
        buffer = weight.buffer
        assert buffer is not None
        weight.extent = self._mover.relocate(self._extent(weight))
        ticket = self._mover.write(weight.extent, buffer.buffer)
        weight.buffer = None
        weight.move_to(WeightState.STORED)
        buffer.release_with(ticket)
        return buffer

    def _end_change(self, weight: Weight) -> None:
        """The new value in the buffer is complete."""
        if not self._write_back(weight).slot_nbytes:
            self._ordinary.settle(WRITES_BEHIND_NBYTES)
