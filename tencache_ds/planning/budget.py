# SPDX-License-Identifier: Apache-2.0
"""How many bytes of host memory, GPU memory and scratch space a rank may use and needs, and its peak.

[Note: peak] The most memory that TenCache makes a rank use, from the first weight of its model to the end of training.
Each figure is an upper limit. It includes building (weights are there twice while DeepSpeed moves its shards into one
buffer; first values wait for their write to NVMe), the update, and every move: into GPU memory, between RAM and NVMe,
and back, where an item takes its old place and the new one until it has been copied. It does not include what the
process had before, what the user's program or a model built outside ``zero.Init`` takes, the GPU memory of training
itself (gathered weights, activations, DeepSpeed's buckets), or a model's weights gathered in RAM to be saved.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tencache_ds.errors import ConfigError
from tencache_ds.layout import N_LANES, gib
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


# The peak


OVERHEAD_NBYTES = 64 * 2**20
"""Stacks of I/O and update threads, records of weights and chunks, pieces of memory between those in use."""

LANE_SHARE = 2 / 3
"""Bytes of gradients and weights, of 4 per parameter at most, for each byte of the state that they belong to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """What a rank's tensors take, and where they may go, once the first places are decided. All sizes in bytes.

    Attributes:
        weights_host: host memory of weights that are there, or return there from GPU memory.
        weights_building: host memory of weights at its highest while the model and the engine are built.
        weights_nvme: weights on NVMe.
        largest_weight: the largest shard.
        weights_sharing_pages: host memory of small weights, which comes back only with that of others.
        gradients: host memory of gradients.
        state_host: optimizer state that begins in host memory, with what an optimizer will have made after its first
            step.
        state_gpu: what begins in GPU memory.
        state_nvme: what begins on NVMe.
        state_may_go_to_nvme: whether optimizer state may go there at all.
        largest_chunk: the largest unit in which state moves: a chunk.
        update: host memory that an update takes beside the state; 0 where it works in place.
        copies: of state that a checkpoint has yet to write.
        host_budget: ``host_memory`` of a rank: what state on NVMe may fill when other things leave RAM.
        activations: host memory of activations.
        staging: the staging buffers that are built at the start.
        late_staging: those that are built when state goes to NVMe for the first time.
        bounces: pinned buffers through which state is copied to a GPU and back.
        gpu_weights: shards that may go to GPU memory.
        gpu_limit: GPU memory that weights, gradients and state may take, beside buffers for the update of such state;
            None without a GPU to use.
        gpu_staging: GPU memory of weights that are read into it.
        weights_pinned: whether the host memory of weights is pinned.
        gradients_pinned: whether that of gradients is.
        staging_pinned: whether the staging buffers, and buffers of activations, are.
    """

    weights_host: int = 0
    weights_building: int = 0
    weights_nvme: int = 0
    largest_weight: int = 0
    weights_sharing_pages: int = 0
    gradients: int = 0
    state_host: int = 0
    state_gpu: int = 0
    state_nvme: int = 0
    state_may_go_to_nvme: bool = False
    largest_chunk: int = 0
    update: int = 0
    copies: int = 0
    host_budget: int = 0
    activations: int = 0
    staging: int = 0
    late_staging: int = 0
    bounces: int = 0
    gpu_weights: int = 0
    gpu_limit: int | None = None
    gpu_staging: int = 0
    weights_pinned: bool = False
    gradients_pinned: bool = False
    staging_pinned: bool = False


