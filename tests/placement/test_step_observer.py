# SPDX-License-Identifier: Apache-2.0
"""Which steps are timed, which are recorded, how many are observed, and what is typical of them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.observability.counters import Counters, Stall, StepRecord
from tencache_ds.placement.step_observer import LEAST_STEPS, MOST_STEPS, ObservedSteps, StepObserver, StepTimes
from tencache_ds.profiling.waits import FetchRecorder

pytestmark = pytest.mark.timeout(60)


RECORD = Counters().step_done(0)


class Training:
    """Steps of the same passes, whose update takes half a second."""

    def __init__(self) -> None:
        self.recorder: FetchRecorder | None = None
        self.recorded: list[bool] = []
        self.waited_seconds = 0.0
        self.observer = StepObserver(False, self.record_fetches, lambda: self.waited_seconds)
        self.observer.step_done(RECORD, RECORD, 1.0, 0.5, 0.1)  # which nobody observes

    def record_fetches(self, recorder: FetchRecorder | None) -> None:
        self.recorder = recorder

    def step(self, seconds: float, *, update_seconds: float = 0.5) -> None:
        self.observer.begin_step(seconds)
        self.recorded.append(self.recorder is not None)
        if self.recorder is not None:
            self.recorder.before_fetch(waits=True)
            self.recorder.after_fetch({1: 100}, [1])
        self.observer.step_done(RECORD, RECORD, seconds, update_seconds, 0.1)


def test_of_short_steps_the_last_is_recorded():
    training = Training()
    for n_steps in range(MOST_STEPS):
        assert not training.observer.has_enough, n_steps
        training.step(0.6)
    assert training.observer.has_enough
    assert training.recorded == [False] * (MOST_STEPS - 1) + [True]
    assert set(training.observer.waits()) == {1}


def test_of_long_steps_the_second_is_recorded():
    training = Training()
    training.step(30.0)
    training.step(30.0)
    assert training.observer.has_enough
    assert training.recorded == [False, True]


def test_a_step_that_takes_unexpectedly_long_is_followed_by_one_that_is_recorded():
    training = Training()
    for seconds in (1.0, 1.0, 20.0):
        training.step(seconds)
    assert not training.observer.has_enough, "nothing is recorded"
    training.step(20.0)
    assert training.observer.has_enough
    assert training.recorded == [False, False, False, True]


def test_a_recorded_step_counts_as_a_typical_one():
    training = Training()
    for seconds in (*[0.6] * (MOST_STEPS - 1), 0.7):
        training.step(seconds)
    assert training.observer.typical.passes == pytest.approx(0.1)
    assert training.observer.typical_share == pytest.approx(0.5)


def test_steps_that_were_skipped_or_not_observed_do_not_count():
    training = Training()
    for _ in range(MOST_STEPS - 1):
        training.step(1.0)
    training.step(1.0, update_seconds=0.0)
    training.observer.close()
    training.observer.step_done(RECORD, RECORD, 1.0, 0.5, 0.1)
    assert not training.observer.has_enough
    assert training.recorder is None
    training.step(1.0)
    assert training.observer.has_enough


def test_a_step_beside_no_update_does_not_count():
    training = Training()
    training.step(1.0, update_seconds=0.0)
    training.step(50.0)
    training.step(1.0)
    assert training.observer.typical.total == pytest.approx(1.0)


def with_update(background: float = 0.0, *, waited: float = 0.0, reads: tuple[float, float] = (0.0, 0.0)) -> StepRecord:
    """Figures of a step: seconds of its update behind the next pass, those that its passes waited for the one before,
    and those that its own waited for reads, before it returned and after that."""
    return dataclasses.replace(
        RECORD,
        stall_seconds=RECORD.stall_seconds | {Stall.UPDATE: waited, Stall.OPTIMIZER_READ: reads[0]},
        background_seconds=background,
        background_stall_seconds=RECORD.background_stall_seconds | {Stall.OPTIMIZER_READ: reads[1]},
    )


def test_the_update_beside_the_passes_is_that_of_the_step_before():
    training = Training()
    training.observer.begin_step(5.0)
    before, record = with_update(2.0, reads=(9.0, 1.5)), with_update(9.0, waited=0.75, reads=(0.125, 9.0))
    training.observer.step_done(record, before, 5.0, 0.25, 1.0)
    times = training.observer.typical
    assert times == StepTimes(1.0, 3.0, update=2.25, arithmetic=0.625, exposed=1.0)
    assert (times.passes, times.total, times.without_update) == (4.0, 5.0, 2.75)


def test_the_recorder_knows_what_is_waited_for_an_update():
    training = Training()
    for _ in range(MOST_STEPS):
        training.observer.begin_step(0.1)
        training.observer.step_done(RECORD, RECORD, 0.1, 0.1, 0.0)
    assert training.recorder is not None
    training.recorder.before_fetch(waits=True)
    training.waited_seconds = 60.0
    training.recorder.after_fetch({1: 100}, [1])
    assert training.observer.waits()[1].seconds == 0, "it has waited for nothing else"


SECONDS = st.floats(0, 100)
TIMES = st.builds(StepTimes, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)


def observed(*steps: StepTimes) -> ObservedSteps:
    """Adds one after another until they are enough."""
    all_of_them = ObservedSteps()
    for step in steps:
        assert not all_of_them.are_enough
        may_be_last = all_of_them.next_may_be_last
        all_of_them.add(step)
    assert may_be_last
    return all_of_them


def lasting(*seconds: float) -> list[StepTimes]:
    """Steps of a length, of which the passes take a second."""
    return [StepTimes(0.5, 0.5, 0.3, 0.1, total - 1.0) for total in seconds]


@given(st.lists(TIMES, min_size=MOST_STEPS, max_size=MOST_STEPS))
def test_they_end(steps):
    all_of_them = ObservedSteps()
    for n_steps, step in enumerate(steps, 1):
        all_of_them.add(step)
        assert not all_of_them.are_enough or n_steps >= LEAST_STEPS
    assert all_of_them.are_enough


@given(st.lists(TIMES, min_size=1))
def test_each_typical_time_is_one_that_as_many_steps_exceed_as_do_not_reach_it(steps):
    all_of_them = ObservedSteps()
    for step in steps:
        all_of_them.add(step)
    for field in dataclasses.fields(StepTimes):
        typical = getattr(all_of_them.typical, field.name)
        times = [getattr(step, field.name) for step in steps]
        assert sum(time < typical for time in times) <= len(times) / 2
        assert sum(time > typical for time in times) <= len(times) / 2
    assert all_of_them.last == steps[-1]


def test_of_short_steps_none_before_the_most_may_be_the_last():
    all_of_them = ObservedSteps()
    for n_steps in range(MOST_STEPS):
        assert all_of_them.next_may_be_last == (n_steps == MOST_STEPS - 1)
        all_of_them.add(StepTimes(0.1, 0.1, 0.1, 0.1, 0.1))
    assert all_of_them.next_may_be_last, "where another rank needs more"


def test_of_short_steps_the_most_are_observed():
    assert observed(*[StepTimes(0.2, 0.2, 0.3, 0.1, 0.2)] * MOST_STEPS).are_enough


@pytest.mark.parametrize(
    ("seconds", "passes"),
    [
        ((34.0, 34.0), (1.0, 1.0)),
        ((2.0, 2.1), (1.0, 1.0)),
        ((1.4, 1.5, 1.4), (1.0, 1.0, 1.0)),
        ((9.0, 5.0, 5.0), (1.0, 1.0, 1.0)),
        ((9.0, 7.0, 5.0, 4.0), (1.0, 1.0, 1.0, 1.0)),
        ((5.5, 5.4, 5.4), (2.5, 1.0, 0.9)),
    ],
    ids=["long", "two", "three", "faster_at_first", "faster_all_the_time", "passes_faster_at_first"],
)
def test_of_long_steps_fewer_are_enough_once_they_are_as_long_as_before(seconds, passes):
    steps = [
        StepTimes(0.0, of_passes, 0.3, 0.1, total - of_passes) for total, of_passes in zip(seconds, passes, strict=True)
    ]
    assert observed(*steps).are_enough


def test_a_disturbance_of_one_part_leaves_the_others_as_they_are():
    """Steps of 150 M parameters on an H100 with its state on a drive that faltered in the last one."""
    steps = observed(
        StepTimes(0.111, 0.114, 1.536, 0.05, 1.536),
        StepTimes(0.130, 0.247, 1.467, 0.06, 1.467),
        StepTimes(0.079, 0.141, 2.6, 0.05, 2.6),
    )
    assert steps.typical == StepTimes(0.111, 0.141, 1.536, 0.05, 1.536)
    assert steps.typical.total == pytest.approx(0.111 + 0.141 + 1.536)
