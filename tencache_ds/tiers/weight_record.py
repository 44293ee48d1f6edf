# SPDX-License-Identifier: Apache-2.0
"""A weight's shard as the weight tier sees it: its home, and what a staging buffer holds of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.io import Extent, Ticket
from tencache_ds.observability.counters import Access
from tencache_ds.tiers.mover import Buffer
from tencache_ds.tiers.weight_home import Home


class CopyState(enum.Enum):
    """What a staging buffer holds of a weight, which lives on NVMe if it holds anything. See [Note: home and copy] in
    :mod:`tencache_ds.tiers.weight_home`."""

    NONE = "not in use"
    """There is no buffer: the value is on NVMe, or in the memory of the weight's home."""

    INITIAL = "initial"
    """In ordinary memory, being filled for the first time; not yet on NVMe."""

    READING = "reading"
    """On NVMe, and a read into a staging buffer is under way."""

    STAGED = "staged"
    """On NVMe, with a clean, still unused copy in a staging buffer."""

    EXPOSED = "exposed"
    """On NVMe, with a clean copy in a staging buffer that DeepSpeed is reading from."""

    UPDATING = "updating"
    """The copy on NVMe is out of date: the optimizer is filling a staging buffer that will be written."""

    OVERWRITING = "overwriting"
    """The copy on NVMe is still the old value: DeepSpeed is filling a staging buffer with a new one from outside the
    optimizer. Until then the contents of the buffer are undefined."""


_TRANSITIONS: dict[CopyState, frozenset[CopyState]] = {
    CopyState.INITIAL: frozenset({CopyState.NONE}),
    CopyState.NONE: frozenset({CopyState.READING, CopyState.UPDATING, CopyState.OVERWRITING}),
    CopyState.READING: frozenset({CopyState.STAGED, CopyState.NONE}),
    CopyState.STAGED: frozenset({CopyState.EXPOSED, CopyState.NONE}),
    CopyState.EXPOSED: frozenset({CopyState.NONE, CopyState.STAGED, CopyState.OVERWRITING}),
    CopyState.UPDATING: frozenset({CopyState.NONE}),
    CopyState.OVERWRITING: frozenset({CopyState.NONE}),
}


class CopyEvent(Protocol):
    """A device event after which a buffer's last reader is done."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WeightHome:
    """Where a weight's shard lives between two uses.

    Attributes:
        key: DeepSpeed's parameter id.
        name: name in messages.
        numel: elements of the shard, padding included.
        on_nvme: on NVMe, or else in host memory.
    """

    key: int
    name: str
    numel: int
    on_nvme: bool


class StagingBuffer(Buffer, Protocol):
    """Memory behind a weight that is not resident: of a pool, or ordinary host memory when there is none."""

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the pool's slot that it is; 0 for ordinary memory."""

    @property
    def for_gpu(self) -> bool:
        """Whether it is memory of the compute device, which may only be accessed by copies within the device."""

    def release_after(self, event: CopyEvent, /) -> None:
        """Gives it back when its last reader is done."""


@dataclass(slots=True)
class Weight:
    """One weight's shard.

    Attributes:
        key: DeepSpeed's parameter id.
        name: name in messages.
        numel: elements of the shard, padding included.
        dtype: the weight's dtype.
        home: where it lives, and its memory there.
        copy: what its staging buffer holds; changed by :meth:`move_to` only.
        extent: its place on NVMe, once it has one.
        buffer: memory it is staged in, if any.
        ticket: the read under way or just done.
        trainable: whether the optimizer updates it.
        prefetched: whether it was in memory, or being read, before it was requested.
        kept: whether it is staged still, from an earlier exposure.
        reader: of a staged weight that was exposed before: what still copies from its buffer.
        counted: whether it has a part of the budget of resident weights.
    """

    key: int
    name: str
    numel: int
    dtype: torch.dtype
    home: Home
    copy: CopyState = CopyState.NONE
    extent: Extent | None = None
    buffer: StagingBuffer | None = None
    ticket: Ticket | None = None
    trainable: bool = True
    prefetched: bool = False
    kept: bool = False
    reader: CopyEvent | None = None
    counted: bool = False

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def unused(self) -> bool:
        """Whether it is staged, or being read, and not in use yet."""
        return self.copy in (CopyState.STAGED, CopyState.READING)

    @property
    def incomplete(self) -> bool:
        """Whether its staging buffer is being filled with a new value and holds none yet."""
        return self.copy in (CopyState.UPDATING, CopyState.OVERWRITING)

    @property
    def evictable(self) -> bool:
        """Whether the staging buffer holds a clean copy that is not in use."""
        read = self.copy is CopyState.READING and self.ticket is not None and self.ticket.done
        return read or self.copy is CopyState.STAGED

    @property
    def access(self) -> Access:
        """How the bytes of a requested weight were available."""
        if not self.prefetched:
            return Access.DEMAND
        under_way = self.ticket is not None and not self.ticket.done
        return Access.LATE if under_way else Access.PREFETCHED

    @property
    def only_stored(self) -> bool:
        """Whether it lives on NVMe and no buffer holds it."""
        return self.home.stored and self.copy is CopyState.NONE

    def move_to(self, copy: CopyState) -> None:
        """Changes the state of the copy; a transition that the table does not know is a bug and raises."""
        if copy not in _TRANSITIONS[self.copy]:
            raise TenCacheError(f"weight {self.name}: no transition from {self.copy.value} to {copy.value}")
        self.copy = copy

    def memory(self) -> torch.Tensor:
        """The staging buffer's bytes."""
        if self.buffer is None:
            raise TenCacheError(f"weight {self.name} has no staging buffer: it is {self.copy.value}")
        return self.buffer.buffer

    def view(self) -> torch.Tensor:
        """The shard in its staging buffer, 1-D."""
        return self.memory()[: self.nbytes].view(self.dtype)
