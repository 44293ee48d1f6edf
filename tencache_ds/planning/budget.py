# SPDX-License-Identifier: Apache-2.0
"""How many bytes of host memory, GPU memory and scratch space a rank may use and needs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tencache_ds.errors import ConfigError
from tencache_ds.layout import gib
from tencache_ds.planning.cores import core_budget
from tencache_ds.planning.size_classes import plan_size_classes, smallest_budget_nbytes
from tencache_ds.profiling.host import CoreQuota, MemoryDomain

AUTO_HOST_SHARE = 0.8
"""Share of the available host memory for weights, gradients and optimizer state when the user names no budget. The rest
is left for staging, data loaders, the page cache and the program itself; where it is not enough for them, state leaves
(:mod:`tencache_ds.placement.memory_watch`)."""

AUTO_CHUNK_SLOTS = 12
"""Chunks in flight: enough for reads ahead and writes behind on every lane while one chunk is updated."""

MIN_CHUNK_SLOTS = 3
"""One chunk being read, one updated, one written: below that nothing overlaps."""

AUTO_WEIGHT_STAGING_NBYTES = 768 * 2**20
"""Weights read ahead. At 4 GB/s this is 0.2 s of reading, more than the compute time of a layer on current GPUs."""

UPDATE_STAGING_NBYTES = 256 * 2**20
"""Weights on their way to NVMe when none is read through host memory: enough to keep every lane writing."""

WRITES_BEHIND_NBYTES = 256 * 2**20
"""Bytes that may wait for their write at one time while there is no staging pool: of freshly initialised weights, above
all."""


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """Bytes of the staging pool and what they are for.

    Attributes:
        nbytes: size of the pool.
        chunk_slots: optimizer chunks that fit at the same time.
        chunk_slot_nbytes: bytes of one of them.
        weight_nbytes: the rest, for weights.
    """

    nbytes: int
    chunk_slots: int
    chunk_slot_nbytes: int
    weight_nbytes: int


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The host memory that one rank may use, as far as it knows.

    Attributes:
        host: name of its host, for messages.
        wanted_nbytes: the user's ``host_memory`` there in bytes, or None for a share.
        domains: the memory it shares with others: its machine's first, then that of its control groups.
        cores: numbers of the machine's cores that it may run on.
        quotas: of the time on them, which it shares with others.
        wanted_share: the user's ``host_memory`` as a share of the available memory, or None for automatic.
    """

    host: str
    wanted_nbytes: int | None
    domains: tuple[MemoryDomain, ...]
    cores: tuple[int, ...]
    quotas: tuple[CoreQuota, ...] = ()
    wanted_share: float | None = None


@dataclass(frozen=True, slots=True)
class HostBudget:
    """The decision that all ranks of a job make together about their host memory.

    Attributes:
        host_nbytes: host memory of each rank for weights, gradients and optimizer state, the same on all.
        reason: where the figure comes from.
        local_ranks: of each rank, how many ranks run on its machine, itself included.
        cores: of each rank, how many cores it may use for arithmetic.
        warning: what the user should know; empty if nothing.
    """

    host_nbytes: int
    reason: str
    local_ranks: tuple[int, ...]
    cores: tuple[int, ...]
    warning: str = ""


def plan_host_memory(ranks: Sequence[RankMemory]) -> HostBudget:
    """The host memory of each rank, from what every rank of the job says, in the order of ranks.

    A rank's own figure is the user's, or a share of what its machine and each of its control groups have available,
    divided by the ranks that share it. The smallest figure counts for all: which weights are on NVMe decides what
    enters a collective, so it has to be the same everywhere.
    """
    sharers = Counter(domain.identity for rank in ranks for domain in rank.domains)
    budgets = [_own_budget(rank, sharers) for rank in ranks]
    smallest = min(range(len(ranks)), key=lambda index: budgets[index][0])
    nbytes, reason = budgets[smallest]
    if len({budget for budget, _ in budgets}) > 1:
        reason += f"; the smallest figure of all ranks, that of rank {smallest} on {ranks[smallest].host}"
    machines = Counter(rank.domains[0].identity for rank in ranks)
    quota_sharers = Counter(quota.identity for rank in ranks for quota in rank.quotas)
    return HostBudget(
        nbytes,
        reason,
        tuple(machines[rank.domains[0].identity] for rank in ranks),
        tuple(_cores_of(index, ranks, quota_sharers) for index in range(len(ranks))),
        _differing(ranks, nbytes),
    )


def _cores_of(index: int, ranks: Sequence[RankMemory], quota_sharers: Counter[str]) -> int:
    """Each core that a rank may run on counts for it and for the other ranks of its machine that may run there, and
    their control groups' quotas for the ranks in them."""
    machine = ranks[index].domains[0].identity
    others = [
        frozenset(rank.cores)
        for other, rank in enumerate(ranks)
        if other != index and rank.domains[0].identity == machine
    ]
    quotas = [(quota.cores, quota_sharers[quota.identity]) for quota in ranks[index].quotas]
    return core_budget(frozenset(ranks[index].cores), others, quotas)


