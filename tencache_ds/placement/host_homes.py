# SPDX-License-Identifier: Apache-2.0
"""Moves optimizer state from host memory to NVMe when the machine runs out of memory, and back when there is enough
again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tencache_ds.errors import TenCacheError
from tencache_ds.layout import gib
from tencache_ds.placement.memory_watch import HostWatch
from tencache_ds.placement.moves import StateMoves

logger = logging.getLogger("DeepSpeed.tencache")

LOOK_EVERY_S = 0.5
"""The kernel's figures are read no more often than this: some hundred microseconds each time."""


class HostHomes:
    """Used by the training thread.

    Args:
        watch: tells how much has to leave and may return.
        moves: carries it out.
        available_nbytes: host memory that this process can still get.
    """

    def __init__(self, watch: HostWatch, moves: StateMoves, available_nbytes: Callable[[], int]) -> None:
        self._watch = watch
        self._moves = moves
        self._available_nbytes = available_nbytes
        self._t_looked_s = self._t_looked_at_step_s = 0.0
        self._stuck = False

    def backward_done(self) -> None:
        """A backward pass is over: with gradient accumulation, a step may take minutes."""
        if time.monotonic() - self._t_looked_s >= LOOK_EVERY_S:
            self._look(may_return=False)

    def step_done(self) -> None:
        """An optimizer step is over."""
        if time.monotonic() - self._t_looked_at_step_s >= LOOK_EVERY_S:
            self._look(may_return=True)
            self._t_looked_at_step_s = self._t_looked_s
        self._watch.step_done()

    def _look(self, *, may_return: bool) -> None:
        self._t_looked_s = time.monotonic()
        if not self._stuck:
            try:
                self._adapt(may_return=may_return)
            except TenCacheError as error:
                self._stuck = True
                logger.warning("host memory is short, but there is no place for optimizer state: %s", error)

    def _adapt(self, *, may_return: bool) -> None:
        available = self._available_nbytes()
        short_nbytes = self._watch.short_nbytes(available)
        if short_nbytes:
            short_nbytes -= self._moves.free_unused()
            left_nbytes = self._moves.leave_host_memory(short_nbytes) if short_nbytes > 0 else 0
            if left_nbytes:
                self._watch.released()
                logger.warning(
                    "only %s of host memory is available: moved %s of optimizer state to NVMe",
                    gib(available),
                    gib(left_nbytes),
                )
            return
        if not may_return:
            return
        spare_nbytes = min(self._watch.spare_nbytes(), self._moves.accounts.host_left_nbytes)
        if spare_nbytes > 0 and self._moves.take_host_memory(spare_nbytes):
            self._watch.came_back()
