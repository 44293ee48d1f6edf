# SPDX-License-Identifier: Apache-2.0
"""What is compared in the storage micro-benchmark: every variant moves the same requests of the same file layout."""

from __future__ import annotations

import enum
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from tencache_ds.ops.async_io import load_async_io

from tencache_ds.errors import StorageError
from tencache_ds.io import AioBackend, ExtentStore, NativeBackend, Operation, PosixBackend, StorageBackend, Ticket

BLOCK_NBYTES = 1 << 20
QUEUE_DEPTH = 32
"""Of DeepSpeed's op, wherever it is used here."""

TIMEOUT_S = 120.0


class Direction(enum.Enum):
    """What a sample does."""

    READ = "read"
    WRITE = "write"
    MIXED = "mixed"
    """Every other buffer reads, the others write."""

    def of(self, slot: int) -> Operation:
        """What the buffer at index ``slot`` is used for."""
        if self is Direction.MIXED:
            return Operation.WRITE if slot % 2 else Operation.READ
        return Operation(self.value)


@dataclass(frozen=True, slots=True)
class Work:
    """The same for every variant of a case.

    Attributes:
        folder: for files of a variant's own.
        path: the shared file, at least ``n_extents * request_nbytes`` long and written throughout.
        request_nbytes: bytes per request.
        lanes: requests that are worked on at the same time.
        buffers: one aligned uint8 tensor of ``request_nbytes`` per request in flight, more than ``lanes``.
        n_extents: requests that the file holds, a multiple of the number of buffers: buffer ``i`` only ever goes to
            extents ``i`` modulo that number, so that no two requests in flight meet.
    """

    folder: str
    path: str
    request_nbytes: int
    lanes: int
    buffers: tuple[torch.Tensor, ...]
    n_extents: int

    def extent(self, slot: int, turn: int) -> int:
        """The extent that buffer ``slot`` goes to at its ``turn``-th request: together they walk through the file."""
        return (turn * len(self.buffers) + slot) % self.n_extents


class Session(Protocol):
    """A variant made ready for a case. Used by one thread."""

    def transfer(self, direction: Direction, duration_s: float) -> int:
        """Starts requests for ``duration_s``, waits for all of them, and returns the bytes they moved.

        Raises:
            OSError: a request failed or came back short.
        """
        ...

    def close(self) -> None:
        """Waits for what is in flight and frees everything, files of its own included."""
        ...


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the things compared.

    Attributes:
        name: for the table.
        open: makes it ready; raises ConfigError where it cannot work.
        needs_locked: whether it takes page-locked buffers only (others it would copy, or pass to somebody else).
    """

    name: str
    open: Callable[[Work], Session]
    needs_locked: bool = False


class RawThreads:
    """``os.preadv``/``os.pwritev`` with O_DIRECT, one blocking request per thread: what Python can get at best."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._fd = os.open(work.path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        self._views = [memoryview(buffer.numpy()) for buffer in work.buffers]
        self._threads = ThreadPoolExecutor(work.lanes, thread_name_prefix="micro-raw")

    def transfer(self, direction: Direction, duration_s: float) -> int:
        """See :meth:`Session.transfer`."""
        end_s = time.perf_counter() + duration_s
        loops = [self._threads.submit(self._loop, lane, direction, end_s) for lane in range(self._work.lanes)]
        return sum(loop.result() for loop in loops)

    def close(self) -> None:
        """See :meth:`Session.close`."""
        self._threads.shutdown()
        os.close(self._fd)

    def _loop(self, lane: int, direction: Direction, end_s: float) -> int:
        nbytes, n_moved, turn = self._work.request_nbytes, 0, 0
        while True:
            for slot in range(lane, len(self._views), self._work.lanes):
                operation, offset = direction.of(slot), self._work.extent(slot, turn) * nbytes
                call = os.preadv if operation is Operation.READ else os.pwritev
                moved = call(self._fd, [self._views[slot]], offset)
                if moved != nbytes:
                    raise StorageError(operation.value, self._work.path, offset, nbytes, f"only {moved} bytes moved")
                n_moved += moved
                if time.perf_counter() >= end_s:
                    return n_moved
            turn += 1


Issue = Callable[[Operation, int, int], Ticket]
"""``issue(operation, slot, extent)``: starts one request."""


