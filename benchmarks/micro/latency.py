# SPDX-License-Identifier: Apache-2.0
"""How long an urgent read takes: alone, and behind a queue of background requests that is never empty.

The time is the caller's: from the call that starts the read to the return of the wait for it. A stock handle has no
priorities and reports no single request as completed, so there it is the time until all earlier requests are done as
well.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tencache_ds.cli.storage_loops import TIMEOUT_S, Requests, keep_in_flight, open_stock_handle, operation_of
from tencache_ds.errors import ConfigError, SpaceError, StorageError
from tencache_ds.io import Operation, Priority, Ticket
from tencache_ds.profiling.probe_storage import Kind

from .area import MIB, open_area, open_buffers, write_files
from .result import MIN_REPEATS, Case, MicroResult, Row, alternate, progress
from .storage_variants import OPENED, PIECE_NBYTES, STOCK_THREADS, OpenBackend, Work, backend_on, stock_settings

LANES = 8
URGENT_NBYTES = 4 * MIB
WORKING_SET_NBYTES = 1 << 30

STEADY, FIRST = "steady", "first for a while"
"""Whether urgent reads are frequent, or the first for a while: a backend may allow more background traffic then."""

ALONE = "nothing"
BEHIND: Mapping[str, Kind | None] = {ALONE: None, "reads": Kind.READ, "writes": Kind.WRITE, "mixed": Kind.MIXED}

_SETTLE_S = 0.03
"""Until the queue is as full as it gets."""

_PAUSE_S = 0.005
"""Between two urgent reads: background gets its room back."""


@dataclass(frozen=True, slots=True)
class Load:
    """The parameters common to all variants."""

    work: Work  # the background requests
    urgent: Requests  # the urgent ones: a buffer, and extents of files that background does not touch


Sample = Callable[[Kind | None, float], list[float]]
"""A variant made ready: the seconds that each of the reads took which started within a time, at least one of them,
behind requests of a kind (None for none), all of which it waits for. Used by one thread; raises StorageError."""


@contextmanager
def on_backend(open_backend: OpenBackend, load: Load) -> Iterator[Sample]:
    """A backend as training opens it."""
    requests, urgent, numbers = load.work.requests, load.urgent, itertools.count()
    with (
        backend_on(open_backend, load.work) as backend,
        ThreadPoolExecutor(1, thread_name_prefix="micro-feeder") as feeder,
    ):

        def issue(operation: Operation, slot: int, extent: int) -> Ticket:
            return backend.submit(operation, *requests.place(extent), requests.buffers[slot])

        def read() -> float:
            path, offset = urgent.place(next(numbers) % urgent.n_extents)
            t_start_s = time.perf_counter()
            ticket = backend.submit(Operation.READ, path, offset, urgent.buffers[0], priority=Priority.URGENT)
            ticket.wait(TIMEOUT_S)
            taken_s = time.perf_counter() - t_start_s
            time.sleep(_PAUSE_S)
            return taken_s

        def sample(kind: Kind | None, seconds: float) -> list[float]:
            end_s = time.perf_counter() + seconds
            if kind is None:
                return _until(end_s, read)
            background = feeder.submit(keep_in_flight, requests, kind, seconds, issue)
            time.sleep(_SETTLE_S)
            taken = _until(end_s, read)
            background.result()
            return taken

        yield sample


@contextmanager
def on_fresh_backends(open_backend: OpenBackend, load: Load) -> Iterator[Sample]:
    """A backend for each read: it has seen no urgent request before."""

    def read(kind: Kind | None) -> float:
        with on_backend(open_backend, load) as sample:
            return sample(kind, 0.0 if kind is None else _SETTLE_S)[0]

    yield lambda kind, seconds: _until(time.perf_counter() + seconds, partial(read, kind))


@contextmanager
def on_stock_handle(threads: int, load: Load) -> Iterator[Sample]:
    """One of DeepSpeed's handles: a batch of background requests, the urgent one, then ``wait()`` for all of them."""
    requests, urgent, turns = load.work.requests, load.urgent, itertools.count(1)
    handle: Any = open_stock_handle(stock_settings(threads))

    def read(kind: Kind | None) -> float:
        turn = next(turns)
        behind = list(enumerate(requests.buffers)) if kind is not None else []
        for slot, buffer in behind:
            is_read = kind is not None and operation_of(kind, slot) is Operation.READ
            start = handle.async_pread if is_read else handle.async_pwrite
            start(buffer, *requests.place(requests.extent(slot, turn)))
        path, offset = urgent.place(turn % urgent.n_extents)
        t_start_s = time.perf_counter()
        handle.async_pread(urgent.buffers[0], path, offset)
        n_done = handle.wait()
        taken_s = time.perf_counter() - t_start_s
        if n_done != len(behind) + 1:
            cause = f"aio_handle.wait() reports {n_done} of {len(behind) + 1} requests as completed"
            raise StorageError("read", path, offset, urgent.request_nbytes, cause)
        time.sleep(_PAUSE_S)
        return taken_s

    yield lambda kind, seconds: _until(time.perf_counter() + seconds, partial(read, kind))


