# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.placement.gpu_policy import (
    LEAST_HEADROOM_NBYTES,
    chunks_to_release,
    gpu_budget,
    headroom,
)
from tencache_ds.placement.places import GpuUsage

GIB = 2**30


def usage(free: int, cached: int = 0, allocated: int = 0, peak: int = 0) -> GpuUsage:
    return GpuUsage(free * GIB, cached * GIB, allocated * GIB, max(peak, allocated) * GIB)


def test_an_automatic_budget_leaves_room_for_a_step_twice_as_large():
    # 10 GiB of activations: 130 are available, the step takes 10 of them, and 10 stay free.
    result = usage(free=120, cached=10, allocated=5, peak=15)
    assert gpu_budget(result, None).nbytes == 110 * GIB
    assert headroom(result) == 10 * GIB
    assert "10.00 GiB stay free" in gpu_budget(result, None).reason


def test_something_stays_free_beside_the_smallest_activations():
    assert gpu_budget(usage(free=8), None).nbytes == 8 * GIB - LEAST_HEADROOM_NBYTES
    assert gpu_budget(usage(free=0), None).nbytes == 0


def test_what_can_leave_takes_most_of_the_room_that_stays_free_of_the_rest():
    result = usage(free=120, cached=10, allocated=5, peak=25)  # 20 GiB of activations
    budget = gpu_budget(result, None, 0, 100 * GIB)
    assert budget.lasting_nbytes == gpu_budget(result, None).nbytes == 90 * GIB
    assert budget.nbytes == (110 - 2) * GIB, "all but a tenth of what a step takes"
    assert "2.00 GiB stay free" in budget.reason
    assert gpu_budget(result, None, 0, 5 * GIB).nbytes == 95 * GIB, "no more than has a place elsewhere"
    assert gpu_budget(result, None, 0, -GIB).nbytes == 90 * GIB
    assert gpu_budget(usage(free=30, peak=20), None, 0, 100 * GIB).lasting_nbytes == 0
    held = gpu_budget(usage(free=10, allocated=20, peak=28), None, 7 * GIB)
    assert (held.nbytes, held.lasting_nbytes) == (7 * GIB, GIB), "what is there already counts"
    wanted = gpu_budget(result, 50 * GIB, 0, 5 * GIB)
    assert wanted.nbytes == wanted.lasting_nbytes == 50 * GIB


def test_state_takes_nothing_that_the_allocator_has_held():
    step = {"free": 40, "cached": 5, "allocated": 10, "peak": 15}  # 5 GiB of activations
    held = GpuUsage(*(step[name] * GIB for name in step), pool_nbytes=15 * GIB)
    assert gpu_budget(held, None, 0, 99 * GIB, 15 * GIB).nbytes == 39 * GIB
    assert gpu_budget(held, None, 0, 99 * GIB, 18 * GIB).nbytes == 36 * GIB, "before it had to free its cache"
    full = gpu_budget(held, None, 0, 99 * GIB, 60 * GIB)
    assert full.nbytes == full.lasting_nbytes == 35 * GIB
    assert gpu_budget(held, 37 * GIB, 0, 99 * GIB, 60 * GIB).nbytes == 37 * GIB, "the user knows better"


def test_a_figure_of_the_user_counts_as_far_as_a_step_leaves_it_free():
    result = usage(free=20, cached=2, allocated=5, peak=9)
    assert gpu_budget(result, 18 * GIB).nbytes == 18 * GIB
    assert gpu_budget(result, 19 * GIB).nbytes == 18 * GIB
    assert "18.00 GiB free" in gpu_budget(result, 19 * GIB).reason
    assert gpu_budget(result, 0).nbytes == 0


@given(st.lists(st.lists(st.integers(1, 100), max_size=6), max_size=4), st.data())
def test_what_leaves_is_enough_and_no_chunk_more(groups, data):
    counts = [data.draw(st.integers(0, len(group))) for group in groups]
    there = sum(sum(group[:count]) for group, count in zip(groups, counts, strict=True))
    wanted = data.draw(st.integers(0, 600))
    left = chunks_to_release(groups, counts, wanted)
    freed = there - sum(sum(group[:count]) for group, count in zip(groups, left, strict=True))
    assert freed >= min(wanted, there)
    if freed:
        last = max(index for index, (a, b) in enumerate(zip(counts, left, strict=True)) if a > b)
        first = min(index for index, (a, b) in enumerate(zip(counts, left, strict=True)) if a > b)
        assert freed - groups[first][left[first]] < wanted
        assert left[last + 1 :] == tuple(counts[last + 1 :])
    assert all(a <= b for a, b in zip(left, counts, strict=True))


def test_the_last_chunks_leave_first():
    assert chunks_to_release([[10, 10], [10, 10]], [2, 2], 15) == (2, 0)
    assert chunks_to_release([[10, 10], [10, 10]], [2, 2], 25) == (1, 0)
    assert chunks_to_release([[10]], [1], 0) == (1,)
    with pytest.raises(IndexError):
        chunks_to_release([], [1], 1)
