# SPDX-License-Identifier: Apache-2.0
"""Per-path statistics: traffic, contents, and the data lost when a path failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contents:
    """The data of one kind of state on one path.

    Attributes:
        kind: ``"weights"``, ``"optimizer"`` or ``"activations"``.
        n_extents: how many weights, optimizer chunks or blocks of activations.
        nbytes: their bytes.
    """

    kind: str
    n_extents: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PathStats:
    """Figures of one NVMe path of this rank.

    Attributes:
        path: the folder as configured.
        backend: name of the I/O backend.
        nbytes_read: read so far.
        nbytes_written: written so far.
        read_seconds: time with a read going on.
        write_seconds: time with a write going on.
        bytes_per_s: both directions over the busy time, in the last few steps; decides the share of data stored here.
            None while unknown, and if there is only one path.
        contents: data stored here now.
    """

    path: str
    backend: str
    nbytes_read: int
    nbytes_written: int
    read_seconds: float
    write_seconds: float
    bytes_per_s: float | None
    contents: tuple[Contents, ...]

    @property
    def read_bytes_per_s(self) -> float | None:
        """Bandwidth of reads so far; None before the first."""
        return self.nbytes_read / self.read_seconds if self.read_seconds else None

    @property
    def write_bytes_per_s(self) -> float | None:
        """Bandwidth of writes so far; None before the first."""
        return self.nbytes_written / self.write_seconds if self.write_seconds else None

    @property
    def stored_nbytes(self) -> int:
        """Bytes stored here now."""
        return sum(part.nbytes for part in self.contents)


def summed(stats: Iterable[PathStats]) -> tuple[PathStats, ...]:
    """The same with one entry per path, of engines that share some."""
    by_path: dict[str, PathStats] = {}
    for one in stats:
        known = by_path.get(one.path)
        by_path[one.path] = one if known is None else _sum(known, one)
    return tuple(by_path.values())


def what_was_on(path: str, contents: Sequence[Contents]) -> str:
    """For the error of a path that failed."""
    parts = [f"{part.nbytes / 2**30:.2f} GiB of {_count(part)}" for part in contents]
    return (
        f"Of this rank's state, {' and '.join(parts) or 'nothing'} was on {path}. A run that does not use this path "
        "can resume from the last checkpoint."
    )


def _count(part: Contents) -> str:
    if part.kind == "weights":
        return f"{part.n_extents} weights"
    if part.kind == "activations":
        return f"activations in {part.n_extents} blocks"
    return f"{part.kind} state in {part.n_extents} chunks"


def _sum(first: PathStats, second: PathStats) -> PathStats:
    return PathStats(
        path=first.path,
        backend=first.backend,
        nbytes_read=first.nbytes_read + second.nbytes_read,
        nbytes_written=first.nbytes_written + second.nbytes_written,
        read_seconds=first.read_seconds + second.read_seconds,
        write_seconds=first.write_seconds + second.write_seconds,
        bytes_per_s=first.bytes_per_s if second.bytes_per_s is None else second.bytes_per_s,
        contents=first.contents + second.contents,
    )
