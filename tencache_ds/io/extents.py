# SPDX-License-Identifier: Apache-2.0
"""Allocation within a file: extents, and first fit over the free ranges. Pure arithmetic, no I/O, not thread-safe."""

from __future__ import annotations

import bisect
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    """A part of a file that belongs to one thing.

    Attributes:
        file: path of the file.
        offset: first byte, a multiple of 4096.
        nbytes: payload in bytes.
        allocated_nbytes: payload rounded up to a multiple of 4096; the size of its buffers.
        tag: name of its contents, for messages.
    """

    file: str
    offset: int
    nbytes: int
    allocated_nbytes: int
    tag: str


class FreeList:
    """Free ranges of a growing file, kept sorted and merged."""

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._sizes: dict[int, int] = {}
        self.end = 0
        """Length of the file this list describes."""

    def take(self, nbytes: int) -> int | None:
        """Takes the first free range that is long enough; None when there is none."""
        for index, offset in enumerate(self._offsets):
            size = self._sizes[offset]
            if size >= nbytes:
                del self._sizes[offset]
                if size == nbytes:
                    del self._offsets[index]
                else:
                    self._offsets[index] = offset + nbytes
                    self._sizes[offset + nbytes] = size - nbytes
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Returns a range and merges it with its neighbours."""
        index = bisect.bisect_left(self._offsets, offset)
        if index < len(self._offsets) and self._offsets[index] == offset + nbytes:
            nbytes += self._sizes.pop(self._offsets.pop(index))
        if index > 0 and self._offsets[index - 1] + self._sizes[self._offsets[index - 1]] == offset:
            self._sizes[self._offsets[index - 1]] += nbytes
        else:
            self._offsets.insert(index, offset)
            self._sizes[offset] = nbytes

    def extend(self, nbytes: int) -> None:
        """Notes that the file has grown by ``nbytes``."""
        self.end += nbytes
        self.give(self.end - nbytes, nbytes)

    @property
    def tail_nbytes(self) -> int:
        """Length of the free range that reaches the end of the file."""
        if not self._offsets:
            return 0
        size = self._sizes[self._offsets[-1]]
        return size if self._offsets[-1] + size == self.end else 0

    @property
    def free_nbytes(self) -> int:
        """Sum of all free ranges."""
        return sum(self._sizes.values())

    def ranges(self) -> list[tuple[int, int]]:
        """All free ranges as (offset, length), ascending."""
        return [(offset, self._sizes[offset]) for offset in self._offsets]
