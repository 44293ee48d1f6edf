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
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tencache_ds.cli.tune_measure import TIMEOUT_S, keep_in_flight, open_buffer, operation_of, requests_on
from tencache_ds.errors import StorageError
from tencache_ds.io import BACKENDS, Operation, Priority, Submission
from tencache_ds.profiling.probe import Kind

from .area import MIB, Load, Work, open_files, open_works
from .result import REPEATS, MicroResult, alternate
from .variants import PIECE_NBYTES, STOCK_THREADS, Variant, open_all, open_backend, open_stock

LANES = 8
URGENT_NBYTES = 4 * MIB
WORKING_SET_NBYTES = 1 << 30

ALONE = "nothing"
BEHIND: Mapping[str, Kind | None] = {ALONE: None, "reads": Kind.READ, "writes": Kind.WRITE, "mixed": Kind.MIXED}

_SETTLE_S = 0.03
"""Until the queue is as full as it gets."""

_PAUSE_S = 0.005
"""Between two urgent reads: background gets its room back."""

Sample = Callable[[Kind | None, float], list[float]]
"""A variant made ready: the seconds that each of the reads took which started within a time, at least one of them,
behind requests of a kind (None for none), all of which it waits for. Used by one thread; raises StorageError."""


@contextmanager
def on_backend(name: str, work: Work) -> Iterator[Sample]:
    """A backend as training opens it."""
    requests, urgent, numbers = work.requests, work.urgent, itertools.count()
    feeding = ThreadPoolExecutor(1, thread_name_prefix="micro-feeder")
    with closing(open_backend(name, work)) as session, feeding as feeder:

        def read() -> float:
            path, offset = urgent.place(next(numbers) % urgent.n_extents)
            t_start_s = time.perf_counter()
            buffer = urgent.buffers[0]
            ticket = session.backend.submit(Submission(Operation.READ, path, offset, buffer, priority=Priority.URGENT))
            ticket.wait(TIMEOUT_S)
            taken_s = time.perf_counter() - t_start_s
            time.sleep(_PAUSE_S)
            return taken_s

        def sample(kind: Kind | None, seconds: float) -> list[float]:
            end_s = time.perf_counter() + seconds
            if kind is None:
                return _until(end_s, read)
            background = feeder.submit(keep_in_flight, requests, kind, seconds, session.start)
            time.sleep(_SETTLE_S)
            taken = _until(end_s, read)
            background.result()
            return taken

        yield sample


@contextmanager
def on_fresh_backends(name: str, work: Work) -> Iterator[Sample]:
    """A backend for each read: it has seen no urgent request before, and may allow more background traffic then."""

    def read(kind: Kind | None) -> float:
        with on_backend(name, work) as sample:
            return sample(kind, 0.0 if kind is None else _SETTLE_S)[0]

    yield lambda kind, seconds: _until(time.perf_counter() + seconds, partial(read, kind))


@contextmanager
def on_stock_handle(threads: int, work: Work) -> Iterator[Sample]:
    """One of DeepSpeed's handles: a batch of background requests, the urgent one, then ``wait()`` for all of them."""
    requests, urgent, turns = work.requests, work.urgent, itertools.count(1)
    handle: Any = open_stock(threads, work).handle

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


VARIANTS: tuple[Variant, ...] = (
    *(Variant(name, partial(on_backend, name), entry.pinned_only) for name, entry in BACKENDS.items()),
    # The others give background the same room at all times.
    Variant("native after a pause", partial(on_fresh_backends, "native")),
    *(Variant(f"stock handle x{n}", partial(on_stock_handle, n), needs_locked=True) for n in STOCK_THREADS),
)


def run(
    nvme_path: Path,
    seconds: float = 20.0,
    *,
    lanes: int = LANES,
    request_nbytes: int = PIECE_NBYTES,
    working_set_nbytes: int = WORKING_SET_NBYTES,
    variants: Sequence[Variant] = VARIANTS,
) -> MicroResult:
    """Measures every variant. The files live in a scratch folder under ``nvme_path`` and are removed in any case.

    Args:
        nvme_path: a folder on the storage to measure.
        seconds: about how long it takes, longer where the storage is slow: requests in flight are always finished.
        lanes: of the backends.
        request_nbytes: bytes per background request, a multiple of 4096.
        working_set_nbytes: most bytes of all files together; less where it is over 25 % of the free space.
        variants: the variants compared.

    Raises:
        ConfigError: the folder cannot be used, or its file system has no O_DIRECT.
        SpaceError: there is too little free space.
    """
    load = Load(lanes, request_nbytes)
    with ExitStack() as stack:
        # A file for each lane, and one more for the urgent reads.
        urgent_nbytes = working_set_nbytes // (1 + lanes)
        (work,), described = stack.enter_context(open_works(nvme_path, working_set_nbytes - urgent_nbytes, [load]))
        area = stack.enter_context(open_files(nvme_path, urgent_nbytes, URGENT_NBYTES, 1))
        buffer, _ = open_buffer(stack, URGENT_NBYTES)
        work = replace(work, urgent=requests_on(area, (buffer,), area.n_requests))
        block_s = seconds / (len(variants) * len(BEHIND) * (1 + REPEATS))
        queue = f"{load.n_buffers} requests of {load.request_nbytes / MIB:g} MiB in flight"
        result = MicroResult(
            name="latency",
            parameters={
                "read": f"{URGENT_NBYTES / MIB:g} MiB, urgent where there are priorities",
                "behind": f"{queue}, {load.lanes} lanes",
                **described,
                "samples": f"{REPEATS} rounds of {1e3 * block_s:.0f} ms or longer, alternated",
                "after a pause": "no urgent request before it",
            },
            columns="behind",
        )
        ready = open_all(stack, variants, work, lambda name, reason: result.lack(name, {}, reason))
        takers = {
            (name, behind): partial(sample, kind, block_s)
            for name, sample in ready.items()
            for behind, kind in BEHIND.items()
        }
        add_figures(result, alternate("latency", takers, REPEATS))
    return result


def add_figures(result: MicroResult, taken: Mapping[tuple[str, str], Sequence[Sequence[float]]]) -> None:
    """Adds figures of the seconds that reads took, in rounds, by variant and by the queue they were behind."""
    for (name, behind), rounds in taken.items():
        case = {"behind": behind}
        all_ms = 1e3 * np.concatenate(rounds)
        result.add("read", "ms", case, {name: all_ms})
        result.add("p95", "ms", case, {name: [np.percentile(all_ms, 95)]})
        if behind != ALONE:
            pairs = zip(rounds, taken[name, ALONE], strict=True)
            result.add("of alone", "", case, {name: [np.median(loaded) / np.median(alone) for loaded, alone in pairs]})
