# SPDX-License-Identifier: Apache-2.0
"""Files that stay open from one transfer to the next, one per path and direction.

Scratch files have no names: the path identifies a file in messages, the descriptor locates it.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tencache_ds.io.backends.ticket import Operation
from tencache_ds.io.scratch import openable


@dataclass(slots=True)
class OpenFile(abc.ABC):
    """An open file and how many transfers use it right now; a retired one is closed by the last of them."""

    n_users: int = field(default=0, init=False)
    retired: bool = field(default=False, init=False)

    @abc.abstractmethod
    def close(self) -> None:
        """Closes it. Called once."""


File = TypeVar("File", bound=OpenFile)


class OpenFiles(abc.ABC, Generic[File]):
    """Opens files when they are first used. Thread-safe. A subclass says how."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[tuple[str, Operation], File] = {}
        self._locations: dict[str, str] = {}

    @abc.abstractmethod
    def _open(self, operation: Operation, path: str, location: str) -> File:
        """Opens an existing file for one direction: named ``path``, opened through ``location``. Called with the lock
        held; never creates a file: one that has vanished must not reappear empty.
        """

    def add(self, path: str, fd: int) -> None:
        """From now on, and until :meth:`forget`, ``path`` means the file of ``fd``, which stays open. Others are opened
        by their names.
        """
        with self._lock:
            self._locations[path] = openable(fd)

    def acquire(self, operation: Operation, path: str) -> File:
        """The file, opened if it is not open yet; :meth:`release` has to follow.

        Raises:
            OSError: the file cannot be opened.
        """
        with self._lock:
            file = self._files.get((path, operation))
            if file is None:
                file = self._files[path, operation] = self._open(operation, path, self._locations.get(path, path))
            file.n_users += 1
            return file

    def release(self, file: File) -> None:
        """Ends a use of a file."""
        with self._lock:
            file.n_users -= 1
            self._close_unused(file)

    @contextlib.contextmanager
    def using(self, operation: Operation, path: str) -> Iterator[File]:
        """The file, for one transfer; see :meth:`acquire`."""
        file = self.acquire(operation, path)
        try:
            yield file
        finally:
            self.release(file)

    def forget(self, path: str) -> None:
        """Closes the descriptors of a path as soon as no transfer uses them."""
        with self._lock:
            self._locations.pop(path, None)
            for operation in Operation:
                self._retire(path, operation)

    def close(self) -> None:
        """Closes every file, as soon as no transfer uses it. Idempotent."""
        with self._lock:
            for path, operation in list(self._files):
                self._retire(path, operation)

    def _retire(self, path: str, operation: Operation) -> None:
        """With the lock held: the next use opens the file anew."""
        file = self._files.pop((path, operation), None)
        if file is not None:
            file.retired = True
            self._close_unused(file)

    @staticmethod
    def _close_unused(file: OpenFile) -> None:
        if file.retired and file.n_users == 0:
            file.close()
