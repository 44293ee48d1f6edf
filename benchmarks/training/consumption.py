# SPDX-License-Identifier: Apache-2.0
"""Other costs of the measured steps: energy of the GPU (NVML) and of the CPU packages (RAPL), writes to the drives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tencache_ds.profiling.filesystem import DiskWrites

POWERCAP = Path("/sys/class/powercap")


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


def gpu_joules() -> float | None:
    """Joules that this process's current CUDA device has used since its driver was loaded, as NVML counts; None without
    an NVIDIA GPU that counts its energy.
    """
    if not torch.cuda.is_available():
        return None
    import pynvml

    try:
        pynvml.nvmlInit()  # counted by NVML: a second one costs nothing
        # By UUID: NVML's numbers do not follow CUDA_VISIBLE_DEVICES.
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByUUID(uuid)) / 1e3
    except pynvml.NVMLError:
        return None


class Consumption:
    """Sums over spans, between which other runs may use the machine.

    Args:
        paths: folders whose block devices are watched.

    Attributes:
        spent: by field of :class:`..record.Measurement`: joules of this process's GPU and of all CPU packages of the
            host, and bytes that the block devices wrote; None where the counter cannot be read.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._disk, self._cpu = DiskWrites(paths), CpuEnergy()
        self.spent: dict[str, float | None] = dict.fromkeys(self.counts(), 0)

    def counts(self) -> dict[str, float | None]:
        """Up to now. Ask often enough, such as after every step, to see a counter wrap around."""
        return {
            "gpu_energy_j": gpu_joules(),
            "cpu_energy_j": self._cpu.joules(),
            "disk_write_nbytes": self._disk.nbytes(),
        }

    @contextmanager
    def span(self) -> Iterator[None]:
        """Adds what is used within it."""
        before = self.counts()
        yield
        for key, now in self.counts().items():
            so_far, start = self.spent[key], before[key]
            self.spent[key] = None if so_far is None or start is None or now is None else so_far + now - start
