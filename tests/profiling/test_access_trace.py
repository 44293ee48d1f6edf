# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.profiling.access_trace import RESYNC_WINDOW, AccessTrace

CYCLES = st.lists(st.integers(0, 8), min_size=1, max_size=30)


def play(trace: AccessTrace[int], cycle: list[int]) -> list[bool]:
    trace.begin_cycle()
    return [trace.access(item) for item in cycle]


def upcoming(trace: AccessTrace[int], *, wrap: bool = False) -> list[int]:
    """Items predicted next, repeats included, to the end of the cycle or once around."""
    end = trace.now + len(trace.order) if wrap else trace.cycle_end
    return [trace.item_at(place) for place in range(trace.now, end)]


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
    assert upcoming(trace) == cycle
    assert all(play(trace, cycle))
    assert trace.divergences == 0


@given(CYCLES, st.data())
def test_upcoming_is_what_follows(cycle, data):
    trace = AccessTrace(cycle)
    done = data.draw(st.integers(0, len(cycle)))
    for item in cycle[:done]:
        trace.access(item)
    assert upcoming(trace) == cycle[done:]
    assert upcoming(trace, wrap=True) == cycle[done:] + cycle[:done]


@given(CYCLES, st.data())
def test_the_next_use_is_found_in_this_cycle_or_a_later_one(cycle, data):
    trace = AccessTrace(cycle)
    for item in cycle[: data.draw(st.integers(0, len(cycle)))]:
        trace.access(item)
    item, skip = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 3))
    uses = [place for place in range(trace.now, trace.now + 5 * len(cycle)) if trace.item_at(place) == item]
    assert trace.next_use(item, skip=skip) == (uses[skip] if item in cycle else None)


@given(CYCLES, st.integers(1, 3))
def test_places_only_grow_and_stay_valid_from_cycle_to_cycle(cycle, repeats):
    trace = AccessTrace(cycle)
    epoch = trace.epoch
    for _ in range(repeats):
        trace.begin_cycle()
        for item in cycle:
            place = trace.next_use(item)
            assert place == trace.now
            assert trace.access(item)
            assert trace.now == place + 1
    assert trace.now == repeats * len(cycle)
    assert trace.epoch == epoch + 1  # the first cycle began before anything was recorded


@given(CYCLES, st.lists(st.integers(0, 9), max_size=40))
def test_places_grow_whatever_is_asked_for(cycle, accesses):
    trace = AccessTrace(cycle)
    for item in accesses:
        before, epoch = trace.now, trace.epoch
        at = [trace.item_at(place) for place in range(before, before + len(cycle))]
        known = item in cycle
        trace.access(item)
        assert trace.now > before if known else trace.now == before
        if trace.epoch == epoch:  # what was predicted for a place is still predicted for it
            assert at == [trace.item_at(place) for place in range(before, before + len(cycle))]


def test_what_stayed_on_the_device_is_remembered_for_each_use():
    trace = AccessTrace([1, 2, 2, 1])
    assert trace.is_held(0)  # nothing is known
    for _ in range(2):
        trace.begin_cycle()
        for item, held in ((1, False), (2, False), (2, True), (1, False)):
            trace.access(item, held=held)
    trace.begin_cycle()
    assert [trace.is_held(trace.now + index) for index in range(6)] == [False, False, True, False, False, False]


@given(CYCLES)
def test_a_prefix_does_not_replace_the_cycle(cycle):
    """A forward without a backward, as in an evaluation between steps."""
    trace = AccessTrace(cycle)
    for end in range(len(cycle) + 1):
        assert all(play(trace, cycle[:end]))
    assert all(play(trace, cycle))
    assert trace.order == tuple(cycle)


def play_on(trace: AccessTrace[int], accesses: list[int]) -> bool:
    """Whether each was the predicted one."""
    answers = [trace.access(item) for item in accesses]
    return all(answers)


def test_each_kind_of_pass_is_predicted_by_the_last_one_of_its_kind():
    trace: AccessTrace[int] = AccessTrace()
    training, evaluation = [1, 2, 3, 3, 2, 1], [1, 2, 3]

    def run(kind: str, accesses: list[int]) -> tuple[list[int], bool]:
        trace.begin_cycle(kind)
        predicted = list(trace.order)
        return predicted, play_on(trace, accesses)

    assert run("training", training) == ([], False)
    assert run("evaluation", evaluation) == (training, True), "nothing better is known"
    assert run("evaluation", evaluation) == (evaluation, True)
    assert trace.item_at(trace.now) == 1, "the next forward, not the backward that there is none of"
    assert run("training", training) == (training, True)
    assert run("training", training) == (training, True)
    assert run("evaluation", evaluation) == (evaluation, True)


@given(st.lists(st.tuples(st.sampled_from("ab"), CYCLES), max_size=8), CYCLES)
def test_passes_of_another_kind_change_nothing(others, cycle):
    trace: AccessTrace[int] = AccessTrace()
    trace.begin_cycle("mine")
    for item in cycle:
        trace.access(item)
    for kind, accesses in others:
        trace.begin_cycle(kind)
        before = trace.now
        for item in accesses:
            trace.access(item)
        assert trace.now >= before
    trace.begin_cycle("mine")
    assert trace.order == tuple(cycle)
    assert play_on(trace, cycle)


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
    assert upcoming(trace) == [4]
    assert trace.divergences == 1


def test_the_nearest_occurrence_ahead_is_taken():
    trace = AccessTrace([1, 2, 3, 2, 1, 5])
    trace.access(1)
    assert not trace.access(3)
    assert upcoming(trace) == [2, 1, 5]


def test_a_jump_back_is_found():
    trace = AccessTrace([1, 2, 3, 4])
    for item in (1, 2, 3):
        trace.access(item)
    assert not trace.access(1)
    assert upcoming(trace) == [2, 3, 4]


def test_an_item_beyond_the_window_is_found():
    length = 3 * RESYNC_WINDOW
    trace = AccessTrace(range(length))
    assert not trace.access(length - 2)
    assert upcoming(trace) == [length - 1]
    assert upcoming(trace, wrap=True)[:3] == [length - 1, 0, 1]


@given(CYCLES, CYCLES)
def test_after_any_divergence_two_equal_cycles_bring_it_back(first, second):
    trace = AccessTrace(first)
    play(trace, second)
    play(trace, second)
    before = trace.divergences
    assert all(play(trace, second))
    assert trace.divergences == before


def test_an_empty_trace_predicts_nothing():
    trace: AccessTrace[int] = AccessTrace()
    trace.begin_cycle()
    assert upcoming(trace) == upcoming(trace, wrap=True) == []
    assert trace.next_use(1) is None
    assert trace.order == ()
