# SPDX-License-Identifier: Apache-2.0
"""How much memory training wants back, and when it gets along without."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.items import GpuUsage
from tencache_ds.planning.gpu_budget import LEAST_HEADROOM_NBYTES
from tencache_ds.planning.memory_watch import FIRST_PATIENCE, LONGEST_PATIENCE, RECORDED_STEPS, MemoryWatch

pytestmark = pytest.mark.timeout(60)

GIB = 2**30
TOTAL = 100 * GIB
LAYERS = (0, 2, 4, 6, 4, 2)
"""GiB that a pass has taken at each place; its peak, which nobody sees, is at 8."""


def usage(there: int, taken: float, peak: float = 0, n_flushes: int = 0) -> GpuUsage:
    allocated = there + int(taken * GIB)
    return GpuUsage(TOTAL - allocated, 0, allocated, max(allocated, there + int(peak * GIB)), n_flushes)


def one_pass(watch: MemoryWatch, there: int, growth: float = 1.0) -> int:
    """Returns the most that was asked for at any place."""
    watch.begin_pass(usage(there, 0))
    most = 0
    for taken in LAYERS:
        place = watch.next_place()
        if watch.recording:
            watch.record(usage(there, growth * taken).allocated_nbytes)
        most = max(most, watch.short_nbytes(usage(there, growth * taken), place))
    return most


def settled(there: int) -> MemoryWatch:
    watch = MemoryWatch()
    for step in range(RECORDED_STEPS):
        assert watch.recording
        one_pass(watch, there if step else 0)
        if step == 0:
            watch.settle(usage(0, 0, peak=8))
        watch.step_done(usage(there, 0, peak=8))
    assert not watch.recording
    return watch


def test_as_much_stays_free_as_the_recorded_step_took():
    assert settled(80 * GIB).headroom_nbytes == 8 * GIB
    watch = MemoryWatch()
    watch.settle(usage(0, 0))
    assert watch.headroom_nbytes == LEAST_HEADROOM_NBYTES


def test_a_pass_like_the_recorded_one_needs_nothing():
    watch = settled(84 * GIB)
    assert one_pass(watch, 84 * GIB) <= 0
    assert watch.short_nbytes(usage(84 * GIB, 0), None) <= 0


def test_a_pass_that_takes_three_times_as_much_is_seen_at_its_first_layers():
    watch = settled(84 * GIB)
    watch.begin_pass(usage(84 * GIB, 0))
    watch.next_place()
    short = watch.short_nbytes(usage(84 * GIB, 6), watch.next_place())
    # It is going to take 24 in all, 18 of them still to come, a tenth of it lost, and a quarter of 8 stays free: of 10.
    assert short == pytest.approx((1.1 * 18 + 2 - 10) * GIB, abs=GIB / 100)


def test_memory_found_by_flushing_is_asked_for_once():
    watch = settled(84 * GIB)
    assert watch.short_nbytes(usage(84 * GIB, 0, n_flushes=1), None) == 8 * GIB
    watch.step_done(usage(84 * GIB, 0, n_flushes=1))
    assert watch.short_nbytes(usage(84 * GIB, 0, n_flushes=1), None) <= 0


def quiet_steps(watch: MemoryWatch, there: int) -> tuple[int, int]:
    """Steps until something may come back, and how much."""
    for step in range(2 * LONGEST_PATIENCE):
        one_pass(watch, there)
        spare = watch.spare_nbytes()
        if spare:
            return step, spare
        watch.step_done(usage(there, 0))
    raise AssertionError("nothing ever comes back")


def test_what_comes_back_leaves_the_headroom_free_at_the_peak():
    watch = settled(84 * GIB)
    watch.released(40 * GIB)
    watch.step_done(usage(44 * GIB, 0))
    steps, spare = quiet_steps(watch, 44 * GIB)
    assert steps == FIRST_PATIENCE
    assert spare == (100 - 44 - 8 - 8) * GIB


def test_each_time_it_has_to_leave_again_it_stays_out_for_longer():
    watch, there, waited = settled(84 * GIB), 84 * GIB, []
    for _ in range(12):
        watch.released(40 * GIB)
        watch.step_done(usage(there - 40 * GIB, 0))
        steps, spare = quiet_steps(watch, there - 40 * GIB)
        waited.append(steps)
        there = there - 40 * GIB + spare
        watch.came_back()
        watch.step_done(usage(there, 0))
    assert waited == [min(FIRST_PATIENCE * 2**n, LONGEST_PATIENCE) for n in range(12)]


@given(st.integers(0, 95), st.floats(0.1, 4.0), st.integers(0, 40))
def test_what_comes_back_does_not_have_to_leave_in_a_pass_like_those_before(there, growth, steps):
    watch = settled(there * GIB)
    watch.released(1)
    watch.step_done(usage(there * GIB, 0))
    for _ in range(FIRST_PATIENCE):
        one_pass(watch, there * GIB, growth)
        assert watch.spare_nbytes() == 0
        watch.step_done(usage(there * GIB, 0))
    one_pass(watch, there * GIB, growth)
    spare = watch.spare_nbytes()
    if spare and growth <= 1:
        assert one_pass(watch, there * GIB + spare, growth) <= 0
