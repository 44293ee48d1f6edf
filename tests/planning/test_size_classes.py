# SPDX-License-Identifier: Apache-2.0
"""Size classes: exact small cases, then properties over random size distributions."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.errors import MemoryLimitError
from tencache_ds.layout import PAGE_NBYTES, round_up
from tencache_ds.planning.size_classes import SizeClass, plan_size_classes, smallest_budget_nbytes

pytestmark = pytest.mark.timeout(60)

P = PAGE_NBYTES
ITEMS = st.lists(st.integers(1, 40 * P), min_size=1, max_size=40)
MAX_WASTE = st.sampled_from([0.0, 0.05, 0.125, 0.5])
MAX_CLASSES = st.integers(1, 6)
MIN_COUNT = st.integers(1, 3)


def total_nbytes(classes: tuple[SizeClass, ...]) -> int:
    return sum(c.nbytes for c in classes)


def waste_of(item_nbytes: int, classes: tuple[SizeClass, ...]) -> float:
    nbytes = round_up(item_nbytes)
    slot_nbytes = min(c.slot_nbytes for c in classes if c.slot_nbytes >= nbytes)
    return (slot_nbytes - nbytes) / slot_nbytes


def total_waste(items: list[int], slots: tuple[int, ...]) -> int:
    return sum(min(s for s in slots if s >= round_up(i)) - round_up(i) for i in items)


def test_ample_budget_gives_every_item_its_slot() -> None:
    items = [1000, 10 * P, 10 * P, 40 * P]
    assert plan_size_classes(items, 1 << 30) == (SizeClass(P, 1), SizeClass(10 * P, 2), SizeClass(40 * P, 1))


def test_close_sizes_share_a_class() -> None:
    assert plan_size_classes([15 * P, 16 * P, 16 * P], 1 << 30) == (SizeClass(16 * P, 3),)
    assert plan_size_classes([14 * P, 16 * P], 1 << 30) == (SizeClass(16 * P, 2),)
    assert plan_size_classes([13 * P, 16 * P], 1 << 30) == (SizeClass(13 * P, 1), SizeClass(16 * P, 1))


def test_budget_is_shared_in_proportion_to_bytes() -> None:
    items = [P] * 100 + [10 * P] * 50
    classes = plan_size_classes(items, 300 * P)
    assert classes == (SizeClass(P, 50), SizeClass(10 * P, 25))


def test_leftover_goes_to_a_class_that_still_fits() -> None:
    items = [P] * 10 + [10 * P] * 10
    assert plan_size_classes(items, 39 * P) == (SizeClass(P, 9), SizeClass(10 * P, 3))


def test_no_items_need_no_memory() -> None:
    assert plan_size_classes([], 0) == ()
    assert smallest_budget_nbytes([]) == 0


@pytest.mark.parametrize(
    ("items", "kwargs", "named"),
    [
        ([0], {}, "item sizes"),
        ([P], {"max_waste": 1.0}, "max_waste"),
        ([P], {"max_classes": 0}, "max_classes"),
        ([P], {"min_count": 0}, "min_count"),
    ],
)
def test_arguments_out_of_range_are_named(items: list[int], kwargs: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        plan_size_classes(items, 1 << 30, **kwargs)


def test_a_large_model_is_planned_quickly() -> None:
    items = [P * (1 + (i * i) % 4001) for i in range(1500)]
    start_s = time.perf_counter()
    plan_size_classes(items, 1 << 30)
    assert time.perf_counter() - start_s < 2.0


@given(ITEMS, st.integers(0, 2000 * P), MAX_WASTE, MAX_CLASSES, MIN_COUNT)
def test_plan_fits_and_serves_every_item(
    items: list[int], budget_nbytes: int, max_waste: float, max_classes: int, min_count: int
) -> None:
    limits = {"max_waste": max_waste, "max_classes": max_classes, "min_count": min_count}
    smallest = smallest_budget_nbytes(items, **limits)
    if budget_nbytes < smallest:
        with pytest.raises(MemoryLimitError, match=r"tencache\.staging_memory") as caught:
            plan_size_classes(items, budget_nbytes, **limits)
        match = re.search(r"at least (\d+) bytes", str(caught.value))
        assert match is not None
        assert int(match[1]) == smallest
        return
    classes = plan_size_classes(items, budget_nbytes, **limits)
    assert total_nbytes(classes) <= budget_nbytes
    assert 1 <= len(classes) <= max_classes
    assert [c.slot_nbytes for c in classes] == sorted({c.slot_nbytes for c in classes})
    assert all(c.slot_nbytes % P == 0 for c in classes)
    floor_nbytes = 0
    for size_class in classes:
        n_items = sum(floor_nbytes < round_up(i) <= size_class.slot_nbytes for i in items)
        assert min(min_count, n_items) <= size_class.count <= n_items
        floor_nbytes = size_class.slot_nbytes
    assert max(round_up(i) for i in items) == classes[-1].slot_nbytes
    left_nbytes = budget_nbytes - total_nbytes(classes)
    if sum(c.count for c in classes) < len(items):
        full = plan_size_classes(items, 1 << 40, **limits)
        wanting = [f.slot_nbytes for f, c in zip(full, classes, strict=True) if c.count < f.count]
        assert min(wanting) > left_nbytes
    assert plan_size_classes(list(reversed(items)), budget_nbytes, **limits) == classes


@given(ITEMS, MAX_WASTE, MIN_COUNT)
def test_smallest_budget_is_tight(items: list[int], max_waste: float, min_count: int) -> None:
    smallest = smallest_budget_nbytes(items, max_waste=max_waste, min_count=min_count)
    plan = plan_size_classes(items, smallest, max_waste=max_waste, min_count=min_count)
    assert total_nbytes(plan) == smallest
    with pytest.raises(MemoryLimitError):
        plan_size_classes(items, smallest - 1, max_waste=max_waste, min_count=min_count)


@given(ITEMS, MAX_WASTE)
def test_waste_is_bounded_when_classes_allow(items: list[int], max_waste: float) -> None:
    classes = plan_size_classes(items, 1 << 40, max_waste=max_waste, max_classes=len(items))
    assert all(waste_of(i, classes) <= max_waste for i in items)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), MAX_CLASSES, MAX_WASTE)
def test_waste_is_the_least_of_all_partitions(pages: list[int], max_classes: int, max_waste: float) -> None:
    items = [p * P for p in pages]
    classes = plan_size_classes(items, 1 << 40, max_classes=max_classes, max_waste=max_waste)
    slots = tuple(c.slot_nbytes for c in classes)
    sizes = sorted(set(items))
    choices = [
        (*c, sizes[-1]) for k in range(min(max_classes, len(sizes))) for c in itertools.combinations(sizes[:-1], k)
    ]
    bounded = [c for c in choices if all(waste_of(i, tuple(SizeClass(s, 1) for s in c)) <= max_waste for i in items)]
    if bounded:
        fewest = min(len(c) for c in bounded)
        assert len(slots) == fewest
        assert slots in bounded
        choices = [c for c in bounded if len(c) == fewest]
    assert total_waste(items, slots) == min(total_waste(items, c) for c in choices)


@given(ITEMS, st.integers(0, 500 * P), st.integers(0, 50 * P), MAX_WASTE, MAX_CLASSES)
def test_more_budget_never_gives_fewer_bytes(
    items: list[int], over_nbytes: int, more_nbytes: int, max_waste: float, max_classes: int
) -> None:
    limits = {"max_waste": max_waste, "max_classes": max_classes}
    budget_nbytes = smallest_budget_nbytes(items, **limits) + over_nbytes
    small = plan_size_classes(items, budget_nbytes, **limits)
    large = plan_size_classes(items, budget_nbytes + more_nbytes, **limits)
    assert total_nbytes(small) <= total_nbytes(large)
