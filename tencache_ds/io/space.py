# SPDX-License-Identifier: Apache-2.0
"""A scratch file that only ever hands out space the device has really reserved."""

from __future__ import annotations

import contextlib
import errno
import os
import threading

from tencache_ds.errors import SpaceError, StorageError
from tencache_ds.io.extents import FreeList, round_up

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SpaceFile:
    """Makes a file and hands out ranges of it. Every method may be called from any thread.

    Args:
        path: must not exist.
        preallocate_nbytes: length reserved at once.
        growth_nbytes: least growth when no free range is long enough; less if the device has no more.

    Raises:
        SpaceError: the device cannot hold ``preallocate_nbytes``.
        StorageError: the file exists or cannot be made.
    """

    def __init__(self, path: str, *, preallocate_nbytes: int, growth_nbytes: int) -> None:
        self._path = path
        self._growth_nbytes = round_up(max(1, growth_nbytes))
        self._lock = threading.Lock()
        self._free = FreeList()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError("create", path, 0, 0, error.strerror or str(error), errno=error.errno) from error
        if preallocate_nbytes > 0:
            try:
                self._reserve(round_up(preallocate_nbytes), "preallocation")
            except StorageError:
                self.remove()
                raise

    @property
    def nbytes_file(self) -> int:
        """Length of the file in bytes."""
        with self._lock:
            return self._free.end

    @property
    def nbytes_taken(self) -> int:
        """Bytes handed out and not returned."""
        with self._lock:
            return self._free.end - self._free.free_nbytes

    def take(self, nbytes: int, tag: str) -> int:
        """Offset of a reserved range of ``nbytes`` (a multiple of 4096) bytes, first fit, growing the file if need be.

        Raises:
            SpaceError: the device is full; says how much is missing.
            StorageError: the file cannot grow for another reason.
        """
        with self._lock:
            offset = self._free.take(nbytes)
            if offset is None:
                self._grow(nbytes - self._free.tail_nbytes, tag)
                offset = self._free.take(nbytes)
            if offset is None:
                raise RuntimeError(f"{self._path} has grown, yet has no free range of {nbytes} bytes")
            return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Returns a range."""
        with self._lock:
            self._free.give(offset, nbytes)

    def remove(self) -> None:
        """Closes and removes the file. Called once."""
        os.close(self._fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def _grow(self, needed_nbytes: int, tag: str) -> None:
        if self._growth_nbytes > needed_nbytes:
            with contextlib.suppress(SpaceError):
                self._reserve(self._growth_nbytes, tag)
                return
        self._reserve(needed_nbytes, tag)

    def _reserve(self, nbytes: int, tag: str) -> None:
        start = self._free.end
        try:
            os.posix_fallocate(self._fd, start, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, start)  # a failed reservation may have taken a part
            cause = error.strerror or str(error)
            if error.errno not in _FULL:
                raise StorageError("allocate", self._path, start, nbytes, cause, errno=error.errno, tag=tag) from error
            status = os.fstatvfs(self._fd)
            free_nbytes = status.f_bavail * status.f_frsize
            raise SpaceError(
                "allocate",
                self._path,
                start,
                nbytes,
                f"{cause}: {max(0, nbytes - free_nbytes)} bytes are missing ({free_nbytes} free); free some space, "
                "choose a larger nvme_path, or let more state stay in RAM",
                errno=error.errno,
                tag=tag,
            ) from error
        self._free.extend(nbytes)
