# SPDX-License-Identifier: Apache-2.0
"""The variants of the storage micro-benchmark: each moves the same requests of the same file layout."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from tencache_ds.cli.storage_loops import Requests, StockSession, keep_in_flight, operation_of
from tencache_ds.config import TenCacheConfig
from tencache_ds.errors import ConfigError, StorageError
from tencache_ds.integration.aio_section import read_aio_section
from tencache_ds.io import BACKENDS, BackendSettings, ExtentStore, Operation, StorageBackend, Ticket
from tencache_ds.io.backends.registry import BackendEntry
from tencache_ds.profiling.probe_storage import Kind

BLOCK_NBYTES = 1 << 20
QUEUE_DEPTH = 32
"""Of DeepSpeed's op and of TenCache's own, in all variants."""

PIECE_NBYTES: int = TenCacheConfig.model_fields["io_request_size"].default
"""The piece size of the posix and aio backends, as in training."""

RAW_THREADS = (4, 8, 16)
"""Threads of the raw variants: the best of them shows the storage's bandwidth."""

STOCK_THREADS = (1, 4)

Transfer = Callable[[Kind, float], int]
"""A variant made ready: starts requests of a kind for some seconds, waits for all of them, returns the bytes moved.
Used by one thread; raises StorageError for a request that failed or came back short."""

OpenBackend = Callable[[int, int], StorageBackend]
"""``open(lanes, request_nbytes)``"""


@dataclass(frozen=True, slots=True)
class Work:
    """The same for every variant of a case."""

    folder: str  # for files of a variant's own
    # the shared files, written throughout. Several, as in training: tmpfs lets one writer at a time into a file
    paths: tuple[str, ...]
    request_nbytes: int  # bytes per request
    lanes: int  # requests that are worked on at the same time
    # one aligned uint8 tensor of ``request_nbytes`` per request in flight, more than ``lanes``
    buffers: tuple[torch.Tensor, ...]
    # requests that the files hold, taken from one file after the other; a multiple of the number of buffers
    n_extents: int

    @property
    def requests(self) -> Requests:
        """In the shared files, in turn."""

        def place(extent: int) -> tuple[str, int]:
            return self.paths[extent % len(self.paths)], extent // len(self.paths) * self.request_nbytes

        return Requests(self.folder, self.buffers, self.n_extents, place)


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the things compared."""

    name: str  # for the table
    open: Callable[[Work], AbstractContextManager[Transfer]]  # makes it ready; raises ConfigError where it cannot work
    # whether it takes page-locked buffers only (others it would copy, or pass to another backend)
    needs_locked: bool = False
    has_own_files: bool = False  # whether it creates its own files besides the shared ones, of the same size


@contextmanager
def raw_threads(n_threads: int, work: Work) -> Iterator[Transfer]:
    """``os.preadv``/``os.pwritev`` with O_DIRECT, one blocking request per thread: what Python can get at best.

    Raises:
        ConfigError: the work has fewer buffers than that.
    """
    if n_threads > len(work.buffers):
        raise ConfigError(f"needs {n_threads} requests in flight")
    requests = work.requests
    views = [memoryview(buffer.numpy()) for buffer in work.buffers[:n_threads]]  # type: ignore[arg-type]
    with ExitStack() as stack:
        fds = {path: os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC) for path in work.paths}
        for fd in fds.values():
            stack.callback(os.close, fd)
        threads = stack.enter_context(ThreadPoolExecutor(n_threads, thread_name_prefix="micro-raw"))

        def loop(view: memoryview, kind: Kind, numbers: Iterator[int], end_s: float) -> int:
            n_moved = 0
            while True:
                number = next(numbers)
                operation = operation_of(kind, number)
                path, offset = requests.place(number % requests.n_extents)
                moved = (os.preadv if operation is Operation.READ else os.pwritev)(fds[path], [view], offset)
                if moved != len(view):
                    cause = f"only {moved} bytes transferred"
                    raise StorageError(operation.value, path, offset, len(view), cause)
                n_moved += moved
                if time.perf_counter() >= end_s:
                    return n_moved

        def transfer(kind: Kind, seconds: float) -> int:
            end_s = time.perf_counter() + seconds
            # From one counter, so that as many bytes are read as written when mixed, like everywhere else.
            numbers = itertools.count()
            return sum(threads.map(lambda view: loop(view, kind, numbers, end_s), views))

        yield transfer


@contextmanager
def backend_on(open_backend: OpenBackend, work: Work) -> Iterator[StorageBackend]:
    """A backend for the shared files."""
    with ExitStack() as stack:
        backend = open_backend(work.lanes, work.request_nbytes)
        stack.callback(backend.close)
        for path in work.paths:
            stack.callback(backend.forget, path)
        yield backend


@contextmanager
def bare(open_backend: OpenBackend, work: Work) -> Iterator[Transfer]:
    """A backend alone, on the shared files."""
    requests = work.requests
    with backend_on(open_backend, work) as backend:

        def issue(operation: Operation, slot: int, extent: int) -> Ticket:
            return backend.submit(operation, *requests.place(extent), requests.buffers[slot])

        yield lambda kind, seconds: keep_in_flight(requests, kind, seconds, issue)


@contextmanager
def store_on(open_backend: OpenBackend, name: str, work: Work) -> Iterator[Transfer]:
    """The extent store on a backend, as training uses it (reads verified), on its own files."""
    nbytes = work.n_extents * work.request_nbytes
    with (
        closing(open_backend(work.lanes, work.request_nbytes)) as backend,
        closing(
            ExtentStore(f"{work.folder}/store-{name}.bin", backend, preallocate_nbytes=nbytes, n_files=len(work.paths))
        ) as store,
    ):
        extents = [store.allocate(work.request_nbytes, f"extent {index}") for index in range(work.n_extents)]
        for index, extent in enumerate(extents):
            store.write(extent, work.buffers[index % len(work.buffers)])
        store.drain()

        def issue(operation: Operation, slot: int, extent: int) -> Ticket:
            start = store.read if operation is Operation.READ else store.write
            return start(extents[extent], work.buffers[slot])

        yield lambda kind, seconds: keep_in_flight(work.requests, kind, seconds, issue)


def stock_settings(threads: int) -> dict[str, bool | int]:
    """DeepSpeed's defaults but for block size, depth and threads."""
    own = {"block_size": BLOCK_NBYTES, "queue_depth": QUEUE_DEPTH, "intra_op_parallelism": threads}
    return read_aio_section({}) | own


