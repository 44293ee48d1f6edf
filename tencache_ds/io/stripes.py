# SPDX-License-Identifier: Apache-2.0
"""The space of a store over several NVMe paths: files on each of them, a range within one file; which path the next
extent goes to, and which extents change their path when measured rates drift.

A pass over a store ends with its slowest path, so a path should hold as much as it moves in the time the others need.
No data is copied for it: stored data is rewritten in every step anyway, and an extent that should be elsewhere goes
there with that write.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence

from tencache_ds.errors import SpaceError
from tencache_ds.io.scratch import SpaceFiles
from tencache_ds.layout import round_up

# The choice of a path


START_GAIN = 1.15
"""A pass has to become that much faster before extents begin to change their path: rates are never quite steady."""

STOP_GAIN = 1.05
"""Once they do, they continue until no more than this can be gained."""

PART_PER_STEP = 0.5
"""Share of the misplaced bytes that moves in one step: a rate measured in one odd step does little harm."""


def weights_of(bytes_per_s: Sequence[float | None]) -> tuple[float, ...]:
    """Share of each path, proportional to what it moves per second.

    Args:
        bytes_per_s: as measured; None where nothing is known, which counts as the mean of the others.
    """
    known = [rate for rate in bytes_per_s if rate is not None and rate > 0]
    usual = sum(known) / len(known) if known else 1.0
    rates = [rate if rate is not None and rate > 0 else usual for rate in bytes_per_s]
    return tuple(rate / sum(rates) for rate in rates)


def fill(nbytes: int, weights: Sequence[float], room: Sequence[int]) -> list[int]:
    """``nbytes`` cut into one part per path, proportional to ``weights`` as far as ``room`` (bytes per path) allows.

    What no path has room for is left out, so that the parts may sum to less.
    """
    parts = [0] * len(weights)
    left, open_paths = nbytes, [path for path in range(len(weights)) if room[path] > 0]
    while left > 0 and open_paths:
        total = sum(weights[path] for path in open_paths)
        wanted = {path: int(left * weights[path] / total) for path in open_paths}
        full = [path for path in open_paths if parts[path] + wanted[path] >= room[path]]
        if not full:
            for path in open_paths:
                parts[path] += wanted[path]
            rest = left - sum(wanted.values())  # of rounding: less than one byte per path
            for path in open_paths:
                more = min(rest, room[path] - parts[path])
                parts[path] += more
                rest -= more
            return parts
        for path in full:
            left -= room[path] - parts[path]
            parts[path] = room[path]
        open_paths = [path for path in open_paths if path not in full]
    return parts


class Striping:
    """Places the extents of one store over ``n_paths`` paths. Not thread-safe.

    Until rates are known all paths count the same.
    """

    def __init__(self, n_paths: int) -> None:
        self.weights: tuple[float, ...] = (1 / n_paths,) * n_paths
        """Share of each path; their sum is 1."""
        self._balancing = False
        self._stored = [0] * n_paths
        self._room = [0] * n_paths
        self._moving = [0.0] * n_paths  # of each path, the part that should leave it in this step
        self._credit = [0.0] * n_paths  # bytes that may leave it now

    def shares(self, nbytes: int, room: Sequence[int]) -> list[int]:
        """How much of ``nbytes`` to reserve on each path, of which ``room`` bytes are free."""
        return fill(nbytes, self.weights, room)

    def order(self, nbytes: int, stored: Sequence[int]) -> list[int]:
        """The paths for a new extent, the best one first: the one that would be through with its extents soonest.

        Args:
            nbytes: of the extent.
            stored: bytes of extents on each path.
        """
        return sorted(range(len(stored)), key=lambda path: (stored[path] + nbytes) / self.weights[path])

    def reweigh(self, stored: Sequence[int], room: Sequence[int], bytes_per_s: Sequence[float | None]) -> None:
        """Takes new rates into account; call it between two steps.

        Args:
            stored: bytes of extents on each path.
            room: further bytes that each path may be given.
            bytes_per_s: measured rate of each path, None where unknown.
        """
        self.weights = weights_of(bytes_per_s)
        self._stored, self._room = list(stored), list(room)
        capacity = [have + more for have, more in zip(stored, room, strict=True)]
        wanted = fill(sum(stored), self.weights, capacity)
        seconds_now, seconds_then = self._seconds(stored), self._seconds(wanted)
        gain = seconds_now / seconds_then if seconds_then else 1.0
        self._balancing = gain > (STOP_GAIN if self._balancing else START_GAIN)
        if not self._balancing:
            self._moving, self._credit = [0.0] * len(stored), [0.0] * len(stored)
            return
        self._moving = [
            PART_PER_STEP * max(0, have - want) / have if have else 0.0
            for have, want in zip(stored, wanted, strict=True)
        ]
        self._credit = [credit if part else 0.0 for credit, part in zip(self._credit, self._moving, strict=True)]

    def destination(self, source: int, nbytes: int) -> int | None:
        """Where an extent of ``nbytes`` on path ``source`` goes with the write that is about to replace it; None: it
        stays.

        Extents that leave are spread evenly over those that are written, because neighbours are needed at the same
        time. Each move makes the slower of its two paths faster; a path keeps its last extent, which measures it.
        """
        self._credit[source] += self._moving[source] * nbytes
        if self._credit[source] < nbytes or self._stored[source] <= nbytes:
            return None
        self._credit[source] -= nbytes
        others = [path for path in range(len(self.weights)) if path != source and self._room[path] >= nbytes]
        if not others:
            return None
        best = min(others, key=lambda path: (self._stored[path] + nbytes) / self.weights[path])
        if (self._stored[best] + nbytes) / self.weights[best] >= self._stored[source] / self.weights[source]:
            return None
        self._stored[source] -= nbytes
        self._stored[best] += nbytes
        self._room[best] -= nbytes
        return best

    def refused(self, source: int, path: int, nbytes: int) -> None:
        """The last requested move failed: ``path`` had no space after all, and gets nothing in this step."""
        self._stored[source] += nbytes
        self._stored[path] -= nbytes
        self._room[path] = 0

    def _seconds(self, nbytes: Sequence[int]) -> float:
        """Time of a pass in which each path moves ``nbytes``, in units of the sum of all rates."""
        return max(have / weight for have, weight in zip(nbytes, self.weights, strict=True))


# Space


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
