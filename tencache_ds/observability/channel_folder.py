# SPDX-License-Identifier: Apache-2.0
"""The folders in which training processes of a user put their sockets. Imports neither torch nor DeepSpeed.

A folder is opened once, must belong to this user and be closed to others, and sockets are addressed through its
descriptor: neither a planted link nor the limit of 108 bytes for a socket's path matters then.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SOCKET_NAME = re.compile(r"(\d+)-[0-9a-f]{8}\.sock")
"""The process's identifier, then something that tells containers with processes of the same identifier apart."""


def folders() -> list[Path]:
    """Where sockets may be, the preferred place first.

    /tmp comes first: ``XDG_RUNTIME_DIR`` is removed when the user logs out, while training continues.
    """
    candidates = [Path(f"/tmp/tencache-{os.geteuid()}")]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        candidates.append(Path(runtime, "tencache"))
    default = Path(f"/run/user/{os.geteuid()}/tencache")
    return candidates if default in candidates else [*candidates, default]


@contextmanager
def opened(folder: Path, *, create: bool = False) -> Iterator[int]:
    """A descriptor of the folder while the block runs.

    Raises:
        OSError: it does not exist and cannot be created.
        PermissionError: it belongs to another user, or is accessible to others.
    """
    if create:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(f"{folder} is not a folder of this user alone: remove it or set its mode to 0700")
        yield descriptor
    finally:
        os.close(descriptor)


def address(descriptor: int, name: str) -> str:
    """The address of a socket in an open folder: short, however long the folder's path is."""
    return f"/proc/self/fd/{descriptor}/{name}"


def connect(descriptor: int, name: str, timeout_s: float) -> socket.socket | None:
    """A connection to the process behind a socket; None if there is none any more, in which case the socket is removed.

    Raises:
        OSError: the process does not accept connections for now.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(address(descriptor, name))
    except (ConnectionRefusedError, FileNotFoundError):  # no listener: its process has ended
        connection.close()
        remove(descriptor, name)
        return None
    except BaseException:
        connection.close()
        raise
    return connection


def remove(descriptor: int, name: str) -> None:
    """Removes a socket, if it is there."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=descriptor)


def remove_stale(descriptor: int) -> None:
    """Removes the sockets of processes that have ended without doing so."""
    for name in os.listdir(descriptor):
        match = SOCKET_NAME.fullmatch(name)
        if match is not None and not os.path.exists(f"/proc/{match[1]}"):
            try:
                connection = connect(descriptor, name, 0.2)
            except OSError:  # of a process in another container, which is busy
                continue
            if connection is not None:
                connection.close()
