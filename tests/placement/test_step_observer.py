# SPDX-License-Identifier: Apache-2.0
"""Which steps are timed, and which are recorded."""

from __future__ import annotations

import pytest

from tencache_ds.observability.counters import Counters
from tencache_ds.placement.step_observer import MOST_STEPS, StepObserver
from tencache_ds.profiling.fetch_waits import FetchRecorder

pytestmark = pytest.mark.timeout(60)


RECORD = Counters().step_done(0)


class Training:
    """Steps of the same passes, whose update takes half a second."""

    def __init__(self) -> None:
        self.recorder: FetchRecorder | None = None
        self.recorded: list[bool] = []
        self.observer = StepObserver(False, self.record_fetches)

    def record_fetches(self, recorder: FetchRecorder | None) -> None:
        self.recorder = recorder

    def step(self, seconds: float, *, update_seconds: float = 0.5) -> None:
        self.observer.begin_step(seconds)
        self.recorded.append(self.recorder is not None)
        if self.recorder is not None:
            self.recorder.before_fetch(waits=True)
            self.recorder.after_fetch({1: 100}, [1])
        self.observer.step_done(RECORD, seconds, update_seconds, 0.1)


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
    training.observer.step_done(RECORD, 1.0, 0.5, 0.1)
    assert not training.observer.has_enough
    assert training.recorder is None
    training.step(1.0)
    assert training.observer.has_enough
