# SPDX-License-Identifier: Apache-2.0
"""How many bytes of host memory and scratch space a rank may use and needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tencache_ds.errors import ConfigError
from tencache_ds.planning.size_classes import plan_size_classes, smallest_budget_nbytes

AUTO_HOST_SHARE = 0.5
"""Share of the available host memory that weights may fill when the user names no budget. The other half is left for
gradients, staging, the page cache of data loaders and the program itself."""

AUTO_CHUNK_SLOTS = 12
"""Chunks in flight: enough for reads ahead and writes behind on every lane while one chunk is updated."""

MIN_CHUNK_SLOTS = 3
"""One chunk being read, one updated, one written: below that nothing overlaps."""

AUTO_WEIGHT_STAGING_NBYTES = 768 * 2**20
"""Weights read ahead. At 4 GB/s this is 0.2 s of reading, more than the compute time of a layer on current GPUs."""


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


def resident_budget(host_memory: int | None, available_nbytes: int, local_ranks: int) -> int:
    """Bytes of weights one rank may keep in host memory: the user's figure or a share of what is available."""
    if host_memory is not None:
        return host_memory
    return int(available_nbytes * AUTO_HOST_SHARE) // max(local_ranks, 1)


def plan_staging(
    staging_memory: int | None, weight_shard_nbytes: Sequence[int], largest_chunk_nbytes: int, chunks: int
) -> StagingPlan:
    """Divides the staging pool between optimizer chunks and weights.

    Args:
        staging_memory: the user's limit in bytes, or None for automatic.
        weight_shard_nbytes: bytes of each weight shard that lives on NVMe.
        largest_chunk_nbytes: bytes of the largest optimizer chunk, 0 if none is stored.
        chunks: number of stored optimizer chunks.

    Raises:
        ConfigError: the limit is below what any schedule needs; names the smallest that works.
    """
    # In slots, not in bytes of weights: a slot is as large as the largest weight of its class, and each class has two.
    all_weights = sum(size_class.nbytes for size_class in plan_size_classes(weight_shard_nbytes, sys.maxsize))
    most_slots = min(AUTO_CHUNK_SLOTS, chunks)
    least_slots = min(MIN_CHUNK_SLOTS, chunks)
    least_weights = smallest_budget_nbytes(weight_shard_nbytes)
    needed = least_slots * largest_chunk_nbytes + least_weights
    if staging_memory is None:
        weights = min(all_weights, max(AUTO_WEIGHT_STAGING_NBYTES, least_weights))
        slots = most_slots
    else:
        if staging_memory < needed:
            raise ConfigError(
                f'"tencache.staging_memory" is {staging_memory} bytes, but this model needs at least {needed} per '
                f"rank: {least_slots} optimizer chunks of {largest_chunk_nbytes} bytes and {least_weights} bytes "
                'for two weights of each size class. Raise it, or make "tencache.chunk_size" smaller.'
            )
        spare = staging_memory - needed
        weights = min(all_weights, least_weights + spare // 2)
        room = staging_memory - weights
        slots = min(chunks, room // largest_chunk_nbytes) if largest_chunk_nbytes else 0
        weights = min(all_weights, staging_memory - slots * largest_chunk_nbytes)
    return StagingPlan(slots * largest_chunk_nbytes + weights, slots, largest_chunk_nbytes, weights)
