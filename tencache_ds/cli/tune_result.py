# SPDX-License-Identifier: Apache-2.0
"""Results of ``tencache tune`` for one path: plain values, read and written as JSON, and those that ``--save`` keeps by
device: measured once, shown until something relevant changes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tencache_ds import __version__
from tencache_ds.profiling.filesystem import block_device_of, device_number, file_system_of

LEAST_GAIN = 0.05
"""Smaller differences are not worth a line in a config."""

LEAST_ROUNDS = 5
"""Being faster in each of fewer rounds is chance too often."""

NVME_BYTES_WRITTEN = {
    "TenCache, weights in RAM": 12,
    "TenCache, weights on NVMe": 14,
    "stock DeepSpeed, all on NVMe": 18,
}
"""Per parameter and step: master weight and two moments, fp32 each; then the 16-bit weight; then the gradient."""

SECONDS_PER_DAY = 86400.0


class Measured(BaseModel):
    """One set of knobs and the rates it reached, in bytes per second: medians of slices of time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: dict[str, bool | int]
    mixed_bytes_per_s: float
    """Reads and writes at the same time, both counted."""

    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    """None if the setting was dropped after screening by its mixed rate."""

    rounds: tuple[float, ...] = ()
    """Per round, bytes per second over reading, writing and doing both, for the same bytes each."""

    @property
    def bytes_per_s(self) -> float:
        """The figure that settings are compared by: the median round, or the mixed rate where there was none."""
        return statistics.median(self.rounds) if self.rounds else self.mixed_bytes_per_s


class Choice(BaseModel):
    """The settings tried for TenCache or for stock, the default first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tried: tuple[Measured, ...]

    @property
    def default(self) -> Measured:
        return self.tried[0]

    @property
    def best(self) -> Measured:
        """The best of those whose every round beat the default's, by more than 5 % in the median; else the default.

        Rounds of all settings alternate, so that the n-th of each met the same weather. Within 5 % of the fastest, the
        one closest to the default is best.
        """
        better = [one for one in self.tried[1:] if self._beats_default(one)]
        fastest = max((one.bytes_per_s for one in better), default=0.0)
        good = [one for one in better if one.bytes_per_s * (1 + LEAST_GAIN) >= fastest]
        return min(good, key=lambda one: (self._n_changes(one), -one.bytes_per_s), default=self.default)

    @property
    def gain(self) -> float:
        """Gain of the best over the default, as a fraction."""
        return self.best.bytes_per_s / self.default.bytes_per_s - 1

    def _n_changes(self, one: Measured) -> int:
        return sum(one.settings[name] != value for name, value in self.default.settings.items())

    def _beats_default(self, one: Measured) -> bool:
        ratios = [theirs / ours for theirs, ours in zip(one.rounds, self.default.rounds, strict=False)]
        return len(ratios) >= LEAST_ROUNDS and min(ratios) > 1 and statistics.median(ratios) > 1 + LEAST_GAIN


class PathResult(BaseModel):
    """One path, measured. Sizes are in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    measured_at: datetime
    seconds: float
    """The time limit."""

    filesystem: str
    device: str
    """Models of the disks; empty on tmpfs and network file systems."""

    disks_nbytes: int
    logical_block_nbytes: int | None
    physical_block_nbytes: int | None
    direct: bool
    """Whether the file system takes O_DIRECT."""

    request_nbytes: int
    in_flight: int
    """Requests submitted at a time, as training does with its chunks."""

    backend: str
    """The one that ``"io_backend": "auto"`` takes here."""

    backend_reason: str
    tencache: Choice
    stock: Choice | None
    """None where stock's ``aio_handle`` could not be measured."""

    notes: tuple[str, ...] = ()
    """Settings that could not be tried, and why."""

    warnings: tuple[str, ...] = ()

    def tencache_sections(self) -> dict[str, dict[str, int]]:
        """The part of ``ds_config.json`` with the best settings for TenCache on this path."""
        best = self.tencache.best.settings
        return {
            "aio": {key: best[key] for key in ("block_size", "queue_depth")},
            "tencache": {key: best[key] for key in ("io_lanes", "io_request_size")},
        }

    def stock_section(self) -> dict[str, dict[str, bool | int]] | None:
        """The ``aio`` section that suits stock DeepSpeed best on this path."""
        return None if self.stock is None else {"aio": dict(self.stock.best.settings)}

    def as_json(self) -> dict[str, Any]:
        """All measurements, and the values derived from them."""
        return self.model_dump(mode="json") | {
            "defaults_are_as_good": self.tencache.best is self.tencache.default,
            "tencache_config": self.tencache_sections(),
            "stock_config": self.stock_section(),
        }


class Endurance(BaseModel):
    """Bytes that training writes to the drives."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    bytes_per_parameter: int
    nbytes_per_step: float
    nbytes_per_day: float
    drive_writes_per_day: float | None
    """How often all drives together are filled in a day; None where their size is not known."""


def endurance(parameters: float, step_s: float, drive_nbytes: float | None) -> list[Endurance]:
    """Bytes written with everything on NVMe that can be there, by whom.

    Args:
        parameters: of the model.
        step_s: seconds of an optimizer step; steps follow one another day and night.
        drive_nbytes: of all drives together.
    """
    estimates = []
    for name, bytes_per_parameter in NVME_BYTES_WRITTEN.items():
        per_step = parameters * bytes_per_parameter
        per_day = per_step * SECONDS_PER_DAY / step_s
        estimates.append(
            Endurance(
                name=name,
                bytes_per_parameter=bytes_per_parameter,
                nbytes_per_step=per_step,
                nbytes_per_day=per_day,
                drive_writes_per_day=per_day / drive_nbytes if drive_nbytes else None,
            )
        )
    return estimates


# Saved, by device


_FORMAT = 1
"""Incremented when the measurement or the file format changes."""


def cache_folder() -> Path:
    """Where results are kept: ``$XDG_CACHE_HOME/tencache``, by default ``~/.cache/tencache``."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "tencache"


def identity(folder: Path) -> str:
    """The storage under an existing folder: its disks by model and serial number, and the file system on them."""
    system, device = file_system_of(folder), block_device_of(folder)
    disks: object = (system.device, system.mount_point)
    if device is not None:
        # Virtual disks have no serial number: the device's number is the best there is.
        disks = (device.models, device.serials or device_number(folder), device.disks_nbytes)
    return json.dumps([system.kind, disks, os.statvfs(folder).f_fsid])


def cache_file(folder: Path, seconds: float) -> Path:
    """Where the result for the storage under ``folder`` is, or would be: another device, budget or version of the
    software, and it is another file.
    """
    versions = [__version__, *(metadata.version(name) for name in ("deepspeed", "torch")), platform.release()]
    what = json.dumps([_FORMAT, identity(folder), seconds, len(os.sched_getaffinity(0)), versions])
    return cache_folder() / f"tune-{hashlib.sha256(what.encode()).hexdigest()[:32]}.json"


def load(folder: Path, seconds: float) -> PathResult | None:
    """The result saved for the storage under ``folder``; None if there is none that can be read."""
    try:
        return PathResult.model_validate_json(cache_file(folder, seconds).read_text())
    except (OSError, ValidationError):
        return None


def save(folder: Path, result: PathResult) -> Path:
    """Keeps a result, in place of an older one; returns where.

    Raises:
        OSError: the user's cache folder cannot be written to.
    """
    file = cache_file(folder, result.seconds)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    try:
        part.write_text(result.model_dump_json(indent=2) + "\n")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return file
