# SPDX-License-Identifier: Apache-2.0
"""The user's ``gpu_memory`` in bytes."""

from __future__ import annotations

from tencache_ds.config import Share
from tencache_ds.items import GpuUsage


def limit_nbytes(usage: GpuUsage, wanted: int | Share | None) -> int | None:
    """The bytes of GPU memory that may hold what TenCache moves there; None for automatic.

    Args:
        usage: at present; a share is one of what this process has or may have.
        wanted: the user's ``gpu_memory``.
    """
    if isinstance(wanted, Share):
        return int(wanted.fraction * (usage.available_nbytes + usage.allocated_nbytes))
    return wanted
