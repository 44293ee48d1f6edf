# SPDX-License-Identifier: Apache-2.0
"""What ``tencache tune`` compares: TenCache's backend and DeepSpeed's ``aio_handle``, with one set of knobs each."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

from tencache_ds.config import TenCacheConfig
from tencache_ds.errors import StorageError
from tencache_ds.io import Operation, StorageBackend, Ticket, open_backend
from tencache_ds.profiling.probe_storage import Area, Kind

Settings = Mapping[str, "bool | int"]

TIMEOUT_S = 120.0
STOCK_KNOBS = ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events")
_MIB = 1 << 20


def tencache_grid(backend: str) -> list[dict[str, bool | int]]:
    """Settings worth trying with a backend, the defaults first.

    ``native`` cuts requests into blocks, so their size is what counts; ``posix`` knows no blocks.
    """
    aio = get_aio_config({})
    fields = TenCacheConfig.model_fields
    default: dict[str, bool | int] = {
        "io_lanes": fields["io_lanes"].default,
        "io_request_size": fields["io_request_size"].default,
        "block_size": aio["block_size"],
        "queue_depth": aio["queue_depth"],
    }
    if backend == "posix":
        changes = [{"io_lanes": lanes, "io_request_size": size * _MIB} for lanes in (4, 8, 16) for size in (1, 4, 8)]
    else:
        changes = [
            {"queue_depth": 32},
            {"io_lanes": 4},
            {"io_lanes": 16},
            {"block_size": 4 * _MIB},
            {"block_size": _MIB // 4, "queue_depth": 32},
            {"io_lanes": 2, "queue_depth": 32},
            {"io_lanes": 4, "block_size": 4 * _MIB},
            {"io_lanes": 16, "block_size": _MIB // 4},
        ]
    return _distinct([default, *({**default, **change} for change in changes)])


def stock_grid(cores: int) -> list[dict[str, bool | int]]:
    """Settings worth trying with DeepSpeed's handle, its defaults first."""
    default = {key: get_aio_config({})[key] for key in STOCK_KNOBS}
    changes: list[dict[str, bool | int]] = [
        {"intra_op_parallelism": 4},
        {"intra_op_parallelism": 8, "queue_depth": 32},
        {"intra_op_parallelism": 4, "queue_depth": 32},
        {"intra_op_parallelism": 4, "block_size": 4 * _MIB},
        {"intra_op_parallelism": 4, "queue_depth": 32, "single_submit": True},
        {"intra_op_parallelism": 4, "queue_depth": 32, "overlap_events": False},
    ]
    if cores >= 16:
        changes.append({"intra_op_parallelism": 16, "queue_depth": 32})
    return _distinct([default, *({**default, **change} for change in changes)])


def _distinct(grid: list[dict[str, bool | int]]) -> list[dict[str, bool | int]]:
    return [settings for index, settings in enumerate(grid) if settings not in grid[:index]]


@dataclass(frozen=True, slots=True)
class Work:
    """The same for everything that is compared.

    Attributes:
        area: written throughout, at least as far as ``n_extents`` requests.
        buffers: one aligned uint8 tensor of ``area.request_nbytes`` per request in flight, an even number.
        n_extents: a multiple of the number of buffers: buffer ``i`` only ever goes to extents ``i`` modulo that number,
            so that no two requests in flight meet.
    """

    area: Area
    buffers: tuple[torch.Tensor, ...]
    n_extents: int

    def place(self, slot: int, turn: int) -> tuple[str, int]:
        """Path and offset that buffer ``slot`` goes to at its ``turn``-th request."""
        fd, offset = self.area.place((turn * len(self.buffers) + slot) % self.n_extents)
        # The files have no names any more; this opens them again, for this process only.
        return f"/proc/self/fd/{fd}", offset


def operation_of(kind: Kind, slot: int) -> Operation:
    """What the buffer at index ``slot`` is used for: when mixed, every other one writes."""
    if kind is Kind.MIXED:
        return Operation.WRITE if slot % 2 else Operation.READ
    return Operation(kind.value)


