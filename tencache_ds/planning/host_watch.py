# SPDX-License-Identifier: Apache-2.0
"""When optimizer state has to leave host memory for NVMe, because the machine or the control group runs out of it."""

from __future__ import annotations

from tencache_ds.planning.patience import Patience

FLOOR_SHARE = 0.03
"""Share of the memory: with less available, the kernel begins to look for victims."""

LEAST_FLOOR_NBYTES = 2**30

FIRST_PATIENCE, LONGEST_PATIENCE = 32, 4096
"""Steps before something comes back, the first time and at most."""


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
        self._patience = Patience(FIRST_PATIENCE, LONGEST_PATIENCE)

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
