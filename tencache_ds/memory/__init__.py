# SPDX-License-Identifier: Apache-2.0
"""Staging memory of one rank, on the host or a GPU: arenas under a limit, and the pool of leased slots cut from one."""

from tencache_ds.memory.arena import DeviceArena, HostArena
from tencache_ds.memory.lease import Lease, LeaseError, LeaseState
from tencache_ds.memory.pages import Locking, PageLocker, locked_memory_headroom_nbytes
from tencache_ds.memory.pool import BufferPool, ClassStats, Holder, PoolBusyError, PoolStats, PoolTimeout

__all__ = [
    "BufferPool",
    "ClassStats",
    "DeviceArena",
    "Holder",
    "HostArena",
    "Lease",
    "LeaseError",
    "LeaseState",
    "Locking",
    "PageLocker",
    "PoolBusyError",
    "PoolStats",
    "PoolTimeout",
    "locked_memory_headroom_nbytes",
]
