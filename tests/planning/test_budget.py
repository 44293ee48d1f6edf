# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.errors import ConfigError
from tencache_ds.layout import round_up
from tencache_ds.planning.budget import (
    AUTO_CHUNK_SLOTS,
    AUTO_HOST_SHARE,
    AUTO_WEIGHT_STAGING_NBYTES,
    MIN_CHUNK_SLOTS,
    RankMemory,
    plan_host_memory,
    plan_staging,
)
from tencache_ds.planning.size_classes import plan_size_classes
from tencache_ds.profiling.host import CoreQuota, MemoryDomain

PAGE = 4096
MIB = 2**20
GIB = 2**30
SHARDS = st.lists(st.one_of(st.integers(1, 40 * PAGE), st.integers(1, 600 * MIB)), max_size=14)
CHUNK = st.integers(1, 2**14).map(lambda pages: pages * PAGE)
CHUNKS = st.integers(1, 40)


CORES = tuple(range(16))


def memory(
    available_gib: float, machine: str = "a", group: tuple[str, float] | None = None, wanted: int | None = None
) -> RankMemory:
    """A rank on ``machine``, perhaps in a control group with its own limit, in GiB."""
    domains = [MemoryDomain(machine, "this machine", 2048 * GIB, int(available_gib * GIB))]
    if group is not None:
        name, left_gib = group
        domains.append(MemoryDomain(f"{machine}:{name}", f"control group {name}", 64 * GIB, int(left_gib * GIB)))
    return RankMemory(f"host-{machine}", wanted, tuple(domains), CORES)


def test_a_share_of_what_is_available() -> None:
    budget = plan_host_memory([memory(100)])
    assert budget.host_nbytes == 80 * GIB
    assert budget.reason == "80% of the 100.00 GiB that this machine has available"
    assert budget.local_ranks == (1,)
    assert budget.cores == (16,)
    assert budget.warning == ""


def test_the_users_figure_is_taken_as_it_is() -> None:
    budget = plan_host_memory([memory(1, wanted=5 * GIB), memory(1, wanted=5 * GIB)])
    assert (budget.host_nbytes, budget.reason) == (5 * GIB, "tencache.host_memory")
    assert budget.warning == ""


def test_ranks_of_one_container_share_its_limit() -> None:
    budget = plan_host_memory([memory(1900, group=("pod", 64))] * 4)
    assert budget.host_nbytes == int(64 * GIB * 0.8) // 4
    assert budget.reason == "80% of the 64.00 GiB that control group pod has available, divided by its 4 ranks"


def test_ranks_in_containers_of_their_own_share_the_machine_only() -> None:
    roomy = plan_host_memory([memory(1900, group=(name, 64)) for name in "pqrs"])
    assert roomy.host_nbytes == int(64 * GIB * 0.8)
    assert roomy.local_ranks == (4, 4, 4, 4)
    assert roomy.cores == (4, 4, 4, 4)
    crowded = plan_host_memory([memory(80, group=(name, 64)) for name in "pqrs"])
    assert crowded.host_nbytes == int(80 * GIB * 0.8) // 4
    assert "this machine" in crowded.reason


def test_ranks_of_one_container_share_its_quota_of_cores() -> None:
    quotas = (CoreQuota("pod", 6.0), CoreQuota("machine.slice", 100.0))
    ranks = [replace(memory(100), quotas=quotas)] * 3 + [memory(100)]
    assert plan_host_memory(ranks).cores == (2, 2, 2, 4)


def test_hosts_with_different_numbers_of_ranks_and_memory() -> None:
    budget = plan_host_memory([memory(100, "a"), memory(100, "b"), memory(90, "b"), memory(100, "b")])
    assert budget.local_ranks == (1, 3, 3, 3)
    assert budget.cores == (16, 5, 5, 5)
    assert budget.host_nbytes == int(90 * GIB * 0.8) // 3
    assert "the smallest figure of all ranks, that of rank 2 on host-b" in budget.reason


def test_the_user_may_name_another_share() -> None:
    ranks = [replace(memory(100), wanted_share=0.8)] * 2
    budget = plan_host_memory(ranks)
    assert budget.host_nbytes == 40 * GIB
    assert budget.reason == "80% of the 100.00 GiB that this machine has available, divided by its 2 ranks"
    assert budget.warning == ""
    assert "80% on rank 0 (host-a), automatic on rank 1" in plan_host_memory([ranks[0], memory(100)]).warning


def test_the_users_figures_that_differ_are_named() -> None:
    budget = plan_host_memory([memory(100, "a", wanted=7), memory(100, "b"), memory(100, "b", wanted=9)])
    assert budget.host_nbytes == 7
    for argv in ("7 bytes on rank 0 (host-a)", "automatic on rank 1 (host-b)", "9 bytes on rank 2", "same config"):
        assert argv in budget.warning


@given(
    st.lists(
        st.builds(
            memory,
            st.integers(0, 4000),
            st.sampled_from("ab"),
            st.none() | st.tuples(st.sampled_from("xy"), st.integers(0, 100)),
            st.none() | st.integers(0, 2**40),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_no_domain_is_planned_beyond_its_share(ranks: list[RankMemory]) -> None:
    budget = plan_host_memory(ranks)
    assert budget.host_nbytes <= min((rank.wanted_nbytes for rank in ranks if rank.wanted_nbytes), default=2**62)
    automatic = [rank for rank in ranks if rank.wanted_nbytes is None]
    for rank in automatic:
        for domain in rank.domains:
            sharers = sum(any(domain.identity == other.identity for other in one.domains) for one in automatic)
            assert budget.host_nbytes * sharers <= domain.available_nbytes * AUTO_HOST_SHARE


def least(shards: list[int], largest: int, chunks: int) -> int:
    """The minimum, as the error for a limit of nothing names it."""
    with pytest.raises(ConfigError) as caught:
        plan_staging(0, shards, largest, chunks)
    message = str(caught.value)
    assert '"tencache.staging_memory" is 0 bytes' in message
    assert '"tencache.chunk_size"' in message
    match = re.search(r"needs at least (\d+) per rank", message)
    assert match is not None
    return int(match.group(1))


def check(plan, shards, largest, chunks):
    """What holds for every plan: the parts add up, and the pools that the engine builds from it can be built."""
    assert plan.nbytes == plan.chunk_slots * plan.chunk_slot_nbytes + plan.weight_nbytes
    assert plan.chunk_slot_nbytes == largest
    assert min(MIN_CHUNK_SLOTS, chunks) <= plan.chunk_slots <= chunks
    classes = plan_size_classes([round_up(nbytes) for nbytes in shards], plan.weight_nbytes)
    assert sum(c.nbytes for c in classes) <= plan.weight_nbytes
    if shards:
        assert classes[-1].slot_nbytes >= round_up(max(shards))
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
    classes = plan_size_classes([round_up(nbytes) for nbytes in shards], 2**60)
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
