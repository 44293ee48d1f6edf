# SPDX-License-Identifier: Apache-2.0
"""Whether activations fit into GPU memory, in a model of one: nothing fails that would not fail without it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tencache_ds.placement.activation_policy import FIRST_PATIENCE, ActivationRoom, Cause
from tencache_ds.placement.places import GpuUsage

pytestmark = pytest.mark.timeout(60)

LAYERS = 20


@dataclass
class Step:
    """What a pass has come to.

    Attributes:
        cause: why its tensors were taken; None if they were not.
        moved: bytes that were moved.
        peak: bytes that it took.
        failed: whether that was more than there was.
    """

    cause: Cause | None
    moved: int = 0
    peak: int = 0
    failed: bool = False


class Training:
    """Passes of so many elements, each of which saves a byte per layer and takes ``beside`` bytes for the loss."""

    def __init__(self, capacity: int, *, beside: int = 0, fixed: int = 0) -> None:
        self.room = ActivationRoom()
        self.capacity, self.beside, self.fixed = capacity, beside, fixed
        self.there = self.peak = self.failures = 0
        self.releasable = 0
        self.small = 0  # per layer, what is saved and cannot be moved
        self.now_s = 0.0

    def usage(self, taken: int = 0) -> GpuUsage:
        allocated = self.there + taken
        self.peak = max(self.peak, min(allocated, self.capacity))
        return GpuUsage(max(self.capacity - allocated, 0), 0, allocated, self.peak, n_failures=self.failures)

    def step(self, elements: float, *, forwards: int = 1) -> Step:
        room = self.room
        room.begin_pass(self.usage(), elements, self.releasable)
        step = Step(room.cause)
        taken = self.fixed
        to_move = room.to_move_nbytes() if room.cause is not None else 0
        kept, planned = [], 0.0
        for forward in range(forwards):
            if forward:
                room.go_on(elements)
                step.cause = step.cause or room.cause
            for _ in range(LAYERS):
                taken += elements + self.small
                step.peak = max(step.peak, taken)
                if room.cause is None:
                    continue
                self.now_s += 0.001
                if room.saved(elements, self.now_s):
                    room.look(self.usage(taken), self.now_s, 1e-5)
                if planned < to_move or room.crowded:
                    planned += elements / room.growth
                    taken -= elements
                    step.moved += elements
                else:
                    kept.append(elements)
                    room.kept(elements)
                while room.excess_nbytes > 0 and kept:
                    nbytes = kept.pop(0)
                    taken -= nbytes
                    step.moved += nbytes
                    room.moved(nbytes)
        step.peak = max(step.peak, taken + self.beside)
        step.failed = self.there + step.peak > self.capacity
        self.failures += step.failed
        self.usage(min(step.peak, self.capacity - self.there))
        room.passed(self.usage())
        self.usage(taken=self.capacity - self.there)  # the optimizer may take what it likes
        if room.cause is not None and not step.failed:
            room.record(step.moved + sum(kept), 0)
        room.step_done()
        return step


def test_a_batch_that_fits_comfortably_is_watched_once_and_moves_nothing():
    training = Training(100, beside=5)
    steps = [training.step(0.5) for _ in range(20)]
    assert [step.cause for step in steps] == [Cause.UNKNOWN] + [None] * 19
    assert not any(step.moved for step in steps)


def test_a_batch_that_takes_more_than_an_eighth_is_moved_only_as_long_as_nothing_is_known():
    training = Training(100, beside=10)
    steps = [training.step(3) for _ in range(20)]
    assert steps[0].moved == 3 * LAYERS
    assert [(step.cause, step.moved) for step in steps[1:]] == [(None, 0)] * 19


def test_a_batch_that_would_not_fit_trains():
    training = Training(100, beside=20)
    steps = [training.step(10) for _ in range(60)]  # 200 bytes to save
    assert not any(step.failed for step in steps)
    assert steps[0].moved >= 120
    assert all(step.cause is Cause.SHORT for step in steps[1:])
    assert all(100 <= step.moved <= 160 for step in steps[1:]), "no more than has to"


def test_a_backward_that_takes_more_than_its_forward_showed_trains_from_the_first_step_on():
    training = Training(100, beside=80)
    steps = [training.step(2) for _ in range(20)]  # 40 bytes to save
    assert not any(step.failed for step in steps)
    assert steps[0].moved == 2 * LAYERS
    assert all(step.cause is Cause.SHORT for step in steps[1:])


def test_what_was_kept_for_a_while_does_not_hide_what_backward_takes():
    training = Training(100, beside=60)
    training.step(2)  # 12 bytes stay at first, and are moved before the peak
    assert training.room.expected_nbytes >= 2 * LAYERS + 60


def test_what_cannot_move_takes_the_place_of_what_had_stayed():
    training = Training(100, beside=20)
    training.small = 3
    steps = [training.step(4) for _ in range(5)]  # 80 bytes that can move, and 60 that cannot
    assert not any(step.failed for step in steps)
    assert 60 < steps[0].moved <= 80


def test_a_longer_input_is_recorded_before_it_is_trusted():
    training = Training(100)
    assert [training.step(n).cause for n in (2, 2, 1)] == [Cause.UNKNOWN, None, None]
    assert [training.step(n).cause for n in (3, 2, 3)] == [Cause.LARGER, None, None]
    steps = [training.step(12) for _ in range(3)]
    assert not any(step.failed for step in steps)
    assert all(step.moved for step in steps)


def test_what_had_to_move_stays_again_after_some_steps_and_after_twice_as_many_the_next_time():
    training = Training(100)
    for elements in (3, 3, 12):
        training.step(elements)

    def steps_until_it_stays() -> int:
        for n in range(10 * FIRST_PATIENCE):
            step = training.step(3)
            assert step.moved == 0
            if step.cause is None:
                return n
        raise AssertionError

    training.step(12)
    assert FIRST_PATIENCE - 1 <= steps_until_it_stays() <= FIRST_PATIENCE + 1
    assert not training.step(12).failed
    assert 2 * FIRST_PATIENCE - 1 <= steps_until_it_stays() <= 2 * FIRST_PATIENCE + 1


def test_less_free_memory_is_noticed_when_a_pass_begins():
    training = Training(100)
    for _ in range(3):
        training.step(3)
    training.there = 50
    step = training.step(3)
    assert step.cause is Cause.SHORT
    assert step.moved > 0
    assert not step.failed


def test_state_leaves_before_activations_do():
    training = Training(100)
    for _ in range(3):
        training.step(3)
    training.there = training.releasable = 50
    assert training.step(3).cause is None


def test_a_failed_allocation_that_the_script_survives_is_answered():
    training = Training(100, beside=10)
    for _ in range(3):
        training.step(4)
    training.beside = 25  # nothing that can be seen before it happens
    failed = training.step(4)
    assert failed.failed
    assert failed.cause is None
    step = training.step(4)
    assert (step.cause, step.failed) == (Cause.FAILED, False)
    assert step.moved > 0
    assert not any(training.step(4).failed for _ in range(40))


def test_two_forwards_before_a_backward_are_one_pass():
    training = Training(100)
    assert training.step(1, forwards=2).cause is Cause.UNKNOWN
    assert [training.step(1, forwards=2).cause for _ in range(3)] == [None] * 3
    step = training.step(2, forwards=2)  # the second one makes it larger than any before
    assert step.cause is Cause.LARGER
    assert training.step(2, forwards=2).cause is Cause.LARGER, "it was not recorded from its beginning"
    assert training.step(2, forwards=2).cause is None


def test_looks_are_rationed_by_time_and_never_far_apart_in_bytes():
    room = ActivationRoom()
    room.begin_pass(GpuUsage(3200, 0, 0, 0), 1)
    assert room.saved(1, 0.0)
    room.look(GpuUsage(3199, 0, 1, 1), 0.0, 1e-5)
    assert not any(room.saved(33, 0.001) for _ in range(3))
    assert room.saved(1, 0.001), "a 32nd of what was free"
    assert room.saved(1, 0.003), "some milliseconds later"


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@settings(deadline=None)
@given(SIZES, st.integers(0, 130), st.integers(0, 10))
def test_no_pass_fails_where_moving_can_prevent_it(sizes, beside, fixed):
    training = Training(200, beside=beside, fixed=fixed)
    for elements in sizes:
        assert not training.step(elements).failed


@settings(deadline=None)
@given(SIZES)
def test_what_would_fit_three_times_is_moved_in_the_first_pass_at_most(sizes):
    training = Training(3 * LAYERS * max(sizes))
    assert not any([training.step(elements).moved for elements in sizes][1:])


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 40), st.integers(0, 10))
def test_equal_passes_are_treated_alike_in_the_end(elements, beside, fixed):
    training = Training(200, beside=beside, fixed=fixed)
    steps = [training.step(elements) for _ in range(FIRST_PATIENCE * 8)]
    last = [(step.cause, step.moved) for step in steps[4:]]
    assert len(set(last)) == 1, "no thrashing"
