# SPDX-License-Identifier: Apache-2.0
"""GB/s and CPU seconds per GB of TenCache's store and backends, of raw O_DIRECT threads and of a stock aio_handle.

A sample starts requests for a fixed time and waits for all of them; bytes are divided by the time until the last has
ended. Everything goes past the page cache, or the benchmark refuses to run.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch

from tencache_ds.cli.storage_loops import Session
from tencache_ds.errors import ConfigError, LockedMemoryError, SpaceError
from tencache_ds.io import ScratchFolder, free_nbytes
from tencache_ds.memory import HostArena, Locking
from tencache_ds.profiling.filesystem import file_system_of, supports_direct_io
from tencache_ds.profiling.probe_storage import Kind

from .result import MIN_REPEATS, MicroResult, Row, alternate, progress
from .storage_variants import BACKENDS, BLOCK_NBYTES, QUEUE_DEPTH, VARIANTS, Work

MIB = 1 << 20
LANES = (1, 4, 8)
REQUESTS_NBYTES = (1 * MIB, 4 * MIB, 8 * MIB, 32 * MIB)
WORKING_SET_NBYTES = 1 << 30
SHARE_OF_FREE_SPACE = 0.25

_MAX_OVERRUN = 1.25
"""A case that would take the whole to more than this multiple of the budget is left out, and says so."""

_N_FILES = 1 + len(BACKENDS)
"""The shared one, and one of each store; all of the same size."""


@dataclass(frozen=True, slots=True)
class _Sample:
    bytes_per_s: float
    cpu_s_per_byte: float


def run(
    nvme_path: Path,
    seconds: float = 34.0,
    *,
    lanes: Sequence[int] = LANES,
    requests_nbytes: Sequence[int] = REQUESTS_NBYTES,
    every_combination: bool = False,
    working_set_nbytes: int = WORKING_SET_NBYTES,
    repeats: int = MIN_REPEATS,
) -> MicroResult:
    """Measures every variant. The files live in a scratch folder under ``nvme_path`` and are removed in any case.

    Args:
        nvme_path: a folder on the storage to measure.
        seconds: about how long it takes. Requests in flight are always finished, so that slow storage needs longer: the
            cases with most bytes in flight are left out if need be, never the first.
        lanes: requests worked on at the same time.
        requests_nbytes: bytes per request, multiples of 4096.
        every_combination: all pairs of lanes and requests; otherwise each is varied with the other in the middle.
        working_set_nbytes: most bytes of all files together; less where it is over 25 % of the free space.
        repeats: samples per figure.

    Raises:
        ConfigError: the folder cannot be used, or its file system has no O_DIRECT.
        SpaceError: there is too little free space for even the smallest case.
    """
    with ExitStack() as stack:
        scratch = ScratchFolder(str(nvme_path), 0, "micro")
        stack.callback(scratch.close)
        folder = Path(scratch.folder)
        if not supports_direct_io(folder):
            raise ConfigError(
                f"{nvme_path} has no O_DIRECT: the page cache would be measured; name a folder on ext4 or xfs"
            )
        free = free_nbytes(scratch.folder)
        working_set_nbytes = min(working_set_nbytes, int(free * SHARE_OF_FREE_SPACE))
        file_nbytes = working_set_nbytes // _N_FILES
        cases = list(_cases(lanes, requests_nbytes, every_combination))
        if not any(_n_buffers(*case, file_nbytes) for case in cases):
            needed = min((n_lanes + 2) // 2 * 2 * nbytes for n_lanes, nbytes in cases) * _N_FILES
            raise SpaceError(
                "allocate", str(nvme_path), 0, needed,
                f"the working set may take {working_set_nbytes} bytes; free some space, or ask for smaller requests",
            )  # fmt: skip
        buffers, locked, lock_note = _buffers(stack, max(_n_buffers(*case, file_nbytes) * case[1] for case in cases))
        path = _write_file(folder / "shared.bin", file_nbytes, buffers)
        n_samples = len(cases) * len(VARIANTS) * len(Kind) * (repeats + 1)
        rows: list[Row] = []
        t_start_s = time.perf_counter()
        with progress(n_samples, "storage") as bar:
            for n_lanes, request_nbytes in cases:
                n_buffers = _n_buffers(n_lanes, request_nbytes, file_nbytes)
                case = {"request": f"{request_nbytes / MIB:g} MiB", "lanes": n_lanes, "in flight": n_buffers}
                if not n_buffers:
                    reason = f"{n_lanes} requests of {request_nbytes} bytes do not fit the working set"
                    rows += [row for v in VARIANTS for row in _absent(v.name, case, reason)]
                    continue
                nbytes_in_flight = n_buffers * request_nbytes
                needed_s = _expected_s(rows, nbytes_in_flight, seconds / n_samples) * n_samples / len(cases)
                if rows and time.perf_counter() - t_start_s + needed_s > _MAX_OVERRUN * seconds:
                    reason = f"this storage would need {needed_s:.0f} s more for it; give more --seconds"
                    rows += [row for v in VARIANTS for row in _absent(v.name, case, reason)]
                    bar.update(n_samples // len(cases))
                    continue
                work = Work(
                    folder=scratch.folder,
                    path=path,
                    request_nbytes=request_nbytes,
                    lanes=n_lanes,
                    buffers=tuple(buffers[: n_buffers * request_nbytes].split(request_nbytes)),
                    n_extents=file_nbytes // request_nbytes // n_buffers * n_buffers,
                )
                rows += _measure(work, case, None if locked else lock_note, seconds / n_samples, repeats, bar.update)
    system = file_system_of(nvme_path)
    return MicroResult(
        name="storage",
        parameters={
            "storage": f"{system.kind} (RAM, stands in for a fast array)" if system.in_memory else system.kind,
            "O_DIRECT": True,
            "working set": f"{working_set_nbytes / 1e9:.3f} GB",
            "buffers": lock_note,
            "repeats": repeats,
            "sample": f"{1e3 * seconds / n_samples:.0f} ms or longer",
            "aio": f"blocks of {BLOCK_NBYTES} bytes, queue depth {QUEUE_DEPTH}",
            "stock handle": "batches of as many requests as are in flight elsewhere, then wait()",
            "CPU": "user and system time of this process; the kernel's own threads are not in it",
        },
        rows=rows,
    )


def _cases(lanes: Sequence[int], requests_nbytes: Sequence[int], every_combination: bool) -> Iterator[tuple[int, int]]:
    """Pairs of (lanes, request bytes), each once, those with the fewest bytes in flight first."""
    middle_lanes = sorted(lanes)[len(lanes) // 2]
    middle_request = sorted(requests_nbytes)[len(requests_nbytes) // 2]
    pairs = product(sorted(lanes), sorted(requests_nbytes))
    wanted = (
        (n_lanes, nbytes)
        for n_lanes, nbytes in pairs
        if every_combination or n_lanes == middle_lanes or nbytes == middle_request
    )
    return iter(sorted(set(wanted), key=lambda pair: (pair[0] * pair[1], pair)))


def _n_buffers(lanes: int, request_nbytes: int, file_nbytes: int) -> int:
    """Requests in flight: more than lanes, so that none waits for the next one, and even, for as many reads as writes.

    0 where the file cannot hold them.
    """
    n_buffers = (lanes + 2) // 2 * 2
    return n_buffers if n_buffers * request_nbytes <= file_nbytes else 0


def _expected_s(rows: Sequence[Row], nbytes_in_flight: int, duration_s: float) -> float:
    """Seconds of one sample, by the rates seen so far: what is in flight at its end is waited for."""
    rates = [row.value for row in rows if row.quantity == "rate" and row.value is not None]
    return max(duration_s, nbytes_in_flight / statistics.median(rates) / 1e9 if rates else 0.0)


def _buffers(stack: ExitStack, nbytes: int) -> tuple[torch.Tensor, bool, str]:
    """Random bytes in aligned memory, locked if that is possible; whether it is, and how or why not."""
    try:
        locking = Locking.CUDA if torch.cuda.is_available() else Locking.MLOCK
        arena = HostArena(None, locking)
        stack.callback(arena.close)
        slab, note = arena.allocate(nbytes, "micro-benchmark"), f"page-locked ({locking.value})"
    except (LockedMemoryError, ConfigError) as error:
        locking = Locking.NONE
        arena = HostArena(None, locking)
        stack.callback(arena.close)
        slab, note = arena.allocate(nbytes, "micro-benchmark"), f"not page-locked: {error}"
    # Compressible data would flatter a device that compresses.
    slab.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
    return slab, locking is not Locking.NONE, note


def _write_file(path: Path, nbytes: int, buffers: torch.Tensor) -> str:
    """The shared file, written throughout: what was only reserved reads back without touching the device."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        view = memoryview(buffers.numpy())[: 32 * MIB]
        done = 0
        while done < nbytes // 4096 * 4096:
            done += os.pwritev(fd, [view[: nbytes // 4096 * 4096 - done]], done)
    finally:
        os.close(fd)
    return str(path)


def _measure(
    work: Work,
    case: dict[str, str | int],
    lock_note: str | None,
    duration_s: float,
    repeats: int,
    advance: Callable[[], object],
) -> list[Row]:
    rows: list[Row] = []
    with ExitStack() as stack:
        sessions: dict[str, Session] = {}
        for variant in VARIANTS:
            if variant.needs_locked and lock_note is not None:
                rows += _absent(variant.name, case, lock_note)
                continue
            try:
                sessions[variant.name] = stack.enter_context(closing(variant.open(work)))
            except ConfigError as error:
                rows += _absent(variant.name, case, str(error))
        for kind in Kind:
            samples = alternate(
                {name: partial(_sample, session, kind, duration_s) for name, session in sessions.items()},
                repeats,
                advance,
            )
            whole = {"operation": kind.value, **case}
            for name, taken in samples.items():
                rates = [sample.bytes_per_s / 1e9 for sample in taken]
                costs = [sample.cpu_s_per_byte * 1e9 for sample in taken]
                rows.append(Row.of(name, "rate", "GB/s", whole, rates))
                rows.append(Row.of(name, "CPU time", "s/GB", whole, costs))
    return rows


def _sample(session: Session, kind: Kind, duration_s: float) -> _Sample:
    cpu_before_s, t_start_s = _cpu_s(), time.perf_counter()
    nbytes = session.transfer(kind, duration_s)
    elapsed_s, cpu_s = time.perf_counter() - t_start_s, _cpu_s() - cpu_before_s
    return _Sample(nbytes / elapsed_s, cpu_s / nbytes)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _absent(name: str, case: dict[str, str | int], reason: str) -> list[Row]:
    return [
        Row.absent(name, quantity, unit, {"operation": kind.value, **case}, reason)
        for kind in Kind
        for quantity, unit in (("rate", "GB/s"), ("CPU time", "s/GB"))
    ]
