# SPDX-License-Identifier: Apache-2.0
"""The pool: exact small cases, waiting and its order, many threads. Random histories: test_pool_machine.py."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tencache_ds.errors import MemoryLimitError, TenCacheError
from tencache_ds.memory import (
    BufferPool,
    ClassStats,
    HostArena,
    Lease,
    LeaseError,
    LeaseState,
    Locking,
    PoolBusyError,
    PoolTimeout,
)
from tencache_ds.memory.arena import POISON_BYTE
from tencache_ds.planning.size_classes import SizeClass

pytestmark = pytest.mark.timeout(60)

P = 4096
SMALL, LARGE = P, 4 * P


class ManualEvent:
    """An event that is done when the test, or whoever synchronizes, says so."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.n_synchronized = 0

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        self.n_synchronized += 1
        self.done.set()


class BlockingEvent(ManualEvent):
    """An event that only the test ends."""

    def synchronize(self) -> None:
        self.n_synchronized += 1
        if not self.done.wait(30):
            raise TimeoutError("nobody ended the event")


class BrokenEvent(ManualEvent):
    """What a CUDA event does after the device was lost."""

    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")


class ManualTicket(Future[None]):
    """A request that ends when the test says so."""

    given_up = False


class PoolFixture:
    def __init__(self, *classes: tuple[int, int], poison: bool = True) -> None:
        self.arena = HostArena(None, Locking.NONE)
        self.pool = BufferPool(self.arena, [SizeClass(*c) for c in classes], poison=poison, name="test")
        self.threads = ThreadPoolExecutor(16)

    def lease(self, nbytes: int, owner: str = "w", **kwargs: Any) -> Lease:
        return self.pool.lease(nbytes, owner, "read", **kwargs)

    def lease_in_thread(self, nbytes: int, owner: str, *, urgent: bool = False) -> Future[Lease]:
        """Start a lease that has to wait, and return when it does."""
        n_waiting = self.pool.stats().n_waiting
        future = self.threads.submit(self.lease, nbytes, owner, urgent=urgent, timeout_s=30.0)
        self.await_condition(lambda: self.pool.stats().n_waiting > n_waiting)
        return future

    def await_condition(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 20
        while not condition():
            if time.monotonic() > deadline_s:
                raise TimeoutError("the condition did not come true")
            time.sleep(0.001)

    def free(self) -> tuple[int, ...]:
        return tuple(c.free for c in self.pool.stats().classes)


@pytest.fixture
def make() -> Iterator[Callable[..., PoolFixture]]:
    pools: list[PoolFixture] = []

    def build(*args: Any, **kwargs: Any) -> PoolFixture:
        pools.append(PoolFixture(*args, **kwargs))
        return pools[-1]

    yield build
    for fixture in pools:
        fixture.threads.shutdown(wait=True)
        fixture.pool.close(timeout_s=5)
        assert fixture.arena.nbytes_in_use == 0
        fixture.arena.close()


Make = Callable[..., PoolFixture]


def test_all_slots_are_one_allocation(make: Make) -> None:
    f = make((LARGE, 2), (SMALL, 3))
    assert f.arena.by_purpose() == {"pool 'test'": 2 * LARGE + 3 * SMALL}
    stats = f.pool.stats()
    assert stats.nbytes_total == 2 * LARGE + 3 * SMALL
    assert stats.classes == (ClassStats(SMALL, 3, 3), ClassStats(LARGE, 2, 2))


def test_buffers_are_aligned_private_and_rounded_up(make: Make) -> None:
    f = make((SMALL, 3), (LARGE, 3))
    leases = [f.lease(n) for n in (1, SMALL, 100, P + 1, 2 * P, LARGE)]
    assert [lease.buffer.numel() for lease in leases] == [P, P, P, 2 * P, 2 * P, LARGE]
    for i, lease in enumerate(leases):
        assert lease.buffer.data_ptr() % P == 0
        lease.buffer.fill_(i)
    assert all(bool((lease.buffer == i).all()) for i, lease in enumerate(leases))
    for lease in leases:
        lease.release()


def test_view_has_the_dtype_and_shares_the_memory(make: Make) -> None:
    f = make((SMALL, 1))
    with f.lease(100) as lease:
        view = lease.view(torch.float32, 25)
        assert view.shape == (25,)
        view.fill_(1.0)
        assert lease.view(torch.int32, 1).item() == 0x3F800000
        assert lease.view(torch.bfloat16, 0).numel() == 0
        with pytest.raises(ValueError, match="4100 bytes, the lease has 4096"):
            lease.view(torch.float32, 1025)
        with pytest.raises(ValueError, match="-4 bytes"):
            lease.view(torch.float32, -1)


def test_views_are_made_once_for_a_slot_and_a_layout(make: Make) -> None:
    f = make((LARGE, 1))
    made: list[int] = []

    def halves(buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        made.append(buffer.numel())
        return {"first": buffer[: P // 2], "second": buffer[P // 2 : P].view(torch.float32)}

    with f.lease(P) as lease:
        views = lease.views("halves", halves)
        assert views["second"].data_ptr() == lease.buffer.data_ptr() + P // 2
        assert lease.views("halves", halves) is views
        assert lease.views("others", halves) is not views
    with f.lease(P - 1) as lease:
        assert lease.views("halves", halves) is views, "the same bytes of the same slot"
    with f.lease(2 * P) as lease:
        assert lease.views("halves", halves) is not views
        assert lease.buffer.numel() == 2 * P
    with f.lease(P) as lease:
        again = lease.views("halves", halves)
        assert lease.buffer.numel() == P
        assert again["first"].data_ptr() == lease.buffer.data_ptr()
    assert made == [P, P, 2 * P, P]
    with pytest.raises(LeaseError, match="views were requested after the lease was released"):
        lease.views("halves", halves)


def test_slots_do_not_share_autograd_versions(make: Make) -> None:
    f = make((SMALL, 2))
    with f.lease(P) as one, f.lease(P) as other:
        weight = one.view(torch.float32, 4).fill_(2.0)
        x = torch.ones(4, requires_grad=True)
        loss = (weight * x).sum()
        other.buffer.zero_()  # would fail backward if the slots shared a version counter
        loss.backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0] * 4


def test_a_larger_class_helps_out_only_when_the_fitting_one_is_empty(make: Make) -> None:
    f = make((SMALL, 1), (LARGE, 1))
    first = f.lease(10)
    assert f.free() == (0, 1)
    second = f.lease(10)
    assert f.free() == (0, 0)
    assert f.pool.try_lease(10, "w", "read") is None
    first.release()
    assert f.pool.try_lease(LARGE, "w", "read") is None
    second.release()
    assert f.free() == (1, 1)


def test_leaving_the_block_releases_once(make: Make) -> None:
    f = make((SMALL, 1))
    with f.lease(10) as lease:
        assert lease.state is LeaseState.HELD
    assert lease.state is LeaseState.RETURNED
    with f.lease(10) as lease:
        lease.release()
    event = ManualEvent()
    with f.lease(10) as lease:
        lease.release_after(event)
    assert lease.state is LeaseState.RETURNING
    assert f.free() == (0,)
    event.done.set()
    assert f.free() == (1,)
    with pytest.raises(ZeroDivisionError), f.lease(10):
        raise ZeroDivisionError
    f.pool.assert_idle()


def test_a_lease_that_was_given_back_is_of_no_use(make: Make) -> None:
    f = make((SMALL, 1))
    lease = f.lease(10, "layer.3.weight")
    lease.release()
    uses: list[Callable[[], object]] = [
        lease.release,
        lambda: lease.release_after(ManualEvent()),
        lambda: lease.release_with(ManualTicket()),
        lambda: lease.buffer,
        lambda: lease.view(torch.uint8, 1),
    ]
    for use in uses:
        with pytest.raises(LeaseError, match=r"layer\.3\.weight \(read\).*it is returned"):
            use()
    assert f.free() == (1,)


def test_a_slot_returns_with_its_ticket_whether_it_failed_or_not(make: Make) -> None:
    f = make((SMALL, 3))
    good = ManualTicket()
    bad = ManualTicket()
    over = ManualTicket()
    over.set_result(None)
    for ticket in (good, bad, over):
        f.lease(10).release_with(ticket)
    assert f.free() == (1,)
    good.set_result(None)
    bad.set_exception(OSError("disk"))
    assert f.free() == (3,)


def test_a_ticket_that_takes_no_callback_leaves_the_lease_held(make: Make) -> None:
    class Deaf:
        def add_done_callback(self, fn: Callable[[Any], None], /) -> None:
            raise RuntimeError("deaf")

    f = make((SMALL, 1))
    with f.lease(10) as lease:
        with pytest.raises(RuntimeError, match="deaf"):
            lease.release_with(Deaf())
        assert lease.state is LeaseState.HELD


def test_poison_shows_on_every_way_back(make: Make) -> None:
    f = make((SMALL, 1))
    event, ticket = ManualEvent(), ManualTicket()
    ends: list[tuple[Callable[[Lease], None], Callable[[], None]]] = [
        (lambda lease: lease.release(), lambda: None),
        (lambda lease: lease.release_after(event), event.done.set),
        (lambda lease: lease.release_with(ticket), lambda: ticket.set_result(None)),
    ]
    for give_back, end in ends:
        lease = f.lease(10)
        tensor = lease.buffer
        assert bool((tensor == POISON_BYTE).all())
        tensor.zero_()
        give_back(lease)
        if lease.state is LeaseState.RETURNING:
            assert not bool(tensor.any())  # its last reader still finds what it should
        end()
    with f.lease(10) as lease:
        assert bool((lease.buffer == POISON_BYTE).all())


def test_sizes_that_no_class_fits_are_errors(make: Make) -> None:
    f = make((SMALL, 1), (LARGE, 1))
    with pytest.raises(ValueError, match=rf"{LARGE + 1} bytes are larger than every size class \[4096, 16384\]"):
        f.lease(LARGE + 1)
    with pytest.raises(ValueError, match="at least 1"):
        f.pool.try_lease(0, "w", "read")
    with pytest.raises(ValueError, match=r"\(none\)"):
        make().lease(1)


@pytest.mark.parametrize("bad", [SizeClass(100, 1), SizeClass(0, 1), SizeClass(4096, 0)])
def test_classes_that_make_no_sense_are_errors(bad: SizeClass) -> None:
    with pytest.raises(ValueError, match="positive multiple of 4096"):
        BufferPool(HostArena(None, Locking.NONE), [bad])


def test_a_pool_over_the_arenas_limit_is_an_error() -> None:
    with pytest.raises(MemoryLimitError, match="pool 'weights' needs 8192"):
        BufferPool(HostArena(P, Locking.NONE), [SizeClass(P, 2)], name="weights")


def test_timeout_names_who_has_the_slots(make: Make) -> None:
    f = make((SMALL, 1), (LARGE, 2))
    small = f.lease(10, "layer.0.bias")
    one, two = f.lease(LARGE, "layer.1.weight"), f.lease(2 * P, "layer.2.weight")
    ticket = ManualTicket()
    two.release_with(ticket)
    t_start_s = time.monotonic()
    with pytest.raises(PoolTimeout) as caught:
        f.lease(LARGE, "layer.3.weight", timeout_s=0.05)
    assert 0.05 <= time.monotonic() - t_start_s < 10
    assert isinstance(caught.value, TenCacheError)
    assert [(h.owner, h.state) for h in caught.value.holders] == [
        ("layer.1.weight", LeaseState.HELD),
        ("layer.2.weight", LeaseState.RETURNING),
    ]
    for part in ("layer.3.weight", "0.05 s", "layer.1.weight (read)", "layer.2.weight", "returning"):
        assert part in str(caught.value)
    assert "layer.0.bias" not in str(caught.value)  # its slot could not help
    stats = f.pool.stats()
    assert (stats.n_waits, stats.n_waiting) == (1, 0)
    assert stats.wait_ns >= 50_000_000
    ticket.set_result(None)
    small.release()
    one.release()
    f.pool.assert_idle()


def test_with_nothing_but_events_the_oldest_is_synchronized(make: Make) -> None:
    f = make((SMALL, 2))
    events = [ManualEvent(), ManualEvent()]
    for event in events:
        f.lease(10).release_after(event)
    lease = f.lease(10)
    assert [event.n_synchronized for event in events] == [1, 0]
    assert f.free() == (0,)
    lease.release()
    events[1].done.set()


def test_events_of_slots_too_small_are_left_alone(make: Make) -> None:
    f = make((SMALL, 1), (LARGE, 1))
    small, large = ManualEvent(), ManualEvent()
    f.lease(10).release_after(small)
    f.lease(LARGE).release_after(large)
    f.lease(LARGE).release()
    assert (small.n_synchronized, large.n_synchronized) == (0, 1)
    small.done.set()


def test_while_a_slot_is_held_events_are_polled_and_not_blocked_in(make: Make) -> None:
    f = make((SMALL, 2))
    held, event = f.lease(10), BlockingEvent()
    f.lease(10).release_after(event)
    waiting = f.lease_in_thread(10, "waiter")
    held.release()  # this one comes back first
    waiting.result(20).release()
    assert event.n_synchronized == 0
    held = f.lease(10)
    waiting = f.lease_in_thread(10, "waiter")
    event.done.set()
    waiting.result(20).release()
    held.release()


def test_a_waiter_hears_of_a_slot_that_is_given_back_with_an_event(make: Make) -> None:
    f = make((SMALL, 1))
    held, event = f.lease(10), BlockingEvent()
    waiting = f.lease_in_thread(10, "waiter")
    held.release_after(event)
    f.await_condition(lambda: event.n_synchronized == 1)
    event.done.set()
    waiting.result(20).release()


def test_an_event_that_fails_is_raised_and_loses_no_slot(make: Make) -> None:
    f = make((SMALL, 1))
    event = BrokenEvent()
    f.lease(10).release_after(event)
    with pytest.raises(RuntimeError, match="launch failure"):
        f.lease(10)
    assert f.pool.stats().n_waiting == 0
    event.done.set()
    f.lease(10).release()


def test_urgent_waiters_go_first_and_others_in_order(make: Make) -> None:
    f = make((SMALL, 1))
    held = f.lease(10)
    order: list[str] = []
    futures = [f.lease_in_thread(10, name, urgent=name[0] == "u") for name in ("a", "b", "u1", "c", "u2")]
    for future in futures:
        future.add_done_callback(lambda done: (order.append(done.result().owner), done.result().release()))
    held.release()
    for future in futures:
        future.result(20)
    f.await_condition(lambda: len(order) == 5)
    assert order == ["u1", "u2", "a", "b", "c"]


def test_a_slot_goes_to_waiters_of_its_own_class_before_smaller_ones(make: Make) -> None:
    f = make((SMALL, 1), (LARGE, 1))
    small, large = f.lease(10), f.lease(LARGE)
    small_waiting = f.lease_in_thread(10, "small")
    large_waiting = f.lease_in_thread(LARGE, "large")
    large.release()
    got = large_waiting.result(20)
    assert not small_waiting.done()
    got.release()  # now nobody else wants it
    small_waiting.result(20).release()
    small.release()


def test_nobody_overtakes_a_waiter(make: Make) -> None:
    f = make((SMALL, 1))
    held = f.lease(10)
    waiting = f.lease_in_thread(10, "waiter")
    held.release()
    assert f.pool.try_lease(10, "late", "read") is None
    waiting.result(20).release()


def test_assert_idle_lists_what_is_out(make: Make) -> None:
    f = make((SMALL, 2))
    lease, event = f.lease(10, "layer.7"), ManualEvent()
    f.lease(10, "layer.8").release_after(event)
    with pytest.raises(PoolBusyError, match=r"(?s)layer\.7.*held.*layer\.8.*returning"):
        f.pool.assert_idle()
    lease.release()
    event.done.set()
    f.pool.assert_idle()


def test_statistics(make: Make) -> None:
    f = make((SMALL, 2), (LARGE, 1))
    one, two = f.lease(10), f.lease(LARGE)
    one.release()
    stats = f.pool.stats()
    assert (stats.nbytes_leased, stats.nbytes_leased_peak, stats.n_leases) == (LARGE, SMALL + LARGE, 2)
    assert (stats.n_waits, stats.wait_ns) == (0, 0)
    two.release()


def test_close_waits_for_what_is_coming_back(make: Make) -> None:
    f = make((SMALL, 2))
    event, ticket = ManualEvent(), ManualTicket()
    f.lease(10).release_after(event)
    f.lease(10).release_with(ticket)
    closing = f.threads.submit(f.pool.close)
    f.await_condition(lambda: event.n_synchronized == 1)
    assert not closing.done()
    assert f.arena.nbytes_in_use == 2 * SMALL
    ticket.set_result(None)
    closing.result(20)
    assert f.arena.nbytes_in_use == 0
    f.pool.close()
    with pytest.raises(LeaseError, match="closed"):
        f.lease(10)


def test_close_refuses_while_leases_are_held_and_wakes_who_waits(make: Make) -> None:
    f = make((SMALL, 1))
    held = f.lease(10, "layer.7")
    waiting = f.lease_in_thread(10, "waiter")
    with pytest.raises(PoolBusyError, match=r"layer\.7"):
        f.pool.close()
    with pytest.raises(LeaseError, match="closed"):
        waiting.result(20)
    held.buffer.zero_()  # the memory is still there
    held.release()
    f.pool.close()
    assert f.arena.nbytes_in_use == 0


def test_drain_gives_up_on_a_ticket_in_time(make: Make) -> None:
    f = make((SMALL, 2))
    ticket = ManualTicket()
    held = f.lease(10, "held")
    f.lease(10, "stuck").release_with(ticket)
    with pytest.raises(PoolTimeout, match="stuck"):
        f.pool.drain(timeout_s=0.05)
    ticket.set_result(None)
    f.pool.drain(timeout_s=5)
    held.release()


def test_a_slot_whose_request_was_given_up_is_nobodys_and_stays_mapped(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    f = make((SMALL, 2))
    ticket = ManualTicket()
    lease = f.lease(10, "layer.7")
    memory = lease.buffer
    lease.release_with(ticket)
    ticket.given_up = True
    ticket.set_result(None)
    assert lease.state is LeaseState.LOST
    assert f.free() == (1,)
    with pytest.raises(PoolBusyError, match=r"layer\.7.*lost"):
        f.pool.assert_idle()
    f.pool.drain(timeout_s=5)
    for _ in range(2):
        f.pool.close()
    f.arena.close()
    memory.fill_(1)
    assert f.arena.nbytes_in_use == 2 * SMALL
    (said,) = caplog.messages
    assert "8192 bytes of host memory" in said
    assert "pool 'test': layer.7 (read, 10 bytes)" in said
    for block in list(f.arena._blocks.values()):  # the device has answered after all
        f.arena.free(block.tensor)


def test_many_threads_never_share_a_slot(make: Make) -> None:
    f = make((SMALL, 3), (LARGE, 2))
    n_rounds = 120
    timers = ThreadPoolExecutor(4)

    def finish(lease_tensor: torch.Tensor, pattern: int, end: Callable[[], None], delay_s: float) -> None:
        """Read the slot once more, as a copy or a disk write would, and only then end the event or the request."""
        time.sleep(delay_s)
        intact = bool((lease_tensor == pattern).all())
        end()
        if not intact:
            raise ValueError("the slot was reused before its last reader was done")

    def work(seed: int) -> list[Future[None]]:
        rng = random.Random(seed)
        readers: list[Future[None]] = []
        for _ in range(n_rounds):
            nbytes = rng.choice([1, SMALL, P + 1, LARGE])
            lease = f.lease(nbytes, f"thread {seed}", urgent=rng.random() < 0.3, timeout_s=30)
            tensor = lease.buffer
            if not bool((tensor == POISON_BYTE).all()):
                raise ValueError("the slot is not fresh")
            pattern = rng.randrange(1, 200)
            tensor.fill_(pattern)
            match rng.randrange(3):
                case 0:
                    lease.release()
                case 1:
                    event = BlockingEvent()
                    lease.release_after(event)
                    readers.append(timers.submit(finish, tensor, pattern, event.done.set, rng.random() * 1e-3))
                case _:
                    ticket = ManualTicket()
                    lease.release_with(ticket)
                    end = lambda ticket=ticket: ticket.set_result(None)  # noqa: E731
                    readers.append(timers.submit(finish, tensor, pattern, end, rng.random() * 1e-3))
        return readers

    workers = [f.threads.submit(work, seed) for seed in range(8)]
    for worker in workers:
        for reader in worker.result(50):
            reader.result(50)
    timers.shutdown()
    f.pool.assert_idle()
    stats = f.pool.stats()
    assert stats.n_leases == 8 * n_rounds
    assert stats.nbytes_leased == 0
    assert f.free() == (3, 2)
