# SPDX-License-Identifier: Apache-2.0
"""Storage: backends that move bytes, the scratch files they live in, the extent store that knows what is where."""

from __future__ import annotations

from typing import Literal

from tencache_ds.errors import ConfigError
from tencache_ds.io.backends.aio import AioBackend
from tencache_ds.io.backends.counters import IoCounters, IoTotals
from tencache_ds.io.backends.gds import GdsBackend
from tencache_ds.io.backends.native import NativeBackend
from tencache_ds.io.backends.posix import PosixBackend
from tencache_ds.io.backends.protocol import StorageBackend
from tencache_ds.io.backends.ticket import Operation, Priority, StorageCancelledError, StorageTimeoutError, Ticket
from tencache_ds.io.extents import Extent
from tencache_ds.io.paths import NvmePath, NvmePaths
from tencache_ds.io.scratch import ScratchFolder, free_nbytes
from tencache_ds.io.store import ExtentStore
from tencache_ds.io.wrappers.routed import RoutedBackend

__all__ = [
    "AioBackend",
    "Extent",
    "ExtentStore",
    "GdsBackend",
    "IoCounters",
    "IoTotals",
    "NativeBackend",
    "NvmePath",
    "NvmePaths",
    "Operation",
    "PosixBackend",
    "Priority",
    "RoutedBackend",
    "ScratchFolder",
    "StorageBackend",
    "StorageCancelledError",
    "StorageTimeoutError",
    "Ticket",
    "free_nbytes",
    "open_backend",
]


def open_backend(
    kind: Literal["auto", "native", "aio", "posix"],
    *,
    n_lanes: int = 8,
    request_nbytes: int = 8 << 20,
    block_nbytes: int = 1 << 20,
    queue_depth: int = 32,
    single_submit: bool = False,
    overlap_events: bool = True,
    buffers_are_pinned: bool,
    close_timeout_s: float = 600.0,
) -> tuple[StorageBackend, str]:
    """Opens the backend asked for, or the best one that works here.

    Args:
        kind: ``"native"``, ``"aio"``, ``"posix"``, or ``"auto"``: native where its op loads, else aio where its op
            loads and the buffers are pinned (it would copy others through a bounce buffer), else posix.
        n_lanes: threads.
        request_nbytes: longest piece in bytes.
        block_nbytes: native and aio, size of one kernel request in bytes.
        queue_depth: native and aio, kernel requests in flight per lane.
        single_submit: aio only, see DeepSpeed's ``aio.single_submit``.
        overlap_events: aio only, see DeepSpeed's ``aio.overlap_events``.
        buffers_are_pinned: the buffers will be page-locked by torch or by DeepSpeed's pin manager.
        close_timeout_s: longest time in seconds that closing waits for a device that hangs.

    Returns:
        The backend, and in words why it was chosen.

    Raises:
        ConfigError: an unknown kind, or ``"native"`` or ``"aio"`` was asked for and cannot work here.
    """

    def native() -> StorageBackend:
        return NativeBackend(n_lanes, min(block_nbytes, request_nbytes), queue_depth, close_timeout_s=close_timeout_s)

    def aio() -> StorageBackend:
        return AioBackend(n_lanes, request_nbytes, block_nbytes, queue_depth, single_submit, overlap_events,
                          close_timeout_s=close_timeout_s)  # fmt: skip

    def posix() -> StorageBackend:
        return PosixBackend(n_lanes, request_nbytes, close_timeout_s=close_timeout_s)

    makers = {"native": native, "aio": aio, "posix": posix}
    if kind in makers:
        return makers[kind](), "asked for"
    if kind != "auto":
        raise ConfigError(f'io_backend must be "auto", "native", "aio" or "posix", not {kind!r}')
    try:
        return native(), "the native op loads"
    except ConfigError as error:
        reason = f"native does not work here: {error}"
    if not buffers_are_pinned:
        return posix(), f"{reason}; the buffers are not pinned, which aio would have to copy"
    try:
        return aio(), f"{reason}; DeepSpeed's async_io op loads and the buffers are pinned"
    except ConfigError as error:
        return posix(), f"{reason}; aio does not work here: {error}"
