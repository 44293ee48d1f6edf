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
from tencache_ds.io import ExtentStore, Priority
from tencache_ds.memory.arena import HostArena
from tencache_ds.memory.lease import DeviceEvent
from tencache_ds.memory.pool import BufferPool
from tencache_ds.observability.counters import Counters
from tencache_ds.planning.budget import WRITES_BEHIND_NBYTES
from tencache_ds.planning.lookahead import Walk
from tencache_ds.tiers.mover import Mover
from tencache_ds.tiers.weight_homes import CopyState, ResidentMemory, Weight, WeightHomes
from tencache_ds.tiers.weight_staging import OrdinaryMemory, WeightStaging, WeightTransfers


class WeightTier:
    """Residency and movement of weight shards; where they live is in ``homes``.

    Every public method may be called from any thread; an autograd thread waiting for a read blocks the others only when
    they ask for a weight too.
    """

    def __init__(
        self,
        *,
        store: Callable[[], ExtentStore],
        resident: ResidentMemory,
        transient_arena: HostArena,
        resident_budget_nbytes: Callable[[], int],
        counters: Counters,
        timeout_s: float,
    ) -> None:
        """
        Args:
            store: opens the weights' extent store; called when the first weight has to go to NVMe.
            resident: memory of resident weights.
            transient_arena: unpinned memory for first writes and for more weights at once than the pool has buffers.
            resident_budget_nbytes: bytes of weights that may stay resident; asked once, at the first weight.
            counters: where accesses, bytes and stalls are counted.
            timeout_s: longest wait for one transfer.
        """
        self._open_store = store
        self._mover = Mover(None, counters, timeout_s)
        self._ordinary = OrdinaryMemory(transient_arena, timeout_s)
        self.homes = WeightHomes(resident, resident_budget_nbytes)
        self._weights = self.homes.weights
        self._transfers = WeightTransfers(self._mover, self._ordinary, self._gone)
        self._staging = self._new_staging()
        self._lock = threading.RLock()

    # Registration

    def register(self, key: int, name: str, numel: int, dtype: torch.dtype, *, always_resident: bool) -> torch.Tensor:
        """Makes room for a new weight shard and returns the zeroed 1-D tensor in which to put its first value.

        Resident memory is filled first, in the order of registration. For the others, :meth:`store_initial` has to
        follow once the value is there.
        """
        with self._lock:
            weight = self.homes.make(key, name, numel, dtype, always_resident=always_resident)
            if weight.home.memory is None:
                self._ordinary.settle(WRITES_BEHIND_NBYTES - weight.nbytes)
                weight.buffer = self._ordinary.take(weight)
            self._weights[key] = weight
            return weight.view() if weight.home.memory is None else weight.home.memory

    def store_initial(self, key: int) -> None:
        """Sends a registered weight's first value to NVMe; returns before it is there."""
        with self._lock:
            weight = self._weights[key]
            if weight.copy is not CopyState.INITIAL:
                return
            if self._mover.store is None:
                self._mover.store = self._open_store()
            weight.extent = self._mover.store.allocate(weight.nbytes, weight.name)
            self._transfers.write_back(weight)

    # Device memory

    def to_device(self, key: int, memory: torch.Tensor) -> None:
        """Makes a weight resident in device memory. It is not in use meanwhile.

        Args:
            key: which.
            memory: 1-D tensor of the shard's length and dtype; a resident weight's host memory is kept for
                :meth:`to_host` until :meth:`free_unused`.

        Raises:
            StorageError: it could not be read.
            TenCacheError: it is in use.
        """
        with self._lock:
            self._transfers.to_device(self._weights[key], memory)

    def to_host(self, key: int) -> torch.Tensor | None:
        """Takes a weight out of device memory, to where it was before: host memory, or NVMe, which is waited for.

        Returns:
            Its host memory, or None if it has none.

        Raises:
            MemoryLimitError: there is no host memory for it; it stays where it is.
            StorageError: it could not be written; it stays where it is.
        """
        with self._lock:
            return self._transfers.to_host(self._weights[key])

    def free_unused(self) -> int:
        """See :meth:`WeightHomes.free_unused`."""
        with self._lock:
            return self.homes.free_unused()

    # Service

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
                    raise TenCacheError(f"weight {weight.name} cannot be handed over: it is {weight.copy.value}")
            other._mover.store = self._mover.store
            for weight in moved:
                other._weights[weight.key] = self._weights.pop(weight.key)

    def drop(self, keys: Iterable[int]) -> None:
        """Removes weights whose parameters are gone; their memory and places on NVMe are given back.

        Raises:
            TenCacheError: a weight is in use.
        """
        with self._lock:
            self._ordinary.settle(0)
            for key in keys:
                weight = self._weights[key]
                if weight.unused:
                    self._transfers.discard(weight)
                elif weight.copy is CopyState.INITIAL:  # an error came before its first value
                    self._transfers.end_buffer(weight)
                elif weight.copy is not CopyState.NONE:
                    raise TenCacheError(f"weight {weight.name} cannot be dropped: it is {weight.copy.value}")
                self.homes.drop(key)
                self._free_extent(weight)

    def begin_service(self, counters: Counters) -> None:
        """Starts a training: events are counted for it from now on. :meth:`use_pool` follows."""
        with self._lock:
            self._mover.counters = counters
            self._staging = self._new_staging()

    def _new_staging(self) -> WeightStaging:
        return WeightStaging(self._weights, self._ordinary, self._transfers.discard, self._mover)

    def end_service(self, counters: Counters) -> None:
        """The training ended: every staging buffer goes back to its pool, and ordinary memory serves as before; what
        happens from now on goes to ``counters``.

        Exposed shards are no longer in use. A weight whose update or overwriting is incomplete keeps its value on NVMe.
        """
        with self._lock:
            for weight in self._weights.values():
                if weight.unused:
                    self._transfers.discard(weight)
                elif weight.buffer is not None and weight.copy is not CopyState.INITIAL:
                    self._transfers.end_buffer(weight)
                    weight.move_to(CopyState.NONE)
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

        A weight larger than every staging buffer is read on demand.
        """
        with self._lock:
            weight = self._weights.get(key)
            if weight is None or not weight.only_stored:
                return True
            if not self._staging.ever(weight, for_host=for_host):
                return True
            buffer = self._staging.ahead(weight, for_host=for_host)
            if buffer is None:
                return False
            self._transfers.start_reading(weight, buffer, Priority.BACKGROUND)
            weight.prefetched = True
            return True

    def follow(self, order: Walk[int]) -> None:
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
            if weight.copy is CopyState.READING and weight.ticket is not None and weight.ticket.done:
                self._transfers.finish_reading(weight)
            return not weight.home.stored or weight.copy in (CopyState.STAGED, CopyState.EXPOSED)

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
                        f"weight {weight.name} is needed while it is {weight.copy.value}: its new value is not complete"
                    )
            kept = set(keys)
            for weight in weights:
                if for_host and weight.unused and weight.buffer is not None and weight.buffer.for_gpu:
                    self._transfers.discard(weight)
                if weight.only_stored:
                    buffer = self._staging.now(weight, kept, for_host=for_host)
                    self._transfers.start_reading(weight, buffer, Priority.URGENT)
                    weight.prefetched = False
                elif weight.copy is CopyState.INITIAL:
                    raise TenCacheError(f"weight {weight.name} is needed before its first value was stored")
            exposed = []
            for weight in weights:
                if weight.home.memory is not None:
                    exposed.append(weight.home.memory.cpu() if for_host else weight.home.memory)
                    continue
                if weight.copy is not CopyState.EXPOSED:
                    self._mover.counters.accessed(weight.access)
                if weight.copy is CopyState.READING:
                    self._transfers.finish_reading(weight)
                if weight.copy is CopyState.STAGED:
                    if weight.reader is not None:  # long done; the next owner of the buffer may change it
                        weight.reader.synchronize()
                        weight.reader = None
                    weight.move_to(CopyState.EXPOSED)
                exposed.append(weight.view())
            return exposed

    def staged_for_gpu(self, key: int) -> bool:
        """Whether the weight's buffer is GPU memory. It is leased again soon: the exposed shard has to be copied."""
        with self._lock:
            buffer = self._weights[key].buffer
            return buffer is not None and buffer.for_gpu

    def give_back(self, key: int, event: DeviceEvent | None = None, *, keep: bool = False) -> None:
        """Ends an exposure: the staging buffer is free once ``event`` (its last reader) is done, or now without one.

        With ``keep`` it is not freed: the weight stays staged in it, unchanged, for its next use. Only if this use
        certainly comes before those of all weights that wait for a buffer.
        """
        with self._lock:
            weight = self._weights[key]
            if weight.copy is not CopyState.EXPOSED:
                return
            assert weight.buffer is not None
            if keep and weight.buffer.slot_nbytes:
                weight.reader, weight.kept, weight.prefetched = event, True, True
                weight.move_to(CopyState.STAGED)
                return
            buffer, weight.buffer = weight.buffer, None
            weight.move_to(CopyState.NONE)
            if event is None:
                buffer.release()
            else:
                buffer.release_after(event)

    def forget(self, key: int) -> None:
        """Gives up the unused staged copy of a weight, if any."""
        with self._lock:
            weight = self._weights[key]
            if weight.unused:
                self._transfers.discard(weight)

    def drop_stale(self) -> None:
        """Before an update: forgets the staged copies of trainable weights, which the update makes out of date."""
        with self._lock:
            for weight in self._weights.values():
                if weight.trainable and weight.unused:
                    self._transfers.discard(weight)

    # Writing

    def begin_overwrite(self, key: int) -> torch.Tensor:
        """A buffer for a new value of the weight (a 1-D tensor), without reading the old one: the buffer it is exposed
        in, as it is, or a zeroed one. An exposure ends with it.

        :meth:`finish_overwrite` or :meth:`abandon_overwrite` has to follow; until then the weight has no value to show.
        """
        with self._lock:
            weight = self._weights[key]
            if weight.home.memory is not None:
                return weight.home.memory
            if weight.unused:
                self._transfers.discard(weight)
            if weight.buffer is not None and weight.buffer.for_gpu:  # the host fills it
                self.give_back(key)
            weight.move_to(CopyState.OVERWRITING)
            if weight.buffer is None:
                weight.buffer = self._staging.now(weight, {key}, for_host=True)
                weight.view().zero_()
            return weight.view()

    def finish_overwrite(self, key: int) -> None:
        """The new value is complete: sends it to NVMe; returns before the bytes are there."""
        with self._lock:
            weight = self._weights[key]
            if not weight.home.stored:
                return
            if weight.copy is not CopyState.OVERWRITING:
                raise TenCacheError(f"weight {weight.name} has no new value to write: it is {weight.copy.value}")
            self._transfers.end_change(weight)

    def abandon_overwrite(self, key: int) -> None:
        """There will be no new value after all: the weight keeps the old one."""
        with self._lock:
            weight = self._weights[key]
            if weight.copy is CopyState.OVERWRITING:
                self._transfers.end_buffer(weight)
                weight.move_to(CopyState.NONE)

    def begin_update(self, key: int) -> torch.Tensor:
        """The buffer that the optimizer fills with the weight's new value, all of it; waits for a free one.

        :meth:`finish_update` has to follow.

        Raises:
            StorageTimeoutError: a transfer that has a buffer is overdue.
        """
        with self._lock:
            weight = self._weights[key]
            if weight.home.memory is not None:
                return weight.home.memory
            if weight.copy is CopyState.UPDATING:
                return weight.view()
            if weight.unused:
                self._transfers.discard(weight)
            if weight.copy is CopyState.EXPOSED:
                self.give_back(key)
            weight.move_to(CopyState.UPDATING)
            try:
                weight.buffer = self._staging.for_update(weight)
            except StorageError:
                weight.move_to(CopyState.NONE)
                raise
            return weight.view()

    def finish_update(self, key: int) -> None:
        """The new value is complete: sends it to NVMe, without waiting."""
        with self._lock:
            weight = self._weights[key]
            if weight.copy is CopyState.UPDATING:
                self._transfers.end_change(weight)

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
        """A copy of the shard as last stored, regardless of the use of its staging buffer.

        Raises:
            StorageError: the read failed, or its bytes are not those last written.
        """
        with self._lock:
            return self._transfers.copy_of(self._weights[key])

    def scan(self, keys: Sequence[int], visit: Callable[[int, torch.Tensor], None]) -> None:
        """Passes unused shards to ``visit``, in the order of ``keys``, reading stored ones ahead; they must not be
        modified.

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

    def close(self) -> None:
        """Gives back every buffer, those that a device is writing to once it is done, and the weights' places on NVMe.
        Idempotent; the store is closed by its owner."""
        with self._lock:
            for weight in self._weights.values():
                self._transfers.end_buffer(weight)
            self._ordinary.close()
            for weight in self._weights.values():
                self._free_extent(weight)
            self._weights.clear()

    def _free_extent(self, weight: Weight) -> None:
        if self._mover.store is not None and weight.extent is not None:
            self._mover.store.free(weight.extent)

    def _gone(self, key: int) -> None:
        for order in self._staging.orders:
            order.gone(key)
