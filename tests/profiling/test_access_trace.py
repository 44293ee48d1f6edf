# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.profiling.access_trace import RESYNC_WINDOW, AccessTrace

CYCLES = st.lists(st.integers(0, 8), min_size=1, max_size=30)


def play(trace: AccessTrace[int], cycle: list[int]) -> list[bool]:
    trace.begin_cycle()
    return [trace.access(item) for item in cycle]


def unique(items: list[int]) -> list[int]:
    return list(dict.fromkeys(items))


@given(CYCLES, st.integers(1, 3))
def test_a_repeated_cycle_is_predicted_exactly(cycle, repeats):
    trace: AccessTrace[int] = AccessTrace()
    play(trace, cycle)
    assert trace.divergences == len(cycle)
    for _ in range(repeats):
        assert all(play(trace, cycle))
    assert trace.order == tuple(cycle)
    assert trace.divergences == len(cycle)


@given(CYCLES)
def test_the_guess_serves_until_a_cycle_is_recorded(cycle):
    trace = AccessTrace(cycle)
    assert list(trace.upcoming()) == unique(cycle)
    assert all(play(trace, cycle))
    assert trace.divergences == 0


@given(CYCLES, st.data())
def test_upcoming_is_what_follows(cycle, data):
    trace = AccessTrace(cycle)
    done = data.draw(st.integers(0, len(cycle)))
    for item in cycle[:done]:
        trace.access(item)
    assert list(trace.upcoming()) == unique(cycle[done:])
    assert list(trace.upcoming(wrap=True)) == unique(cycle[done:] + cycle[:done])
    limit = data.draw(st.integers(0, 10))
    assert list(trace.upcoming(limit)) == unique(cycle[done:])[:limit]
    assert list(trace.upcoming(limit, wrap=True)) == unique(cycle[done:] + cycle[:done])[:limit]


@given(CYCLES)
def test_a_prefix_does_not_replace_the_cycle(cycle):
    """A forward without a backward, as in an evaluation between steps."""
    trace = AccessTrace(cycle)
    for end in range(len(cycle) + 1):
        assert all(play(trace, cycle[:end]))
    assert all(play(trace, cycle))
    assert trace.order == tuple(cycle)


@given(CYCLES, CYCLES)
def test_another_cycle_replaces_it(first, second):
    trace: AccessTrace[int] = AccessTrace()
    play(trace, first)
    play(trace, second)
    trace.begin_cycle()
    assert trace.order == tuple(first if second == first[: len(second)] else second)


@given(st.integers(2, 60), st.data())
def test_a_skipped_item_costs_one_divergence(length, data):
    """Each item once, as in a forward pass: after the gap the rest is predicted again."""
    trace = AccessTrace(range(length))
    start = data.draw(st.integers(0, length - 2))
    stop = data.draw(st.integers(start + 1, length - 1))
    answers = play(trace, [*range(start), *range(stop, length)])
    assert trace.divergences == 1
    assert answers.index(False) == start
    assert sum(answers) == len(answers) - 1


def test_an_unknown_item_does_not_lose_the_place():
    trace = AccessTrace([1, 2, 3, 4])
    assert [trace.access(item) for item in (1, 99, 2, 3)] == [True, False, True, True]
    assert list(trace.upcoming()) == [4]
    assert trace.divergences == 1


def test_the_nearest_occurrence_ahead_is_taken():
    trace = AccessTrace([1, 2, 3, 2, 1, 5])
    trace.access(1)
    assert not trace.access(3)
    assert list(trace.upcoming()) == [2, 1, 5]


def test_a_jump_back_is_found():
    trace = AccessTrace([1, 2, 3, 4])
    for item in (1, 2, 3):
        trace.access(item)
    assert not trace.access(1)
    assert list(trace.upcoming()) == [2, 3, 4]


def test_an_item_beyond_the_window_is_found():
    length = 3 * RESYNC_WINDOW
    trace = AccessTrace(range(length))
    assert not trace.access(length - 2)
    assert list(trace.upcoming()) == [length - 1]
    assert list(islice(trace.upcoming(wrap=True), 3)) == [length - 1, 0, 1]


@given(CYCLES, CYCLES)
def test_after_any_divergence_two_equal_cycles_bring_it_back(first, second):
    trace = AccessTrace(first)
    play(trace, second)
    play(trace, second)
    before = trace.divergences
    assert all(play(trace, second))
    assert trace.divergences == before


def test_upcoming_looks_no_further_than_it_is_asked():
    class Counted:
        hashed = 0

        def __hash__(self) -> int:
            Counted.hashed += 1
            return id(self)

    trace = AccessTrace([Counted() for _ in range(10_000)])
    assert len(list(trace.upcoming(3, wrap=True))) == 3
    assert len(list(islice(trace.upcoming(), 2))) == 2
    assert Counted.hashed < 50


def test_upcoming_does_not_change_under_the_reader():
    trace = AccessTrace([1, 2, 3])
    ahead = trace.upcoming()
    assert next(ahead) == 1
    trace.access(1)
    trace.access(2)
    assert list(ahead) == [2, 3]


def test_an_empty_trace_predicts_nothing():
    trace: AccessTrace[int] = AccessTrace()
    trace.begin_cycle()
    assert list(trace.upcoming()) == list(trace.upcoming(wrap=True)) == []
    assert trace.order == ()
