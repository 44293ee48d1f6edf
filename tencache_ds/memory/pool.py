# SPDX-License-Identifier: Apache-2.0
"""A pool of page-aligned slots in a few size classes, lent out as leases; its statistics, and errors that name the
holders.

[Note: pool locks] Leases are taken by training and autograd threads and released by those and by I/O threads. There is
one lock per pool. Lock order: a caller's locks, then a ticket's lock, then the pool's lock, then nothing. Under the
pool's lock only ``event.query()`` is called; never a ticket, the arena, ``event.synchronize()`` or a memory fill.

[Note: hand-over] A returned slot is handed to a waiter before it can become free, so a free slot means that no waiter
could use it, and waiters are never overtaken. Urgent waiters come first, then waiters of the slot's own class, then
those of smaller classes, each in the order they came.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.layout import PAGE_NBYTES, round_up
from tencache_ds.memory.arena import POISON_BYTE, DeviceArena, HostArena, wait_for_device
from tencache_ds.memory.lease import DeviceEvent, Lease, LeaseError, LeaseState, Slot
from tencache_ds.planning.size_classes import SizeClass

# Statistics, and errors that name the holders


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a slot, for messages and reports."""

    owner: str
    purpose: str
    nbytes: int
    slot_nbytes: int
    age_s: float
    state: LeaseState

    def __str__(self) -> str:
        return (
            f"{self.owner} ({self.purpose}): {self.nbytes} bytes in a slot of {self.slot_nbytes}, {self.state.value}, "
            f"for {self.age_s:.3f} s"
        )


class HeldSlotsError(TenCacheError):
    """Names the slots that are not free.

    Attributes:
        holders: who has them, oldest first.
    """

    def __init__(self, message: str, holders: Sequence[Holder]) -> None:
        lines = "".join(f"\n  {holder}" for holder in holders)
        super().__init__(f"{message}; slots in use ({len(holders)}):{lines or ' none'}")
        self.holders = tuple(holders)


class PoolTimeout(HeldSlotsError, TimeoutError):
    """No slot came back in time. Usual cause: everything is held by those who wait, so the pool is too small."""


class PoolBusyError(HeldSlotsError, RuntimeError):
    """Slots are still leased where none should be."""


@dataclass(frozen=True, slots=True)
class ClassStats:
    """One size class: ``free`` of ``count`` slots of ``slot_nbytes`` bytes can be leased at once."""

    slot_nbytes: int
    count: int
    free: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A consistent snapshot of a pool.

    Attributes:
        nbytes_total: bytes of all slots.
        nbytes_leased: bytes of the slots that are not free (held, or coming back).
        nbytes_leased_peak: largest ``nbytes_leased`` so far.
        n_leases: leases handed out so far.
        n_waits: leases that had to be waited for so far (those that timed out too).
        wait_ns: time spent waiting so far, summed over threads.
        n_waiting: threads that wait now.
        classes: every size class, by ascending slot size.
    """

    nbytes_total: int
    nbytes_leased: int
    nbytes_leased_peak: int
    n_leases: int
    n_waits: int
    wait_ns: int
    n_waiting: int
    classes: tuple[ClassStats, ...]


# The pool


__all__ = ["BufferPool", "ClassStats", "Holder", "Lease", "PoolBusyError", "PoolStats", "PoolTimeout"]

_POLL_MIN_S, _POLL_MAX_S = 50e-6, 500e-6


Arena = HostArena | DeviceArena
"""Where a pool's memory comes from."""


class _Waiter:
    """A thread in :meth:`BufferPool.lease`; ``lease`` is set when a slot is handed over."""

    __slots__ = ("changed", "home", "lease", "nbytes", "owner", "purpose", "urgent")

    def __init__(self, lock: threading.Lock, home: int, nbytes: int, owner: str, purpose: str, urgent: bool) -> None:
        self.changed = threading.Condition(lock)
        self.home = home
        self.nbytes = nbytes
        self.owner = owner
        self.purpose = purpose
        self.urgent = urgent
        self.lease: Lease | None = None


