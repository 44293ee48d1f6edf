# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.placement.places import Place, StateCapacity, place_state, plan_state

pytestmark = pytest.mark.timeout(60)

G, H, N = Place.GPU, Place.HOST, Place.NVME
sizes = st.lists(st.integers(1, 2**40), max_size=40)


def in_host(nbytes: list[int], places: tuple[Place, ...]) -> int:
    return sum(each for each, place in zip(nbytes, places, strict=True) if place is H)


@given(sizes, st.integers(0, 2**45))
def test_the_budget_is_kept_and_used(nbytes: list[int], budget: int) -> None:
    places = place_state(nbytes, budget)
    used = in_host(nbytes, places)
    assert used <= budget
    if sum(nbytes) <= budget:
        assert used == sum(nbytes)
    else:
        assert budget - used < 2 * max(nbytes)


@given(st.integers(1, 60), st.integers(1, 2**30), st.integers(0, 2**36))
def test_equal_chunks_use_every_slot_and_are_spread_evenly(count: int, nbytes: int, budget: int) -> None:
    places = place_state([nbytes] * count, budget)
    stays = [index for index, place in enumerate(places) if place is H]
    assert len(stays) == min(count, budget // nbytes) or len(stays) + 1 == min(count, budget // nbytes)
    gaps = {right - left for left, right in pairwise(stays)}
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert not stays or stays[0] == 0


@given(sizes, st.integers(0, 2**45), st.integers(0, 2**45))
def test_more_memory_never_keeps_much_less(nbytes: list[int], budget: int, more: int) -> None:
    """Greedy, so a larger budget may be used a little less well, and never by more than two chunks."""
    less, larger = (in_host(nbytes, place_state(nbytes, each)) for each in (budget, budget + more))
    assert larger > less - 2 * max(nbytes, default=1)


def test_by_hand() -> None:
    assert place_state([], 0) == ()
    assert place_state([4, 4, 4], 12) == (H, H, H)
    assert place_state([4, 4, 4], 3) == (N, N, N)
    assert place_state([4] * 6, 12) == (H, N, H, N, H, N)
    assert place_state([4] * 6, 8) == (H, N, N, H, N, N)


def test_sub_groups() -> None:
    assert plan_state([[4, 4], [4, 2]], StateCapacity(14, 100), by_chunks=True) == ((H, H), (H, H))
    assert plan_state([[4, 4], [4, 2]], StateCapacity(14, 100), by_chunks=False) == (None, None)
    assert plan_state([[4, 4], [4, 2]], StateCapacity(13, 100), by_chunks=True) == ((H, N), (H, H))
    assert plan_state([[4, 4], [4, 2]], StateCapacity(0, 100), by_chunks=True) == ((N, N), (N, N))
    assert plan_state([[4, 4], [4, 2]], StateCapacity(8, 100), by_chunks=False) == (None, (N, N))
    assert plan_state([[4, 4], [4, 2]], StateCapacity(7, 100), by_chunks=False) == ((N, N), None)
    assert plan_state([[], []], StateCapacity(0, 100), by_chunks=True) == ((), ())


def test_what_fits_nowhere_else_goes_to_the_gpu_from_the_front() -> None:
    groups = [[4] * 4, [4] * 4]
    assert plan_state(groups, StateCapacity(8, 24, 100), by_chunks=True) == ((G, G, H, N), (N, H, N, N))
    assert plan_state(groups, StateCapacity(8, 32, 100), by_chunks=True) == ((H, N, N, N), (H, N, N, N))
    assert plan_state(groups, StateCapacity(0, 0, 100), by_chunks=True) == ((G,) * 4, (G,) * 4)
    # Where that is not enough either, it is for somebody else to say so.
    assert plan_state(groups, StateCapacity(0, 0, 8), by_chunks=True) == ((G, G, N, N), (N,) * 4)


def test_without_nvme_the_host_takes_the_rest() -> None:
    groups = [[4] * 4, [4] * 4]
    assert plan_state(groups, StateCapacity(32), by_chunks=True) == (None, None)
    assert plan_state(groups, StateCapacity(20), by_chunks=True) == (None, None)
    assert plan_state(groups, StateCapacity(20, gpu_nbytes=100), by_chunks=True) == ((G, G, G, H), (H,) * 4)
    assert plan_state(groups, StateCapacity(20, gpu_nbytes=100), by_chunks=False) == (None, None)
    assert plan_state(groups, StateCapacity(20, gpu_nbytes=5), by_chunks=True) == ((G, H, H, H), (H,) * 4)


@given(st.lists(sizes, max_size=4), st.integers(0, 2**43), st.integers(0, 2**43), st.integers(0, 2**43))
def test_nothing_is_on_the_gpu_that_has_another_place(groups, host, nvme, gpu) -> None:
    places = plan_state(groups, StateCapacity(host, nvme, gpu), by_chunks=True)
    flat = [
        (each, place)
        for group, homes in zip(groups, places, strict=True)
        for each, place in zip(group, homes or [H] * len(group), strict=True)
    ]
    there = [each for each, place in flat if place is G]
    assert sum(there) <= gpu
    assert [place is G for _, place in flat] == [True] * len(there) + [False] * (len(flat) - len(there))
    largest = max((each for each, _ in flat), default=0)
    if there:
        assert sum(each for each, _ in flat) > host + max(nvme - 2 * largest, 0)
    full = len(there) == len(flat) or sum(there) + flat[len(there)][0] > gpu
    if not full:
        assert sum(each for each, place in flat if place is N) <= nvme
