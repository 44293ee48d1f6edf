# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.errors import ConfigError
from tencache_ds.planning.budget import (
    AUTO_CHUNK_SLOTS,
    AUTO_WEIGHT_STAGING_NBYTES,
    MIN_CHUNK_SLOTS,
    plan_staging,
    resident_budget,
)
from tencache_ds.planning.chunks import align
from tencache_ds.planning.size_classes import plan_size_classes

PAGE = 4096
MIB = 2**20
SHARDS = st.lists(st.one_of(st.integers(1, 40 * PAGE), st.integers(1, 600 * MIB)), max_size=14)
CHUNK = st.integers(1, 2**14).map(lambda pages: pages * PAGE)
CHUNKS = st.integers(1, 40)


@given(st.none() | st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 16))
def test_resident_budget(host_memory, available, ranks):
    budget = resident_budget(host_memory, available, ranks)
    if host_memory is not None:
        assert budget == host_memory
    else:
        assert 0 <= budget * max(ranks, 1) <= available // 2
        assert budget >= available // 2 // max(ranks, 1) - 1


def least(shards: list[int], largest: int, chunks: int) -> int:
    """The minimum, as the error for a limit of nothing names it."""
    with pytest.raises(ConfigError) as caught:
        plan_staging(0, shards, largest, chunks)
    message = str(caught.value)
    assert '"tencache.staging_memory" is 0 bytes' in message
    assert '"tencache.chunk_size"' in message
    found = re.search(r"needs at least (\d+) per rank", message)
    assert found is not None
    return int(found.group(1))


def check(plan, shards, largest, chunks):
    """What holds for every plan: the parts add up, and the pools that the engine builds from it can be built."""
    assert plan.nbytes == plan.chunk_slots * plan.chunk_slot_nbytes + plan.weight_nbytes
    assert plan.chunk_slot_nbytes == largest
    assert min(MIN_CHUNK_SLOTS, chunks) <= plan.chunk_slots <= chunks
    classes = plan_size_classes([align(nbytes) for nbytes in shards], plan.weight_nbytes)
    assert sum(c.nbytes for c in classes) <= plan.weight_nbytes
    if shards:
        assert classes[-1].slot_nbytes >= align(max(shards))
        assert all(c.count >= 1 for c in classes)
    else:
        assert plan.weight_nbytes == 0


@given(SHARDS, CHUNK, CHUNKS)
def test_the_minimum_named_in_the_error_works_and_less_does_not(shards, largest, chunks):
    minimum = least(shards, largest, chunks)
    plan = plan_staging(minimum, shards, largest, chunks)
    assert plan.nbytes <= minimum
    check(plan, shards, largest, chunks)
    with pytest.raises(ConfigError, match=f"needs at least {minimum} "):
        plan_staging(minimum - 1, shards, largest, chunks)


@given(SHARDS, CHUNK, CHUNKS, st.integers(0, 2**33))
def test_a_plan_stays_within_its_limit(shards, largest, chunks, spare):
    limit = least(shards, largest, chunks) + spare
    plan = plan_staging(limit, shards, largest, chunks)
    assert plan.nbytes <= limit
    check(plan, shards, largest, chunks)


@given(SHARDS, CHUNK, CHUNKS)
def test_a_limit_without_end_stages_everything_and_no_more(shards, largest, chunks):
    plan = plan_staging(2**60, shards, largest, chunks)
    check(plan, shards, largest, chunks)
    assert plan.chunk_slots == chunks
    classes = plan_size_classes([align(nbytes) for nbytes in shards], 2**60)
    assert plan.weight_nbytes == sum(c.nbytes for c in classes)


@given(SHARDS, CHUNK, CHUNKS)
def test_automatic_is_bounded(shards, largest, chunks):
    plan = plan_staging(None, shards, largest, chunks)
    check(plan, shards, largest, chunks)
    assert plan.chunk_slots == min(AUTO_CHUNK_SLOTS, chunks)
    if shards:
        least_weights = least(shards, 0, 0)
        assert plan.weight_nbytes <= max(AUTO_WEIGHT_STAGING_NBYTES, least_weights)


@given(SHARDS.filter(bool))
def test_weights_only(shards):
    """No optimizer state on NVMe."""
    for limit in (None, least(shards, 0, 0), least(shards, 0, 0) + 5 * MIB):
        plan = plan_staging(limit, shards, 0, 0)
        assert plan.chunk_slots == 0
        assert plan.nbytes == plan.weight_nbytes
        check(plan, shards, 0, 0)


def test_nothing_stored_needs_nothing():
    assert plan_staging(None, [], 0, 0).nbytes == 0
    assert plan_staging(0, [], 0, 0).nbytes == 0


@pytest.mark.parametrize(
    "shards",
    [
        [8 * PAGE, 7 * PAGE],  # one class whose two slots are larger than the two weights
        [2000 * MIB, 2000 * MIB]
        + [448 * MIB] * 6
        + [128 * MIB] * 8,  # two of each class are more than two of the largest
    ],
    ids=["rounding", "classes"],
)
def test_models_whose_classes_need_more_than_their_two_largest_weights(shards):
    check(plan_staging(None, shards, MIB, 4), shards, MIB, 4)
