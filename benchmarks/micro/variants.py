# SPDX-License-Identifier: Apache-2.0
"""The variants of the benchmarks of storage: each moves the same requests of the same file layout."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tencache_ds.cli.tune_measure import Session, StockSession, TenCacheSession, keep_in_flight, operation_of
from tencache_ds.config import TenCacheConfig
from tencache_ds.errors import ConfigError, StorageError
from tencache_ds.integration.config_checks import read_aio_section
from tencache_ds.io import BACKENDS, ExtentStore, Operation, Ticket
from tencache_ds.profiling.probe import Kind

from .area import Work

BLOCK_NBYTES = 1 << 20
QUEUE_DEPTH = 32
"""Queue depth of DeepSpeed's op and of TenCache's own, in all variants."""

PIECE_NBYTES: int = TenCacheConfig.model_fields["io_request_size"].default
"""The piece size of the posix and aio backends, as in training."""

Transfer = Callable[[Kind, float], int]
"""A variant made ready: starts requests of a kind for some seconds, waits for all of them, returns the bytes moved.
Used by one thread; raises StorageError for a request that failed or came back short."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the things compared."""

    name: str  # for the table
    open: Callable[[Work], AbstractContextManager[Any]]  # makes it ready; raises ConfigError where it cannot work
    # whether it takes page-locked buffers only (others it would copy, or pass to another backend)
    needs_locked: bool = False
    has_own_files: bool = False  # whether it creates its own files besides the shared ones, of the same size


def open_all(
    stack: ExitStack, variants: Sequence[Variant], work: Work, refuse: Callable[[str, str], None]
) -> dict[str, Any]:
    """The variants made ready, by name; ``refuse`` gets the name and the reason of one that cannot work here."""
    ready = {}
    for variant in variants:
        try:
            if variant.needs_locked and work.unlocked:
                raise ConfigError(work.unlocked)
            ready[variant.name] = stack.enter_context(variant.open(work))
        except ConfigError as error:
            refuse(variant.name, str(error))
    return ready


@contextmanager
def raw_threads(n_threads: int, work: Work) -> Iterator[Transfer]:
    """``os.preadv``/``os.pwritev`` with O_DIRECT, one blocking request per thread: what Python can get at best.

    Raises:
        ConfigError: the work has fewer buffers than that.
    """
    requests = work.requests
    if n_threads > len(requests.buffers):
        raise ConfigError(f"needs {n_threads} requests in flight")
    views = [memoryview(buffer.numpy()) for buffer in requests.buffers[:n_threads]]  # type: ignore[arg-type]

    def loop(view: memoryview, kind: Kind, numbers: Iterator[int], end_s: float) -> int:
        n_moved = 0
        while True:
            number = next(numbers)
            operation = operation_of(kind, number)
            fd, offset = work.area.place(number % requests.n_extents)
            moved = (os.preadv if operation is Operation.READ else os.pwritev)(fd, [view], offset)
            if moved != len(view):
                cause = f"only {moved} bytes transferred"
                raise StorageError(operation.value, work.area.name, offset, len(view), cause)
            n_moved += moved
            if time.perf_counter() >= end_s:
                return n_moved

    with ThreadPoolExecutor(n_threads, thread_name_prefix="micro-raw") as threads:

        def transfer(kind: Kind, seconds: float) -> int:
            end_s = time.perf_counter() + seconds
            # From one counter, so that as many bytes are read as written when mixed, like everywhere else.
            numbers = itertools.count()
            return sum(threads.map(lambda view: loop(view, kind, numbers, end_s), views))

        yield transfer


def open_backend(name: str, work: Work) -> TenCacheSession:
    """One of TenCache's backends as training opens it, on the shared files."""
    settings = {
        "io_lanes": work.lanes, "io_request_size": min(PIECE_NBYTES, work.requests.request_nbytes),
        "block_size": BLOCK_NBYTES, "queue_depth": QUEUE_DEPTH,
    }  # fmt: skip
    return TenCacheSession(name, settings, work.requests, not work.unlocked)


def open_stock(threads: int, work: Work) -> StockSession:
    """DeepSpeed's handle with its defaults, but for block size, depth and threads."""
    own = {"block_size": BLOCK_NBYTES, "queue_depth": QUEUE_DEPTH, "intra_op_parallelism": threads}
    return StockSession(read_aio_section({}) | own, work.requests)


@contextmanager
def on_files(open_session: Callable[[Work], Session], work: Work) -> Iterator[Transfer]:
    """A session alone, on the shared files."""
    with closing(open_session(work)) as session:
        yield session.transfer


@contextmanager
def store_on(name: str, work: Work) -> Iterator[Transfer]:
    """The extent store on a backend, as training uses it (reads verified), on its own files."""
    requests, path = work.requests, f"{work.area.name}/.tencache-micro-{os.getpid()}-{name}"
    size = {"preallocate_nbytes": requests.n_extents * requests.request_nbytes, "n_files": len(work.area.fds)}
    with closing(open_backend(name, work)) as session, closing(ExtentStore(path, session.backend, **size)) as store:
        extents = [store.allocate(requests.request_nbytes, f"extent {index}") for index in range(requests.n_extents)]
        for extent, buffer in zip(extents, itertools.cycle(requests.buffers), strict=False):
            store.write(extent, buffer)
        store.drain()

        def issue(operation: Operation, slot: int, extent: int) -> Ticket:
            start = store.read if operation is Operation.READ else store.write
            return start(extents[extent], requests.buffers[slot])

        yield lambda kind, seconds: keep_in_flight(requests, kind, seconds, issue)


STOCK_THREADS = (1, 4)

# The best number of raw threads shows the storage's bandwidth.
RAW = tuple(Variant(f"raw x{n}", partial(raw_threads, n)) for n in (4, 8, 16))
STOCK = tuple(
    Variant(f"stock handle x{n}", partial(on_files, partial(open_stock, n)), needs_locked=True) for n in STOCK_THREADS
)

VARIANTS: tuple[Variant, ...] = (
    *RAW,
    *(
        Variant(name, partial(on_files, partial(open_backend, name)), entry.pinned_only)
        for name, entry in BACKENDS.items()
    ),
    *(
        Variant(f"store on {name}", partial(store_on, name), entry.pinned_only, has_own_files=True)
        for name, entry in BACKENDS.items()
    ),
    *STOCK,
)
