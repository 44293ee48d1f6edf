# SPDX-License-Identifier: Apache-2.0
"""Processor and memory of this host, as the control groups (cgroups v1 and v2) of this process limit them.

A control group limits its processes and all groups below it, so the limits of each ancestor that can be seen from here
count as well. The headroom of a process is the smallest one of the machine, its own group and each of these ancestors;
other users of these can change it at any time.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted hierarchy of control groups.

    Attributes:
        point: where it is mounted.
        root: the group that is seen there, as this process's cgroup namespace names it.
        version: 1 or 2.
    """

    point: Path
    root: str
    version: int


def machine_identity(root: Path = Path("/")) -> str:
    """Identifier of this machine: the boot id, which containers on one machine share, or else the host name.

    Args:
        root: where ``/proc`` is looked for.
    """
    return text_of(root / "proc/sys/kernel/random/boot_id") or socket.gethostname()


def own_groups(root: Path, controller: str) -> Iterator[tuple[Mount, str]]:
    """Each mounted hierarchy with a controller ("memory", "cpu"), with the path of this process's group in it.

    Args:
        root: where ``/proc`` and the mounted hierarchies are looked for.
        controller: as version 1 names it; version 2 has all in one.
    """
    paths: dict[int, str] = {}
    for line in text_of(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[2] = path
        elif controller in controllers.split(","):
            paths[1] = path
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), (*after.split(), "", "", "")[:3]
        version = {"cgroup2": 2, "cgroup": 1}.get(kind)
        if version not in paths or len(fields) < 5 or (version == 1 and controller not in options.split(",")):
            continue
        point = root / _unescaped(fields[4]).lstrip("/")
        yield Mount(point, _unescaped(fields[3]), version), paths[version]


def upwards(mount: Mount, group: str) -> Iterator[Path]:
    """The folders of a group and of its ancestors, up to the root of the mount.

    A group outside the mounted hierarchy cannot be read: ``/../x`` from a cgroup namespace, or the host's path where a
    container sees a part of the hierarchy. The mounted root is then the nearest known ancestor.
    """
    relative = os.path.relpath(_absolute(group), _absolute(mount.root))
    parts = [] if relative.split("/")[0] in (".", "..") else relative.split("/")
    for length in range(len(parts), -1, -1):
        yield mount.point.joinpath(*parts[:length])


def identity_of(folder: Path, machine: str) -> str | None:
    """The same for all processes, in any container that sees the group; None if unavailable.

    Args:
        folder: of the group.
        machine: what :func:`machine_identity` says.
    """
    try:
        status = folder.stat()
    except OSError:
        return None
    return f"{machine}:{status.st_dev}:{status.st_ino}"


def _absolute(path: str) -> str:
    return os.path.normpath("/" + path.lstrip("/"))


def number_in(file: Path) -> int | None:
    """The contents of a file if it is one unsigned number, else None."""
    text = text_of(file)
    return int(text) if text.isdigit() else None


def fields_of(file: Path) -> dict[str, int]:
    """The numbers of a file of lines ``name number …``."""
    lines = (line.split() for line in text_of(file).splitlines())
    return {columns[0]: int(columns[1]) for columns in lines if len(columns) > 1 and columns[1].isdigit()}


def text_of(file: Path) -> str:
    """The content of a file; "" where it cannot be read."""
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="surrogateescape").strip()
    return ""


def _unescaped(path: str) -> str:
    """A path of ``mountinfo``, where blanks and the like are octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), path)


def processor_field(*names: str, cpuinfo: str | None = None) -> str | None:
    """The first of some fields that has a value; None where none has, or there is no such file.

    Args:
        names: as in ``/proc/cpuinfo``; they differ between architectures.
        cpuinfo: its text; this machine's when omitted.
    """
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(errors="replace")
        except OSError:
            return None
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names and value.strip():
            return value.strip()
    return None


def processor_name(cpuinfo: str | None = None) -> str:
    """Model of the processor, of the text of ``/proc/cpuinfo`` (this machine's when omitted); else its architecture."""
    return processor_field("model name", "Model", "cpu model", cpuinfo=cpuinfo) or platform.machine()


@dataclass(frozen=True, slots=True)
class CoreQuota:
    """Time on cores that the processes of a control group share.

    Attributes:
        identity: the same for all processes of the group, in any container that sees it.
        cores: cores' worth of time, such as 3.5.
    """

    identity: str
    cores: float


def core_quotas(root: Path = Path("/")) -> tuple[CoreQuota, ...]:
    """The quotas of this process's control groups, innermost first; empty without any.

    Args:
        root: where ``/proc`` and the mounted hierarchies are looked for.
    """
    machine = machine_identity(root)
    by_group: dict[str, CoreQuota] = {}
    for mount, group in own_groups(root, "cpu"):
        for folder in upwards(mount, group):
            cores = _cores_v2(folder) if mount.version == 2 else _cores_v1(folder)
            identity = identity_of(folder, machine)
            if cores is not None and identity is not None:
                by_group.setdefault(identity, CoreQuota(identity, cores))
    return tuple(by_group.values())


def _cores_v2(folder: Path) -> float | None:
    quota, _, period = text_of(folder / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _cores_v1(folder: Path) -> float | None:
    quota, period = number_in(folder / "cpu.cfs_quota_us"), number_in(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and period else None  # "-1" is no quota


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
