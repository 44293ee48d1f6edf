# SPDX-License-Identifier: Apache-2.0
"""Which part of the optimizer's state lives in host memory when not all of it fits.

A step reads and writes every byte of state once, in the same order: whatever is kept saves two bytes of NVMe traffic
per byte and step, and keeping what was used last would save nothing. So it does not matter which chunks stay, as far as
bytes go. It does matter that they are spread over the step: while resident chunks are updated, the drive reads those
that follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from tencache_ds.items import Place


def place_state(nbytes: Sequence[int], host_nbytes: int) -> tuple[Place, ...]:
    """Homes of chunks (or of whole sub-groups), in the order in which a step updates them.

    Args:
        nbytes: of each.
        host_nbytes: host memory for all of them.

    Returns:
        HOST for as many as fit, spread evenly by bytes, beginning with the first, which nothing can be read ahead of;
        NVME for the others. What is left unused is less than twice the largest.
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


def plan_state(
    nbytes: Sequence[Sequence[int]], host_nbytes: int, *, by_chunks: bool
) -> tuple[tuple[Place, ...] | None, ...]:
    """Homes of the optimizer's state.

    Args:
        nbytes: of each chunk of each sub-group.
        host_nbytes: host memory for all of them.
        by_chunks: an update takes one chunk at a time; else all of a sub-group's.

    Returns:
        Of each sub-group the homes of its chunks, or None where it is whole in host memory.
    """
    if not by_chunks:  # what is in chunks is copied for each update
        homes = place_state([sum(group) for group in nbytes], host_nbytes)
        pairs = zip(homes, nbytes, strict=True)
        return tuple(None if home is Place.HOST else (Place.NVME,) * len(group) for home, group in pairs)
    places = iter(place_state([each for group in nbytes for each in group], host_nbytes))
    return tuple(tuple(next(places) for _ in group) for group in nbytes)
