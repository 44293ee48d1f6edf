# SPDX-License-Identifier: Apache-2.0
"""Handling of a read whose bytes differ from the last write."""

from __future__ import annotations

import logging
import mmap

import torch

from tencache_ds.errors import CorruptionError
from tencache_ds.io.backends.posix import PosixFiles
from tencache_ds.io.backends.ticket import Operation
from tencache_ds.io.extents import Extent
from tencache_ds.io.integrity.witness import Witness
from tencache_ds.memory.device_arena import wait_for_device

_logger = logging.getLogger("DeepSpeed.tencache.io")


def verify_read(witness: Witness, extent: Extent, fd: int, buffer: torch.Tensor) -> bool:
    """Compares a buffer that was read with the last write of its extent; reads it once more, from the file of ``fd``,
    if they differ. Any thread.

    Returns:
        False when the bytes differed and are right now: in ``buffer`` too, but the device is one to watch.

    Raises:
        CorruptionError: they still differ.
        StorageError: reading again failed.
    """
    if not witness.differs(buffer):
        return True
    # The aio op cannot say what went wrong. Plain descriptors can: this raises the device's errno, if it has one.
    files = PosixFiles()
    files.add(extent.file, fd)
    again = buffer
    if buffer.device.type != "cpu":
        again = torch.frombuffer(mmap.mmap(-1, buffer.numel()), dtype=torch.uint8)  # page aligned, for O_DIRECT
    try:
        files.transfer(Operation.READ, extent.file, extent.offset, again, extent.tag)
    finally:
        files.close()
    if not witness.differs(again):
        if again is not buffer:
            buffer.copy_(again)
            wait_for_device(buffer)
        _logger.warning(
            "%s at offset %d of %s was read with wrong bytes, and correctly when read again; watch this device",
            extent.tag,
            extent.offset,
            extent.file,
        )
        return False
    raise corruption(
        extent,
        buffer.nbytes,
        f"the bytes are not those of write {witness.generation + 1}: it was lost or torn, or something else "
        "has changed the file since; check the device (smartctl, dmesg) and that no other job uses this folder",
    )


def corruption(extent: Extent, nbytes: int, reason: str) -> CorruptionError:
    """The error of bytes that were read and are not those last written."""
    return CorruptionError("read", extent.file, extent.offset, nbytes, reason, tag=extent.tag)