def _until(end_s: float, read: Callable[[], float]) -> list[float]:
    """Reads until then, at least once."""
    taken = [read()]
    while time.perf_counter() < end_s:
        taken.append(read())
    return taken


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the things compared."""

    name: str  # for the table
    moment: str  # the traffic before the read
    open: Callable[[Load], AbstractContextManager[Sample]]  # makes it ready; raises ConfigError where it cannot work
    needs_locked: bool = False  # whether it takes page-locked buffers only


VARIANTS: tuple[Variant, ...] = (
    Variant("native", STEADY, partial(on_backend, OPENED["native"][0])),
    # The others give background the same room at all times.
    Variant("native", FIRST, partial(on_fresh_backends, OPENED["native"][0])),
    *(
        Variant(name, STEADY, partial(on_backend, opened), locked)
        for name, (opened, locked) in OPENED.items()
        if name != "native"
    ),
    *(Variant(f"stock handle x{n}", STEADY, partial(on_stock_handle, n), needs_locked=True) for n in STOCK_THREADS),
)


def run(
    nvme_path: Path,
    seconds: float = 20.0,
    *,
    lanes: int = LANES,
    request_nbytes: int = PIECE_NBYTES,
    working_set_nbytes: int = WORKING_SET_NBYTES,
    repeats: int = MIN_REPEATS,
    variants: Sequence[Variant] = VARIANTS,
) -> MicroResult:
    """Measures every variant. The files live in a scratch folder under ``nvme_path`` and are removed in any case.

    Args:
        nvme_path: a folder on the storage to measure.
        seconds: about how long it takes, longer where the storage is slow: requests in flight are always finished.
        lanes: of the backends.
        request_nbytes: bytes per background request, a multiple of 4096; twice as many as lanes are in flight.
        working_set_nbytes: most bytes of all files together; less where it is over 25 % of the free space.
        repeats: rounds, in each of which every variant takes samples.
        variants: the variants compared.

    Raises:
        ConfigError: the folder cannot be used, or its file system has no O_DIRECT.
        SpaceError: there is too little free space.
    """
    with ExitStack() as stack:
        area = open_area(stack, nvme_path, working_set_nbytes)
        n_buffers = 2 * lanes
        file_nbytes = area.most_nbytes // (lanes + 1)
        n_extents = file_nbytes // request_nbytes * lanes // n_buffers * n_buffers
        n_urgent = file_nbytes // URGENT_NBYTES
        if not n_extents or not n_urgent:
            needed = (lanes + 1) * max(2 * request_nbytes, URGENT_NBYTES)
            raise SpaceError(
                "allocate", str(nvme_path), 0, needed, f"the working set may take {area.most_nbytes} bytes"
            )
        slab, locked, lock_note = open_buffers(stack, n_buffers * request_nbytes + URGENT_NBYTES)
        *paths, urgent_path = write_files(area.folder, lanes + 1, file_nbytes, slab)
        buffers = slab[: n_buffers * request_nbytes].split(request_nbytes)
        work = Work(str(area.folder), tuple(paths), request_nbytes, lanes, tuple(buffers), n_extents)
        urgent = Requests(
            urgent_path, (slab[-URGENT_NBYTES:],), n_urgent, lambda extent: (urgent_path, extent * URGENT_NBYTES)
        )
        rows: list[Row] = []
        ready: dict[tuple[str, str], Sample] = {}
        for variant in variants:
            try:
                if variant.needs_locked and not locked:
                    raise ConfigError(lock_note)
                ready[variant.name, variant.moment] = stack.enter_context(variant.open(Load(work, urgent)))
            except ConfigError as error:
                cases = [{"moment": variant.moment, "behind": behind} for behind in BEHIND]
                rows += [Row.absent(variant.name, "read", "ms", case, str(error)) for case in cases]
        n_samples = len(ready) * len(BEHIND) * (repeats + 1)
        block_s = seconds / max(n_samples, 1)
        takers = {
            (*key, behind): partial(sample, kind, block_s)
            for key, sample in ready.items()
            for behind, kind in BEHIND.items()
        }
        with progress(n_samples, "latency") as bar:
            samples = alternate(takers, repeats, bar.update)
        for key in ready:
            rows += _rows(*key, {behind: samples[*key, behind] for behind in BEHIND})
    return MicroResult(
        name="latency",
        parameters={
            "read": f"{URGENT_NBYTES / MIB:g} MiB, urgent where there are priorities",
            "behind": f"{n_buffers} requests of {request_nbytes / MIB:g} MiB in flight, {lanes} lanes",
            "storage": f"{area.description}, O_DIRECT",
            "buffers": lock_note,
            "samples": f"{repeats} rounds of {1e3 * block_s:.0f} ms or longer, alternated",
            FIRST: "no urgent request before it",
        },
        rows=rows,
        columns="behind",
    )


def _rows(name: str, moment: str, taken: Mapping[str, Sequence[Sequence[float]]]) -> list[Row]:
    """The figures of a variant.

    Args:
        taken: seconds of each read, in rounds, by the queue it was behind.
    """
    rows: list[Row] = []
    for behind, rounds in taken.items():
        case: Case = {"moment": moment, "behind": behind}
        all_ms = 1e3 * np.concatenate(rounds)
        rows.append(Row.of(name, "read", "ms", case, list(all_ms)))
        rows.append(Row.of(name, "p95", "ms", case, [np.percentile(all_ms, 95)]))
        if behind != ALONE:
            ratios = [np.median(loaded) / np.median(alone) for loaded, alone in zip(rounds, taken[ALONE], strict=True)]
            rows.append(Row.of(name, "of alone", "", case, ratios))
    return rows
