# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from tencache_ds.placement.places import Place
from tencache_ds.profiling.waits import MoveCost, MoveWaits


class ManualClock:
    """A stream that comes to each mark at a time that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def mark(self) -> float:
        return self.now_s

    def seconds_between(self, first: float, second: float) -> float:
        return second - first


def test_waits_and_bytes_of_all_micro_steps_are_added_up():
    clock = ManualClock()
    waits = MoveWaits(clock)
    for seconds in (0.25, 0.5):
        waits.moved(0, 100, Place.NVME)
        waits.moved(7, 60, Place.HOST)
        for position in (7, 0):
            before = waits.mark()
            clock.now_s += seconds if position == 7 else 0.0
            waits.waited(position, before)
    waits.moved(9, 10, Place.HOST)  # backward did not need it
    assert waits.costs() == {
        0: MoveCost(100, 200, 0.0, in_host=False),
        7: MoveCost(60, 120, 0.75, in_host=True),
        9: MoveCost(10, 10, 0.0, in_host=True),
    }