@dataclass(frozen=True, slots=True)
class OwnShard:
    """A shard in host memory that DeepSpeed keeps itself.

    Attributes:
        nbytes: of it.
        moves: whether it moves into a buffer when the engine is built: the optimizer updates it.
    """

    nbytes: int
    moves: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideNeeds:
    """The part of the needs that DeepSpeed and the optimizer know. Sizes in bytes.

    Attributes:
        own_shards: those that DeepSpeed keeps itself.
        own_shards_pinned: whether it has them pinned.
        later_state: of optimizer state that will have been made after the first step.
        update: see :class:`MemoryNeeds`, as the next two.
        gpu_weights: in bytes.
        gpu_limit: in bytes.
    """

    own_shards: Sequence[OwnShard] = ()
    own_shards_pinned: bool = False
    later_state: int = 0
    update: int = 0
    gpu_weights: int = 0
    gpu_limit: int | None = None


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Upper limits for one rank; see the module.

    Attributes:
        host_nbytes: resident host memory beyond what the process had before.
        pinned_nbytes: the part of it that is pinned.
        gpu_nbytes: GPU memory of weights, gradients and optimizer state that live there, and of weights read into it.
    """

    host_nbytes: int
    pinned_nbytes: int
    gpu_nbytes: int

    def describe(self) -> str:
        """For the line that TenCache prints when it is active."""
        gpu = f" and {gib(self.gpu_nbytes)} of GPU memory" if self.gpu_nbytes else ""
        return f"never more than {gib(self.host_nbytes)} of RAM ({gib(self.pinned_nbytes)} pinned){gpu}"


def peak_memory(needs: MemoryNeeds) -> PeakMemory:
    """The most memory that a rank uses with these needs."""
    state = needs.state_host + needs.state_gpu + needs.state_nvme
    uses_gpu = needs.gpu_limit is not None
    at_start = needs.weights_host + needs.gradients + needs.state_host
    everything = needs.weights_host + needs.gradients + state
    if needs.state_may_go_to_nvme:
        # Host memory that something has left takes state from NVMe, within the budget.
        filled = needs.host_budget - needs.activations + needs.weights_sharing_pages
        homes = max(at_start, min(filled, everything))
    else:
        homes = everything  # what began in GPU memory has no other place to leave it for
    staging = needs.staging + (needs.late_staging if needs.state_may_go_to_nvme else 0)
    moving = needs.largest_chunk + needs.update + needs.bounces
    first_values = min(needs.weights_nvme, WRITES_BEHIND_NBYTES + needs.largest_weight)
    building = max(needs.weights_building, needs.weights_host) + first_values
    training = homes + needs.activations + staging + moving + needs.copies
    pinned_training = (
        needs.bounces
        + (needs.weights_host if needs.weights_pinned else 0)
        + (needs.gradients if needs.gradients_pinned else 0)
        + (staging + needs.activations if needs.staging_pinned else 0)
    )
    pinned_building = max(needs.weights_building, needs.weights_host) if needs.weights_pinned else 0
    movable = needs.gpu_weights + (needs.gradients + state if uses_gpu else 0)
    gpu = min(movable, needs.gpu_limit or 0)
    if 0 < gpu < movable:  # else all state is updated in place, or none is there
        gpu += int(N_LANES * LANE_SHARE * needs.largest_chunk)
    return PeakMemory(
        max(building, training) + OVERHEAD_NBYTES,
        max(pinned_building, pinned_training),
        gpu + needs.gpu_staging,
    )


@dataclass(frozen=True, slots=True)
class OwnWeights:
    """Host memory of the weights that DeepSpeed keeps itself, in bytes.

    Attributes:
        kept: for good.
        building: at its highest while the engine is built.
    """

    kept: int
    building: int


def memory_of_own_weights(shards: Sequence[OwnShard], *, pinned: bool) -> OwnWeights:
    """Host memory of shards in DeepSpeed's hands. Those that the optimizer updates are moved into buffers of exactly
    their size, one after another; pinned by torch, each takes the next power of two until all have moved.

    Args:
        shards: all of them.
        pinned: whether torch has pinned them when the model was made.
    """
    made = [1 << max(shard.nbytes - 1, 0).bit_length() if pinned else shard.nbytes for shard in shards]
    kept = sum(shard.nbytes if shard.moves else nbytes for shard, nbytes in zip(shards, made, strict=True))
    if pinned:
        return OwnWeights(kept, sum(made) + sum(shard.nbytes for shard in shards if shard.moves))
    return OwnWeights(kept, sum(made) + max((shard.nbytes for shard in shards if shard.moves), default=0))
