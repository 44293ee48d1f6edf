# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may use."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def container_limit_nbytes(files: tuple[Path, ...] = CGROUP_LIMITS) -> int | None:
    """Memory limit of the container this process runs in, in bytes; ``None`` if there is none."""
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        # cgroup v1 says "no limit" with a number close to 2**63.
        return int(text) if text.isdigit() and int(text) < 1 << 60 else None
    return None


def memory_nbytes() -> int:
    """RAM of this machine, or of the container this process runs in where that may use less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = container_limit_nbytes()
    return total if limit is None else min(total, limit)
