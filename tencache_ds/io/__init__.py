# SPDX-License-Identifier: Apache-2.0
"""Storage: backends that move bytes, the scratch folder they live in, the extent store that knows what is where."""

from __future__ import annotations

from typing import Literal

from tencache_ds.errors import ConfigError
from tencache_ds.io.aio import AioBackend
from tencache_ds.io.backend import (
    ALIGNMENT_NBYTES,
    IoCounters,
    IoTotals,
    Operation,
    Priority,
    StorageBackend,
    StorageTimeoutError,
    Ticket,
)
from tencache_ds.io.extents import Extent
from tencache_ds.io.posix import PosixBackend
from tencache_ds.io.scratch import ScratchFolder, free_nbytes
from tencache_ds.io.store import ExtentStore

__all__ = [
    "ALIGNMENT_NBYTES",
    "AioBackend",
    "Extent",
    "ExtentStore",
    "IoCounters",
    "IoTotals",
    "Operation",
    "PosixBackend",
    "Priority",
    "ScratchFolder",
    "StorageBackend",
    "StorageTimeoutError",
    "Ticket",
    "free_nbytes",
    "open_backend",
]


def open_backend(
    kind: Literal["auto", "aio", "posix"],
    *,
    n_lanes: int = 8,
    request_nbytes: int = 8 << 20,
    block_nbytes: int = 1 << 20,
    queue_depth: int = 32,
    single_submit: bool = False,
    overlap_events: bool = True,
    buffers_are_pinned: bool,
) -> tuple[StorageBackend, str]:
    """Opens the backend asked for, or the best one that works here.

    Args:
        kind: ``"aio"``, ``"posix"``, or ``"auto"``: aio where its op loads and the buffers are pinned (it would copy
            others through a bounce buffer), else posix.
        n_lanes: threads.
        request_nbytes: longest piece in bytes.
        block_nbytes: aio only, size of one kernel request in bytes.
        queue_depth: aio only, kernel requests in flight per lane.
        single_submit: aio only, see DeepSpeed's ``aio.single_submit``.
        overlap_events: aio only, see DeepSpeed's ``aio.overlap_events``.
        buffers_are_pinned: the buffers will be page-locked by torch or by DeepSpeed's pin manager.

    Returns:
        The backend, and in words why it was chosen.

    Raises:
        ConfigError: an unknown kind, or ``"aio"`` was asked for and cannot work here.
    """
    if kind not in ("auto", "aio", "posix"):
        raise ConfigError(f'io_backend must be "auto", "aio" or "posix", not {kind!r}')
    if kind == "posix":
        return PosixBackend(n_lanes, request_nbytes), "asked for"
    if kind == "auto" and not buffers_are_pinned:
        return PosixBackend(n_lanes, request_nbytes), "the buffers are not pinned, which aio would have to copy"
    try:
        backend = AioBackend(n_lanes, request_nbytes, block_nbytes, queue_depth, single_submit, overlap_events)
    except ConfigError as error:
        if kind == "aio":
            raise
        return PosixBackend(n_lanes, request_nbytes), f"aio does not work here: {error}"
    return backend, "asked for" if kind == "aio" else "DeepSpeed's async_io op loads and the buffers are pinned"
