# SPDX-License-Identifier: Apache-2.0
"""How much of the GPU memory that was given away training wants back, and how much it can spare later.

[Note: memory that training needs] What lives on the GPU between two uses lies in memory that training left idle, and
training may want it back at any time: for a longer sequence, an evaluation, a second model. State leaves within the
allocation that needs its memory ([Note: loans] in :mod:`tencache_ds.memory.device_memory`). Weights and gradients
cannot, so as much as the recorded step took stays free of them.

After each step it is known what its peak has left. Where that is less than half of the headroom, state leaves, and
weights when there is none: allocations of the next step need not wait for it. What has left may come back when a number
of steps have passed whose peaks had room for it, and in which torch's allocator did not have to return cached memory to
the device: where that is in pieces, more is needed than a peak says. If it has to leave again, the next wait is twice
as long: a training that needs the memory now and then soon keeps it.
"""

from __future__ import annotations

from tencache_ds.items import GpuUsage
from tencache_ds.planning.gpu_budget import LEAST_HEADROOM_NBYTES
from tencache_ds.planning.patience import Patience

FIRST_PATIENCE, LONGEST_PATIENCE = 16, 4096
"""Steps before something comes back, the first time and at most."""


class MemoryWatch:
    """The memory of one GPU over steps; decides nothing but numbers of bytes."""

    def __init__(self) -> None:
        self.headroom_nbytes = LEAST_HEADROOM_NBYTES
        self._n_flushes = 0
        self._lowest_nbytes: int | None = None
        self._patience = Patience(FIRST_PATIENCE, LONGEST_PATIENCE)

    def settle(self, headroom_nbytes: int, usage: GpuUsage) -> None:
        """From now on so much is to stay free at a step's peak."""
        self.headroom_nbytes = headroom_nbytes
        self._n_flushes = usage.n_flushes

    def step_done(self, usage: GpuUsage) -> int:
        """A step is over.

        Args:
            usage: at present, with the peak of this step.

        Returns:
            Bytes that have to become free; 0 if none.
        """
        left_nbytes = usage.available_nbytes - usage.transient_nbytes
        flushed = usage.n_flushes > self._n_flushes
        if flushed:
            self._patience.undone()
        if self._patience.step_done():
            self._lowest_nbytes = None
        elif self._lowest_nbytes is None or left_nbytes < self._lowest_nbytes:
            self._lowest_nbytes = left_nbytes
        short_nbytes = self.headroom_nbytes - left_nbytes if left_nbytes < self.headroom_nbytes // 2 else 0
        if flushed:
            # The allocation succeeded, but each time a step takes twice as long.
            short_nbytes = max(short_nbytes, self.headroom_nbytes)
        self._n_flushes = usage.n_flushes
        return short_nbytes

    def released(self) -> None:
        """Something has left: in the step under way, or by what the last one took."""
        self._patience.undone()

    def spare_nbytes(self) -> int:
        """Bytes that may be given away again now; 0 before enough steps have passed."""
        if not self._patience.over or self._lowest_nbytes is None:
            return 0
        self._patience.begin_again()
        spare_nbytes, self._lowest_nbytes = self._lowest_nbytes - self.headroom_nbytes, None
        return max(spare_nbytes, 0)

    def came_back(self) -> None:
        """Something was given away again."""
        self._patience.tried()
