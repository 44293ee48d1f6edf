# SPDX-License-Identifier: Apache-2.0
"""The places where something can live, the memory in use there, and the places of optimizer state at the start: which
part of it lives in host memory when not all of it fits.

A step reads and writes every byte of state once, in the same order: each byte kept saves two bytes of NVMe traffic
per step, and keeping the most recently used ones would save nothing. So it does not matter which chunks stay, as far as
bytes go. It does matter that they are spread over the step: while resident chunks are updated, the drive reads those
that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Place(IntEnum):
    """Where something lives between two uses, fastest first."""

    GPU = 0
    HOST = 1
    NVME = 2


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """Usage of a GPU's memory.

    Attributes:
        free_nbytes: what no process uses, as far as this one may use it.
        cached_nbytes: what torch's allocator keeps for later, and no tensor uses.
        allocated_nbytes: memory used by tensors of this process.
        peak_nbytes: the most that they have used since recording began.
        n_flushes: how often torch's allocator had to free its whole cache to obtain memory.
        n_failures: how often it did not obtain any.
        pool_nbytes: what it holds: tensors, its cache, and what streams are not done with.
    """

    free_nbytes: int
    cached_nbytes: int
    allocated_nbytes: int
    peak_nbytes: int
    n_flushes: int = 0
    n_failures: int = 0
    pool_nbytes: int = 0

    @property
    def available_nbytes(self) -> int:
        """Memory available to new tensors."""
        return self.free_nbytes + self.cached_nbytes

    @property
    def transient_nbytes(self) -> int:
        """Memory that the recorded step needed at its peak beyond the permanent part: activations and gradients."""
        return self.peak_nbytes - self.allocated_nbytes


def place_state(nbytes: Sequence[int], host_nbytes: int) -> tuple[Place, ...]:
    """Homes of chunks (or of whole sub-groups), in the order in which a step updates them.

    Args:
        nbytes: of each.
        host_nbytes: host memory for all of them.

    Returns:
        HOST for as many as fit, spread evenly by bytes, beginning with the first, which nothing can be read ahead of;
        NVME for the others. The unused remainder is less than twice the largest.
    """
    total = sum(nbytes)
    if total <= host_nbytes:
        return (Place.HOST,) * len(nbytes)
    places, seen, used = [], 0, 0
    for each in nbytes:
        # In integers: has a smaller share of the budget been given away than of the state been passed?
        fits = used + each <= host_nbytes
        stays = fits and used * total <= seen * host_nbytes
        places.append(Place.HOST if stays else Place.NVME)
        seen += each
        used += each if stays else 0
    return tuple(places)


@dataclass(frozen=True, slots=True)
class StateCapacity:
    """The memory available for optimizer state, in bytes.

    Attributes:
        host_nbytes: host memory.
        nvme_nbytes: on NVMe; None where state may not go there: then host memory takes the rest in any case.
        gpu_nbytes: GPU memory that may be used before anything is known about what training needs.
    """

    host_nbytes: int
    nvme_nbytes: int | None = None
    gpu_nbytes: int = 0


def plan_state(
    nbytes: Sequence[Sequence[int]], capacity: StateCapacity, *, by_chunks: bool
) -> tuple[tuple[Place, ...] | None, ...]:
    """Homes of the optimizer's state at the start. What fits neither into host memory nor on NVMe goes to the GPU, from
    the front.

    Args:
        nbytes: of each chunk of each sub-group.
        capacity: for all of them.
        by_chunks: an update takes one chunk at a time; else all of a sub-group's, none of them on the GPU.

    Returns:
        Of each sub-group the homes of its chunks, or None where it is whole in host memory.
    """
    no_limit = sum(map(sum, nbytes))
    host_nbytes = no_limit if capacity.nvme_nbytes is None else capacity.host_nbytes
    if not by_chunks:  # chunks are copied for each update
        homes = place_state([sum(group) for group in nbytes], host_nbytes)
        pairs = zip(homes, nbytes, strict=True)
        return tuple(None if home is Place.HOST else (Place.NVME,) * len(group) for home, group in pairs)
    flat = [each for group in nbytes for each in group]
    n_gpu = _on_gpu(flat, capacity)
    if capacity.nvme_nbytes is None and not n_gpu:
        return (None,) * len(nbytes)
    places = iter((*(Place.GPU for _ in range(n_gpu)), *place_state(flat[n_gpu:], host_nbytes)))
    return tuple(tuple(next(places) for _ in group) for group in nbytes)


def _on_gpu(nbytes: Sequence[int], capacity: StateCapacity) -> int:
    """How many chunks, counted from the first, have to be on the GPU; as many as fit there where that is not enough."""
    left = sum(nbytes)
    # Host memory is filled but for less than two chunks.
    elsewhere = capacity.host_nbytes
    if capacity.nvme_nbytes is not None:
        elsewhere += max(capacity.nvme_nbytes - 2 * max(nbytes, default=0), 0)
    used = 0
    for n, each in enumerate(nbytes):
        if left <= elsewhere or used + each > capacity.gpu_nbytes:
            return n
        used += each
        left -= each
    return len(nbytes)
