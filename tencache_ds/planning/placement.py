# SPDX-License-Identifier: Apache-2.0
"""Which part of the optimizer's state lives in host memory when not all of it fits.

A step reads and writes every byte of state once, in the same order: each byte kept saves two bytes of NVMe traffic
per step, and keeping the most recently used ones would save nothing. So it does not matter which chunks stay, as far as
bytes go. It does matter that they are spread over the step: while resident chunks are updated, the drive reads those
that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tencache_ds.items import Place


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
