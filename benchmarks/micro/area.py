# SPDX-License-Identifier: Apache-2.0
"""Files, buffers and requests of the benchmarks of storage: on the probe's files, past the page cache, or a refusal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tencache_ds.cli.tune_measure import Requests, open_buffer, requests_on
from tencache_ds.errors import ConfigError, SpaceError
from tencache_ds.profiling import probe
from tencache_ds.profiling.filesystem import file_system_of
from tencache_ds.profiling.probe import Area

MIB = 1 << 20
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

    area: Area  # the shared files, written throughout, in requests of this length
    requests: Requests  # to these in turn, by as many buffers as are in flight
    lanes: int  # requests that are worked on at the same time
    unlocked: str  # why the buffers are not page-locked; empty if they are
    urgent: Requests | None = None  # to a further file, one at a time


@contextmanager
def open_files(nvme_path: Path, most_nbytes: int, request_nbytes: int, n_files: int, n_sets: int = 1) -> Iterator[Area]:
    """Files of equal length without names, fully written: space that is only reserved is read without touching the
    device, and takes locks and memory at its first write.

    Args:
        nvme_path: a folder on the storage to measure; made if it is not there.
        most_nbytes: most bytes of all files together; less where it is over 25 % of the free space.
        request_nbytes: their length is a multiple of it.
        n_files: how many. Several, as in training: tmpfs lets one writer at a time into a file.
        n_sets: so many times their space is needed.

    Raises:
        ConfigError: the folder cannot be used, or its file system has no O_DIRECT.
        SpaceError: there is too little free space.
    """
    with suppress(FileExistsError):
        nvme_path.mkdir(parents=True, exist_ok=True)
    probe.check_folder(nvme_path)
    most_nbytes = min(most_nbytes, probe.free_nbytes(nvme_path) // probe.SHARE_OF_FREE)
    n_requests = most_nbytes // n_sets // (n_files * request_nbytes) * n_files
    if not n_requests:
        raise _too_small(nvme_path, n_sets * n_files * request_nbytes, most_nbytes)
    with probe.open_area(nvme_path, n_requests * request_nbytes, request_nbytes, n_files) as area:
        if not area.direct:
            raise ConfigError(
                f"{nvme_path} has no O_DIRECT: the page cache would be measured; name a folder on ext4 or xfs"
            )
        probe.fill_area(area, math.inf)
        yield area


@contextmanager
def open_works(
    nvme_path: Path, most_nbytes: int, loads: Sequence[Load], n_sets: int = 1
) -> Iterator[tuple[list[Work | None], dict[str, str]]]:
    """The work of each load, None for one that the files do not hold, and the description for a result.

    There are as many files as lanes at most; see :func:`open_files`.

    Raises:
        ConfigError: the folder cannot be used, or its file system has no O_DIRECT.
        SpaceError: there is too little free space for even the smallest load.
    """
    n_files, unit_nbytes = max(load.lanes for load in loads), min(load.request_nbytes for load in loads)
    with ExitStack() as stack:
        area = stack.enter_context(open_files(nvme_path, most_nbytes, unit_nbytes, n_files, n_sets))
        file_nbytes = area.n_requests // n_files * unit_nbytes
        fitting = [load for load in loads if load.n_buffers <= file_nbytes // load.request_nbytes * n_files]
        if not fitting:
            raise _too_small(nvme_path, n_sets * min(load.nbytes for load in loads), most_nbytes)
        slab, unlocked = open_buffer(stack, max(load.nbytes for load in fitting))
        works: list[Work | None] = []
        for load in loads:
            nbytes = load.request_nbytes
            part = replace(area, request_nbytes=nbytes, n_requests=file_nbytes // nbytes * n_files)
            requests = requests_on(part, slab[: load.nbytes].split(nbytes), part.n_requests)
            works.append(Work(part, requests, load.lanes, unlocked) if load in fitting else None)
        system = file_system_of(nvme_path)
        kind = f"{system.kind} (RAM, in place of a fast array)" if system.in_memory else system.kind
        parameters = {
            "storage": f"{kind}, O_DIRECT, {n_files} files of {file_nbytes / 1e9:.3f} GB",
            "buffers": f"not page-locked: {unlocked}" if unlocked else "page-locked",
        }
        yield works, parameters


def _too_small(nvme_path: Path, needed_nbytes: int, most_nbytes: int) -> SpaceError:
    cause = f"the working set may take {most_nbytes} bytes; free some space, or choose smaller requests"
    return SpaceError("allocate", str(nvme_path), 0, needed_nbytes, cause)
