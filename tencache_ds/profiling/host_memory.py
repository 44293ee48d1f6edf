# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may use: of the machine, and of every control group (cgroups v1 and v2) it is in.

The headroom of a process is the smallest one of the machine, its own group and each ancestor that can be seen from
here; other users of these can change it at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tencache_ds.profiling.control_groups import (
    fields_of,
    identity_of,
    machine_identity,
    number_in,
    own_groups,
    text_of,
    upwards,
)

_NO_LIMIT_NBYTES = 1 << 60
"""cgroup v1 says "no limit" with a number close to 2**63."""


@dataclass(frozen=True, slots=True)
class MemoryDomain:
    """Memory that is limited as one: the machine's, or a control group's.

    Attributes:
        identity: the same for all processes that share this memory, in any container that sees it.
        name: name in messages.
        limit_nbytes: most bytes that all its processes together may use.
        available_nbytes: bytes they can still get without swapping: free memory, and memory that the kernel reclaims at
            once.
    """

    identity: str
    name: str
    limit_nbytes: int
    available_nbytes: int


def memory_domains(root: Path = Path("/")) -> tuple[MemoryDomain, ...]:
    """The machine's memory, then that of each control group this process is in and that has a limit, innermost first.

    Args:
        root: where ``/proc`` and the mounted hierarchies are looked for.
    """
    machine = machine_identity(root)
    sizes = fields_of(root / "proc/meminfo")
    total = sizes.get("MemTotal:", 0) * 1024
    available = sizes.get("MemAvailable:", sizes.get("MemFree:", 0)) * 1024
    domains = {machine: MemoryDomain(machine, "this machine", total, available)}
    for mount, group in own_groups(root, "memory"):
        for depth, folder in enumerate(upwards(mount, group)):
            if depth and mount.version == 1 and text_of(folder / "memory.use_hierarchy") == "0":
                continue  # as kernels before 5.11 may be told: this ancestor does not count its descendants
            domain = _domain_of(folder, mount.version, machine)
            if domain is not None:
                domains.setdefault(domain.identity, domain)
    return tuple(domains.values())


def memory_nbytes(root: Path = Path("/")) -> int:
    """RAM of this machine, or of the container this process runs in where that may use less."""
    return min(domain.limit_nbytes for domain in memory_domains(root))


def available_nbytes(root: Path = Path("/")) -> int:
    """Bytes this process can still get: the smallest headroom of the machine and of its control groups."""
    return min(domain.available_nbytes for domain in memory_domains(root))


def _domain_of(folder: Path, version: int, machine: str) -> MemoryDomain | None:
    """The memory of one group, or None where it has no limit (or the folder is not there)."""
    statistics = fields_of(folder / "memory.stat")
    if version == 2:
        limits = [number_in(folder / "memory.max"), number_in(folder / "memory.high")]
        used, idle = number_in(folder / "memory.current"), statistics.get("inactive_file", 0)
    else:
        # The hierarchical figure includes ancestors outside the mounted hierarchy.
        limits = [number_in(folder / "memory.limit_in_bytes"), statistics.get("hierarchical_memory_limit")]
        used = number_in(folder / "memory.usage_in_bytes")
        idle = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
    limit = min((nbytes for nbytes in limits if nbytes is not None and nbytes < _NO_LIMIT_NBYTES), default=None)
    if limit is None:
        return None
    identity = identity_of(folder, machine)
    if identity is None:
        return None
    # Cached file pages not used lately count as used, but are reclaimed as soon as memory is needed.
    available = max(0, limit - max(0, (used or 0) - idle))
    return MemoryDomain(identity, f"control group {folder}", limit, available)
