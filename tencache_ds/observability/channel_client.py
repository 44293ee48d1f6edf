# SPDX-License-Identifier: Apache-2.0
"""Questions to the training processes of this user on this host. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tencache_ds.errors import TenCacheError
from tencache_ds.observability.channel_folder import SOCKET_NAME, connect, folders, opened

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
        snapshot: its figures; see :func:`tencache_ds.integration.observing.snapshot`.
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
