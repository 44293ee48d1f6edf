# SPDX-License-Identifier: Apache-2.0
"""Host memory for activations, whose sizes are known only when they are saved: allocated at first use, then reused."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tencache_ds.layout import PAGE_NBYTES, round_up
from tencache_ds.memory.arena import POISON_BYTE, HostArena

_CLASSES_PER_DOUBLING = 8


def class_nbytes(nbytes: int) -> int:
    """The size of the buffer for so many bytes: at most an eighth more, so that batches of varying length share
    buffers; a multiple of 4096."""
    step = (1 << max(nbytes - 1, 0).bit_length()) // (2 * _CLASSES_PER_DOUBLING)
    return round_up(nbytes, max(step, PAGE_NBYTES))


class HostBuffers:
    """Used by one thread at a time.

    Args:
        arena: where the memory comes from. Registering it with a GPU takes about 0.5 s per GB, so it is kept.
        allows: whether so many more bytes may be allocated.
        count: called with the bytes that are allocated, or freed (negative).
        purpose: in errors and reports.
        poison: for tests: fill what is given back.
    """

    def __init__(
        self,
        arena: HostArena,
        allows: Callable[[int], bool],
        count: Callable[[int], None],
        purpose: str,
        *,
        poison: bool = False,
    ) -> None:
        self._arena = arena
        self._allows = allows
        self._count = count
        self._purpose = purpose
        self._poison = poison
        self._free: dict[int, list[torch.Tensor]] = {}
        self._free_nbytes = 0
        self.allocated_nbytes = 0
        """In use or free for the next."""

    @property
    def used_nbytes(self) -> int:
        """In use."""
        return self.allocated_nbytes - self._free_nbytes

    def take(self, nbytes: int, *, regardless: bool = False) -> torch.Tensor | None:
        """A 1-D page-aligned uint8 tensor of at least ``nbytes``, or None if there is no room.

        Args:
            nbytes: at least 1.
            regardless: take it even if ``allows`` says no.

        Raises:
            MemoryLimitError, LockedMemoryError: the system has no such memory.
        """
        size = class_nbytes(nbytes)
        free = self._free.get(size)
        if free:
            self._free_nbytes -= size
            return free.pop()
        if not self._allows(size):
            self._release(size)
            if not (regardless or self._allows(size)):
                return None
        buffer = self._arena.allocate(size, self._purpose)
        self.allocated_nbytes += size
        self._count(size)
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Takes back what :meth:`take` returned; no device may still read or write it."""
        if self._poison:
            buffer.fill_(POISON_BYTE)
        self._free.setdefault(buffer.numel(), []).append(buffer)
        self._free_nbytes += buffer.numel()

    def trim(self) -> None:
        """Frees what nobody uses."""
        for size in self._free:
            while self._free[size]:
                self._free_one(size)

    def _release(self, needed_nbytes: int) -> None:
        """Frees buffers of other sizes that nobody uses, largest first, until so many more bytes are allowed."""
        for size in sorted(self._free, reverse=True):
            while self._free[size] and not self._allows(needed_nbytes):
                self._free_one(size)

    def _free_one(self, size: int) -> None:
        self._arena.free(self._free[size].pop())
        self._free_nbytes -= size
        self.allocated_nbytes -= size
        self._count(-size)
