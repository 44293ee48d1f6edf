# SPDX-License-Identifier: Apache-2.0
"""How much GPU memory forward passes without a backward pass leave to weights, and which weights live there.

What a pass takes for a moment has two parts. Activations and logits grow with its tokens: reading a prompt takes more
than each token that is generated from it. The weights that DeepSpeed has gathered ahead of their use do not: what they
may take depends on how many of them do not live in GPU memory, and on DeepSpeed's limit. In a small pass of a large
model they are nearly all that it takes. The cache of keys and values stays from pass to pass and grows.

So a part of the memory stays free: as much as may be gathered, as much as all else of the largest pass so far took, and
a little more. For a pass with more tokens than any before the second part is expected to grow in proportion, before it
begins. Whenever no more than such a pass itself would be free, the whole of it is made free again.

Each weight is used once per forward pass, so per byte all of those in one place save the same: the time of their
transfer. What is on NVMe goes first, because its link is the slowest. Within a place the weights are spread evenly over
the pass: between two that have to be fetched, the link has the arithmetic of those that are there to hide behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from tencache_ds.placement.gpu_policy import LEAST_HEADROOM_NBYTES
from tencache_ds.placement.memory_watch import LOOK_EVERY_S, Patience, pause_s
from tencache_ds.placement.places import GpuUsage

SPARE_SHARE = 0.25
"""Share of what a pass is expected to take that is kept free in addition, for what is lost between allocations."""

AMPLE = 4
"""Times the headroom. With so much available a pass of known size runs short only if it takes several times what any
took before, or if another process takes the memory within this very pass: looking when it begins and ends is enough."""

AMPLE_PAUSE_S = 1.0
"""Between two looks within a pass then: some passes take long."""

FIRST_PATIENCE, LONGEST_PATIENCE = 16, 4096
"""Passes before weights come back, the first time and at most."""


class PassMemory:
    """The memory of one GPU over forward passes; decides nothing but numbers of bytes. One thread at a time."""

    def __init__(self) -> None:
        self._growing_nbytes = 0  # the most that a pass took beside gathered weights and what was there before
        self._most_tokens = 0  # of any pass that is over
        self._limit_nbytes = 0  # of gathered weights
        self._gathered_nbytes = 0  # at most, in this pass
        self._tokens = self._start_nbytes = self._peak_nbytes = 0
        self._available_nbytes = 0  # when it was looked at last
        self._lowest_nbytes: int | None = None
        self._patience = Patience(FIRST_PATIENCE, LONGEST_PATIENCE)

    @property
    def headroom_nbytes(self) -> int:
        """Bytes that stay free between passes."""
        return self.headroom_beside(self._limit_nbytes)

    def headroom_beside(self, limit_nbytes: int) -> int:
        """Bytes that would have to stay free if at most ``limit_nbytes`` of weights were gathered at a time."""
        return max(_with_spare(limit_nbytes + self._growing_nbytes), LEAST_HEADROOM_NBYTES)

    def begin_pass(self, usage: GpuUsage, tokens: int, limit_nbytes: int) -> int:
        """A pass begins.

        Args:
            usage: at present.
            tokens: elements of its input, all sequences together; 0 if that is not known.
            limit_nbytes: of weights, the most that are gathered at a time during the pass. It holds for the whole pass:
                nothing is gathered ahead of its use any more once weights have left during a pass.

        Returns:
            Bytes that have to become free for it; 0 or less if none.
        """
        self._tokens, self._start_nbytes, self._peak_nbytes = tokens, usage.allocated_nbytes, usage.peak_nbytes
        self._limit_nbytes, self._gathered_nbytes = limit_nbytes, 0
        self._note(usage.available_nbytes)
        return self._short_nbytes(usage, 0, 0)

    def gathered(self, nbytes: int) -> None:
        """Between two modules of the pass: so many bytes of weights are gathered now."""
        self._gathered_nbytes = max(self._gathered_nbytes, nbytes)

    def look(self, usage: GpuUsage, gathered_nbytes: int) -> int:
        """Between two modules of the pass, with so many bytes of weights gathered: bytes that have to become free; 0 or
        less if none."""
        self.gathered(gathered_nbytes)
        self._learn(usage)
        return self._short_nbytes(usage, usage.allocated_nbytes - self._start_nbytes, gathered_nbytes)

    def pause_s(self, cost_s: float) -> float:
        """Seconds until the next look within the pass, after one (or its beginning) that took ``cost_s``."""
        if not 0 < self._tokens <= self._most_tokens:
            return LOOK_EVERY_S  # what is expected of it is a guess; there are few such passes
        if self._available_nbytes >= AMPLE * self.headroom_nbytes:
            return AMPLE_PAUSE_S
        return pause_s(cost_s)

    def end_pass(self, usage: GpuUsage) -> int:
        """The pass is over.

        Returns:
            Bytes that weights may take in addition; 0 before enough passes have been quiet.
        """
        self._learn(usage)
        self._most_tokens = max(self._most_tokens, self._tokens)
        self._tokens = 0
        self._note(usage.available_nbytes)
        if self._patience.step_done():
            self._lowest_nbytes = None
        if not self._patience.over or self._lowest_nbytes is None:
            return 0
        self._patience.begin_again()
        spare_nbytes, self._lowest_nbytes = self._lowest_nbytes - self.headroom_nbytes, None
        return max(spare_nbytes, 0)

    def released(self, nbytes: int) -> None:
        """So much has left GPU memory."""
        self._start_nbytes -= nbytes
        self._patience.undone()

    def came_back(self) -> None:
        """Something was brought there again."""
        self._patience.tried()

    def _learn(self, usage: GpuUsage) -> None:
        """The peak counts from the start of recording: only where it rose has this pass set it."""
        if usage.peak_nbytes > self._peak_nbytes:
            growing_nbytes = usage.peak_nbytes - self._start_nbytes - min(self._gathered_nbytes, self._limit_nbytes)
            self._growing_nbytes = max(self._growing_nbytes, growing_nbytes)

    def _short_nbytes(self, usage: GpuUsage, taken_nbytes: int, gathered_nbytes: int) -> int:
        """
        Args:
            usage: at present.
            taken_nbytes: by this pass so far, gathered weights included.
            gathered_nbytes: of weights, at present.
        """
        headroom_nbytes, available_nbytes = self.headroom_nbytes, usage.available_nbytes
        self._available_nbytes = available_nbytes
        if self._most_tokens and self._tokens > self._most_tokens:
            growing_nbytes = self._growing_nbytes * self._tokens // self._most_tokens
            expected_nbytes = needed_nbytes = _with_spare(self._limit_nbytes + growing_nbytes)
        else:
            # Passes of this size are known: the spare part may be used up, by a growing cache, before weights leave.
            needed_nbytes = self._limit_nbytes + self._growing_nbytes
            expected_nbytes = _with_spare(needed_nbytes)
        # Gathered weights are not lost: they are released in the same pass, and the headroom has a place for them.
        rest_nbytes = headroom_nbytes - min(gathered_nbytes, self._limit_nbytes)
        if available_nbytes >= max(needed_nbytes - taken_nbytes, rest_nbytes - headroom_nbytes // 2):
            return 0
        return max(expected_nbytes - taken_nbytes, rest_nbytes) - available_nbytes

    def _note(self, available_nbytes: int) -> None:
        if self._lowest_nbytes is None or available_nbytes < self._lowest_nbytes:
            self._lowest_nbytes = available_nbytes


def _with_spare(nbytes: int) -> int:
    return int((1 + SPARE_SHARE) * nbytes)


def spread_order(n: int) -> list[int]:
    """The numbers below ``n`` such that those of any prefix lie nearly evenly apart.

    Source: the van der Corput sequence: numbers in the order of their reversed binary digits.
    """
    bits = max(n - 1, 0).bit_length()
    reversed_digits = (int(format(i, f"0{bits}b")[::-1], 2) if bits else 0 for i in range(1 << bits))
    return [number for number in reversed_digits if number < n]


def choose_weights(nbytes: Sequence[int], stored: Sequence[bool], budget_nbytes: int) -> list[int]:
    """The weights to move to GPU memory.

    Args:
        nbytes: of each, in the order of their use.
        stored: whether each is on NVMe; otherwise it is in host memory.
        budget_nbytes: GPU memory that they may take.

    Returns:
        Their indices, in the order of worth: what has to leave later leaves from the end.
    """
    chosen, left = [], budget_nbytes
    for wanted in (True, False):
        indices = [index for index, each in enumerate(stored) if each is wanted]
        for position in spread_order(len(indices)):
            index = indices[position]
            if nbytes[index] <= left:
                chosen.append(index)
                left -= nbytes[index]
    return chosen
