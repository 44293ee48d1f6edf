# SPDX-License-Identifier: Apache-2.0
"""The loops that keep storage busy for a while: of ``tencache tune`` and of the storage micro-benchmark.

Requests go to extents of equal length that were written before. A buffer that becomes free is submitted again until the
time is over; then the requests in flight are waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tencache_ds.errors import ConfigError, LockedMemoryError, StorageError
from tencache_ds.io import Operation, Ticket
from tencache_ds.memory import HostArena, Locking
from tencache_ds.profiling.probe import Kind

TIMEOUT_S = 120.0
"""A request that takes longer is an error."""

_HANDLE_ARGUMENTS = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests, the same for all candidates.

    Attributes:
        name: the folder or file, for messages.
        buffers: one aligned uint8 tensor per request in flight, all of one length.
        n_extents: a multiple of the number of buffers: buffer ``i`` only ever goes to extents ``i`` modulo that number,
            so that no two requests in flight meet.
        place: path and offset of an extent.
    """

    name: str
    buffers: tuple[torch.Tensor, ...]
    n_extents: int
    place: Callable[[int], tuple[str, int]]

    @property
    def request_nbytes(self) -> int:
        """Length of a request."""
        return self.buffers[0].numel()

    def extent(self, slot: int, turn: int) -> int:
        """The extent that buffer ``slot`` goes to at its ``turn``-th request: together they walk through all."""
        return (turn * len(self.buffers) + slot) % self.n_extents


def open_buffer(stack: ExitStack, nbytes: int) -> tuple[torch.Tensor, str]:
    """Random bytes in aligned memory, locked if that is possible, as in training; why it is not, or an empty string."""
    why = ""
    for locking in (Locking.CUDA if torch.cuda.is_available() else Locking.MLOCK, Locking.NONE):
        with ExitStack() as attempt:
            try:
                arena = HostArena(None, locking)
                attempt.callback(arena.close)
                slab = arena.allocate(nbytes, "storage benchmark")
            except (LockedMemoryError, ConfigError) as error:
                if locking is Locking.NONE:
                    raise
                why = str(error)
                continue
            stack.push(attempt.pop_all())
            # Compressible data would flatter a device that compresses.
            slab.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
            return slab, why
    raise RuntimeError("neither locked nor plain memory was tried")


def operation_of(kind: Kind, slot: int) -> Operation:
    """Operation of the buffer at index ``slot``: when mixed, every other one writes."""
    if kind is Kind.MIXED:
        return Operation.WRITE if slot % 2 else Operation.READ
    return Operation(kind.value)


class Session(Protocol):
    """One of the compared backends, ready for use. Used by one thread."""

    def transfer(self, kind: Kind, seconds: float) -> int:
        """Starts requests for ``seconds``, waits for all of them, and returns the bytes they moved.

        Raises:
            StorageError: a request failed or came back short; names the folder or file.
        """
        ...

    def close(self) -> None:
        """Waits for the requests in flight and frees everything, including its own files."""
        ...


Issue = Callable[[Operation, int, int], Ticket]
"""``issue(operation, slot, extent)``: starts one request."""


def keep_in_flight(requests: Requests, kind: Kind, seconds: float, issue: Issue) -> int:
    """A request for each buffer, and the next one as soon as the oldest has ended, for ``seconds``; one thread.

    Returns:
        The bytes that were moved.

    Raises:
        StorageError: a request failed, or took longer than ``TIMEOUT_S``.
    """

    def start(slot: int, turn: int) -> tuple[int, int, Ticket]:
        return slot, turn, issue(operation_of(kind, slot), slot, requests.extent(slot, turn))

    end_s = time.perf_counter() + seconds
    n_moved = 0
    pending = deque(start(slot, 0) for slot in range(len(requests.buffers)))
    while pending:
        slot, turn, ticket = pending.popleft()
        ticket.wait(TIMEOUT_S)
        n_moved += ticket.nbytes
        if time.perf_counter() < end_s:
            pending.append(start(slot, turn + 1))
    return n_moved


def open_stock_handle(settings: Mapping[str, bool | int]) -> Any:
    """An ``aio_handle``.

    Args:
        settings: of DeepSpeed's ``aio`` section: all but ``use_gds``.

    Raises:
        ConfigError: DeepSpeed's op cannot be built or loaded.
    """
    from tencache_ds.ops.async_io import load_async_io

    return load_async_io().aio_handle(*(settings[key] for key in _HANDLE_ARGUMENTS))


class StockSession:
    """One ``aio_handle`` the way DeepSpeed's swappers use it: a batch of asynchronous requests, then ``wait()``.

    Args:
        settings: see :func:`open_stock_handle`.
        requests: with page-locked buffers; the handle would copy others.

    Raises:
        ConfigError: DeepSpeed's op cannot be built or loaded.
    """

    def __init__(self, settings: Mapping[str, bool | int], requests: Requests) -> None:
        self._requests = requests
        self.handle: Any = open_stock_handle(settings)

    def transfer(self, kind: Kind, seconds: float) -> int:
        """See :meth:`Session.transfer`."""
        requests = self._requests
        end_s = time.perf_counter() + seconds
        n_moved, turn = 0, 0
        while True:
            for slot, buffer in enumerate(requests.buffers):
                is_read = operation_of(kind, slot) is Operation.READ
                start = self.handle.async_pread if is_read else self.handle.async_pwrite
                start(buffer, *requests.place(requests.extent(slot, turn)))
            n_done = self.handle.wait()
            if n_done != len(requests.buffers):
                cause = f"aio_handle.wait() reports {n_done} of {len(requests.buffers)} requests as completed"
                raise StorageError(kind.value, requests.name, 0, requests.request_nbytes, cause)
            n_moved += n_done * requests.request_nbytes
            turn += 1
            if time.perf_counter() >= end_s:
                return n_moved

    def close(self) -> None:
        """See :meth:`Session.close`."""
        self.handle = None
