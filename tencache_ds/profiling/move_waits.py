# SPDX-License-Identifier: Apache-2.0
"""What the moves of saved tensors cost in a step: how long the compute device waits for each block's copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tencache_ds.placement.places import Place
from tencache_ds.profiling.fetch_waits import StreamClock


@dataclass(frozen=True, slots=True)
class MoveCost:
    """One block in a step.

    Attributes:
        nbytes: of the block.
        moved_nbytes: by all micro-steps together, in each direction.
        seconds: upper bound of the device's idle time for it.
        in_host: whether it was in host memory between its uses; else on NVMe.
    """

    nbytes: int
    moved_nbytes: int
    seconds: float
    in_host: bool


class MoveWaits:
    """Records one step, of all its micro-steps together. Used by one thread at a time."""

    def __init__(self, clock: StreamClock) -> None:
        self._clock = clock
        self._waits: list[tuple[int, Any, Any]] = []
        self._nbytes: dict[int, int] = {}  # of the block at a position
        self._moved_nbytes: dict[int, int] = {}  # by all passes together
        self._in_host: dict[int, bool] = {}

    def mark(self) -> Any:
        """The device may have to wait from here on, for :meth:`waited`."""
        return self._clock.mark()

    def waited(self, position: int, before: Any) -> None:
        """What follows needs a block, or its memory."""
        self._waits.append((position, before, self._clock.mark()))

    def moved(self, position: int, nbytes: int, place: Place) -> None:
        """A block is copied to host memory, from where it may go on to NVMe."""
        self._nbytes[position] = nbytes
        self._moved_nbytes[position] = self._moved_nbytes.get(position, 0) + nbytes
        self._in_host[position] = place is Place.HOST

    def costs(self) -> dict[int, MoveCost]:
        """Cost of each block that was moved, by its position. After the device was waited for."""
        waits: dict[int, float] = {}
        for position, before, after in self._waits:
            seconds = max(self._clock.seconds_between(before, after), 0.0)
            waits[position] = waits.get(position, 0.0) + seconds
        return {
            position: MoveCost(nbytes, self._moved_nbytes[position], waits.get(position, 0.0), self._in_host[position])
            for position, nbytes in self._nbytes.items()
        }
