# SPDX-License-Identifier: Apache-2.0
"""Predicts the GPU memory that a pass will take from the amount taken so far.

A pass takes memory layer by layer, in proportion to its tokens. Where a third of the layers have taken twice what they
took in the recorded pass, the rest will as well, and the peak comes where it came then: mostly between the last layer
and the loss, where nothing is measured.
"""

from __future__ import annotations

SMALLEST_SHARE = 0.1
"""Share of the recorded peak below which what was taken says little about the rest. DeepSpeed may fetch more or fewer
layers ahead, which is nothing that the rest is in proportion to."""


class MemoryCurve:
    """Memory of recorded passes, forward and backward, at the places where it is looked at: the most that any took."""

    def __init__(self) -> None:
        self._taken: list[int] = []
        self._place = 0
        self._still_to_come: list[int] = []
        self._peak_nbytes = 0

    def begin(self) -> None:
        """A pass begins."""
        self._place = 0

    def record(self, nbytes: int) -> None:
        """The pass has taken so much at the next place."""
        if self._place < len(self._taken):
            self._taken[self._place] = max(self._taken[self._place], nbytes)
        else:
            self._taken.append(nbytes)
        self._place += 1

    def complete(self, peak_nbytes: int) -> int:
        """A recorded pass is over, or several.

        Args:
            peak_nbytes: the most that was taken at any time, also between two places.

        Returns:
            By how much the peak exceeds the largest value observed at any place.
        """
        self._peak_nbytes = max(peak_nbytes, 0)
        highest = max(self._taken, default=0)
        came = self._taken.index(highest) if highest > 0 else -1
        self._still_to_come, rest = [0] * len(self._taken), 0
        for index in reversed(range(len(self._taken))):
            rest = max(rest, self._taken[index])
            share = rest / highest if highest > 0 else 0.0
            self._still_to_come[index] = self._peak_nbytes if index <= came else int(self._peak_nbytes * share)
        return max(self._peak_nbytes - highest, 0)

    def more_nbytes(self, place: int, nbytes: int) -> int:
        """The additional bytes that a pass will take at its peak, if it continues as it began.

        Args:
            place: how many places it has passed before this one.
            nbytes: what it has taken.

        Returns:
            Less than 0 behind the peak; of a pass that took less than the recorded one, as much as that one took; 0
            where nothing is known.
        """
        if place >= len(self._taken) or self._peak_nbytes == 0:
            return 0
        then = self._taken[place]
        growth = nbytes / then if then > SMALLEST_SHARE * self._peak_nbytes else 1.0
        return int(self._still_to_come[place] * max(growth, 1.0)) - nbytes
