# SPDX-License-Identifier: Apache-2.0
"""GB/s and CPU seconds per GB of TenCache's store and backends, of raw O_DIRECT threads and of a stock aio_handle.

A sample starts requests for a fixed time and waits for all of them; bytes are divided by the time until the last has
ended. Everything goes past the page cache, or the benchmark refuses to run. Each rate is also divided, round by round,
by that of the best raw variant and by that of the stock handle with most threads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from tencache_ds.errors import ConfigError, SpaceError
from tencache_ds.profiling.probe_storage import Kind

from .area import MIB, open_area, open_buffers, write_files
from .result import MIN_REPEATS, Case, MicroResult, Row, alternate, progress
from .storage_variants import BLOCK_NBYTES, PIECE_NBYTES, QUEUE_DEPTH, RAW, STOCK, VARIANTS, Transfer, Variant, Work

LANES = (1, 4, 8)
REQUESTS_NBYTES = (1 * MIB, 4 * MIB, 8 * MIB, 32 * MIB)
WORKING_SET_NBYTES = 2 << 30

_MAX_OVERRUN = 2.5
"""A case that would take the whole to more than this multiple of the budget is left out, and says so."""

_LEAST_IN_FLIGHT = 4

_RATIOS = {"of best raw": tuple(variant.name for variant in RAW), "of stock": (STOCK[-1].name,)}
"""Quantities that are ratios of rates: to the best of which variants."""


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
        cases = _cases(lanes, requests_nbytes, every_combination)
        in_flight = {case: _n_buffers(case[0]) * case[1] for case in cases}
        # Requests that the files hold, a multiple of those in flight; 0 where they hold fewer.
        n_extents = {
            (n_lanes, nbytes): file_nbytes // nbytes * n_files // _n_buffers(n_lanes) * _n_buffers(n_lanes)
            for n_lanes, nbytes in cases
        }
        if not any(n_extents.values()):
            cause = f"the working set may take {area.most_nbytes} bytes; free some space, or choose smaller requests"
            raise SpaceError("allocate", str(nvme_path), 0, min(in_flight.values()) * n_file_sets, cause)
        slab, locked, lock_note = open_buffers(stack, max(in_flight[case] for case in cases if n_extents[case]))
        paths = write_files(area.folder, n_files, file_nbytes, slab)
        samples_per_case = len(variants) * len(Kind) * (repeats + 1)
        duration_s = seconds / (len(cases) * samples_per_case)
        rows: list[Row] = []
        t_start_s = time.perf_counter()
        bar = stack.enter_context(progress(len(cases) * samples_per_case, "storage"))
        for n_lanes, nbytes in cases:
            n_buffers = _n_buffers(n_lanes)
            case: Case = {"request": f"{nbytes / MIB:g} MiB", "lanes": n_lanes, "in flight": n_buffers}
            needed_s = _expected_s(rows, in_flight[n_lanes, nbytes], duration_s) * samples_per_case
            reason = ""
            if not n_extents[n_lanes, nbytes]:
                reason = f"{n_buffers} requests of {nbytes} bytes do not fit the working set"
            elif rows and time.perf_counter() - t_start_s + needed_s > _MAX_OVERRUN * seconds:
                reason = f"this storage would need {needed_s:.0f} s more for it; raise --seconds"
            if reason:
                rows += [row for variant in variants for row in _absent(variant.name, case, reason)]
                bar.update(samples_per_case)
                continue
            buffers = tuple(slab[: n_buffers * nbytes].split(nbytes))
            work = Work(str(area.folder), paths, nbytes, n_lanes, buffers, n_extents[n_lanes, nbytes])
            rows += _measure(variants, work, case, None if locked else lock_note, duration_s, repeats, bar.update)
    return MicroResult(
        name="storage",
        parameters={
            "storage": f"{area.description}, O_DIRECT, {n_files} files of {file_nbytes / 1e9:.3f} GB",
            "buffers": lock_note,
            "samples": f"{repeats} of {1e3 * duration_s:.0f} ms or longer, alternated",
            "native, aio, stock": f"blocks of {BLOCK_NBYTES / MIB:g} MiB, queue depth {QUEUE_DEPTH}",
            "posix, aio": f"pieces of {PIECE_NBYTES / MIB:g} MiB",
            "stock handle": "batches of as many requests as are in flight elsewhere, then wait()",
            "CPU": "user and system time of this process, without the kernel's own threads",
        },
        rows=rows,
        columns="operation",
    )


def _cases(lanes: Sequence[int], requests_nbytes: Sequence[int], every: bool) -> list[tuple[int, int]]:
    """Pairs of (lanes, request bytes), each once, those with the fewest bytes in flight first."""
    middle = sorted(lanes)[len(lanes) // 2], sorted(requests_nbytes)[len(requests_nbytes) // 2]
    pairs = set(product(lanes, requests_nbytes))
    wanted = (pair for pair in pairs if every or pair[0] == middle[0] or pair[1] == middle[1])
    return sorted(wanted, key=lambda pair: (pair[0] * pair[1], pair))


def _n_buffers(lanes: int) -> int:
    """Requests in flight: twice as many as lanes, so that none waits for the next one, and an even number, for as many
    reads as writes.
    """
    return max(_LEAST_IN_FLIGHT, 2 * lanes)


def _expected_s(rows: Sequence[Row], nbytes_in_flight: int, duration_s: float) -> float:
    """Seconds of one sample, by the rates seen so far: requests in flight at its end are waited for."""
    rates = [row.value for row in rows if row.quantity == "rate" and row.value is not None]
    return duration_s + (nbytes_in_flight / statistics.median(rates) / 1e9 if rates else 0.0)


def _measure(
    variants: Sequence[Variant], work: Work, case: Case, lock_note: str | None, duration_s: float, repeats: int,
    advance: Callable[[], object],
) -> list[Row]:  # fmt: skip
    rows: list[Row] = []
    with ExitStack() as stack:
        ready: dict[str, Transfer] = {}
        for variant in variants:
            try:
                if variant.needs_locked and lock_note is not None:
                    raise ConfigError(lock_note)
                ready[variant.name] = stack.enter_context(variant.open(work))
            except ConfigError as error:
                rows += _absent(variant.name, case, str(error))
        for kind in Kind:
            samples = alternate(
                {name: partial(_sample, transfer, kind, duration_s) for name, transfer in ready.items()},
                repeats,
                advance,
            )
            whole = {"operation": kind.value, **case}
            rates = {name: [rate for rate, _ in taken] for name, taken in samples.items()}
            for name, taken in samples.items():
                rows.append(Row.of(name, "rate", "GB/s", whole, rates[name]))
                rows += _ratios(name, rates, whole)
                rows.append(Row.of(name, "CPU time", "s/GB", whole, [cpu_s for _, cpu_s in taken]))
    return rows


def _ratios(name: str, rates: Mapping[str, Sequence[float]], case: Case) -> Iterator[Row]:
    """The rates of a variant over those of each reference, round by round: disturbances of a round slow both."""
    for quantity, references in _RATIOS.items():
        measured = [rates[reference] for reference in references if reference in rates]
        if measured:
            best = max(measured, key=statistics.median)
            yield Row.of(name, quantity, "", case, list(np.divide(rates[name], best)))


def _sample(transfer: Transfer, kind: Kind, duration_s: float) -> tuple[float, float]:
    """GB/s, and CPU seconds per GB."""
    cpu_before_s, t_start_s = time.process_time(), time.perf_counter()
    gb = transfer(kind, duration_s) / 1e9
    elapsed_s, cpu_s = time.perf_counter() - t_start_s, time.process_time() - cpu_before_s
    return gb / elapsed_s, cpu_s / gb


def _absent(name: str, case: Case, reason: str) -> list[Row]:
    return [
        Row.absent(name, quantity, unit, {"operation": kind.value, **case}, reason)
        for kind in Kind
        for quantity, unit in (("rate", "GB/s"), ("CPU time", "s/GB"))
    ]
