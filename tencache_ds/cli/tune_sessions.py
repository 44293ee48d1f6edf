# SPDX-License-Identifier: Apache-2.0
"""The candidates of ``tencache tune``: settings of TenCache's backend and of DeepSpeed's ``aio_handle``."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from tencache_ds.cli.storage_loops import Requests, keep_in_flight
from tencache_ds.config import TenCacheConfig
from tencache_ds.errors import StorageError
from tencache_ds.integration.aio_section import read_aio_section
from tencache_ds.io import BACKENDS, BackendSettings, Operation, Ticket, open_backend
from tencache_ds.planning.cores import LANES
from tencache_ds.profiling.probe_storage import Area, Kind

Settings = Mapping[str, "bool | int"]

STOCK_KNOBS = ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events")
_MIB = 1 << 20


def tencache_grid(backend: str) -> list[dict[str, bool | int]]:
    """Settings worth trying with a backend, the defaults first.

    Where the kernel gets requests in blocks, the size of these is what counts, and elsewhere that of the requests.
    """
    aio = read_aio_section({})
    fields = TenCacheConfig.model_fields
    default: dict[str, bool | int] = {
        "io_lanes": LANES,
        "io_request_size": fields["io_request_size"].default,
        "block_size": aio["block_size"],
        "queue_depth": aio["queue_depth"],
    }
    if not BACKENDS[backend].in_blocks:
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
    aio = read_aio_section({})
    default = {key: aio[key] for key in STOCK_KNOBS}
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


def requests_on(area: Area, buffers: tuple[torch.Tensor, ...], n_written: int) -> Requests:
    """The transfers of every setting.

    Args:
        area: written as far as ``n_written`` requests.
        buffers: one aligned uint8 tensor of ``area.request_nbytes`` per request in flight, an even number.
        n_written: at least as many as there are buffers.
    """

    def place(extent: int) -> tuple[str, int]:
        fd, offset = area.place(extent)
        # The files have no names any more; this opens them again, for this process only.
        return f"/proc/self/fd/{fd}", offset

    return Requests(area.name, buffers, n_written // len(buffers) * len(buffers), place)


class TenCacheSession:
    """TenCache's backend as training opens it.

    Args:
        kind: of ``open_backend``.
        settings: keys of :func:`tencache_grid`.
        requests: files and buffers.
        buffers_are_pinned: whether they are page-locked.

    Raises:
        ConfigError: this backend cannot work here with these settings.
    """

    def __init__(self, kind: str, settings: Settings, requests: Requests, buffers_are_pinned: bool) -> None:
        self.requests = requests
        self.backend, self.reason = open_backend(
            kind,
            BackendSettings(
                buffers_are_pinned=buffers_are_pinned,
                n_lanes=settings["io_lanes"],
                request_nbytes=settings["io_request_size"],
                block_nbytes=settings["block_size"],
                queue_depth=settings["queue_depth"],
            ),
        )

    def transfer(self, kind: Kind, seconds: float) -> int:
        """See :meth:`~.storage_loops.Session.transfer`."""
        try:
            return keep_in_flight(self.requests, kind, seconds, self.start)
        except StorageError as error:
            cause = os.strerror(error.errno) if error.errno else str(error)
            raise StorageError(
                error.operation, self.requests.name, error.offset, error.nbytes, cause, errno=error.errno
            ) from error

    def close(self) -> None:
        """See :meth:`~.storage_loops.Session.close`."""
        self.backend.close()

    def start(self, operation: Operation, slot: int, extent: int) -> Ticket:
        """See :data:`~.storage_loops.Issue`."""
        return self.backend.submit(operation, *self.requests.place(extent), self.requests.buffers[slot])
