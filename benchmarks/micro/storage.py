# SPDX-License-Identifier: Apache-2.0
"""GB/s and CPU seconds per GB of TenCache's store and backends, of raw O_DIRECT threads and of a stock aio_handle.

A sample starts requests for a fixed time and waits for all of them; bytes are divided by the time until the last has
ended. Everything goes past the page cache, or the benchmark refuses to run. Each rate is also divided, round by round,
by that of the best raw variant and by that of the stock handle with most threads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path

import pandas as pd

from tencache_ds.profiling.probe import Kind

from .area import MIB, Load, Work, open_works
from .result import REPEATS, Case, MicroResult, alternate
from .variants import BLOCK_NBYTES, PIECE_NBYTES, QUEUE_DEPTH, RAW, STOCK, VARIANTS, Transfer, Variant, open_all

LANES = (1, 4, 8)
REQUESTS_NBYTES = (1 * MIB, 4 * MIB, 8 * MIB, 32 * MIB)
WORKING_SET_NBYTES = 2 << 30

_MAX_OVERRUN = 2.5
"""A case that would take the whole to more than this multiple of the budget is left out, and says so."""

_RATIOS = {"of best raw": [variant.name for variant in RAW], "of stock": [STOCK[-1].name]}
"""Quantities that are ratios of rates: to the best of which variants."""


def run(
    nvme_path: Path,
    seconds: float = 34.0,
    *,
    lanes: Sequence[int] = LANES,
    requests_nbytes: Sequence[int] = REQUESTS_NBYTES,
    every_combination: bool = False,
    working_set_nbytes: int = WORKING_SET_NBYTES,
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
        variants: the variants compared.

    Raises:
        ConfigError: the folder cannot be used, or its file system has no O_DIRECT.
        SpaceError: there is too little free space for even the smallest case.
    """
    loads = _loads(lanes, requests_nbytes, every_combination)
    samples_per_case = len(variants) * len(Kind) * (1 + REPEATS)
    duration_s = seconds / (len(loads) * samples_per_case)
    n_sets = 1 + sum(variant.has_own_files for variant in variants)
    with open_works(nvme_path, working_set_nbytes, loads, n_sets) as (works, described):
        result = MicroResult(
            name="storage",
            parameters={
                **described,
                "samples": f"{REPEATS} of {1e3 * duration_s:.0f} ms or longer, alternated",
                "native, aio, stock": f"blocks of {BLOCK_NBYTES / MIB:g} MiB, queue depth {QUEUE_DEPTH}",
                "posix, aio": f"pieces of {PIECE_NBYTES / MIB:g} MiB",
                "stock handle": "batches of as many requests as are in flight elsewhere, then wait()",
                "CPU": "user and system time of this process, without the kernel's own threads",
            },
            columns="operation",
        )
        t_start_s = time.perf_counter()
        for load, work in zip(loads, works, strict=True):
            case = {"request": f"{load.request_nbytes / MIB:g} MiB", "lanes": load.lanes, "in flight": load.n_buffers}
            what = f"{load.n_buffers} requests of {case['request']}"
            needed_s = samples_per_case * _expected_s(result, load, duration_s)
            if work is None:
                result.lack("any variant", case, f"{what} do not fit the working set")
            elif result.rows and time.perf_counter() - t_start_s + needed_s > _MAX_OVERRUN * seconds:
                reason = f"with {what} in flight this storage would need {needed_s:.0f} s more; raise --seconds"
                result.lack("any variant", case, reason)
            else:
                _measure(result, variants, work, case, duration_s)
    return result


def _loads(lanes: Sequence[int], requests_nbytes: Sequence[int], every: bool) -> list[Load]:
    """Each once, those with the fewest bytes in flight first."""
    middle = Load(sorted(lanes)[len(lanes) // 2], sorted(requests_nbytes)[len(requests_nbytes) // 2])
    loads = {Load(*pair) for pair in product(lanes, requests_nbytes)}
    wanted = (
        load for load in loads if every or load.lanes == middle.lanes or load.request_nbytes == middle.request_nbytes
    )
    return sorted(wanted, key=lambda load: (load.lanes * load.request_nbytes, load))


def _expected_s(result: MicroResult, load: Load, duration_s: float) -> float:
    """Seconds of one sample, by the rates seen so far: requests in flight at its end are waited for."""
    rates = [row.value for row in result.rows if row.quantity == "rate" and row.value is not None]
    return duration_s + (load.nbytes / statistics.median(rates) / 1e9 if rates else 0.0)


def _measure(result: MicroResult, variants: Sequence[Variant], work: Work, case: Case, duration_s: float) -> None:
    with ExitStack() as stack:
        ready = open_all(stack, variants, work, lambda name, reason: result.lack(name, case, reason))
        for kind in Kind:
            timed = {name: partial(_sample, transfer, kind, duration_s) for name, transfer in ready.items()}
            taken = alternate(f"storage, {case['request']}, {work.lanes} lanes, {kind.value}", timed, REPEATS)
            rates, cpu = (pd.DataFrame({name: [s[i] for s in found] for name, found in taken.items()}) for i in (0, 1))
            whole = {"operation": kind.value, **case}
            result.add("rate", "GB/s", whole, rates)
            for quantity, ratios in _ratios(rates).items():
                result.add(quantity, "", whole, ratios)
            result.add("CPU time", "s/GB", whole, cpu)


def _ratios(rates: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rates over those of each reference, round by round: disturbances of a round slow both."""
    measured = {quantity: rates.filter(names) for quantity, names in _RATIOS.items()}
    return {
        quantity: rates.div(references[references.median().idxmax()], axis=0)
        for quantity, references in measured.items()
        if not references.empty
    }


def _sample(transfer: Transfer, kind: Kind, duration_s: float) -> tuple[float, float]:
    """GB/s, and CPU seconds per GB."""
    cpu_before_s, t_start_s = time.process_time(), time.perf_counter()
    gb = transfer(kind, duration_s) / 1e9
    elapsed_s, cpu_s = time.perf_counter() - t_start_s, time.process_time() - cpu_before_s
    return gb / elapsed_s, cpu_s / gb
