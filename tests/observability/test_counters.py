# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
import time
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.observability.counters import Access, Counters, Event, Link, Stall, StepRecord

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("moved"), st.sampled_from(Link), st.integers(0, 10**12)),
        st.tuples(st.just("accessed"), st.sampled_from(Access)),
        st.tuples(st.just("happened"), st.sampled_from(Event), st.integers(0, 5)),
        st.tuples(st.just("stall"), st.sampled_from(Stall)),
        st.tuples(st.just("step_done"), st.integers(0, 10**9)),
    ),
    max_size=40,
)


def carry_out(counters: Counters, operation: tuple) -> StepRecord | None:
    name, *arguments = operation
    result = getattr(counters, name)(*arguments)
    if name == "stall":
        with result:
            pass
    return result if name == "step_done" else None


@given(OPERATIONS)
def test_steps_sum_to_the_total(operations):
    counters = Counters()
    records = [record for operation in operations if (record := carry_out(counters, operation))]
    records.append(counters.step_done(0))
    total = counters.total()
    assert [record.step for record in records] == list(range(1, len(records) + 1))
    assert total.step == len(records)
    for name in ("nbytes", "accesses", "events"):
        totals = getattr(total, name)
        assert totals == {key: sum(getattr(record, name)[key] for record in records) for key in totals}
    for key, seconds in total.stall_seconds.items():
        assert seconds == pytest.approx(sum(record.stall_seconds[key] for record in records))
    assert total.update_seconds == pytest.approx(sum(record.update_seconds for record in records))
    assert total.seconds >= sum(record.seconds for record in records) - 1e-6
    assert counters.last_step == records[-1]


@given(OPERATIONS)
def test_counts_are_those_given(operations):
    counters = Counters()
    for operation in operations:
        carry_out(counters, operation)
    total = counters.total()
    for link in Link:
        assert total.nbytes[link.value] == sum(o[2] for o in operations if o[:2] == ("moved", link))
    for access in Access:
        assert total.accesses[access.value] == operations.count(("accessed", access))
    for event in Event:
        assert total.events[event.value] == sum(o[2] for o in operations if o[:2] == ("happened", event))


def test_every_name_is_there_before_anything_happened():
    total = Counters().total()
    assert list(total.nbytes) == [link.value for link in Link]
    assert list(total.stall_seconds) == [stall.value for stall in Stall]
    assert list(total.accesses) == [access.value for access in Access]
    assert list(total.events) == [event.value for event in Event]
    assert Counters().last_step is None


def test_threads_lose_nothing():
    counters = Counters()
    n_threads, n_rounds = 4, 500
    start = threading.Barrier(n_threads)

    def work() -> None:
        start.wait()
        for _ in range(n_rounds):
            counters.moved(Link.NVME_READ, 3)
            counters.accessed(Access.PREFETCHED)
            counters.happened(Event.DIVERGENCE)
            with counters.stall(Stall.BUFFER):
                pass

    threads = [threading.Thread(target=work) for _ in range(n_threads)]
    for thread in threads:
        thread.start()
    records = [counters.step_done(1) for _ in range(50)]
    for thread in threads:
        thread.join()
    records.append(counters.step_done(1))
    assert counters.total().nbytes["nvme_read"] == 3 * n_threads * n_rounds
    assert sum(record.nbytes["nvme_read"] for record in records) == 3 * n_threads * n_rounds
    assert sum(record.accesses["prefetched"] for record in records) == n_threads * n_rounds
    assert sum(record.events["divergence"] for record in records) == n_threads * n_rounds


def test_what_others_counted_belongs_to_the_step_under_way():
    counters, others = Counters(), Counters()
    counters.moved(Link.H2D, 5)
    counters.step_done(0)
    others.moved(Link.H2D, 7)
    others.accessed(Access.DEMAND)
    others.happened(Event.DIVERGENCE, 3)
    with others.stall(Stall.WRITE_BACK):
        time.sleep(0.002)
    counters.add(others)
    record = counters.step_done(0)
    assert record.nbytes[Link.H2D] == 7
    assert record.accesses[Access.DEMAND] == 1
    assert record.events[Event.DIVERGENCE] == 3
    assert record.stall_seconds[Stall.WRITE_BACK] > 0.001
    assert counters.total().nbytes[Link.H2D] == 12


def test_a_stall_is_timed_even_when_the_wait_fails():
    counters = Counters()

    def fail() -> None:
        with counters.stall(Stall.WEIGHT_READ):
            time.sleep(0.02)
            raise TimeoutError

    with pytest.raises(TimeoutError):
        fail()
    stalled = counters.step_done(5_000_000)
    assert 0.02 <= stalled.stall_seconds["weight_read"] <= stalled.seconds
    assert stalled.stall_seconds["optimizer_read"] == 0.0
    assert stalled.update_seconds == 0.005


def test_a_stall_shows_in_the_profiler():
    counters = Counters()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, counters.stall(Stall.WRITE_BACK):
        torch.ones(1)
    assert "tencache::wait::write_back" in {event.key for event in profile.key_averages()}


def test_a_record_does_not_change_afterwards():
    counters = Counters()
    record = counters.step_done(0)
    total = counters.total()
    counters.moved(Link.H2D, 7)
    assert record.nbytes["h2d"] == total.nbytes["h2d"] == 0
    with pytest.raises(FrozenInstanceError):
        record.step = 2


def counted(counters: Counters, n_steps: int, nbytes: int, during=lambda: None) -> None:
    """An update beside the training that reads."""

    def update() -> None:
        with counters.in_background(n_steps):
            counters.moved(Link.NVME_READ, nbytes)
            with counters.stall(Stall.OPTIMIZER_READ):
                time.sleep(0.002)
            during()

    thread = threading.Thread(target=update)
    thread.start()
    thread.join()


@pytest.mark.parametrize("returned_before", [True, False])
def test_an_update_beside_the_training_counts_for_its_own_step(returned_before):
    counters = Counters()
    for number in range(3):
        counters.moved(Link.NVME_READ, 1)
        with counters.stall(Stall.BUFFER):
            time.sleep(0.001)
        if returned_before:
            counters.step_done(10**9)
            counted(counters, number, 100, lambda: counters.moved(Link.H2D, 7))
        else:
            counted(counters, number, 100, lambda: counters.moved(Link.H2D, 7))
            counters.step_done(10**9)
        record = counters.last_step
        assert record.nbytes == {"h2d": 7, "d2h": 0, "nvme_read": 101, "nvme_write": 0}
        assert record.update_seconds == 1.0
        assert record.background_seconds >= record.background_stall_seconds[Stall.OPTIMIZER_READ] >= 0.002
        assert record.stall_seconds[Stall.OPTIMIZER_READ] == 0
        assert record.stall_seconds[Stall.BUFFER] >= 0.001
    total = counters.total()
    assert total.nbytes["nvme_read"] == 303
    assert total.background_stall_seconds[Stall.OPTIMIZER_READ] >= 0.006


def test_what_the_training_counts_meanwhile_is_the_next_steps():
    counters = Counters()
    counters.step_done(0)
    counted(counters, 0, 100, lambda: None)
    moved = threading.Thread(target=counters.moved, args=(Link.D2H, 5))
    counted(counters, 0, 0, lambda: (moved.start(), moved.join()))
    assert counters.last_step.nbytes["d2h"] == 0
    assert counters.step_done(0).nbytes["d2h"] == 5