@contextmanager
def stock(threads: int, work: Work) -> Iterator[Transfer]:
    """DeepSpeed's handle."""
    with closing(StockSession(stock_settings(threads), work.requests)) as session:
        yield session.transfer


def _open_backend(entry: BackendEntry, lanes: int, request_nbytes: int) -> StorageBackend:
    return entry.open(
        BackendSettings(
            buffers_are_pinned=entry.pinned_only, n_lanes=lanes, request_nbytes=min(PIECE_NBYTES, request_nbytes),
            block_nbytes=BLOCK_NBYTES, queue_depth=QUEUE_DEPTH,
        )
    )  # fmt: skip


OPENED: dict[str, tuple[OpenBackend, bool]] = {
    name: (partial(_open_backend, entry), entry.pinned_only) for name, entry in BACKENDS.items()
}
"""TenCache's backends: how each is opened, and whether it needs page-locked buffers."""

RAW = tuple(Variant(f"raw x{n}", partial(raw_threads, n)) for n in RAW_THREADS)
STOCK = tuple(Variant(f"stock handle x{n}", partial(stock, n), needs_locked=True) for n in STOCK_THREADS)

VARIANTS: tuple[Variant, ...] = (
    *RAW,
    *(Variant(name, partial(bare, opened), locked) for name, (opened, locked) in OPENED.items()),
    *(
        Variant(f"store on {name}", partial(store_on, opened, name), locked, has_own_files=True)
        for name, (opened, locked) in OPENED.items()
    ),
    *STOCK,
)
