# SPDX-License-Identifier: Apache-2.0
"""How much memory training wants back, and when it gets along without."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.placement.memory_watch import (
    FIRST_HOST_PATIENCE,
    FIRST_PATIENCE,
    LONGEST_PATIENCE,
    HostWatch,
    MemoryWatch,
)
from tencache_ds.placement.places import GpuUsage

pytestmark = pytest.mark.timeout(60)

GIB = 2**30
TOTAL = 100 * GIB


def usage(there: int, peak: float, n_flushes: int = 0) -> GpuUsage:
    """Behind a step that took ``peak`` GiB beside the bytes that are there."""
    return GpuUsage(TOTAL - there, 0, there, there + int(peak * GIB), n_flushes)


def settled(headroom: int = 8) -> MemoryWatch:
    watch = MemoryWatch()
    watch.settle(headroom * GIB, usage(0, 0))
    return watch


def test_a_step_that_leaves_half_of_the_headroom_needs_nothing():
    watch = settled()
    assert watch.step_done(usage(84 * GIB, 8)) == 0
    assert watch.step_done(usage(84 * GIB, 12)) == 0


def test_the_headroom_is_restored_at_once():
    assert settled().step_done(usage(84 * GIB, 12.5)) == 4.5 * GIB
    assert settled().step_done(usage(84 * GIB, 20)) == 12 * GIB, "whatever made room within the step has gone back"


def test_memory_found_by_flushing_is_asked_for_once():
    watch = settled()
    assert watch.step_done(usage(84 * GIB, 0, n_flushes=1)) == 8 * GIB
    assert watch.step_done(usage(84 * GIB, 0, n_flushes=1)) == 0


def quiet_steps(watch: MemoryWatch, there: int, peak: float = 8) -> tuple[int, int]:
    """Steps until something may come back, and how much."""
    for step in range(1, 2 * LONGEST_PATIENCE):
        watch.step_done(usage(there, peak))
        spare = watch.spare_nbytes()
        if spare:
            return step, spare
    raise AssertionError("nothing ever comes back")


def disturbed(watch: MemoryWatch, there: int, peak: float = 16) -> None:
    """A step from which so much has come back that less is there."""
    watch.released()
    watch.step_done(usage(there, peak))
    assert watch.spare_nbytes() == 0


def test_nothing_comes_back_while_the_allocator_has_to_flush():
    """An H200 limited to 24 GiB had 6 GiB to spare at every peak, and lost 4 s when state took them."""
    watch = settled()
    for n_flushes in range(1, 4 * FIRST_PATIENCE):
        watch.step_done(usage(0, 60, n_flushes))
        assert watch.spare_nbytes() == 0
    for _ in range(FIRST_PATIENCE - 1):
        watch.step_done(usage(0, 60, n_flushes))
        assert watch.spare_nbytes() == 0
    watch.step_done(usage(0, 60, n_flushes))
    assert watch.spare_nbytes() == (100 - 60 - 8) * GIB


def test_what_comes_back_leaves_the_headroom_free_at_the_peak():
    watch = settled()
    disturbed(watch, 44 * GIB)
    steps, spare = quiet_steps(watch, 44 * GIB)
    assert steps == FIRST_PATIENCE
    assert spare == (100 - 44 - 8 - 8) * GIB


def test_each_time_it_has_to_leave_again_it_stays_out_for_longer():
    watch, there, waited = settled(), 84 * GIB, []
    for _ in range(12):
        disturbed(watch, there - 40 * GIB)
        steps, spare = quiet_steps(watch, there - 40 * GIB)
        waited.append(steps)
        there = there - 40 * GIB + spare
        watch.came_back()
        watch.step_done(usage(there, 0))
    assert waited == [min(FIRST_PATIENCE * 2**n, LONGEST_PATIENCE) for n in range(12)]


@given(st.integers(0, 95), st.lists(st.floats(0.0, 30.0), min_size=FIRST_PATIENCE, max_size=3 * FIRST_PATIENCE))
def test_what_comes_back_does_not_have_to_leave_in_a_step_like_those_before(there, peaks):
    watch = settled()
    disturbed(watch, there * GIB)
    window: list[float] = []
    for peak in peaks:
        watch.step_done(usage(there * GIB, peak))
        window.append(peak)
        spare = watch.spare_nbytes()
        if spare:
            watch.came_back()
            assert len(window) >= FIRST_PATIENCE
            assert watch.step_done(usage(there * GIB + spare, max(window))) == 0
            break
        if len(window) == FIRST_PATIENCE:
            window.clear()


def test_above_the_floor_nothing_has_to_leave():
    watch = HostWatch(100 * GIB, ranks=1)  # its floor is 3 GiB
    assert watch.short_nbytes(3 * GIB) == 0
    assert watch.short_nbytes(2 * GIB) == 4 * GIB
    assert HostWatch(100 * GIB, ranks=4).short_nbytes(2 * GIB) == GIB


def test_a_small_machine_has_a_small_floor():
    assert HostWatch(2 * GIB, ranks=1).short_nbytes(GIB // 4) == 0
    assert HostWatch(2 * GIB, ranks=1).short_nbytes(GIB // 4 - 1) > 0


def test_what_left_may_return_after_a_while_and_leaves_four_floors():
    watch = HostWatch(100 * GIB, ranks=2)
    watch.short_nbytes(GIB)
    watch.released()
    watch.step_done()
    for _ in range(FIRST_HOST_PATIENCE):
        assert watch.spare_nbytes() == 0
        assert watch.short_nbytes(40 * GIB) == 0
        watch.step_done()
    assert watch.spare_nbytes() == 14 * GIB
    assert watch.spare_nbytes() == 0


@given(st.integers(1, 2**42), st.integers(1, 16), st.lists(st.integers(0, 2**42), min_size=1, max_size=100))
def test_what_is_taken_again_does_not_have_to_leave_at_once(limit, ranks, available):
    watch = HostWatch(limit, ranks)
    for each in (min(each, limit) for each in available):
        if watch.short_nbytes(each):
            watch.released()
            watch.step_done()
            continue
        spare = watch.spare_nbytes()
        if spare:
            watch.came_back()
            assert watch.short_nbytes(each - ranks * spare) == 0
        watch.step_done()
