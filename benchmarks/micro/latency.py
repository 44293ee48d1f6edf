# SPDX-License-Identifier: Apache-2.0
"""How long an urgent read takes: alone, and behind a queue of background requests that is never empty.

The time is the caller's: from the call that starts the read to the return of the wait for it. A stock handle has no
priorities and reports no single request as completed, so there it is the time until all earlier requests are done as
well.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tencache_ds.cli.storage_loops import TIMEOUT_S, Requests, keep_in_flight, open_stock_handle, operation_of
from tencache_ds.errors import ConfigError, SpaceError, StorageError
from tencache_ds.io import Operation, Priority, Ticket
from tencache_ds.profiling.probe_storage import Kind

from .area import MIB, open_area, open_buffers, write_files
from .result import MIN_REPEATS, MicroResult, Row, alternate, progress
from .storage_variants import OPENED, PIECE_NBYTES, STOCK_THREADS, OpenBackend, Work, stock_settings

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
    """The parameters common to all variants.

    Attributes:
        work: the background requests.
        urgent: the urgent ones: a buffer, and extents of files that background does not touch.
    """

    work: Work
    urgent: Requests


class Session(Protocol):
    """Something that reads under load. Used by one thread."""

    def sample(self, kind: Kind | None, seconds: float) -> list[float]:
        """Seconds that each of the reads took which started in a time, at least one of them.

        Args:
            kind: of the background requests that are in flight meanwhile; None for none.
            seconds: how long reads are started; all requests are waited for then.

        Raises:
            StorageError: a request failed.
        """
        ...

    def close(self) -> None:
        """Frees everything."""
        ...


class BackendSession:
    """A backend as training opens it."""

    def __init__(self, open_backend: OpenBackend, load: Load) -> None:
        work = load.work
        self._urgent, self._requests = load.urgent, work.requests
        with ExitStack() as stack:
            self._backend = open_backend(work.lanes, work.request_nbytes)
            stack.callback(self._backend.close)
            for path in work.paths:
                stack.callback(self._backend.forget, path)
            self._feeder = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="micro-feeder"))
            self._resources = stack.pop_all()
        self._n_reads = 0

    def sample(self, kind: Kind | None, seconds: float) -> list[float]:
        """See :class:`Session`."""
        end_s = time.perf_counter() + seconds
        if kind is None:
            return self._read_until(end_s)
        load = self._feeder.submit(keep_in_flight, self._requests, kind, seconds, self._issue)
        time.sleep(_SETTLE_S)
        taken = self._read_until(end_s)
        load.result()
        return taken

    def close(self) -> None:
        """See :class:`Session`."""
        self._resources.close()

    def _issue(self, operation: Operation, slot: int, extent: int) -> Ticket:
        return self._backend.submit(operation, *self._requests.place(extent), self._requests.buffers[slot])

    def _read_until(self, end_s: float) -> list[float]:
        taken: list[float] = []
        while not taken or time.perf_counter() < end_s:
            path, offset = self._urgent.place(self._n_reads % self._urgent.n_extents)
            self._n_reads += 1
            t_start_s = time.perf_counter()
            ticket = self._backend.submit(
                Operation.READ, path, offset, self._urgent.buffers[0], priority=Priority.URGENT
            )
            ticket.wait(TIMEOUT_S)
            taken.append(time.perf_counter() - t_start_s)
            time.sleep(_PAUSE_S)
        return taken


class FreshBackend:
    """A backend for each read: it has seen no urgent request before."""

    def __init__(self, open_backend: OpenBackend, load: Load) -> None:
        self._open = partial(BackendSession, open_backend, load)

    def sample(self, kind: Kind | None, seconds: float) -> list[float]:
        """See :class:`Session`."""
        end_s = time.perf_counter() + seconds
        taken: list[float] = []
        while not taken or time.perf_counter() < end_s:
            with closing(self._open()) as session:
                taken += session.sample(kind, 0.0 if kind is None else _SETTLE_S)[:1]
        return taken

    def close(self) -> None:
        """See :class:`Session`."""


class StockSession:
    """One of DeepSpeed's handles: a batch of background requests, the urgent one, then ``wait()`` for all of them."""

    def __init__(self, threads: int, load: Load) -> None:
        self._urgent, self._requests = load.urgent, load.work.requests
        self._handle: Any = open_stock_handle(stock_settings(threads))
        self._n_turns = 0

    def sample(self, kind: Kind | None, seconds: float) -> list[float]:
        """See :class:`Session`."""
        end_s = time.perf_counter() + seconds
        taken: list[float] = []
        while not taken or time.perf_counter() < end_s:
            self._n_turns += 1
            if kind is not None:
                for slot, buffer in enumerate(self._requests.buffers):
                    is_read = operation_of(kind, slot) is Operation.READ
                    start = self._handle.async_pread if is_read else self._handle.async_pwrite
                    start(buffer, *self._requests.place(self._requests.extent(slot, self._n_turns)))
            path, offset = self._urgent.place(self._n_turns % self._urgent.n_extents)
            n_asked = 1 + (len(self._requests.buffers) if kind is not None else 0)
            t_start_s = time.perf_counter()
            self._handle.async_pread(self._urgent.buffers[0], path, offset)
            n_done = self._handle.wait()
            taken.append(time.perf_counter() - t_start_s)
            if n_done != n_asked:
                cause = f"aio_handle.wait() reports {n_done} of {n_asked} requests as completed"
                raise StorageError("read", path, offset, URGENT_NBYTES, cause)
            time.sleep(_PAUSE_S)
        return taken

    def close(self) -> None:
        """See :class:`Session`."""
        self._handle = None


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the things compared.

    Attributes:
        name: for the table.
        moment: the traffic before the read.
        open: makes it ready; raises ConfigError where it cannot work.
        needs_locked: whether it takes page-locked buffers only.
    """

    name: str
    moment: str
    open: Callable[[Load], Session]
    needs_locked: bool = False


VARIANTS: tuple[Variant, ...] = (
    Variant("native", STEADY, partial(BackendSession, OPENED["native"][0])),
    # The others give background the same room at all times.
    Variant("native", FIRST, partial(FreshBackend, OPENED["native"][0])),
    *(
        Variant(name, STEADY, partial(BackendSession, opened), locked)
        for name, (opened, locked) in OPENED.items()
        if name != "native"
    ),
    *(Variant(f"stock handle x{n}", STEADY, partial(StockSession, n), needs_locked=True) for n in STOCK_THREADS),
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
        load = Load(
            Work(str(area.folder), tuple(paths), request_nbytes, lanes, tuple(buffers), n_extents),
            Requests(
                urgent_path, (slab[-URGENT_NBYTES:],), n_urgent, lambda extent: (urgent_path, extent * URGENT_NBYTES)
            ),
        )
        rows: list[Row] = []
        sessions: dict[tuple[str, str], Session] = {}
        for variant in variants:
            try:
                if variant.needs_locked and not locked:
                    raise ConfigError(lock_note)
                sessions[variant.name, variant.moment] = stack.enter_context(closing(variant.open(load)))
            except ConfigError as error:
                rows += _absent(variant, str(error))
        n_samples = len(sessions) * len(BEHIND) * (repeats + 1)
        block_s = seconds / max(n_samples, 1)
        with progress(n_samples, "latency") as bar:
            samples = alternate(
                {
                    (*key, behind): partial(session.sample, kind, block_s)
                    for key, session in sessions.items()
                    for behind, kind in BEHIND.items()
                },
                repeats,
                bar.update,
            )
        for key in sessions:
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
        case: dict[str, str | int] = {"moment": moment, "behind": behind}
        all_ms = [1e3 * seconds for round_s in rounds for seconds in round_s]
        rows.append(Row.of(name, "read", "ms", case, all_ms))
        rows.append(Row.of(name, "p95", "ms", case, [_p95(all_ms)]))
        if behind != ALONE:
            ratios = [
                statistics.median(loaded) / statistics.median(alone)
                for loaded, alone in zip(rounds, taken[ALONE], strict=True)
            ]
            rows.append(Row.of(name, "of alone", "", case, ratios))
    return rows


def _p95(samples: Sequence[float]) -> float:
    return statistics.quantiles(samples, n=20, method="inclusive")[-1] if len(samples) > 1 else samples[0]


def _absent(variant: Variant, reason: str) -> list[Row]:
    return [
        Row.absent(variant.name, "read", "ms", {"moment": variant.moment, "behind": behind}, reason)
        for behind in BEHIND
    ]
