# SPDX-License-Identifier: Apache-2.0
"""Checks of ``tencache doctor``: the folder given as ``nvme_path``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tencache_ds.cli.console import Finding, Level, format_nbytes
from tencache_ds.errors import ConfigError
from tencache_ds.profiling.filesystem import (
    BlockDevice,
    block_device_of,
    existing_parent,
    file_system_of,
    supports_direct_io,
)

BYTES_PER_PARAMETER = 14
"""Master weight, two moments (fp32 each) and the 16-bit weight of a parameter kept on NVMe."""

LITTLE_SPACE_NBYTES = 16 << 30


def check_nvme_path(path: Path) -> list[Finding]:
    """Whether ``path`` can be an ``nvme_path``: access, kind of storage, free space, direct I/O."""
    folder = existing_parent(path)
    if not folder.is_dir():
        return [Finding(Level.PROBLEM, "nvme path", f"{folder} is not a folder", "give a folder on a local disk")]
    if not os.access(folder, os.W_OK | os.X_OK):
        return [
            Finding(
                Level.PROBLEM, "nvme path", f"{folder} cannot be written to by this user", f"sudo chown $USER {folder}"
            )
        ]
    text = str(folder) if folder == path.expanduser().resolve() else f"{path} will be created in {folder}"
    findings = [Finding(Level.OK, "nvme path", text), _kind(folder), _free_space(folder), _direct_io(folder)]
    device = block_device_of(folder)
    return findings if device is None else [*findings, _blocks(folder, device)]


def _kind(folder: Path) -> Finding:
    file_system = file_system_of(folder)
    text = f"{file_system.kind} on {file_system.device}, mounted at {file_system.mount_point}"
    remedy = "name a folder on a local NVMe disk"
    if file_system.in_memory:
        return Finding(Level.WARNING, "file system", f"{text}: this is RAM, not a disk", remedy)
    if file_system.over_network:
        return Finding(Level.WARNING, "file system", f"{text}: network storage is slow for this", remedy)
    return Finding(Level.OK, "file system", text)


def _free_space(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    billions = free / BYTES_PER_PARAMETER / 1e9
    text = f"{format_nbytes(free)}: room for {billions:.1f} billion parameters at {BYTES_PER_PARAMETER} bytes each"
    if free < LITTLE_SPACE_NBYTES:
        return Finding(Level.WARNING, "free space", text, "free some space, or name a folder on a larger disk")
    return Finding(Level.OK, "free space", text)


def _blocks(folder: Path, device: BlockDevice) -> Finding:
    text = f"{device.logical_block_nbytes} bytes, {device.physical_block_nbytes} physically ({device.name})"
    try:
        device.check_alignment(folder)
    except ConfigError as error:
        return Finding(Level.PROBLEM, "device blocks", text, str(error))
    return Finding(Level.OK, "device blocks", text)


def _direct_io(folder: Path) -> Finding:
    try:
        direct = supports_direct_io(folder)
    except OSError as error:
        return Finding(Level.PROBLEM, "direct I/O", f"writing a file failed: {error}", "name a folder that works")
    if direct:
        return Finding(Level.OK, "direct I/O", "O_DIRECT works")
    return Finding(
        Level.WARNING,
        "direct I/O",
        "O_DIRECT is not supported: data goes through the page cache, which costs RAM and time",
        "name a folder on ext4 or xfs",
    )
