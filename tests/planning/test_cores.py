# SPDX-License-Identifier: Apache-2.0
"""Cores per rank, with plain values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.planning.cores import block_nbytes, core_budget, cores_beside_training, lane_count

ALL = frozenset(range(32))


@pytest.mark.parametrize(
    ("own", "others", "cores"),
    [
        (ALL, [], 32),
        (ALL, [ALL], 16),  # the deepspeed launcher with two ranks, nothing set
        (ALL, [ALL] * 7, 4),
        (frozenset(range(16)), [frozenset(range(16, 32))], 16),  # --bind_cores_to_rank
        (frozenset(range(16)), [frozenset(range(8, 24))], 12),  # half of it shared
        (frozenset({0, 1}), [frozenset({0, 1})], 1),
        (frozenset({0}), [frozenset({0})] * 3, 1),
    ],
)
def test_a_core_is_divided_by_the_ranks_that_may_use_it(
    own: frozenset[int], others: list[frozenset[int]], cores: int
) -> None:
    assert core_budget(own, others) == cores


@pytest.mark.parametrize(
    ("quota", "sharers", "cores"), [(8.0, 1, 8), (8.0, 2, 4), (0.5, 1, 1), (64.0, 1, 32), (3.5, 1, 3)]
)
def test_a_control_groups_quota_counts_too(quota: float, sharers: int, cores: int) -> None:
    assert core_budget(ALL, [], [(quota, sharers)]) == cores
    assert core_budget(ALL, [], [(100.0, 1), (quota, sharers), (50.0, 1)]) == cores


@given(st.lists(st.frozensets(st.integers(0, 15), min_size=1), min_size=1, max_size=8))
def test_budgets_fit_the_cores_together(masks: list[frozenset[int]]) -> None:
    budgets = [core_budget(mask, masks[:i] + masks[i + 1 :]) for i, mask in enumerate(masks)]
    assert all(1 <= budget <= len(mask) for budget, mask in zip(budgets, masks, strict=True))
    floors = sum(budget for budget in budgets if budget > 1)
    assert floors <= len(frozenset().union(*masks))


@pytest.mark.parametrize(("cores", "lanes"), [(1, 8), (2, 8), (12, 12), (16, 16), (96, 32)])
def test_every_core_copies_where_files_are_in_memory(cores: int, lanes: int) -> None:
    assert lane_count(cores, in_memory=True) == lanes
    assert lane_count(cores, in_memory=False) == 8


def test_lanes_that_copy_ask_for_work_less_often() -> None:
    assert block_nbytes(in_memory=True) == 4 * block_nbytes(in_memory=False)


@pytest.mark.parametrize(("cores", "left"), [(1, 1), (2, 2), (3, 2), (7, 6), (8, 6), (16, 14), (96, 94)])
def test_update_and_copies_leave_cores_to_the_thread_that_feeds_a_gpu(cores: int, left: int) -> None:
    assert cores_beside_training(cores, on_gpu=True) == left
    assert cores_beside_training(cores, on_gpu=False) == cores
