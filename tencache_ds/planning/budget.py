# SPDX-License-Identifier: Apache-2.0
"""How many bytes of host memory, GPU memory and scratch space a rank may use and needs."""

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

UPDATE_STAGING_NBYTES = 256 * 2**20
"""Weights on their way to NVMe when none is read through host memory: enough to keep every lane writing."""


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
    staging_memory: int | None,
    weight_shard_nbytes: Sequence[int],
    largest_chunk_nbytes: int,
    chunks: int,
    *,
    weights_read_by_gpu: bool = False,
) -> StagingPlan:
    """Divides the staging pool between optimizer chunks and weights.

    Args:
        staging_memory: the user's limit in bytes, or None for automatic.
        weight_shard_nbytes: bytes of each weight shard that lives on NVMe.
        largest_chunk_nbytes: bytes of the largest optimizer chunk, 0 if none is stored.
        chunks: number of stored optimizer chunks.
        weights_read_by_gpu: weights are only written through this pool; reads go to that of
            :func:`plan_gpu_staging`.

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
        if staging_memory < needed:
            raise ConfigError(
                f'"tencache.staging_memory" is {staging_memory} bytes, but this model needs at least {needed} per '
                f"rank: {least_slots} optimizer chunks of {largest_chunk_nbytes} bytes and {least_weights} bytes "
                'for two weights of each size class. Raise it, or make "tencache.chunk_size" smaller.'
            )
        spare = staging_memory - needed
        weights = min(most_weights, least_weights + spare // 2)
        room = staging_memory - weights
        slots = min(chunks, room // largest_chunk_nbytes) if largest_chunk_nbytes else 0
        weights = min(most_weights, staging_memory - slots * largest_chunk_nbytes)
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
