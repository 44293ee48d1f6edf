# SPDX-License-Identifier: Apache-2.0
"""The space of a store over several NVMe paths: files on each of them, a range within one file.

The placement (:class:`tencache_ds.planning.striping.Striping`) chooses the path of a range; this module provides the
candidates, and handles paths without space.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence

from tencache_ds.errors import SpaceError
from tencache_ds.io.scratch import SpaceFiles
from tencache_ds.layout import round_up
from tencache_ds.planning.striping import Striping

KEPT_FREE_PART = 0.05
KEPT_FREE_MOST_NBYTES = 16 << 30
"""Space that a move leaves free on a file system: a share of it, with an upper limit. Only state without another place
may use it; a checkpoint may be written there."""


class StripedSpace:
    """Files on several paths as one space. Any thread may call every method.

    Args:
        files: names of the files on each path, see :class:`tencache_ds.io.scratch.SpaceFile`.
        placement: chooses paths; used by this space alone.
        preallocate_nbytes: length reserved at once, over all paths; one that is too small leaves it to the others.
        growth_nbytes: least growth of a path when no free range is long enough.

    Raises:
        SpaceError: all paths together cannot hold ``preallocate_nbytes``.
        StorageError: a file exists or cannot be created.
    """

    def __init__(
        self,
        files: Sequence[Sequence[str]],
        placement: Striping,
        *,
        preallocate_nbytes: int,
        growth_nbytes: int,
    ) -> None:
        self.n_moved = 0
        """Ranges that were given another path."""
        self._placement = placement
        self._lock = threading.Lock()
        self._paths: list[SpaceFiles] = []
        self._index: dict[str, int] = {}
        self._full: set[int] = set()  # paths that could not grow; asked again after the next step
        try:
            for names in files:
                self._index |= dict.fromkeys(names, len(self._paths))
                self._paths.append(SpaceFiles(names, preallocate_nbytes=0, growth_nbytes=growth_nbytes))
            if preallocate_nbytes > 0:
                self._preallocate(round_up(preallocate_nbytes))
        except BaseException:
            self.close()
            raise

    def descriptor(self, file: str) -> int:
        """See :attr:`tencache_ds.io.scratch.SpaceFile.descriptor`."""
        return self._paths[self._index[file]].descriptor(file)

    @property
    def nbytes(self) -> int:
        """Length of all files in bytes."""
        return sum(path.nbytes for path in self._paths)

    @property
    def nbytes_taken(self) -> int:
        """Bytes handed out and not returned."""
        return sum(path.nbytes_taken for path in self._paths)

    def held(self) -> list[tuple[int, int]]:
        """Ranges handed out on each path: how many, and their bytes."""
        return [(path.n_taken, path.nbytes_taken) for path in self._paths]

    def take(self, nbytes: int, tag: str) -> tuple[str, int]:
        """File and offset of a reserved range of ``nbytes`` (a multiple of 4096), on the best path that has room.

        Raises:
            SpaceError: no path has room.
            StorageError: a file cannot grow for another reason.
        """
        with self._lock:
            for path in self._placement.order(nbytes, self._stored()):
                taken = self._take_on(path, nbytes, tag)
                if taken is not None:
                    return taken
            raise self._no_room(nbytes, tag)

    def take_elsewhere(self, file: str, nbytes: int, tag: str) -> tuple[str, int] | None:
        """A range on another path for data in ``file`` that is about to be rewritten; None if it stays."""
        with self._lock:
            source = self._index[file]
            path = self._placement.destination(source, nbytes)
            if path is None:
                return None
            taken = self._take_on(path, nbytes, tag)
            if taken is None:
                self._placement.refused(source, path, nbytes)
            else:
                self.n_moved += 1
            return taken

    def reweigh(self, bytes_per_s: Sequence[float | None]) -> None:
        """Tells the placement the measured rate of each path; call it between two steps."""
        with self._lock:
            self._full.clear()
            room = [_room_for_moves(path) + path.nbytes - path.nbytes_taken for path in self._paths]
            self._placement.reweigh(self._stored(), room, bytes_per_s)

    def give(self, file: str, offset: int, nbytes: int) -> None:
        """Returns a range."""
        self._paths[self._index[file]].give(file, offset, nbytes)

    def close(self) -> None:
        """Gives the space back, see :meth:`tencache_ds.io.scratch.SpaceFile.close`. Called once."""
        for path in self._paths:
            path.close()

    # Mechanics, called with the lock held

    def _stored(self) -> list[int]:
        return [path.nbytes_taken for path in self._paths]

    def _take_on(self, path: int, nbytes: int, tag: str) -> tuple[str, int] | None:
        if path in self._full:
            return self._paths[path].take_free(nbytes)
        try:
            return self._paths[path].take(nbytes, tag)
        except SpaceError:
            self._full.add(path)
            return None

    def _preallocate(self, nbytes: int) -> None:
        left, free = nbytes, [_device_nbytes(path)[0] for path in self._paths]
        while left > 0:
            shares = self._placement.shares(left, free)
            if not any(shares):
                raise self._no_room(left, "preallocation")
            for path, share in enumerate(shares):
                if share == 0:
                    continue
                before = self._paths[path].nbytes
                try:
                    self._paths[path].reserve(share, "preallocation")
                except SpaceError:  # another job, or another rank, was faster
                    free[path] = 0
                else:
                    free[path] -= share
                left -= self._paths[path].nbytes - before

    def _no_room(self, nbytes: int, tag: str) -> SpaceError:
        files: dict[int, str] = {}
        for file, path in self._index.items():
            files.setdefault(path, file)
        places = ", ".join(
            f"{_device_nbytes(self._paths[path])[0]} free at {os.path.dirname(file)}" for path, file in files.items()
        )
        return SpaceError(
            "allocate",
            files[0],
            0,
            nbytes,
            f"{os.strerror(errno.ENOSPC)}: none of {len(files)} paths has room for {nbytes} more bytes ({places}); "
            "free some space, choose larger paths, or keep more state in RAM",
            errno=errno.ENOSPC,
            tag=tag,
        )


def _device_nbytes(path: SpaceFiles) -> tuple[int, int]:
    """Free bytes and size; of a device that is gone, nothing."""
    try:
        return path.device_nbytes()
    except OSError:
        return 0, 0


def _room_for_moves(path: SpaceFiles) -> int:
    """Bytes of the device that moved ranges may take."""
    free_nbytes, device_nbytes = _device_nbytes(path)
    return max(0, free_nbytes - min(int(KEPT_FREE_PART * device_nbytes), KEPT_FREE_MOST_NBYTES))
