# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.planning.lookahead import GROWTH_PER_FETCH, CommitWindow, Reach, Walk, farthest_first
from tencache_ds.profiling.access_trace import AccessTrace

CYCLES = st.lists(st.integers(0, 6), min_size=1, max_size=16)


class Memory:
    """Room for a few items; reads are done at once."""

    def __init__(self, walk: Walk[int], room: int) -> None:
        self.walk = walk
        self.room = room
        self.items: set[int] = set()
        self.n_visits = 0

    def visit(self, item: int) -> bool:
        self.n_visits += 1
        if item not in self.items and len(self.items) == self.room:
            return False
        self.items.add(item)
        return True

    def drop(self, item: int) -> None:
        self.items.discard(item)
        self.walk.gone(item)


def test_the_nearest_are_read_and_the_walk_goes_on_where_it_stopped():
    trace = AccessTrace(range(10))
    walk = Walk(trace)
    memory = Memory(walk, room=3)
    walk.go(memory.visit, trace.cycle_end)
    assert memory.items == {0, 1, 2}
    for item in range(10):
        assert item in memory.items
        trace.access(item)
        memory.drop(item)
        walk.go(memory.visit, trace.cycle_end)
    assert memory.n_visits <= 10 + 10  # each place once, and one refusal per look


def test_what_left_memory_is_visited_again_for_its_next_use():
    trace = AccessTrace([1, 2, 3, 3, 2, 1])
    walk = Walk(trace)
    memory = Memory(walk, room=3)
    walk.go(memory.visit, trace.cycle_end)
    assert memory.items == {1, 2, 3}
    for item in (1, 2, 3, 3, 2, 1):
        assert item in memory.items
        trace.access(item)
        memory.drop(item)
        walk.go(memory.visit, trace.cycle_end)
    assert memory.items == set()


@given(CYCLES, st.integers(1, 8), st.integers(1, 3), st.booleans())
def test_nothing_is_missed_in_a_steady_cycle(cycle, room, repeats, wrap):
    """With any room, after the first item nothing is missing that there was room for: no use finds less than Belady."""
    trace = AccessTrace(cycle)
    walk = Walk(trace)
    memory = Memory(walk, room)
    for _ in range(repeats):
        trace.begin_cycle()
        for item in cycle:
            walk.go(memory.visit, trace.now + len(cycle) if wrap else trace.cycle_end)
            assert item in memory.items
            trace.access(item)
            memory.drop(item)


@given(CYCLES, st.lists(st.integers(0, 8), max_size=30), st.integers(1, 4))
def test_after_any_divergence_the_walk_is_near_again(cycle, accesses, room):
    trace = AccessTrace(cycle)
    walk = Walk(trace)
    memory = Memory(walk, room)
    for item in accesses:
        walk.go(memory.visit, trace.cycle_end)
        trace.access(item)
        for other in sorted(memory.items):
            memory.drop(other)
    walk.go(memory.visit, trace.cycle_end)
    if trace.now < trace.cycle_end:
        assert trace.item_at(trace.now) in memory.items


def test_the_end_of_the_pass_is_gone_beyond_only_when_asked():
    trace = AccessTrace([1, 2, 3])
    walk = Walk(trace)
    memory = Memory(walk, room=9)
    trace.begin_cycle()
    for item in (1, 2, 3):
        trace.access(item)
        memory.drop(item)
    walk.go(memory.visit, trace.cycle_end)
    assert memory.items == set()
    walk.go(memory.visit, trace.now + 3)  # after the update: the next pass
    assert memory.items == {1, 2, 3}
    n_visits = memory.n_visits
    trace.begin_cycle()
    walk.go(memory.visit, trace.cycle_end)
    assert memory.n_visits == n_visits  # nothing is looked at twice


def test_an_item_is_worth_keeping_if_it_is_needed_before_all_that_wait():
    trace: AccessTrace[int] = AccessTrace()
    for _ in range(2):
        trace.begin_cycle()
        for item in (1, 2, 3, 3, 2, 1):
            trace.access(item)
    trace.begin_cycle()
    walk = Walk(trace)
    walk.go(lambda item: True, trace.now + 5)  # as far as the second use of 2
    trace.access(1)
    trace.access(2)
    assert walk.worth_keeping(2)
    assert not walk.worth_keeping(1)
    assert walk.worth_keeping(3, skip=1)
    assert not walk.worth_keeping(3, skip=2)
    assert not walk.worth_keeping(99)
    trace.access(1)  # another place than predicted: nothing is known before the next walk
    trace.access(2)
    assert not walk.worth_keeping(3)


