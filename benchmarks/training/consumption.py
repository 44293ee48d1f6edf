# SPDX-License-Identifier: Apache-2.0
"""Other costs of the measured steps: energy of the GPU (NVML) and of the CPU packages (RAPL), writes to the drives."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import torch

from tencache_ds.profiling.filesystem import DiskWrites

POWERCAP = Path("/sys/class/powercap")

Number = TypeVar("Number", int, float)


class CpuEnergy:
    """Joules used by all CPU packages of this host since the meter was made (Intel and AMD, without DRAM).

    Ask at least once in the time a counter takes to wrap around: 3 minutes at 350 W on the smallest one.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self._used_uj = 0
        self._last_uj: dict[Path, int] = {}
        try:
            for folder in sorted(root.iterdir()):
                # Sub-domains ("intel-rapl:0:0") are part of their package, "psys" contains the packages.
                is_domain = re.fullmatch(r"intel-rapl:\d+", folder.name) is not None
                if is_domain and (folder / "name").read_text().startswith("package"):
                    self._last_uj[folder] = _read(folder / "energy_uj")
        except (OSError, ValueError):
            self._last_uj = {}  # not there, or only readable by root

    def joules(self) -> float | None:
        """Since the meter was made; None where it cannot be read."""
        try:
            for folder, last_uj in self._last_uj.items():
                now_uj = self._last_uj[folder] = _read(folder / "energy_uj")
                range_uj = _read(folder / "max_energy_range_uj")
                self._used_uj += now_uj - last_uj + (range_uj if now_uj < last_uj else 0)
        except (OSError, ValueError):
            self._last_uj = {}
        return self._used_uj / 1e6 if self._last_uj else None


def _read(file: Path) -> int:
    return int(file.read_text())


class GpuEnergy:
    """Joules used by this process's current CUDA device since the meter was made, as NVML counts."""

    def __init__(self) -> None:
        self._start_mj = self._read_mj()

    def joules(self) -> float | None:
        """Since the meter was made; None without an NVIDIA GPU that counts its energy."""
        now_mj = self._read_mj()
        return None if now_mj is None or self._start_mj is None else (now_mj - self._start_mj) / 1e3

    @staticmethod
    def _read_mj() -> int | None:
        if not torch.cuda.is_available():
            return None
        import pynvml

        try:
            pynvml.nvmlInit()  # counted by NVML: a second one costs nothing
            # By UUID: NVML's numbers do not follow CUDA_VISIBLE_DEVICES.
            uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
            return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByUUID(uuid)))
        except pynvml.NVMLError:
            return None


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
