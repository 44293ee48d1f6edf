# SPDX-License-Identifier: Apache-2.0
"""How much of the GPU memory that was given away training wants back, and how much it can spare later.

[Note: memory that training needs] What lives on the GPU between two uses lies in memory that training left idle, and
training may want it back at any time: for a longer sequence, an evaluation, a second model. State can leave within an
allocation ([Note: loans] in :mod:`tencache_ds.memory.device_memory`), weights and gradients cannot, and a pass that
waits for state to leave takes longer. So a part of the memory stays free, as much as activations and gradients took in
the recorded step.
Between modules it is looked at how much the pass has taken and, compared with the recorded pass, how much it is going
to take. Before that exceeds the remaining memory, and whenever half of the free memory is gone, state has to leave.

What has left may come back when a number of steps have passed in which there was room for it. If it has to leave again,
the next wait is twice as long: a training that needs the memory now and then soon keeps it.
"""

from __future__ import annotations

import sys

from tencache_ds.items import GpuUsage
from tencache_ds.planning.gpu_budget import LEAST_HEADROOM_NBYTES, headroom
from tencache_ds.planning.memory_curve import MemoryCurve
from tencache_ds.planning.patience import Patience

SPARE_SHARE = 0.25
"""Share of the headroom kept free in addition to what a pass is expected to take."""

LOST_SHARE = 0.1
"""Fragmentation, as a share of the memory that a pass is going to take."""

RECORDED_STEPS = 3
"""DeepSpeed knows the order of modules from the second step on, and then takes more memory to fetch ahead."""

FIRST_PATIENCE, LONGEST_PATIENCE = 16, 4096
"""Steps before something comes back, the first time and at most."""


class MemoryWatch:
    """The memory of one GPU over passes and steps; decides nothing but numbers of bytes."""

    def __init__(self) -> None:
        self.headroom_nbytes = LEAST_HEADROOM_NBYTES
        self._curve = MemoryCurve()
        self._to_record = RECORDED_STEPS
        self._place = self._base_nbytes = self._unseen_nbytes = self._n_flushes = 0
        self._lowest_nbytes: int | None = None
        self._lowest_at_start_nbytes = sys.maxsize
        self._patience = Patience(FIRST_PATIENCE, LONGEST_PATIENCE)

    # Within a pass

    def begin_pass(self, usage: GpuUsage) -> None:
        """A forward pass begins."""
        self._place, self._base_nbytes = 0, usage.allocated_nbytes
        self._lowest_at_start_nbytes = min(usage.available_nbytes, self._lowest_at_start_nbytes)
        self._curve.begin()

    def places_changed(self) -> None:
        """From the next pass on there are others: what was recorded at the old ones says nothing."""
        self._curve, self._to_record = MemoryCurve(), RECORDED_STEPS

    def next_place(self) -> int:
        """Counts the places between modules; returns the number of this one. Cheap."""
        self._place += 1
        return self._place - 1

    @property
    def recording(self) -> bool:
        """Whether every place is to be recorded: in the first steps."""
        return self._to_record > 0

    def record(self, allocated_nbytes: int) -> None:
        """The bytes of this process's tensors at the next place of a pass."""
        self._curve.record(allocated_nbytes - self._base_nbytes)

    def short_nbytes(self, usage: GpuUsage, place: int | None) -> int:
        """Bytes that have to become free: what is missing to the headroom, if half of that is gone, or what the rest
        of a pass will take beyond what is there; 0 or less if none.

        Args:
            usage: at present.
            place: in a pass, or None between two steps.
        """
        available_nbytes = usage.available_nbytes
        if self._lowest_nbytes is None or available_nbytes < self._lowest_nbytes:
            self._lowest_nbytes = available_nbytes
        short_nbytes = self.headroom_nbytes - available_nbytes
        if available_nbytes >= self.headroom_nbytes // 2:
            short_nbytes = 0
        if place is not None and not self.recording:
            more_nbytes = self._curve.more_nbytes(place, usage.allocated_nbytes - self._base_nbytes)
            short_nbytes = max(short_nbytes, self._wanted_nbytes(more_nbytes) - available_nbytes)
        elif place is None and usage.n_flushes > self._n_flushes:
            # The allocation succeeded, but each time a step takes twice as long.
            short_nbytes = max(short_nbytes, self.headroom_nbytes)
        return short_nbytes

    def released(self, nbytes: int) -> None:
        """So much has left."""
        self._base_nbytes -= nbytes
        self._to_record = 0  # the peak is that with what has left
        self._patience.undone()

    # Between two steps

    def settle(self, usage: GpuUsage) -> None:
        """Memory is about to be given away, by what the steps so far took."""
        self.headroom_nbytes = headroom(usage)

    def step_done(self, usage: GpuUsage) -> None:
        """A step is over, and everything that it led to."""
        if self.recording:
            self._unseen_nbytes = self._curve.complete(usage.peak_nbytes - self._base_nbytes)
            self._to_record -= 1
        self._n_flushes = usage.n_flushes
        if self._patience.step_done():
            self._begin_window()

    def spare_nbytes(self) -> int:
        """Bytes that may be given away again now; 0 before enough steps have passed."""
        if not self._patience.over or self._lowest_nbytes is None:
            return 0
        self._patience.begin_again()
        spare_nbytes = min(
            self._lowest_nbytes - self._unseen_nbytes - self.headroom_nbytes,
            # Nor may the next pass seem too large at its first place.
            self._lowest_at_start_nbytes - self._wanted_nbytes(self._curve.more_nbytes(0, 0)),
        )
        self._begin_window()
        return max(spare_nbytes, 0)

    def came_back(self) -> None:
        """Something was given away again."""
        self._patience.tried()

    def _begin_window(self) -> None:
        self._lowest_nbytes, self._lowest_at_start_nbytes = None, sys.maxsize

    def _wanted_nbytes(self, more_nbytes: int) -> int:
        """The bytes that must be available where a pass will take this much more."""
        return int((1 + LOST_SHARE) * more_nbytes + SPARE_SHARE * self.headroom_nbytes)