def test_an_item_that_stays_on_the_device_is_not_worth_keeping_besides():
    trace: AccessTrace[int] = AccessTrace()
    for _ in range(2):
        trace.begin_cycle()
        for item, held in ((1, False), (2, False), (2, True), (1, False)):
            trace.access(item, held=held)
    trace.begin_cycle()
    walk = Walk(trace)
    walk.go(lambda item: True, trace.cycle_end)
    trace.access(1)
    trace.access(2)
    assert not walk.worth_keeping(2)
    assert walk.worth_keeping(1)


@given(CYCLES, st.integers(0, 12), st.data())
def test_a_stretch_is_the_longest_within_its_limit(cycle, limit, data):
    trace = AccessTrace(cycle)
    reach = Reach(trace, lambda item: item, limit)
    for _ in range(2):
        trace.begin_cycle()
        for item in cycle:
            if data.draw(st.booleans()):
                sizes = [trace.item_at(place) for place in range(trace.now, trace.cycle_end)]
                longest = max(n for n in range(len(sizes) + 1) if sum(sizes[:n]) <= limit)
                assert reach.end() == trace.now + longest
            trace.access(item)


def test_the_window_opens_slowly_and_ends_with_the_bucket_or_the_memory():
    trace = AccessTrace(range(100))

    def ends(**limits: int) -> list[int]:
        trace.begin_cycle()
        window = CommitWindow(trace, lambda item: 10, lambda item: 5, **limits)
        distances = []
        for item in range(20):
            trace.access(item)
            distances.append(window.end() - trace.now)
        return distances

    grows = [GROWTH_PER_FETCH * fetch for fetch in range(1, 21)]
    assert ends(bucket_numel=75, read_ahead_nbytes=10**6) == [min(7, n) for n in grows]
    assert ends(bucket_numel=10**6, read_ahead_nbytes=61) == [min(6, n) for n in grows]
    assert ends(bucket_numel=9, read_ahead_nbytes=10**6) == [0] * 20


def test_the_window_opens_by_whole_modules_where_these_are_large():
    """A mixture of experts takes many weights with one fetch."""
    trace = AccessTrace(range(1000))
    trace.begin_cycle()
    window = CommitWindow(trace, lambda item: 1, lambda item: 1, bucket_numel=150, read_ahead_nbytes=10**6)
    distances = []
    for fetch in range(5):
        for item in range(64 * fetch, 64 * (fetch + 1)):
            trace.access(item)
        distances.append(window.end() - trace.now)
    assert distances == [2, 66, 130, 150, 150]


def test_all_ranks_have_the_same_window_whatever_their_reads_do():
    """The same accesses, with walks over memories of different sizes beside them."""
    results = []
    for room in (1, 3, 50):
        trace = AccessTrace(range(30))
        window = CommitWindow(trace, lambda item: item, lambda item: item, bucket_numel=60, read_ahead_nbytes=200)
        walk, ends = Walk(trace), []
        memory = Memory(walk, room)
        for item in (*range(5), *range(9, 20), 3, *range(4, 30), 77, 2):
            trace.access(item)
            ends.append(window.end() - trace.now)
            memory.drop(item)
            walk.go(memory.visit, trace.cycle_end)
        results.append(ends)
    assert results[0] == results[1] == results[2]


def test_the_farthest_next_use_is_given_up_first():
    """In backward the last weight registered is needed next; what nobody predicts goes before all others."""
    trace = AccessTrace([1, 2, 3, 4, 4, 3, 2, 1])
    for item in (1, 2, 3, 4):
        trace.access(item)
    assert farthest_first([1, 2, 3, 4, 9], trace.next_use) == [9, 1, 2, 3, 4]
    assert farthest_first([7, 8, 9], trace.next_use) == [9, 8, 7]


@pytest.mark.parametrize("n_items", [2_000, 10_000])
def test_a_look_costs_the_same_however_much_is_staged(n_items):
    """Everything is in memory, as with small weights and a large pool: a fetch used to walk all of it, in 6 ms."""
    order = [*range(n_items), *reversed(range(n_items))]
    trace = AccessTrace(order)
    walk = Walk(trace)
    window = CommitWindow(trace, lambda item: 1, lambda item: 1, bucket_numel=1500, read_ahead_nbytes=10**9)
    walk.go(lambda item: True, trace.now + len(order))
    n_visits = 0

    def visit(item: int) -> bool:
        nonlocal n_visits
        n_visits += 1
        return True

    n_fetches, seconds = 2_000, []
    for item in order[:n_fetches]:
        t_start = time.perf_counter()
        trace.access(item)
        window.end()
        walk.gone(item)
        walk.go(visit, trace.now + len(order))
        seconds.append(time.perf_counter() - t_start)
    assert n_visits <= 2 * n_fetches
    median_us = sorted(seconds)[n_fetches // 2] * 1e6
    print(f"{n_items} weights staged: {median_us:.1f} us per fetch")
    assert median_us < 100
