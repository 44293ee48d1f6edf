# SPDX-License-Identifier: Apache-2.0
"""The items to place, the places, and the memory in use there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Place(IntEnum):
    """Where something lives between two uses, fastest first."""

    GPU = 0
    HOST = 1
    NVME = 2


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """Usage of a GPU's memory.

    Attributes:
        free_nbytes: what no process uses, as far as this one may use it.
        cached_nbytes: what torch's allocator keeps for later, and no tensor uses.
        allocated_nbytes: memory used by tensors of this process.
        peak_nbytes: the most that they have used since recording began.
        n_flushes: how often torch's allocator had to free its whole cache to obtain memory.
        n_failures: how often it did not obtain any.
        pool_nbytes: what it holds: tensors, its cache, and what streams are not done with.
    """

    free_nbytes: int
    cached_nbytes: int
    allocated_nbytes: int
    peak_nbytes: int
    n_flushes: int = 0
    n_failures: int = 0
    pool_nbytes: int = 0

    @property
    def available_nbytes(self) -> int:
        """Memory available to new tensors."""
        return self.free_nbytes + self.cached_nbytes

    @property
    def transient_nbytes(self) -> int:
        """Memory that the recorded step needed at its peak beyond the permanent part: activations and gradients."""
        return self.peak_nbytes - self.allocated_nbytes
