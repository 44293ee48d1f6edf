# SPDX-License-Identifier: Apache-2.0
"""Scratch files that only hand out space the device has actually reserved. They have no names, see ``scratch``."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Sequence

from tencache_ds.errors import SpaceError, StorageError
from tencache_ds.io.extents import FreeList
from tencache_ds.io.scratch import close_unnamed, make_unnamed
from tencache_ds.layout import round_up
from tencache_ds.limits import limit, remedy

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SpaceFile:
    """Makes a file and hands out ranges of it. Every method may be called from any thread.

    Args:
        path: its name; must not exist, and does not exist afterwards either.
        preallocate_nbytes: length reserved at once.
        growth_nbytes: least growth when no free range is long enough; less if the device has no more.

    Raises:
        SpaceError: the device cannot hold ``preallocate_nbytes``.
        StorageError: the file exists or cannot be created.
    """

    def __init__(self, path: str, *, preallocate_nbytes: int, growth_nbytes: int) -> None:
        self._path = path
        self._growth_nbytes = round_up(max(1, growth_nbytes))
        self._lock = threading.Lock()
        self._free = FreeList()
        self._n_taken = 0
        try:
            self._fd = make_unnamed(path)
        except OSError as error:
            cause = f"{error.strerror or error}{remedy(error.errno)}"
            raise StorageError("create", path, 0, 0, cause, errno=error.errno) from error
        if preallocate_nbytes > 0:
            try:
                self._reserve(round_up(preallocate_nbytes), "preallocation")
            except StorageError:
                self.close()
                raise

    @property
    def descriptor(self) -> int:
        """The file, until :meth:`close`."""
        return self._fd

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

    @property
    def n_taken(self) -> int:
        """Ranges handed out and not returned."""
        with self._lock:
            return self._n_taken

    def device_nbytes(self) -> tuple[int, int]:
        """Bytes that are free for a normal user on the file system, and its size.

        Raises:
            OSError: the file system cannot be queried.
        """
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize

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
            self._n_taken += 1
            return offset

    def take_free(self, nbytes: int) -> int | None:
        """Like :meth:`take`, but without growing the file: None when there is no such range."""
        with self._lock:
            offset = self._free.take(nbytes)
            self._n_taken += offset is not None
            return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Returns a range."""
        with self._lock:
            self._free.give(offset, nbytes)
            self._n_taken -= 1

    def reserve(self, nbytes: int, tag: str) -> None:
        """Makes the file longer by ``nbytes`` (rounded up to 4096), to be handed out later.

        Raises:
            SpaceError: the device is full; says how much is missing.
            StorageError: the file cannot grow for another reason.
        """
        with self._lock:
            self._reserve(round_up(nbytes), tag)

    def close(self) -> None:
        """Releases the space as soon as the file is not open elsewhere. Called once."""
        fd, self._fd = self._fd, -1  # its number may soon be another file's
        close_unnamed(fd)

    def _grow(self, needed_nbytes: int, tag: str) -> None:
        if self._growth_nbytes > needed_nbytes:
            with contextlib.suppress(SpaceError):
                self._reserve(self._growth_nbytes, tag)
                return
        self._reserve(needed_nbytes, tag)

    def _reserve(self, nbytes: int, tag: str) -> None:
        start = self._free.end
        try:
            if nbytes > self.device_nbytes()[0]:
                # Not left to the kernel: it would first take all there is, and until it gives that back nobody else
                # could write a byte.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self._fd, start, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, start)  # a failed reservation may have taken a part
            cause = error.strerror or str(error)
            if error.errno not in _FULL:
                raise StorageError("allocate", self._path, start, nbytes, cause, errno=error.errno, tag=tag) from error
            raise SpaceError(
                "allocate",
                self._path,
                start,
                nbytes,
                f"{cause}: {self._what_is_missing(error, start + nbytes)}",
                errno=error.errno,
                tag=tag,
            ) from error
        self._free.extend(nbytes)

    def _what_is_missing(self, error: OSError, end: int) -> str:
        """The limit that a file of ``end`` bytes exceeds, and the remedy."""
        if error.errno == errno.EFBIG:
            most = limit(resource.RLIMIT_FSIZE)
            if most != "unlimited":
                return f"the file needs {end} bytes, and this process may write {most} per file; raise `ulimit -f`"
            return f"the file needs {end} bytes, more than the file system allows in one; choose another nvme_path"
        free_nbytes, _ = self.device_nbytes()
        if error.errno == errno.EDQUOT:
            return (
                f"this user's quota does not allow {end} bytes for the file, although the device has {free_nbytes} "
                "bytes free; raise the quota, or choose another nvme_path"
            )
        return (
            f"{max(0, end - self._free.end - free_nbytes)} bytes are missing ({free_nbytes} free); free some space, "
            "choose a larger nvme_path, or keep more state in RAM"
        )


