# SPDX-License-Identifier: Apache-2.0
"""What is placed, where it can be, and how much of a place is in use."""

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
    """What a GPU's memory is used for.

    Attributes:
        total_nbytes: what this process may use of the device, whatever others use of it.
        free_nbytes: what nobody uses.
        reserved_nbytes: what torch's allocator holds; after a step it keeps what the step needed at its peak.
        allocated_nbytes: the part of it that is in use by tensors; the rest served activations and gradients.
    """

    total_nbytes: int
    free_nbytes: int
    reserved_nbytes: int
    allocated_nbytes: int

    @property
    def transient_nbytes(self) -> int:
        """What the step needed at its peak beside what stays."""
        return self.reserved_nbytes - self.allocated_nbytes
