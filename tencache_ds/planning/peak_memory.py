# SPDX-License-Identifier: Apache-2.0
"""The most memory that TenCache makes a rank use, from the first weight of its model to the end of training.

Each figure is an upper limit. It includes building (weights are there twice while DeepSpeed moves its shards into one
buffer; first values wait for their write to NVMe), the update, and every move: into GPU memory, between RAM and NVMe,
and back, where an item takes its old place and the new one until it has been copied. It does not include what the
process had before, what the user's program or a model built outside ``zero.Init`` takes, the GPU memory of training
itself (gathered weights, activations, DeepSpeed's buckets), or a model's weights gathered in RAM to be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tencache_ds.layout import N_LANES, gib
from tencache_ds.planning.budget import WRITES_BEHIND_NBYTES

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