class Session(Protocol):
    """One set of knobs, ready to be measured. Used by one thread."""

    def transfer(self, kind: Kind, seconds: float) -> int:
        """Starts requests for ``seconds``, waits for all of them, and returns the bytes they moved.

        Raises:
            StorageError: a request failed; names the folder.
        """
        ...

    def close(self) -> None:
        """Waits for what is in flight and frees everything."""
        ...


class TenCacheSession:
    """TenCache's backend as training opens it.

    Args:
        kind: of ``open_backend``.
        settings: keys of :func:`tencache_grid`.
        work: files and buffers.
        buffers_are_pinned: whether they are page-locked.

    Raises:
        ConfigError: this backend cannot work here with these settings.
    """

    def __init__(self, kind: str, settings: Settings, work: Work, buffers_are_pinned: bool) -> None:
        self._work = work
        self._backend, self.reason = open_backend(
            cast(Literal["auto", "native", "aio", "posix"], kind),
            n_lanes=settings["io_lanes"],
            request_nbytes=settings["io_request_size"],
            block_nbytes=settings["block_size"],
            queue_depth=settings["queue_depth"],
            buffers_are_pinned=buffers_are_pinned,
        )

    @property
    def backend(self) -> StorageBackend:
        return self._backend

    def transfer(self, kind: Kind, seconds: float) -> int:
        """See :meth:`Session.transfer`."""
        end_s = time.perf_counter() + seconds
        n_moved = 0
        try:
            pending = deque((slot, 0, self._start(kind, slot, 0)) for slot in range(len(self._work.buffers)))
            while pending:
                slot, turn, ticket = pending.popleft()
                ticket.wait(TIMEOUT_S)
                n_moved += ticket.nbytes
                if time.perf_counter() < end_s:
                    pending.append((slot, turn + 1, self._start(kind, slot, turn + 1)))
        except StorageError as error:
            cause = os.strerror(error.errno) if error.errno else str(error)
            raise StorageError(
                error.operation, self._work.area.name, error.offset, error.nbytes, cause,
                errno=error.errno, tag="tencache tune",
            ) from error  # fmt: skip
        return n_moved

    def close(self) -> None:
        """See :meth:`Session.close`."""
        self._backend.close()

    def _start(self, kind: Kind, slot: int, turn: int) -> Ticket:
        path, offset = self._work.place(slot, turn)
        return self._backend.submit(operation_of(kind, slot), path, offset, self._work.buffers[slot])


class StockSession:
    """One ``aio_handle`` the way DeepSpeed's swappers use it: a batch of asynchronous requests, then ``wait()``.

    Args:
        settings: keys of DeepSpeed's ``aio`` section.
        work: files and page-locked buffers; the handle would copy others.

    Raises:
        ConfigError: DeepSpeed's op cannot be built or loaded.
    """

    def __init__(self, settings: Settings, work: Work) -> None:
        from tencache_ds.ops.async_io import load_async_io

        self._work = work
        self._handle: Any = load_async_io().aio_handle(*(settings[key] for key in _HANDLE_ARGUMENTS))

    def transfer(self, kind: Kind, seconds: float) -> int:
        """See :meth:`Session.transfer`."""
        work = self._work
        end_s = time.perf_counter() + seconds
        n_moved, turn = 0, 0
        while True:
            for slot, buffer in enumerate(work.buffers):
                is_read = operation_of(kind, slot) is Operation.READ
                start = self._handle.async_pread if is_read else self._handle.async_pwrite
                start(buffer, *work.place(slot, turn))
            n_done = self._handle.wait()
            if n_done != len(work.buffers):
                cause = f"aio_handle.wait() says that {n_done} of {len(work.buffers)} requests were done"
                raise StorageError(kind.value, work.area.name, 0, work.area.request_nbytes, cause, tag="tencache tune")
            n_moved += n_done * work.area.request_nbytes
            turn += 1
            if time.perf_counter() >= end_s:
                return n_moved

    def close(self) -> None:
        """See :meth:`Session.close`."""
        self._handle = None


_HANDLE_ARGUMENTS = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")
