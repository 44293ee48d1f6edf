# SPDX-License-Identifier: Apache-2.0
"""Energy counters: of the GPU through NVML, of the CPU packages through RAPL."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

POWERCAP = Path("/sys/class/powercap")


def counter_delta(before: int, now: int, range_: int) -> int:
    """How far a counter that starts again after ``range_`` has moved; once around at most."""
    return now - before if now >= before else now - before + range_


@dataclass(slots=True)
class _Package:
    counter: Path
    range_uj: int
    last_uj: int
    used_uj: int = 0


class CpuEnergy:
    """Joules used by all CPU packages of this host since the meter was made (Intel and AMD, without DRAM).

    Ask at least once in the time a counter takes to wrap around: 3 minutes at 350 W on the smallest one.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self._packages: list[_Package] = []
        try:
            for folder in sorted(root.iterdir()):
                # Sub-domains ("intel-rapl:0:0") are part of their package, "psys" contains the packages.
                is_domain = re.fullmatch(r"intel-rapl:\d+", folder.name) is not None
                if is_domain and (folder / "name").read_text().startswith("package"):
                    counter = folder / "energy_uj"
                    range_uj = int((folder / "max_energy_range_uj").read_text())
                    self._packages.append(_Package(counter, range_uj, int(counter.read_text())))
        except (OSError, ValueError):
            self._packages = []  # not there, or only readable by root

    def joules(self) -> float | None:
        """Since the meter was made; None where it cannot be read."""
        if not self._packages:
            return None
        try:
            for package in self._packages:
                now_uj = int(package.counter.read_text())
                package.used_uj += counter_delta(package.last_uj, now_uj, package.range_uj)
                package.last_uj = now_uj
        except (OSError, ValueError):
            self._packages = []
            return None
        return sum(package.used_uj for package in self._packages) / 1e6


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
