# SPDX-License-Identifier: Apache-2.0
"""Other costs of the measured steps: energy, and writes to the drives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tencache_ds.profiling.filesystem import DiskWrites

from .energy import CpuEnergy, GpuEnergy

Number = TypeVar("Number", int, float)


class Consumption:
    """Sums over spans, between which other runs may use the machine.

    Each sum is None where its counter cannot be read, and 0 before the first span.

    Args:
        paths: folders whose block devices are watched.

    Attributes:
        gpu_j: joules of this process's GPU.
        cpu_j: joules of all CPU packages of the host.
        disk_write_nbytes: bytes that the block devices wrote.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = tuple(paths)
        self.gpu_j: float | None = 0.0
        self.cpu_j: float | None = 0.0
        self.disk_write_nbytes: int | None = 0

    def start(self) -> None:
        """Begins a span."""
        self._disk, self._cpu, self._gpu = DiskWrites(self._paths), CpuEnergy(), GpuEnergy()

    def look(self) -> None:
        """Call it often enough, such as after every step, to see a counter wrap around."""
        self._cpu.joules()

    def stop(self) -> None:
        """Ends a span."""
        self.gpu_j = _sum(self.gpu_j, self._gpu.joules())
        self.cpu_j = _sum(self.cpu_j, self._cpu.joules())
        self.disk_write_nbytes = _sum(self.disk_write_nbytes, self._disk.nbytes())


def _sum(so_far: Number | None, more: Number | None) -> Number | None:
    return None if so_far is None or more is None else so_far + more
