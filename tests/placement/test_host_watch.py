# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.placement.memory_watch import FIRST_HOST_PATIENCE, HostWatch

pytestmark = pytest.mark.timeout(60)

GIB = 2**30


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
