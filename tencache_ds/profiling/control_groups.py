# SPDX-License-Identifier: Apache-2.0
"""The control groups (cgroups v1 and v2) of this process and the files in them.

A control group limits its processes and all groups below it, so the limits of each ancestor that can be seen from here
count as well.
"""

from __future__ import annotations

import contextlib
import os
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
