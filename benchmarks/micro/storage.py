# SPDX-License-Identifier: Apache-2.0
"""GB/s and CPU seconds per GB of TenCache's store and backends, of raw O_DIRECT threads and of a stock aio_handle.

A sample starts requests for a fixed time and waits for all of them; bytes are divided by the time until the last has
ended. Everything goes past the page cache, or the benchmark refuses to run. Each rate is also divided, round by round,
by that of the best raw variant and by that of the stock handle with most threads.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from tencache_ds.cli.storage_loops import Session
from tencache_ds.errors import ConfigError, SpaceError
from tencache_ds.profiling.probe_storage import Kind

from .area import MIB, open_area, open_buffers, write_files
from .result import MIN_REPEATS, MicroResult, Row, alternate, progress
from .storage_variants import BLOCK_NBYTES, PIECE_NBYTES, QUEUE_DEPTH, RAW, STOCK, VARIANTS, Variant, Work

LANES = (1, 4, 8)
REQUESTS_NBYTES = (1 * MIB, 4 * MIB, 8 * MIB, 32 * MIB)
WORKING_SET_NBYTES = 2 << 30

_MAX_OVERRUN = 2.5
"""A case that would take the whole to more than this multiple of the budget is left out, and says so."""

_LEAST_IN_FLIGHT = 4

_RATIOS = {"of best raw": tuple(variant.name for variant in RAW), "of stock": (STOCK[-1].name,)}
"""Quantities that are ratios of rates: to the best of which variants."""


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
    variants: Sequence[Variant] = VARIANTS,
) -> MicroResult:
    """Measures every variant. The files live in a scratch folder under ``nvme_path`` and are removed in any case.

    Args:
        nvme_path: a folder on the storage to measure.
        seconds: how long requests are started, all in all. Those in flight are always finished, so that slow storage
            takes longer, up to 2.5 times: the cases with most bytes in flight are left out if need be, never the first.
        lanes: requests worked on at the same time.
        requests_nbytes: bytes per request, multiples of 4096.
        every_combination: all pairs of lanes and requests; otherwise each is varied with the other in the middle.
        working_set_nbytes: most bytes of all files together; less where it is over 25 % of the free space.
        repeats: samples per figure.
        variants: the variants compared.

    Raises:
        ConfigError: the folder cannot be used, or its file system has no O_DIRECT.
        SpaceError: there is too little free space for even the smallest case.
    """
    with ExitStack() as stack:
        area = open_area(stack, nvme_path, working_set_nbytes)
        n_file_sets = 1 + sum(variant.has_own_files for variant in variants)
        n_files = max(lanes)
        file_nbytes = area.most_nbytes // n_file_sets // n_files
        cases = list(_cases(lanes, requests_nbytes, every_combination))
        n_extents = {case: _n_extents(*case, file_nbytes, n_files) for case in cases}
        if not any(n_extents.values()):
            needed = min(_n_buffers(n_lanes) * nbytes for n_lanes, nbytes in cases) * n_file_sets
            raise SpaceError(
                "allocate", str(nvme_path), 0, needed,
                f"the working set may take {area.most_nbytes} bytes; free some space, or choose smaller requests",
            )  # fmt: skip
        slab, locked, lock_note = open_buffers(
            stack, max(_n_buffers(case[0]) * case[1] for case in cases if n_extents[case])
        )
        paths = write_files(area.folder, n_files, file_nbytes, slab)
        n_samples = len(cases) * len(variants) * len(Kind) * (repeats + 1)
        rows: list[Row] = []
        t_start_s = time.perf_counter()
        with progress(n_samples, "storage") as bar:
            for n_lanes, request_nbytes in cases:
                n_buffers = _n_buffers(n_lanes)
                case = {"request": f"{request_nbytes / MIB:g} MiB", "lanes": n_lanes, "in flight": n_buffers}
                if not n_extents[n_lanes, request_nbytes]:
                    reason = f"{n_buffers} requests of {request_nbytes} bytes do not fit the working set"
                    rows += [row for v in variants for row in _absent(v.name, case, reason)]
                    continue
                nbytes_in_flight = n_buffers * request_nbytes
                needed_s = _expected_s(rows, nbytes_in_flight, seconds / n_samples) * n_samples / len(cases)
                if rows and time.perf_counter() - t_start_s + needed_s > _MAX_OVERRUN * seconds:
                    reason = f"this storage would need {needed_s:.0f} s more for it; raise --seconds"
                    rows += [row for v in variants for row in _absent(v.name, case, reason)]
                    bar.update(n_samples // len(cases))
                    continue
                work = Work(
                    folder=str(area.folder),
                    paths=paths,
                    request_nbytes=request_nbytes,
                    lanes=n_lanes,
                    buffers=tuple(slab[: n_buffers * request_nbytes].split(request_nbytes)),
                    n_extents=n_extents[n_lanes, request_nbytes],
                )
                unlocked_note = None if locked else lock_note
                rows += _measure(variants, work, case, unlocked_note, seconds / n_samples, repeats, bar.update)
    return MicroResult(
        name="storage",
        parameters={
            "storage": f"{area.description}, O_DIRECT, {n_files} files of {file_nbytes / 1e9:.3f} GB",
            "buffers": lock_note,
            "samples": f"{repeats} of {1e3 * seconds / n_samples:.0f} ms or longer, alternated",
            "native, aio, stock": f"blocks of {BLOCK_NBYTES / MIB:g} MiB, queue depth {QUEUE_DEPTH}",
            "posix, aio": f"pieces of {PIECE_NBYTES / MIB:g} MiB",
            "stock handle": "batches of as many requests as are in flight elsewhere, then wait()",
            "CPU": "user and system time of this process, without the kernel's own threads",
        },
        rows=rows,
        columns="operation",
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


def _n_buffers(lanes: int) -> int:
    """Requests in flight: twice as many as lanes, so that none waits for the next one, and an even number, for as many
    reads as writes.
    """
    return max(_LEAST_IN_FLIGHT, 2 * lanes)


def _n_extents(lanes: int, request_nbytes: int, file_nbytes: int, n_files: int) -> int:
    """Requests that the files hold, a multiple of those in flight; 0 where they hold fewer."""
    n_buffers = _n_buffers(lanes)
    return file_nbytes // request_nbytes * n_files // n_buffers * n_buffers


def _expected_s(rows: Sequence[Row], nbytes_in_flight: int, duration_s: float) -> float:
    """Seconds of one sample, by the rates seen so far: requests in flight at its end are waited for."""
    rates = [row.value for row in rows if row.quantity == "rate" and row.value is not None]
    return duration_s + (nbytes_in_flight / statistics.median(rates) / 1e9 if rates else 0.0)


def _measure(
    variants: Sequence[Variant],
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
        for variant in variants:
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
            rates = {name: [sample.bytes_per_s / 1e9 for sample in taken] for name, taken in samples.items()}
            for name, taken in samples.items():
                costs = [sample.cpu_s_per_byte * 1e9 for sample in taken]
                rows.append(Row.of(name, "rate", "GB/s", whole, rates[name]))
                rows += _ratios(name, rates, whole)
                rows.append(Row.of(name, "CPU time", "s/GB", whole, costs))
    return rows


def _ratios(name: str, rates: Mapping[str, Sequence[float]], case: dict[str, str | int]) -> Iterator[Row]:
    """The rates of a variant over those of each reference, round by round: disturbances of a round slow both."""
    for quantity, references in _RATIOS.items():
        measured = [reference for reference in references if reference in rates]
        if measured:
            best = max(measured, key=lambda reference: statistics.median(rates[reference]))
            ratios = [rate / other for rate, other in zip(rates[name], rates[best], strict=True)]
            yield Row.of(name, quantity, "", case, ratios)


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
