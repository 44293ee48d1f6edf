# SPDX-License-Identifier: Apache-2.0
"""Zeroed tensors in the memory of an arena, counted as they come and go."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tencache_ds.memory.arena import HostArena


class HostTensors:
    """A :class:`tencache_ds.tiers.gradients.GradientMemory`. Not thread-safe.

    Args:
        arena: whose memory it is.
        purpose: what for, in errors and reports.
        count: called with the bytes taken, or given back (negative).
    """

    def __init__(self, arena: HostArena, purpose: str, count: Callable[[int], None]) -> None:
        self._arena = arena
        self._purpose = purpose
        self._count = count

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed 1-D tensor.

        Raises:
            MemoryLimitError, LockedMemoryError: the arena has no such memory.
        """
        nbytes = numel * dtype.itemsize
        memory = self._arena.allocate(max(nbytes, 1), self._purpose)
        self._count(nbytes)
        return memory.zero_()[:nbytes].view(dtype)

    def give_back(self, tensor: torch.Tensor) -> None:
        """A whole tensor of :meth:`take` is not needed any more; its pages go with the last reference to them. No
        device may still access it.

        Raises:
            LockedMemoryError: the driver refused; the memory stays mapped.
        """
        self._arena.leave(tensor)
        self._count(-tensor.nbytes)
