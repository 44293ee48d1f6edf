# SPDX-License-Identifier: Apache-2.0
"""Host memory of the weights that stay there: packed into slabs, never freed one by one."""

from __future__ import annotations

import torch

from tencache_ds.memory.arena import HostArena

SLAB_NBYTES = 64 * 2**20
"""One registration with the driver per slab instead of one per weight; larger weights get their own memory."""

ALIGNMENT_NBYTES = 256


class ResidentMemory:
    """Hands out pieces of an arena. Not thread-safe: its owner serialises calls; the arena's owner frees everything."""

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self._slab: torch.Tensor | None = None
        self._used = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A zeroed 1-D uint8 tensor of ``nbytes``.

        Raises:
            MemoryLimitError, LockedMemoryError: the arena has no such memory.
        """
        length = -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
        if length >= SLAB_NBYTES:
            return self._arena.allocate(length, "resident weights").zero_()[:nbytes]
        if self._slab is None or self._used + length > self._slab.numel():
            self._slab = self._arena.allocate(SLAB_NBYTES, "resident weights")
            self._used = 0
        piece = self._slab[self._used : self._used + length]
        self._used += length
        return piece.zero_()[:nbytes]
