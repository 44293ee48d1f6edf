# SPDX-License-Identifier: Apache-2.0
"""The kernel's figures for this process and this host: memory, and bytes moved to and from storage.

The ``parse_*`` functions take the text of the file they are named after; the others read it now. Bytes throughout.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
import torch

PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


def parse_io(text: str) -> tuple[int, int]:
    """Bytes fetched from and sent to storage (``read_bytes``, ``write_bytes`` of ``/proc/<pid>/io``).

    Raises:
        ValueError: the lines are missing.
    """
    found = dict(re.findall(r"^(\w+): (\d+)$", text, re.M))
    if "read_bytes" not in found or "write_bytes" not in found:
        raise ValueError("/proc/self/io has no read_bytes or write_bytes: this kernel was built without I/O accounting")
    return int(found["read_bytes"]), int(found["write_bytes"])


def parse_sizes(text: str) -> dict[str, int]:
    """The sizes of ``/proc/<pid>/status`` or ``/proc/meminfo`` in bytes, by name."""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^([\w()]+):\s+(\d+) kB$", text, re.M)}


def parse_statm(text: str, page_nbytes: int = PAGE_NBYTES) -> int:
    """Resident bytes of ``/proc/<pid>/statm``: its second number, in pages."""
    return int(text.split()[1]) * page_nbytes


def process_io() -> tuple[int, int]:
    """Bytes this process has read from and written to storage, as the kernel counts them (0 on tmpfs)."""
    return parse_io(Path("/proc/self/io").read_text())


def process_nbytes(key: str) -> int:
    """A size of ``/proc/self/status`` ("VmHWM", "VmLck"); 0 where the kernel does not say."""
    return parse_sizes(Path("/proc/self/status").read_text()).get(key, 0)


def rss_nbytes() -> int:
    """Resident memory of this process now. Cheap enough for a sampler."""
    return parse_statm(Path("/proc/self/statm").read_text())


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
    try:
        children = psutil.Process().children(recursive=True)
    except psutil.Error:
        return 0
    for child in children:
        try:
            total += parse_sizes(Path(f"/proc/{child.pid}/status").read_text()).get("RssAnon", 0)
        except OSError:
            continue  # it has ended
    return total


def host_used_nbytes() -> int:
    """Memory in use on the whole host without page cache: also counts pages that a driver pinned for this process."""
    sizes = parse_sizes(Path("/proc/meminfo").read_text())
    return sizes["MemTotal"] - sizes["MemAvailable"]


def pinned_by_torch_nbytes() -> int:
    """Held by torch's pinned host allocator, blocks kept for reuse included."""
    if not torch.cuda.is_available():
        return 0
    stats = torch.cuda.host_memory_stats()
    return int(stats.get("allocated_bytes.current", stats.get("reserved_bytes.current", 0)))