class SpaceFiles:
    """Several files as one space, each range within one file, evenly spread. Any thread may call every method.

    Why several: writes to one file can wait for each other in the kernel, even on a fast device. tmpfs allows one
    writer per file at a time, ext4 does so until every block has been written once.

    Args:
        paths: names of the files, see :class:`SpaceFile`.
        preallocate_nbytes: length reserved at once, over all files. A range that fits no share grows one of them.
        growth_nbytes: least growth when no free range is long enough, over all files.

    Raises:
        SpaceError: the device cannot hold ``preallocate_nbytes``.
        StorageError: a file exists or cannot be created.
    """

    def __init__(self, paths: Sequence[str], *, preallocate_nbytes: int, growth_nbytes: int) -> None:
        self._lock = threading.Lock()  # so that two takers do not choose the same emptiest file
        self._files: dict[str, SpaceFile] = {}
        try:
            for path in paths:
                self._files[path] = SpaceFile(
                    path,
                    preallocate_nbytes=-(-preallocate_nbytes // len(paths)),
                    growth_nbytes=-(-growth_nbytes // len(paths)),
                )
        except BaseException:
            self.close()
            raise

    def descriptor(self, path: str) -> int:
        """See :attr:`SpaceFile.descriptor`."""
        return self._files[path].descriptor

    @property
    def nbytes(self) -> int:
        """Length of all files in bytes."""
        return sum(file.nbytes_file for file in self._files.values())

    @property
    def nbytes_taken(self) -> int:
        """Bytes handed out and not returned."""
        return sum(file.nbytes_taken for file in self._files.values())

    @property
    def n_taken(self) -> int:
        """Ranges handed out and not returned."""
        return sum(file.n_taken for file in self._files.values())

    def held(self) -> list[tuple[int, int]]:
        """Ranges handed out and not returned on this one device: how many, and their bytes."""
        return [(self.n_taken, self.nbytes_taken)]

    def device_nbytes(self) -> tuple[int, int]:
        """See :meth:`SpaceFile.device_nbytes`."""
        return next(iter(self._files.values())).device_nbytes()

    def take(self, nbytes: int, tag: str) -> tuple[str, int]:
        """File and offset of a reserved range of ``nbytes`` (a multiple of 4096), in the emptiest file that has one.

        Raises:
            SpaceError: the device is full; says how much is missing.
            StorageError: a file cannot grow for another reason.
        """
        with self._lock:
            emptiest_first = self._emptiest_first()
            free = self._take_free(emptiest_first, nbytes)
            return free or (emptiest_first[0], self._files[emptiest_first[0]].take(nbytes, tag))

    def take_free(self, nbytes: int) -> tuple[str, int] | None:
        """Like :meth:`take`, but without growing a file: None when there is no such range."""
        with self._lock:
            return self._take_free(self._emptiest_first(), nbytes)

    def reserve(self, nbytes: int, tag: str) -> None:
        """Makes the files longer by ``nbytes`` together, to be handed out later.

        Raises:
            SpaceError: the device is full; says how much is missing.
            StorageError: a file cannot grow for another reason.
        """
        for file in self._files.values():
            file.reserve(-(-nbytes // len(self._files)), tag)

    def give(self, path: str, offset: int, nbytes: int) -> None:
        """Returns a range."""
        self._files[path].give(offset, nbytes)

    def close(self) -> None:
        """Gives the space back, see :meth:`SpaceFile.close`. Called once."""
        for file in self._files.values():
            file.close()

    def _emptiest_first(self) -> list[str]:
        return sorted(self._files, key=lambda path: self._files[path].nbytes_taken)

    def _take_free(self, paths: Sequence[str], nbytes: int) -> tuple[str, int] | None:
        for path in paths:
            offset = self._files[path].take_free(nbytes)
            if offset is not None:
                return path, offset
        return None
