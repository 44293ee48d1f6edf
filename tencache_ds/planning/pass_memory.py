# SPDX-License-Identifier: Apache-2.0
"""How much GPU memory forward passes without a backward pass leave to weights.

What a pass takes for a moment, above all the activations of one layer and the logits, grows with its tokens: reading a
prompt takes more than each token that is generated from it. The cache of keys and values stays from pass to pass and
grows. So a part of the memory stays free, as much as the largest pass so far took and a little more. A pass with more
tokens than any before is expected to take more in proportion, before it begins. Whenever half of what stayed free is
gone, the whole of it is made free again.
"""

from __future__ import annotations

from tencache_ds.items import GpuUsage
from tencache_ds.planning.gpu_budget import LEAST_HEADROOM_NBYTES
from tencache_ds.planning.patience import Patience

SPARE_SHARE = 0.25
"""Of what a pass is expected to take: so much more is kept free, for what is lost between allocations."""

FIRST_PATIENCE, LONGEST_PATIENCE = 16, 4096
"""Passes before weights come back, the first time and at most."""


class PassMemory:
    """The memory of one GPU over forward passes; decides nothing but numbers of bytes. One thread at a time."""

    def __init__(self) -> None:
        self._largest_nbytes = 0  # that a pass took beyond what was there when it began
        self._largest_tokens = 0  # of that pass
        self._tokens = self._start_nbytes = self._peak_nbytes = 0
        self._lowest_nbytes: int | None = None
        self._patience = Patience(FIRST_PATIENCE, LONGEST_PATIENCE)

    @property
    def headroom_nbytes(self) -> int:
        """Bytes that stay free between passes."""
        return max(int((1 + SPARE_SHARE) * self._largest_nbytes), LEAST_HEADROOM_NBYTES)

    def begin_pass(self, usage: GpuUsage, tokens: int) -> int:
        """A pass begins.

        Args:
            usage: at present.
            tokens: elements of its input, all sequences together; 0 if that is not known.

        Returns:
            Bytes that have to become free for it; 0 or less if none.
        """
        self._tokens, self._start_nbytes, self._peak_nbytes = tokens, usage.allocated_nbytes, usage.peak_nbytes
        self._note(usage.available_nbytes)
        return self._short_nbytes(usage, self._expected_nbytes(tokens))

    def look(self, usage: GpuUsage) -> int:
        """Between two modules of the pass: bytes that have to become free; 0 or less if none."""
        self._learn(usage)
        taken_nbytes = usage.allocated_nbytes - self._start_nbytes
        return self._short_nbytes(usage, self._expected_nbytes(self._tokens) - taken_nbytes)

    def end_pass(self, usage: GpuUsage) -> int:
        """The pass is over.

        Returns:
            Bytes that weights may take in addition; 0 before enough passes have been quiet.
        """
        self._learn(usage)
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
        taken_nbytes = usage.peak_nbytes - self._start_nbytes
        if usage.peak_nbytes > self._peak_nbytes and taken_nbytes > self._largest_nbytes:
            self._largest_nbytes, self._largest_tokens = taken_nbytes, self._tokens

    def _expected_nbytes(self, tokens: int) -> int:
        """What a pass of so many tokens takes at its peak."""
        share = tokens / self._largest_tokens if self._largest_tokens and tokens else 1.0
        return int((1 + SPARE_SHARE) * share * self._largest_nbytes)

    def _short_nbytes(self, usage: GpuUsage, expected_nbytes: int) -> int:
        available_nbytes = usage.available_nbytes
        short_nbytes = expected_nbytes - available_nbytes
        if available_nbytes < self.headroom_nbytes // 2:
            short_nbytes = max(short_nbytes, self.headroom_nbytes - available_nbytes)
        return short_nbytes

    def _note(self, available_nbytes: int) -> None:
        if self._lowest_nbytes is None or available_nbytes < self._lowest_nbytes:
            self._lowest_nbytes = available_nbytes
