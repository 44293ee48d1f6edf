# SPDX-License-Identifier: Apache-2.0
"""Random histories of the pool against a small model: which class lends, when a slot is back, who is listed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tencache_ds.memory import BufferPool, HostArena, Lease, LeaseError, LeaseState, Locking, PoolBusyError, PoolTimeout
from tencache_ds.memory.arena import POISON_BYTE
from tencache_ds.planning.size_classes import SizeClass

P = 4096
CLASSES = (SizeClass(P, 2), SizeClass(3 * P, 2), SizeClass(6 * P, 1))
NBYTES = st.integers(1, 6 * P)
PICK = st.integers(0, 10**6)


class ManualEvent:
    """Done when the model fires it, or when the pool synchronizes."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


class ManualTicket:
    """A request that ends when the model says so."""

    def __init__(self) -> None:
        self.done = False
        self.given_up = False
        self.callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, fn: Callable[[Any], None], /) -> None:
        if self.done:
            fn(self)
        else:
            self.callbacks.append(fn)

    def end(self) -> None:
        self.done = True
        for fn in self.callbacks:
            fn(self)


@dataclass(eq=False, slots=True)
class Out:
    """What the model knows of a slot that is out."""

    lease: Lease
    tensor: torch.Tensor
    class_index: int
    pattern: int
    event: ManualEvent | None = None
    ticket: ManualTicket | None = None

    @property
    def held(self) -> bool:
        return self.event is None and self.ticket is None


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arena = HostArena(sum(c.nbytes for c in CLASSES), Locking.NONE)
        self.pool = BufferPool(self.arena, CLASSES, poison=True)
        self.out: list[Out] = []  # oldest lease first
        self.pending: list[Out] = []  # given back with an event, oldest return first
        self.gone: list[Lease] = []
        self.n_leases = 0

    # The model.

    def home(self, nbytes: int) -> int:
        return next(i for i, c in enumerate(CLASSES) if nbytes <= c.slot_nbytes)

    def n_free(self, index: int) -> int:
        return CLASSES[index].count - sum(o.class_index == index for o in self.out)

    def came_back(self, out: Out) -> None:
        self.out.remove(out)
        self.gone.append(out.lease)
        assert out.lease.state is LeaseState.RETURNED

    def model_reap(self) -> None:
        done = [o for o in self.pending if o.event is not None and o.event.done]
        self.pending = [o for o in self.pending if o not in done]
        for out in done:
            self.came_back(out)

    def expected_class(self, home: int) -> int | None:
        """The class that lends now, after the events that are done were looked at."""
        return next((i for i in range(home, len(CLASSES)) if self.n_free(i)), None)

    def took(self, lease: Lease, class_index: int, nbytes: int) -> None:
        assert lease.slot.class_index == class_index
        assert lease.buffer.numel() == -(-nbytes // P) * P
        assert bool((lease.slot.tensor == POISON_BYTE).all())
        self.n_leases += 1
        out = Out(lease, lease.buffer, class_index, self.n_leases % 200)
        out.tensor.fill_(out.pattern)
        self.out.append(out)

    def held_one(self, pick: int) -> Out:
        held = [o for o in self.out if o.held]
        return held[pick % len(held)]

    def only_events_can_help(self, home: int) -> bool:
        busy = [o for o in self.out if o.class_index >= home]
        return self.expected_class(home) is None and all(o.event is not None for o in busy)

    # What happens.

    @rule(nbytes=NBYTES)
    def try_lease(self, nbytes: int) -> None:
        home = self.home(nbytes)
        lease = self.pool.try_lease(nbytes, f"w{self.n_leases}", "read")
        if not self.n_free(home):
            self.model_reap()
        expected = self.expected_class(home)
        if expected is None:
            assert lease is None
        else:
            assert lease is not None
            self.took(lease, expected, nbytes)

    @rule(nbytes=NBYTES)
    def lease_what_events_bring(self, nbytes: int) -> None:
        home = self.home(nbytes)
        self.pool.stats()
        self.model_reap()
        if not self.only_events_can_help(home):
            return
        lease = self.pool.lease(nbytes, f"w{self.n_leases}", "read")
        oldest = next(o for o in self.pending if o.class_index >= home)
        assert oldest.event is not None
        assert oldest.event.done
        self.model_reap_one(oldest)
        self.took(lease, oldest.class_index, nbytes)

    def model_reap_one(self, out: Out) -> None:
        self.pending.remove(out)
        self.came_back(out)

    @rule(nbytes=NBYTES)
    def lease_in_vain(self, nbytes: int) -> None:
        home = self.home(nbytes)
        self.pool.stats()
        self.model_reap()
        if self.expected_class(home) is not None:
            return
        with pytest.raises(PoolTimeout) as caught:
            self.pool.lease(nbytes, "late", "read", timeout_s=0.0)
        assert [h.owner for h in caught.value.holders] == [o.lease.owner for o in self.out if o.class_index >= home]

    @precondition(lambda self: any(o.held for o in self.out))
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        out = self.held_one(pick)
        out.lease.release()
        self.came_back(out)

    @precondition(lambda self: any(o.held for o in self.out))
    @rule(pick=PICK, done=st.booleans())
    def release_after(self, pick: int, done: bool) -> None:
        out = self.held_one(pick)
        event = ManualEvent()
        event.done = done
        out.lease.release_after(event)
        out.event = event
        self.pending.append(out)

    @precondition(lambda self: any(o.held for o in self.out))
    @rule(pick=PICK, done=st.booleans())
    def release_with(self, pick: int, done: bool) -> None:
        out = self.held_one(pick)
        ticket = ManualTicket()
        ticket.done = done
        out.lease.release_with(ticket)
        if done:
            self.came_back(out)
        else:
            out.ticket = ticket

    @precondition(lambda self: bool(self.pending))
    @rule(pick=PICK)
    def event_ends(self, pick: int) -> None:
        event = self.pending[pick % len(self.pending)].event
        assert event is not None
        event.done = True

    @precondition(lambda self: any(o.ticket for o in self.out))
    @rule(pick=PICK)
    def request_ends(self, pick: int) -> None:
        reading = [o for o in self.out if o.ticket]
        out = reading[pick % len(reading)]
        assert out.ticket is not None
        out.ticket.end()
        self.came_back(out)

    @precondition(lambda self: bool(self.gone) or bool(self.pending))
    @rule(pick=PICK)
    def release_twice(self, pick: int) -> None:
        leases = self.gone + [o.lease for o in self.pending]
        with pytest.raises(LeaseError):
            leases[pick % len(leases)].release()

    @rule()
    def look(self) -> None:
        stats = self.pool.stats()
        self.model_reap()
        assert [c.free for c in stats.classes] == [self.n_free(i) for i in range(len(CLASSES))]
        assert stats.nbytes_leased == sum(CLASSES[o.class_index].slot_nbytes for o in self.out)
        assert stats.n_leases == self.n_leases
        assert stats.n_waiting == 0
        if self.out:
            with pytest.raises(PoolBusyError) as caught:
                self.pool.assert_idle()
            assert [h.owner for h in caught.value.holders] == [o.lease.owner for o in self.out]
        else:
            self.pool.assert_idle()

    @invariant()
    def every_reader_still_finds_its_bytes(self) -> None:
        for out in self.out:
            assert bool((out.tensor == out.pattern).all()), out.lease

    def teardown(self) -> None:
        for out in list(self.out):
            if out.held:
                out.lease.release()
            elif out.ticket:
                out.ticket.end()
        self.pool.close(timeout_s=1.0)  # synchronizes the events
        assert self.arena.nbytes_in_use == 0


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPoolMachine = pytest.mark.timeout(60)(PoolMachine.TestCase)
