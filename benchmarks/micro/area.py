# SPDX-License-Identifier: Apache-2.0
"""Files, buffers and requests of the benchmarks of storage: in a scratch folder past the page cache, or a refusal."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from tencache_ds.cli.storage_loops import Requests
from tencache_ds.errors import ConfigError, LockedMemoryError, SpaceError
from tencache_ds.io import ScratchFolder, free_nbytes
from tencache_ds.memory import HostArena, Locking
from tencache_ds.profiling.filesystem import file_system_of, supports_direct_io

MIB = 1 << 20
SHARE_OF_FREE_SPACE = 0.25

_WRITE_NBYTES = 32 * MIB
_LEAST_IN_FLIGHT = 4


class Load(NamedTuple):
    """How much is asked of storage at the same time."""

    lanes: int  # requests that are worked on
    request_nbytes: int  # a multiple of 4096

    @property
    def n_buffers(self) -> int:
        """Requests in flight: twice as many as lanes, so that none waits for the next one, and an even number, for as
        many reads as writes.
        """
        return max(_LEAST_IN_FLIGHT, 2 * self.lanes)

    @property
    def nbytes(self) -> int:
        """Bytes in flight."""
        return self.n_buffers * self.request_nbytes


@dataclass(frozen=True, slots=True)
class Work:
    """The same for every variant of a case."""

    requests: Requests  # to the shared files in turn, by as many buffers as are in flight; their name is the folder
    lanes: int  # requests that are worked on at the same time
    paths: tuple[str, ...]  # the shared files
    refusal: str  # why the buffers are not page-locked; empty if they are
    urgent: Requests | None  # to a further file, one at a time


@dataclass(frozen=True, slots=True)
class Area:
    """Files of equal length, and a buffer."""

    folder: Path
    # fully written. Several, as in training: tmpfs lets one writer at a time into a file
    paths: tuple[str, ...]
    file_nbytes: int
    buffer: torch.Tensor  # random bytes in aligned memory
    refusal: str  # why it is not page-locked; empty if it is
    urgent: Requests | None  # to a further file and buffer
    parameters: dict[str, str]  # the description for a result

    def work(self, load: Load) -> Work | None:
        """Requests in the files; None if these hold fewer than are in flight."""
        paths, nbytes = self.paths, load.request_nbytes
        # A multiple of the number of buffers.
        n_extents = self.file_nbytes // nbytes * len(paths) // load.n_buffers * load.n_buffers
        if not n_extents:
            return None

        def place(extent: int) -> tuple[str, int]:
            return paths[extent % len(paths)], extent // len(paths) * nbytes

        buffers = tuple(self.buffer[: load.nbytes].split(nbytes))
        requests = Requests(str(self.folder), buffers, n_extents, place)
        return Work(requests, load.lanes, paths, self.refusal, self.urgent)


@contextmanager
def open_area(
    nvme_path: Path, most_nbytes: int, loads: Sequence[Load], *, n_own_sets: int = 0, urgent_nbytes: int = 0
) -> Iterator[Area]:
    """An area in a scratch folder under ``nvme_path``, with a file per lane; all of it is gone afterwards, in any case.

    Args:
        nvme_path: a folder on the storage to measure.
        most_nbytes: most bytes of all files together; less where it is over 25 % of the free space.
        loads: the buffer holds the requests in flight of each of these that fits the files, which one has to.
        n_own_sets: variants that will make as many files of their own.
        urgent_nbytes: bytes of an urgent request, for which there are one more file and buffer; 0 if there are none.

    Raises:
        ConfigError: the folder cannot be used, or its file system has no O_DIRECT.
        SpaceError: there is too little free space for even the smallest load.
    """
    root = ScratchFolder(str(nvme_path), 0, "micro").folder
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".tencache-micro-", dir=root)))
        if not supports_direct_io(folder):
            raise ConfigError(
                f"{nvme_path} has no O_DIRECT: the page cache would be measured; name a folder on ext4 or xfs"
            )
        most_nbytes = min(most_nbytes, int(free_nbytes(root) * SHARE_OF_FREE_SPACE))
        n_files = max(load.lanes for load in loads)
        n_of_all = n_files * (1 + n_own_sets) + bool(urgent_nbytes)
        file_nbytes = most_nbytes // n_of_all
        fitting = [load.nbytes for load in loads if load.n_buffers <= file_nbytes // load.request_nbytes * n_files]
        if not fitting or file_nbytes < urgent_nbytes:
            cause = f"the working set may take {most_nbytes} bytes; free some space, or choose smaller requests"
            needed = n_of_all * max(min(2 * load.request_nbytes for load in loads), urgent_nbytes)
            raise SpaceError("allocate", str(nvme_path), 0, needed, cause)
        buffer, locked, note = open_buffer(stack, max(fitting) + urgent_nbytes)
        *paths, last = write_files(folder, n_files + bool(urgent_nbytes), file_nbytes, buffer)
        urgent = None
        if urgent_nbytes:
            n_extents = file_nbytes // urgent_nbytes
            urgent = Requests(last, (buffer[-urgent_nbytes:],), n_extents, lambda n: (last, n * urgent_nbytes))
        else:
            paths.append(last)
        system = file_system_of(nvme_path)
        kind = f"{system.kind} (RAM, in place of a fast array)" if system.in_memory else system.kind
        parameters = {
            "storage": f"{kind}, O_DIRECT, {n_files} files of {file_nbytes / 1e9:.3f} GB",
            "buffers": note,
        }
        yield Area(folder, tuple(paths), file_nbytes, buffer, "" if locked else note, urgent, parameters)


def open_buffer(stack: ExitStack, nbytes: int) -> tuple[torch.Tensor, bool, str]:
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


def write_files(folder: Path, n_files: int, nbytes: int, buffer: torch.Tensor) -> tuple[str, ...]:
    """Files of ``nbytes`` each, fully written: space that is only reserved is read without touching the device, and
    takes locks and memory at its first write.
    """
    paths = tuple(str(folder / f"shared-{index}.bin") for index in range(n_files))
    whole = nbytes // 4096 * 4096
    for path in paths:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            view = memoryview(buffer.numpy())[:_WRITE_NBYTES]  # type: ignore[arg-type]
            done = 0
            while done < whole:
                done += os.pwritev(fd, [view[: whole - done]], done)
        finally:
            os.close(fd)
    return paths
