# SPDX-License-Identifier: Apache-2.0
"""Memory of this process and this host, and bytes moved to and from storage, in bytes, as the kernel counts them."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import torch

_SELF = psutil.Process()


def process_io() -> tuple[int, int]:
    """Bytes this process has read from and written to storage (0 on tmpfs)."""
    counters = _SELF.io_counters()
    return counters.read_bytes, counters.write_bytes


def process_nbytes(key: str) -> int:
    """A size of ``/proc/self/status`` ("VmHWM", "VmLck"); 0 where the kernel does not say."""
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return int(found[1]) * 1024 if found else 0


def rss_nbytes() -> int:
    """Resident memory of this process now. Cheap enough for a sampler."""
    return int(_SELF.memory_info().rss)


def reset_peak_rss() -> bool:
    """Makes VmHWM start again from the present; False where the kernel or a sandbox does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def children_nbytes() -> int:
    """Private memory of this process's descendants (ZenFlow and SuperOffload update in one)."""
    total = 0
    for child in _SELF.children(recursive=True):
        try:
            memory = child.memory_info()
        except psutil.Error:
            continue  # it has ended
        total += memory.rss - memory.shared
    return total


def host_used_nbytes() -> int:
    """Memory in use on the whole host without page cache: also counts pages that a driver pinned for this process."""
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


def pinned_by_torch_nbytes() -> int:
    """Held by torch's pinned host allocator, blocks kept for reuse included."""
    if not torch.cuda.is_available():
        return 0
    stats = torch.cuda.host_memory_stats()
    # The first name is that of older versions of torch, where the second one counted what was asked for.
    return int(stats.get("reserved_bytes.current", stats.get("allocated_bytes.current", 0)))
