# SPDX-License-Identifier: Apache-2.0
"""Storage: backends that move bytes, the scratch files that hold them, and the extent store that manages their
places."""

from __future__ import annotations

from tencache_ds.io.backends.aio import AioBackend
from tencache_ds.io.backends.gds import GdsBackend
from tencache_ds.io.backends.native import NativeBackend
from tencache_ds.io.backends.posix import PosixBackend
from tencache_ds.io.backends.protocol import (
    IoCounters,
    IoTotals,
    Operation,
    Priority,
    StorageBackend,
    StorageCancelledError,
    StorageTimeoutError,
    Submission,
    Ticket,
)
from tencache_ds.io.backends.registry import BACKENDS, BackendSettings, open_backend
from tencache_ds.io.extents import Extent
from tencache_ds.io.paths import NvmePath, NvmePaths
from tencache_ds.io.scratch import ScratchFolder, free_nbytes
from tencache_ds.io.store import ExtentStore
from tencache_ds.io.wrappers.routed import RoutedBackend

__all__ = [
    "BACKENDS",
    "AioBackend",
    "BackendSettings",
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
    "Submission",
    "Ticket",
    "free_nbytes",
    "open_backend",
]
