# SPDX-License-Identifier: Apache-2.0
"""Files and buffers of the benchmarks of storage: a scratch folder past the page cache, or a refusal."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from tencache_ds.errors import ConfigError, LockedMemoryError
from tencache_ds.io import ScratchFolder, free_nbytes
from tencache_ds.memory import HostArena, Locking
from tencache_ds.profiling.filesystem import file_system_of, supports_direct_io

MIB = 1 << 20
SHARE_OF_FREE_SPACE = 0.25

_WRITE_NBYTES = 32 * MIB


@dataclass(frozen=True, slots=True)
class Area:
    """A folder that is gone afterwards, the limit on the size of its files together, and the kind of storage."""

    folder: Path
    most_nbytes: int
    description: str


def open_area(stack: ExitStack, nvme_path: Path, most_nbytes: int) -> Area:
    """A scratch folder under ``nvme_path``, removed with the stack, for at most 25 % of the free space.

    Raises:
        ConfigError: the folder cannot be used, or its file system has no O_DIRECT.
    """
    root = ScratchFolder(str(nvme_path), 0, "micro").folder
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".tencache-micro-", dir=root)))
    if not supports_direct_io(folder):
        raise ConfigError(
            f"{nvme_path} has no O_DIRECT: the page cache would be measured; name a folder on ext4 or xfs"
        )
    system = file_system_of(nvme_path)
    description = f"{system.kind} (RAM, in place of a fast array)" if system.in_memory else system.kind
    return Area(folder, min(most_nbytes, int(free_nbytes(root) * SHARE_OF_FREE_SPACE)), description)


def open_buffers(stack: ExitStack, nbytes: int) -> tuple[torch.Tensor, bool, str]:
    """Random bytes in aligned memory, locked if that is possible; whether it is, and how or why not."""

    def allocate(locking: Locking) -> torch.Tensor:
        arena = HostArena(None, locking)
        stack.callback(arena.close)
        return arena.allocate(nbytes, "micro-benchmark")

    try:
        locking = Locking.CUDA if torch.cuda.is_available() else Locking.MLOCK
        slab, locked, note = allocate(locking), True, f"page-locked ({locking.value})"
    except (LockedMemoryError, ConfigError) as error:
        slab, locked, note = allocate(Locking.NONE), False, f"not page-locked: {error}"
    # Compressible data would flatter a device that compresses.
    slab.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
    return slab, locked, note


def write_files(folder: Path, n_files: int, nbytes: int, buffers: torch.Tensor) -> tuple[str, ...]:
    """Files of ``nbytes`` each, fully written: space that is only reserved is read without touching the device, and
    takes locks and memory at its first write.
    """
    paths = tuple(str(folder / f"shared-{index}.bin") for index in range(n_files))
    whole = nbytes // 4096 * 4096
    for path in paths:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            view = memoryview(buffers.numpy())[:_WRITE_NBYTES]  # type: ignore[arg-type]
            done = 0
            while done < whole:
                done += os.pwritev(fd, [view[: whole - done]], done)
        finally:
            os.close(fd)
    return paths
