# SPDX-License-Identifier: Apache-2.0
"""What has to leave GPU memory or host memory when training or the machine needs it, and what may come back later.

[Note: memory that training needs] What lives on the GPU between two uses lies in memory that training left idle, and
training may want it back at any time: for a longer sequence, an evaluation, a second model. State leaves within the
allocation that needs its memory ([Note: loans] in :mod:`tencache_ds.memory.device_memory`). Weights and gradients
cannot, so as much as the recorded step took stays free of them.

After each step it is known what its peak has left. Where that is less than half of the headroom, state leaves, and
weights when there is none: allocations of the next step need not wait for it. What has left may come back when a number
of steps have passed whose peaks had room for it, and in which torch's allocator did not have to return cached memory to
the device: where that is in pieces, more is needed than a peak says. If it has to leave again, the next wait is twice
as long: a training that needs the memory now and then soon keeps it.

Optimizer state leaves host memory for NVMe when the machine or the control group runs out of it.
"""

from __future__ import annotations

from tencache_ds.placement.gpu_policy import LEAST_HEADROOM_NBYTES
from tencache_ds.placement.places import GpuUsage

FLOOR_SHARE = 0.03
"""Share of the memory: with less available, the kernel begins to look for victims."""

LEAST_FLOOR_NBYTES = 2**30

FIRST_PATIENCE, FIRST_HOST_PATIENCE, LONGEST_PATIENCE = 16, 32, 4096
"""Steps before something comes back to GPU memory and to host memory, the first time, and at most to either."""

LOOK_EVERY_S = 0.002
"""Memory is looked at no more often than this."""

LOOK_SHARE = 0.01
"""Share of the time that looking at memory may take: most looks take 10 microseconds, with some virtual GPUs 200."""

LONGEST_PAUSE_S = 0.02
"""Between two looks, whatever they take: one that was interrupted must not hide the rest of the pass."""


def pause_s(cost_s: float) -> float:
    """Seconds until the next look, after one that took ``cost_s``."""
    return min(max(LOOK_EVERY_S, cost_s / LOOK_SHARE), LONGEST_PAUSE_S)


class Patience:
    """Counts quiet steps. What had to be undone soon after it was tried again is waited for twice as long next time.

    Args:
        first: steps before the first new try.
        longest: steps before any.
    """

    def __init__(self, first: int, longest: int) -> None:
        self._needed = first
        self._longest = longest
        self._quiet = 0
        self._disturbed = self._tried = False

    def undone(self) -> None:
        """It had to be undone, in the step under way."""
        self._disturbed = True
        if self._tried:
            self._tried = False
            self._needed = min(2 * self._needed, self._longest)

    def tried(self) -> None:
        """It was tried again."""
        self._tried = True

    def step_done(self) -> bool:
        """Ends a step; returns whether it was disturbed, in which case counting begins anew."""
        disturbed, self._disturbed = self._disturbed, False
        self._quiet = 0 if disturbed else self._quiet + 1
        return disturbed

    @property
    def over(self) -> bool:
        """Whether enough quiet steps have passed."""
        return self._quiet >= self._needed

    def begin_again(self) -> None:
        """Counts anew: it is about to be tried, or cannot be."""
        self._quiet = 0


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


class HostWatch:
    """The available host memory over steps; decides nothing but numbers of bytes.

    Args:
        limit_nbytes: of the machine, or of the control group where that has less.
        ranks: that share it and do the same.
    """

    def __init__(self, limit_nbytes: int, ranks: int) -> None:
        self._floor_nbytes = max(int(FLOOR_SHARE * limit_nbytes), min(LEAST_FLOOR_NBYTES, limit_nbytes // 8))
        self._ranks = ranks
        self._lowest_nbytes: int | None = None
        self._patience = Patience(FIRST_HOST_PATIENCE, LONGEST_PATIENCE)

    def short_nbytes(self, available_nbytes: int) -> int:
        """Bytes that this rank has to free: until twice the floor is available; 0 above the floor."""
        if self._lowest_nbytes is None or available_nbytes < self._lowest_nbytes:
            self._lowest_nbytes = available_nbytes
        if available_nbytes >= self._floor_nbytes:
            return 0
        return -(-(2 * self._floor_nbytes - available_nbytes) // self._ranks)

    def released(self) -> None:
        """Something has left."""
        self._patience.undone()

    def step_done(self) -> None:
        """A step is over."""
        if self._patience.step_done():
            self._lowest_nbytes = None

    def spare_nbytes(self) -> int:
        """Bytes that this rank may take again now, so that four times the floor stay available; 0 before enough steps
        have passed."""
        if not self._patience.over or self._lowest_nbytes is None:
            return 0
        spare_nbytes = (self._lowest_nbytes - 4 * self._floor_nbytes) // self._ranks
        self._patience.begin_again()
        self._lowest_nbytes = None
        return max(spare_nbytes, 0)

    def came_back(self) -> None:
        """Something was taken again."""
        self._patience.tried()
