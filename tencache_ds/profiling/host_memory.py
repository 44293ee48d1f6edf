# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may use: of the machine, and of every control group (cgroups v1 and v2) it is in.

A control group limits its processes and all groups below it. So the headroom of a process is the smallest one of the
machine, its own group and each ancestor that can be seen from here; who else uses them can change it at any time.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT_NBYTES = 1 << 60
"""cgroup v1 says "no limit" with a number close to 2**63."""


@dataclass(frozen=True, slots=True)
class MemoryDomain:
    """Memory that is limited as one: the machine's, or a control group's.

    Attributes:
        identity: the same for all processes that share this memory, in whatever container they look at it.
        name: what messages call it.
        limit_nbytes: most bytes that all its processes together may use.
        available_nbytes: bytes they can still get without swapping: what is free, and what the kernel gives up at once.
    """

    identity: str
    name: str
    limit_nbytes: int
    available_nbytes: int


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mounted hierarchy with the memory controller.

    Attributes:
        point: where it is mounted.
        root: the group that is seen there, as this process's cgroup namespace names it.
        version: 1 or 2.
    """

    point: Path
    root: str
    version: int


def machine_identity(root: Path = Path("/")) -> str:
    """What tells this machine from others: the boot id, which containers on one machine share, or else the host name.

    Args:
        root: where ``/proc`` is looked for.
    """
    return _text(root / "proc/sys/kernel/random/boot_id") or socket.gethostname()


def memory_domains(root: Path = Path("/")) -> tuple[MemoryDomain, ...]:
    """The machine's memory, then that of each control group this process is in and that has a limit, innermost first.

    Args:
        root: where ``/proc`` and the mounted hierarchies are looked for.
    """
    machine = machine_identity(root)
    sizes = _fields(root / "proc/meminfo")
    total = sizes.get("MemTotal:", 0) * 1024
    available = sizes.get("MemAvailable:", sizes.get("MemFree:", 0)) * 1024
    domains = {machine: MemoryDomain(machine, "this machine", total, available)}
    for mount, group in _own_groups(root):
        for depth, folder in enumerate(_upwards(mount, group)):
            if depth and mount.version == 1 and _text(folder / "memory.use_hierarchy") == "0":
                continue  # as kernels before 5.11 may be told: this ancestor does not count what is below it
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


def _own_groups(root: Path) -> Iterator[tuple[_Mount, str]]:
    """Each mounted hierarchy that limits memory, with the path of this process's group in it."""
    paths: dict[int, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), (*after.split(), "", "", "")[:3]
        version = {"cgroup2": 2, "cgroup": 1}.get(kind)
        if version not in paths or len(fields) < 5 or (version == 1 and "memory" not in options.split(",")):
            continue
        point = root / _unescaped(fields[4]).lstrip("/")
        yield _Mount(point, _unescaped(fields[3]), version), paths[version]


def _upwards(mount: _Mount, group: str) -> Iterator[Path]:
    """The folders of a group and of its ancestors, up to the root of the mount.

    A group outside of what is mounted cannot be looked at: ``/../x`` from a cgroup namespace, or the host's path where
    a container sees a part of the hierarchy. The mounted root is then the nearest that is known.
    """
    relative = os.path.relpath(_absolute(group), _absolute(mount.root))
    parts = [] if relative.split("/")[0] in (".", "..") else relative.split("/")
    for length in range(len(parts), -1, -1):
        yield mount.point.joinpath(*parts[:length])


def _domain_of(folder: Path, version: int, machine: str) -> MemoryDomain | None:
    """The memory of one group, or None where it has no limit (or the folder is not there)."""
    statistics = _fields(folder / "memory.stat")
    if version == 2:
        limits = [_nbytes(folder / "memory.max"), _nbytes(folder / "memory.high")]
        used, idle = _nbytes(folder / "memory.current"), statistics.get("inactive_file", 0)
    else:
        # The hierarchical figure includes ancestors outside of what is mounted.
        limits = [_nbytes(folder / "memory.limit_in_bytes"), statistics.get("hierarchical_memory_limit")]
        used = _nbytes(folder / "memory.usage_in_bytes")
        idle = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
    limit = min((nbytes for nbytes in limits if nbytes is not None and nbytes < _NO_LIMIT_NBYTES), default=None)
    if limit is None:
        return None
    try:
        status = folder.stat()
    except OSError:
        return None
    # Cached file pages that nobody used lately count as used, but go as soon as somebody needs the room.
    available = max(0, limit - max(0, (used or 0) - idle))
    return MemoryDomain(f"{machine}:{status.st_dev}:{status.st_ino}", f"control group {folder}", limit, available)


def _absolute(path: str) -> str:
    return os.path.normpath("/" + path.lstrip("/"))


def _nbytes(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isdigit() else None


def _fields(file: Path) -> dict[str, int]:
    """The numbers of a file of lines ``name number …``."""
    lines = (line.split() for line in _text(file).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _text(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="surrogateescape").strip()
    return ""


def _unescaped(path: str) -> str:
    """A path of ``mountinfo``, where blanks and the like are octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), path)