class Tickets:
    """Whatever answers a request with a :class:`~tencache_ds.io.Ticket`: a buffer starts again when its ticket ends."""

    def __init__(self, work: Work, issue: Issue, resources: ExitStack) -> None:
        self._work = work
        self._issue = issue
        self._resources = resources

    def transfer(self, direction: Direction, duration_s: float) -> int:
        """See :meth:`Session.transfer`."""
        end_s = time.perf_counter() + duration_s
        n_moved = 0
        pending = deque((slot, 0, self._start(direction, slot, 0)) for slot in range(len(self._work.buffers)))
        while pending:
            slot, turn, ticket = pending.popleft()
            ticket.wait(TIMEOUT_S)
            n_moved += ticket.nbytes
            if time.perf_counter() < end_s:
                pending.append((slot, turn + 1, self._start(direction, slot, turn + 1)))
        return n_moved

    def close(self) -> None:
        """See :meth:`Session.close`."""
        self._resources.close()

    def _start(self, direction: Direction, slot: int, turn: int) -> Ticket:
        return self._issue(direction.of(slot), slot, self._work.extent(slot, turn))


OpenBackend = Callable[[int, int], StorageBackend]
"""``open(lanes, request_nbytes)``"""


def open_bare(open_backend: OpenBackend, work: Work) -> Tickets:
    """A backend by itself, on the shared file."""
    with ExitStack() as stack:
        backend = open_backend(work.lanes, work.request_nbytes)
        stack.callback(backend.close)
        stack.callback(backend.forget, work.path)

        def issue(operation: Operation, slot: int, extent: int) -> Ticket:
            return backend.submit(operation, work.path, extent * work.request_nbytes, work.buffers[slot])

        return Tickets(work, issue, stack.pop_all())


def open_store(open_backend: OpenBackend, name: str, work: Work) -> Tickets:
    """The extent store on a backend, as training uses it (reads verified), on a file of its own."""
    with ExitStack() as stack:
        backend = open_backend(work.lanes, work.request_nbytes)
        stack.callback(backend.close)
        preallocate_nbytes = work.n_extents * work.request_nbytes
        store = ExtentStore(f"{work.folder}/store-{name}.bin", backend, preallocate_nbytes=preallocate_nbytes)
        stack.callback(store.close)
        extents = [store.allocate(work.request_nbytes, f"extent {index}") for index in range(work.n_extents)]
        for index, extent in enumerate(extents):
            store.write(extent, work.buffers[index % len(work.buffers)])
        store.drain()

        def issue(operation: Operation, slot: int, extent: int) -> Ticket:
            start = store.read if operation is Operation.READ else store.write
            return start(extents[extent], work.buffers[slot])

        return Tickets(work, issue, stack.pop_all())


class StockHandle:
    """One ``aio_handle`` the way DeepSpeed's swappers use it: a batch of asynchronous requests, then ``wait()``."""

    def __init__(self, intra_op_parallelism: int, work: Work) -> None:
        self._work = work
        self._handle: Any = load_async_io().aio_handle(BLOCK_NBYTES, QUEUE_DEPTH, False, True, intra_op_parallelism)

    def transfer(self, direction: Direction, duration_s: float) -> int:
        """See :meth:`Session.transfer`."""
        work = self._work
        end_s = time.perf_counter() + duration_s
        n_moved, turn = 0, 0
        while True:
            for slot, buffer in enumerate(work.buffers):
                is_read = direction.of(slot) is Operation.READ
                start = self._handle.async_pread if is_read else self._handle.async_pwrite
                start(buffer, work.path, work.extent(slot, turn) * work.request_nbytes)
            n_done = self._handle.wait()
            if n_done != len(work.buffers):
                cause = f"aio_handle.wait() says that {n_done} of {len(work.buffers)} requests were done"
                raise StorageError(direction.value, work.path, 0, work.request_nbytes, cause)
            n_moved += len(work.buffers) * work.request_nbytes
            turn += 1
            if time.perf_counter() >= end_s:
                return n_moved

    def close(self) -> None:
        """See :meth:`Session.close`."""
        self._handle = None


def _open_native(lanes: int, request_nbytes: int) -> StorageBackend:
    return NativeBackend(lanes, min(BLOCK_NBYTES, request_nbytes), QUEUE_DEPTH)


def _open_posix(lanes: int, request_nbytes: int) -> StorageBackend:
    return PosixBackend(lanes, request_nbytes)


def _open_aio(lanes: int, request_nbytes: int) -> StorageBackend:
    return AioBackend(lanes, request_nbytes, BLOCK_NBYTES, QUEUE_DEPTH)


BACKENDS: dict[str, tuple[OpenBackend, bool]] = {
    "native": (_open_native, False),
    "posix": (_open_posix, False),
    "aio": (_open_aio, True),
}
"""TenCache's backends: how each is opened, and whether it needs page-locked buffers. A new one is one more line."""

VARIANTS: tuple[Variant, ...] = (
    Variant("raw threads", RawThreads),
    *(Variant(name, partial(open_bare, opened), locked) for name, (opened, locked) in BACKENDS.items()),
    *(
        Variant(f"store on {name}", partial(open_store, opened, name), locked)
        for name, (opened, locked) in BACKENDS.items()
    ),
    *(Variant(f"stock handle x{n}", partial(StockHandle, n), needs_locked=True) for n in (1, 4)),
)