def _own_budget(rank: RankMemory, sharers: Counter[str]) -> tuple[int, str]:
    """One rank's own figure, and where it comes from."""
    if rank.wanted_nbytes is not None:
        return rank.wanted_nbytes, "tencache.host_memory"
    share = AUTO_HOST_SHARE if rank.wanted_share is None else rank.wanted_share
    shares = [(int(domain.available_nbytes * share) // sharers[domain.identity], domain) for domain in rank.domains]
    nbytes, domain = min(shares, key=lambda share: share[0])
    count = sharers[domain.identity]
    divided = f", divided by its {count} ranks" if count > 1 else ""
    return nbytes, f"{100 * share:g}% of the {gib(domain.available_nbytes)} that {domain.name} has available{divided}"


def _differing(ranks: Sequence[RankMemory], nbytes: int) -> str:
    """A warning where the user gave ranks different figures."""
    first_with: dict[str, int] = {}
    for index, rank in enumerate(ranks):
        wanted = f"{100 * rank.wanted_share:g}%" if rank.wanted_share is not None else "automatic"
        first_with.setdefault(wanted if rank.wanted_nbytes is None else f"{rank.wanted_nbytes} bytes", index)
    if len(first_with) == 1:
        return ""
    given = ", ".join(f"{wanted} on rank {index} ({ranks[index].host})" for wanted, index in first_with.items())
    return (
        f'"tencache.host_memory" differs between ranks: {given}. The smallest figure, {nbytes} bytes, counts for all: '
        "the weights' places have to be the same everywhere. Give all hosts the same config."
    )


def plan_staging(
    staging_memory: int | None,
    weight_shard_nbytes: Sequence[int],
    largest_chunk_nbytes: int,
    chunks: int,
    *,
    weights_read_by_gpu: bool = False,
    momentum_nbytes: int = 0,
) -> StagingPlan:
    """Divides the staging pool between optimizer chunks and weights.

    Args:
        staging_memory: the user's limit in bytes, or None for automatic.
        weight_shard_nbytes: bytes of each weight shard that lives on NVMe.
        largest_chunk_nbytes: bytes of the largest optimizer chunk, 0 if none is stored.
        chunks: number of stored optimizer chunks.
        weights_read_by_gpu: weights are only written through this pool; reads go to that of
            :func:`plan_gpu_staging`.
        momentum_nbytes: bytes of the buffers for Muon's momentum, which are under the same limit.

    Raises:
        ConfigError: the limit is below what any schedule needs; names the smallest that works.
    """
    # In slots, not in bytes of weights: a slot is as large as the largest weight of its class, and each class has two.
    most_weights = _whole_nbytes(weight_shard_nbytes)
    most_slots = min(AUTO_CHUNK_SLOTS, chunks)
    least_slots = min(MIN_CHUNK_SLOTS, chunks)
    least_weights = smallest_budget_nbytes(weight_shard_nbytes)
    needed = least_slots * largest_chunk_nbytes + least_weights
    if weights_read_by_gpu:
        most_weights = min(most_weights, max(UPDATE_STAGING_NBYTES, least_weights))
    if staging_memory is None:
        weights = min(most_weights, max(AUTO_WEIGHT_STAGING_NBYTES, least_weights))
        slots = most_slots
    else:
        limit_nbytes = staging_memory - momentum_nbytes
        if limit_nbytes < needed:
            momentum = f", and {momentum_nbytes} for Muon's momentum" if momentum_nbytes else ""
            raise ConfigError(
                f'"tencache.staging_memory" is {staging_memory} bytes, but this model needs at least '
                f"{needed + momentum_nbytes} per rank: {least_slots} optimizer chunks of {largest_chunk_nbytes} bytes "
                f"and {least_weights} bytes for two weights of each size class{momentum}. Raise it, or make "
                '"tencache.chunk_size" smaller.'
            )
        spare = limit_nbytes - needed
        weights = min(most_weights, least_weights + spare // 2)
        room = limit_nbytes - weights
        slots = min(chunks, room // largest_chunk_nbytes) if largest_chunk_nbytes else 0
        weights = min(most_weights, limit_nbytes - slots * largest_chunk_nbytes)
    return StagingPlan(slots * largest_chunk_nbytes + weights, slots, largest_chunk_nbytes, weights)


def plan_gpu_staging(gds_memory: int | None, weight_shard_nbytes: Sequence[int]) -> int:
    """Bytes of GPU memory for weights that are read into it.

    Args:
        gds_memory: the user's limit in bytes, or None for automatic.
        weight_shard_nbytes: bytes of each weight shard that lives on NVMe.

    Raises:
        ConfigError: the limit is below what any schedule needs; names the smallest that works.
    """
    whole, least = _whole_nbytes(weight_shard_nbytes), smallest_budget_nbytes(weight_shard_nbytes)
    if gds_memory is None:
        return min(whole, max(AUTO_WEIGHT_STAGING_NBYTES, least))
    if gds_memory < least:
        raise ConfigError(
            f'"tencache.gds_memory" is {gds_memory} bytes, but this model needs at least {least} per rank, for two '
            'weights of each size class. Raise it, or set "tencache.gds" to "off".'
        )
    return min(whole, gds_memory)


def _whole_nbytes(weight_shard_nbytes: Sequence[int]) -> int:
    """Bytes of a pool with a slot for every weight."""
    return sum(size_class.nbytes for size_class in plan_size_classes(weight_shard_nbytes, sys.maxsize))
