# SPDX-License-Identifier: Apache-2.0
"""Results of ``tencache tune --save``, kept by device: measured once, shown until something relevant changes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from tencache_ds import __version__
from tencache_ds.cli.tune_result import PathResult
from tencache_ds.profiling.filesystem import block_device_of, device_number, file_system_of

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