class BufferPool:
    """Slots of one slab of arena memory. Every method may be called from any thread, but not from ``__del__``.

    Args:
        arena: where the slab comes from: one allocation, reserved here and freed by :meth:`close`.
        classes: the size classes; none is allowed, then nothing can be leased.
        poison: for tests: fill a slot with 0xCB before it can be leased (again).
        name: for messages.

    Raises:
        MemoryLimitError: the slots do not fit the arena's limit.
        ValueError: a class has no slots, or its slot size is not a positive multiple of 4096.
    """

    def __init__(self, arena: Arena, classes: Sequence[SizeClass], *, poison: bool = False, name: str = "") -> None:
        for c in classes:
            if c.count < 1 or c.slot_nbytes < 1 or c.slot_nbytes % PAGE_NBYTES:
                raise ValueError(f"a size class needs slots of a positive multiple of {PAGE_NBYTES} bytes, got {c}")
        self.name = name or "staging"
        self._arena = arena
        self._poison = poison
        self._classes = tuple(sorted(classes, key=lambda c: c.slot_nbytes))
        self._slot_nbytes = [c.slot_nbytes for c in self._classes]
        self._nbytes_total = sum(c.nbytes for c in self._classes)
        self._slab: torch.Tensor | None = None
        self._free: list[list[Slot]] = [[] for _ in self._classes]
        if self._nbytes_total:
            self._slab = arena.allocate(self._nbytes_total, f"pool {self.name!r}")
            offset = 0
            for index, c in enumerate(self._classes):
                for _ in range(c.count):
                    # .data: a separate autograd version counter, so that a write to one slot does not look like a write
                    # to all the others.
                    slot = Slot(index, self._slab[offset : offset + c.slot_nbytes].data)
                    offset += c.slot_nbytes
                    self._free[index].append(slot)
            if poison:
                self._slab.fill_(POISON_BYTE)
                wait_for_device(self._slab)
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)  # a lease came back, or began to
        self._live: dict[Lease, None] = {}  # every lease that is neither RETURNED nor LOST, oldest first
        self._lost: list[Lease] = []
        self._pending: deque[tuple[DeviceEvent, Lease]] = deque()  # released, waiting for an event; oldest first
        self._waiters: list[_Waiter] = []
        self._closing = False
        self._nbytes_leased = 0
        self._nbytes_leased_peak = 0
        self._n_leases = 0
        self._n_waits = 0
        self._wait_ns = 0

    @property
    def largest_nbytes(self) -> int:
        """Bytes of the largest slot: the most that one lease can hold."""
        return max(self._slot_nbytes, default=0)

    def try_lease(self, nbytes: int, owner: str, purpose: str) -> Lease | None:
        """Return a lease on the smallest free slot that fits, or None. Never blocks.

        Slots whose event is done count as free. A larger class lends a slot only when the fitting one has none.

        Args:
            nbytes: bytes needed, at least 1.
            owner: whose bytes (a weight's or chunk's name), for messages.
            purpose: what for, for messages.

        Raises:
            ValueError: ``nbytes`` is not positive or larger than every class.
            LeaseError: the pool is closed.
        """
        home = self._home_class(nbytes)
        with self._lock:
            self._require_open()
            # Slots that are coming back may be of the fitting class: a larger one is lent when they are not.
            if self._free[home] or not self._pending:
                return self._lend_free(home, nbytes, owner, purpose)
        self._reap()
        with self._lock:
            return self._lend_free(home, nbytes, owner, purpose)

    def lease(self, nbytes: int, owner: str, purpose: str, *, urgent: bool = False, timeout_s: float = 600.0) -> Lease:
        """Return a lease, waiting for a slot if there is none: back-pressure.

        While it waits it looks after the events of slots that are coming back; where events are all that can bring a
        slot, it synchronizes with the oldest.

        Args:
            nbytes, owner, purpose: as for :meth:`try_lease`.
            urgent: a compute thread waits for these bytes: served before those who only read ahead.
            timeout_s: longest wait in seconds. A ``synchronize()`` of an event is not cut short.

        Raises:
            PoolTimeout: no slot came back in time; lists who has them.
            ValueError: ``nbytes`` is not positive or larger than every class.
            LeaseError: the pool is closed, or was while waiting.
        """
        lease = self.try_lease(nbytes, owner, purpose)
        if lease is not None:
            return lease
        t_start_ns = time.monotonic_ns()
        waiter = _Waiter(self._lock, self._home_class(nbytes), nbytes, owner, purpose, urgent)
        with self._lock:
            self._require_open()
            self._n_waits += 1
            lease = self._lend_free(waiter.home, nbytes, owner, purpose)  # one may have come back since the try
            if lease is not None:
                return lease
            self._waiters.append(waiter)
        try:
            return self._await_slot(waiter, timeout_s)
        except BaseException:
            # A slot may have been handed over just when the wait was given up.
            with self._lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
            if waiter.lease is not None:
                waiter.lease.release()
            raise
        finally:
            with self._lock:
                self._wait_ns += time.monotonic_ns() - t_start_ns

    def stats(self) -> PoolStats:
        """Return the pool's figures. Looks at events first, without blocking."""
        self._reap()
        with self._lock:
            return PoolStats(
                nbytes_total=self._nbytes_total,
                nbytes_leased=self._nbytes_leased,
                nbytes_leased_peak=self._nbytes_leased_peak,
                n_leases=self._n_leases,
                n_waits=self._n_waits,
                wait_ns=self._wait_ns,
                n_waiting=len(self._waiters),
                classes=tuple(
                    ClassStats(c.slot_nbytes, c.count, len(free))
                    for c, free in zip(self._classes, self._free, strict=True)
                ),
            )

    def drain(self, *, timeout_s: float = 600.0) -> None:
        """Wait until the slot of every released lease has returned. Held leases are not waited for.

        Raises:
            PoolTimeout: an I/O request did not end in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._reap()
            with self._lock:
                event = self._pending[0][0] if self._pending else None
                if event is None:
                    if all(lease.state is LeaseState.HELD for lease in self._live):
                        return
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0:
                        raise PoolTimeout(f"pool {self.name!r} did not drain in {timeout_s} s", self._holders(0))
                    self._settled.wait(left_s)
            if event is not None:
                event.synchronize()

    def assert_idle(self) -> None:
        """Raise :class:`PoolBusyError`, listing them, if leases are held, still coming back or lost. Does not wait."""
        self._reap()
        with self._lock:
            if self._live or self._lost:
                raise PoolBusyError(f"pool {self.name!r} should be idle", self._holders(0))

    def close(self, *, timeout_s: float = 600.0) -> None:
        """Refuse new leases, wake waiters, wait for returning slots and free the memory. Idempotent.

        Memory that a device may still touch is leaked on purpose: it stays mapped when the arena is closed, too.

        Raises:
            PoolBusyError: leases are held. The memory stays; release them and close again.
            PoolTimeout: an I/O request did not end in time. The memory stays, until it has ended and the pool is closed
                again.
        """
        with self._lock:
            self._closing = True
            for waiter in self._waiters:
                waiter.changed.notify()
        try:
            self.drain(timeout_s=timeout_s)
        except PoolTimeout:
            with self._lock:
                slab, owners = self._slab, self._owners([le for le in self._live if le.state is not LeaseState.HELD])
            if slab is not None:
                self._arena.keep(slab, owners)
            raise
        with self._lock:
            if self._live:
                raise PoolBusyError(f"pool {self.name!r} cannot be closed", self._holders(0))
            owners = self._owners(self._lost)
            slab, self._slab = self._slab, None
            for slots in self._free:
                slots.clear()
        if slab is not None and owners:
            self._arena.keep(slab, owners)
        elif slab is not None:
            self._arena.free(slab)

    # The leases' side: called by Lease only.

    def begin_return(self, lease: Lease, event: DeviceEvent | None) -> None:
        """HELD → RETURNING; with an event, the slot comes back when the event is done. This and the next three are the
        callbacks of a lease's release."""
        with self._lock:
            lease.require_held("it was released twice")
            lease._state = LeaseState.RETURNING
            if event is not None:
                self._pending.append((event, lease))
                for waiter in self._waiters:
                    waiter.changed.notify()
                self._settled.notify_all()

    def finish_return(self, lease: Lease) -> None:
        """HELD or RETURNING → RETURNED."""
        self._finish_returns((lease,))

    def lose(self, lease: Lease) -> None:
        """RETURNING → LOST: the device may touch the slot at any time."""
        with self._lock:
            lease._state = LeaseState.LOST
            del self._live[lease]
            self._lost.append(lease)
            self._settled.notify_all()

    def cancel_return(self, lease: Lease) -> None:
        """RETURNING → HELD: the wait before the return of the slot failed."""
        with self._lock:
            lease._state = LeaseState.HELD

    # Below: "locked" means that the caller holds the pool's lock.

    def _home_class(self, nbytes: int) -> int:
        if nbytes <= 0:
            raise ValueError(f"pool {self.name!r}: cannot lease {nbytes} bytes: at least 1 is needed")
        home = bisect_left(self._slot_nbytes, nbytes)
        if home == len(self._classes):
            raise ValueError(
                f"pool {self.name!r}: {nbytes} bytes are larger than every size class {self._slot_nbytes or '(none)'}"
            )
        return home

    def _require_open(self) -> None:
        if self._closing:
            raise LeaseError(f"pool {self.name!r} is closed")

    def _lend_free(self, home: int, nbytes: int, owner: str, purpose: str) -> Lease | None:
        """Make a lease on a slot of the smallest class from ``home`` on that has one; locked."""
        slot = next((free.pop() for free in self._free[home:] if free), None)
        return None if slot is None else self._lend(slot, nbytes, owner, purpose)

    def _lend(self, slot: Slot, nbytes: int, owner: str, purpose: str) -> Lease:
        """Make a lease on an unowned slot; locked."""
        lease = Lease(self, slot, slot.part(round_up(nbytes)), nbytes, owner, purpose)
        self._live[lease] = None
        self._n_leases += 1
        self._nbytes_leased += slot.tensor.numel()
        self._nbytes_leased_peak = max(self._nbytes_leased_peak, self._nbytes_leased)
        return lease

    def _hand_over(self, slot: Slot) -> None:
        """Give a slot to the waiter who comes first, or put it on the free list; locked. See [Note: hand-over]."""
        index = slot.class_index
        fitting = () if self._closing else [w for w in self._waiters if w.home <= index]
        if not fitting:
            self._free[index].append(slot)
            return
        waiter = min(fitting, key=lambda w: (not w.urgent, w.home != index))  # the first of equals: the oldest
        self._waiters.remove(waiter)
        waiter.lease = self._lend(slot, waiter.nbytes, waiter.owner, waiter.purpose)
        waiter.changed.notify()

    def _reap(self) -> None:
        """Take back the slots whose event is done."""
        with self._lock:
            if not self._pending:
                return
            states = [(event.query(), event, lease) for event, lease in self._pending]
            self._pending = deque((event, lease) for done, event, lease in states if not done)
        # Small slots first: a small request should not take a large slot when a small one comes back with it.
        self._finish_returns(sorted((le for done, _, le in states if done), key=lambda le: le.slot.class_index))

    def _finish_returns(self, leases: Sequence[Lease]) -> None:
        if self._poison:
            for lease in leases:
                lease.slot.tensor.fill_(POISON_BYTE)
            if leases:
                wait_for_device(leases[0].slot.tensor)  # see [Note: quiet device memory]
        with self._lock:
            for lease in leases:
                lease._state = LeaseState.RETURNED
                del self._live[lease]
                self._nbytes_leased -= lease.slot.tensor.numel()
                self._hand_over(lease.slot)
            self._settled.notify_all()

    def _await_slot(self, waiter: _Waiter, timeout_s: float) -> Lease:
        """Wait until ``waiter`` is handed a slot, possibly by this thread itself when it polls events."""
        deadline_s = time.monotonic() + timeout_s
        pause_s = _POLL_MIN_S
        while True:
            with self._lock:
                if waiter.lease is None:
                    self._require_open()
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0:
                        raise PoolTimeout(
                            f"pool {self.name!r}: no slot for {waiter.owner} ({waiter.purpose}, {waiter.nbytes} bytes) "
                            f"was returned within {timeout_s} s",
                            self._holders(waiter.home),
                        )
                    events = [event for event, lease in self._pending if lease.slot.class_index >= waiter.home]
                    n_busy = sum(lease.slot.class_index >= waiter.home for lease in self._live)
                    # Nothing but events can bring a slot: block in the oldest instead of looking again and again.
                    only_events = len(events) == n_busy
                    if not events:
                        waiter.changed.wait(left_s)
                    elif not only_events:
                        waiter.changed.wait(min(pause_s, left_s))
                if waiter.lease is not None:
                    return waiter.lease
            if events:
                if only_events:
                    events[0].synchronize()
                pause_s = min(2 * pause_s, _POLL_MAX_S)
                self._reap()

    def _holders(self, home: int) -> list[Holder]:
        """Holders of slots of the classes from ``home`` on, oldest first; locked."""
        now_ns = time.monotonic_ns()
        return [
            Holder(
                lease.owner,
                lease.purpose,
                lease.nbytes,
                lease.slot.tensor.numel(),
                (now_ns - lease.t_lease_ns) / 1e9,
                lease.state,
            )
            for lease in (*self._live, *self._lost)
            if lease.slot.class_index >= home
        ]

    def _owners(self, leases: Sequence[Lease]) -> str:
        """Owners of the bytes that a device may still access, "" for none."""
        if not leases:
            return ""
        first = f"pool {self.name!r}: {leases[0].owner} ({leases[0].purpose}, {leases[0].nbytes} bytes)"
        return first if len(leases) == 1 else f"{first} and {len(leases) - 1} more"
