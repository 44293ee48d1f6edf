# SPDX-License-Identifier: Apache-2.0
"""Questions to the training processes of this user on this host. Imports neither torch nor DeepSpeed.

Processes put their sockets into folders. A folder is opened once, must belong to this user and be closed to others, and
sockets are addressed through its descriptor: neither a planted link nor the limit of 108 bytes for a socket's path
matters then.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tencache_ds.errors import TenCacheError

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


CONNECT_TIMEOUT_S = 2.0
SNAPSHOT_TIMEOUT_S = 5.0
"""A process that trains answers within milliseconds, unless one call of its holds the interpreter."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The socket of a process.

    Attributes:
        folder, name: where it is.
    """

    folder: Path
    name: str

    @property
    def pid(self) -> int:
        """As the process itself sees it."""
        return int(self.name.partition("-")[0])

    def ask(self, request: dict[str, Any], timeout_s: float) -> Answer:
        """Asks the process.

        Args:
            request: the question.
            timeout_s: longest wait for the next line of the answer.

        Raises:
            TenCacheError: the process cannot be queried.
        """
        connection = None
        try:
            with opened(self.folder) as descriptor:
                connection = connect(descriptor, self.name, CONNECT_TIMEOUT_S)
            if connection is not None:
                connection.sendall(json.dumps(request).encode() + b"\n")
                connection.settimeout(timeout_s)
        except OSError as error:
            if connection is not None:
                connection.close()
            if isinstance(error, ConnectionError):  # it has ended since it was connected to
                return Answer(self.pid, None, timeout_s)
            raise TenCacheError(f"process {self.pid} cannot be queried: {error}") from error
        return Answer(self.pid, connection, timeout_s)


class Answer:
    """The lines of an answer, one after another; none if the process has ended. Used by one thread, except
    :meth:`close`.

    Args:
        pid: of the process.
        connection: to it; None if it has ended.
        timeout_s: longest wait for a line.
    """

    def __init__(self, pid: int, connection: socket.socket | None, timeout_s: float) -> None:
        self._pid = pid
        self._connection = connection
        self._stream = None if connection is None else connection.makefile("rb")
        self._timeout_s = timeout_s

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (line := self.next()) is not None:
            yield line

    def next(self) -> dict[str, Any] | None:
        """The next line; None after the last one.

        Raises:
            TenCacheError: the process refuses, or does not answer in time.
        """
        if self._stream is None:
            return None
        try:
            text = self._stream.readline()
            line: dict[str, Any] | None = json.loads(text) if text else None
        except ConnectionResetError:  # it ended before it had read the question
            return None
        except TimeoutError as error:
            raise TenCacheError(f"process {self._pid} did not answer within {self._timeout_s:.0f} s") from error
        except (OSError, ValueError) as error:
            raise TenCacheError(f"the answer of process {self._pid} was incomplete: {error}") from error
        if line is not None and "error" in line:
            raise TenCacheError(f"process {self._pid}: {line['error']}")
        return line

    def close(self) -> None:
        """Ends the conversation, and a wait for a line on another thread. Idempotent."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()


def endpoints() -> list[Endpoint]:
    """The sockets of this user's processes."""
    sockets = []
    for folder in folders():
        with contextlib.suppress(OSError), opened(folder) as descriptor:
            names = [name for name in os.listdir(descriptor) if SOCKET_NAME.fullmatch(name)]
            sockets += [Endpoint(folder, name) for name in names]
    return sorted(sockets, key=lambda endpoint: endpoint.pid)


@dataclass(frozen=True, slots=True)
class Process:
    """A training process that answered.

    Attributes:
        endpoint: its socket.
        snapshot: its figures; see :func:`tencache_ds.integration.reporting.snapshot`.
    """

    endpoint: Endpoint
    snapshot: dict[str, Any]

    @property
    def pid(self) -> int:
        """As this process sees it if they share a namespace."""
        return int(self.snapshot["pid"])

    @property
    def rank(self) -> int:
        """Global rank."""
        return int(self.snapshot["rank"])


@dataclass(frozen=True, slots=True)
class Job:
    """The ranks of one job that are on this host.

    Attributes:
        run_id: the same for all ranks.
        processes: those that answered, by rank.
        silent: errors of those that did not.
    """

    run_id: str
    processes: tuple[Process, ...]
    silent: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """All ranks of the job, those on other hosts too."""
        return int(self.processes[0].snapshot["world_size"])


def snapshot_of(endpoint: Endpoint) -> Process | None:
    """A process as it is now; None if it has ended.

    Raises:
        TenCacheError: it does not answer.
    """
    with contextlib.closing(endpoint.ask({"command": "snapshot"}, SNAPSHOT_TIMEOUT_S)) as answer:
        snapshot = answer.next()
    return None if snapshot is None else Process(endpoint, snapshot)


def _snapshot(endpoint: Endpoint) -> Process | str | None:
    try:
        return snapshot_of(endpoint)
    except TenCacheError as error:
        return str(error)


def jobs(among: Sequence[Endpoint] | None = None) -> tuple[list[Job], list[str]]:
    """All jobs of this user on this host, and the errors of processes that did not answer.

    Args:
        among: ask these only.
    """
    asked = endpoints() if among is None else among
    if not asked:
        return [], []
    with ThreadPoolExecutor(min(len(asked), 32)) as executor:
        answers = list(executor.map(_snapshot, asked))
    by_run: dict[str, list[Process]] = {}
    for answer in answers:
        if isinstance(answer, Process) and answer.snapshot["engines"]:
            by_run.setdefault(answer.snapshot["run_id"], []).append(answer)
    running = [Job(run_id, tuple(sorted(each, key=lambda p: p.rank))) for run_id, each in by_run.items()]
    return running, [answer for answer in answers if isinstance(answer, str)]


def select(jobs_found: Sequence[Job], wanted: str | None) -> Job | None:
    """The job that a user means by a process identifier, an identifier of the run, or nothing; None if that is not
    exactly one."""
    if wanted is None:
        return jobs_found[0] if len(jobs_found) == 1 else None
    for job in jobs_found:
        if job.run_id == wanted or any(str(process.pid) == wanted for process in job.processes):
            return job
    return None
