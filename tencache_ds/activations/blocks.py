# SPDX-License-Identifier: Apache-2.0
"""One storage that autograd has saved tensors of, and the handles that autograd keeps in their place.

A storage is moved as a whole, because its memory is freed only as a whole: views of any shape, stride and dtype are
rebuilt from the same bytes, and tensors that share a storage are moved once.

[Note: lifetimes] Autograd owns the handles, the handles own their block, and the block owns its memory. When a graph is
dropped, with or without a backward pass, its memory on the device is freed at once by reference counting, like that
of any saved tensor. Host buffers and extents may still be in use by a copy or a request: what a block leaves behind
is put on a list, from which it is collected at the next call.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tencache_ds.activations.host_buffers import HostBuffers
from tencache_ds.errors import InplaceChangeError, TenCacheError
from tencache_ds.io import Extent, Ticket
from tencache_ds.memory.lease import Event
from tencache_ds.placement.places import Place
from tencache_ds.tensors import empty


@dataclass(slots=True)
class Remains:
    """What a block leaves behind: freed when the events are done and the requests over.

    Attributes:
        buffers, buffer: a host buffer and where it belongs.
        storage: device memory that a copy still fills.
        arriving_nbytes: of the block, if it was reloaded ahead of a use that did not come.
        extent: on NVMe.
        events: of copies.
        tickets: of requests.
    """

    buffers: HostBuffers | None
    buffer: torch.Tensor | None
    storage: torch.UntypedStorage | None
    arriving_nbytes: int
    extent: Extent | None
    events: tuple[Event, ...]
    tickets: tuple[Ticket, ...]

    @property
    def idle(self) -> bool:
        """Whether nothing accesses it any more."""
        return all(event.query() for event in self.events) and all(ticket.done for ticket in self.tickets)


class Block:
    """The bytes of one storage at one version. Its fields belong to
    :class:`~tencache_ds.activations.saved_tensors.SavedTensors`, those of NVMe to
    :class:`~tencache_ds.activations.stored_blocks.StoredBlocks`, and those of the way back to the device to
    :class:`~tencache_ds.activations.reloads.Reloads`.

    Attributes:
        position: in its pass.
        name: for messages.
        nbytes: of the storage.
        version: of the tensors when they were saved.
        place: where it is kept between forward and backward.
        n_waiting: handles that have not been unpacked yet.
        storage: on the device, as long as it has to stay there.
        reloaded: storage that is there as long as somebody else holds it.
        arriving: storage that a copy is filling, and the copy's event.
        buffers, host: host buffer, and where it belongs.
        left, arrived: events of the last copies out and back.
        extent: on NVMe.
        written, reading: requests that are under way, or were the last.
    """

    __slots__ = (
        "__weakref__",
        "_remains",
        "_source",
        "_witness",
        "arrived",
        "arriving",
        "buffers",
        "extent",
        "host",
        "left",
        "n_waiting",
        "name",
        "nbytes",
        "place",
        "position",
        "reading",
        "reloaded",
        "storage",
        "version",
        "written",
    )

    def __init__(self, tensor: torch.Tensor, position: int, place: Place, remains: deque[Remains]) -> None:
        self.storage: torch.UntypedStorage | None = tensor.untyped_storage()
        self.position = position
        self.name = f"activation {position} ({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)})"
        self.nbytes = self.storage.nbytes()
        self.version = tensor._version
        self.place = place
        self.n_waiting = 0
        self.reloaded: StorageWeakRef | None = None
        self.arriving: tuple[torch.UntypedStorage, Event | None] | None = None
        self.buffers: HostBuffers | None = None
        self.host: torch.Tensor | None = None
        self.left: Event | None = None
        self.arrived: Event | None = None
        self.extent: Extent | None = None
        self.written: Ticket | None = None
        self.reading: Ticket | None = None
        self._remains = remains
        # As long as there is a weak reference to a storage, no other one gets its address.
        self._source = StorageWeakRef(self.storage)
        # Shares the version counter, not the memory.
        self._witness = tensor.detach()
        self._witness.data = tensor.new_empty(0)

    @property
    def current_version(self) -> int:
        """Version of the saved tensors, wherever their bytes are: above :attr:`version` after a change in place."""
        return int(self._witness._version)

    @property
    def host_bytes(self) -> torch.Tensor:
        """Its part of the host buffer, 1-D uint8.

        Raises:
            TenCacheError: it has none.
        """
        if self.host is None:
            raise TenCacheError(f"{self.name} has lost its host memory")
        return self.host[: self.nbytes]

    def held_elsewhere(self) -> torch.UntypedStorage | None:
        """The original storage, if the training still holds it."""
        return alive(self._source)

    def leave_buffer(self) -> None:
        """Gives the host buffer up."""
        if self.host is not None:
            self._leave(None, 0, None)
            self.host = self.buffers = None

    def _leave(self, storage: torch.UntypedStorage | None, arriving_nbytes: int, extent: Extent | None) -> None:
        events = tuple(event for event in (self.left, self.arrived) if event is not None)
        tickets = tuple(ticket for ticket in (self.written, self.reading) if ticket is not None)
        self._remains.append(Remains(self.buffers, self.host, storage, arriving_nbytes, extent, events, tickets))

    def __del__(self) -> None:
        # In any thread, and during a garbage collection: nothing here may take a lock.
        if self.arriving is not None:
            storage, self.arrived = self.arriving
            self._leave(storage, self.nbytes, self.extent)
        elif self.host is not None or self.extent is not None:
            self._leave(None, 0, self.extent)


def alive(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage, if it still exists."""
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


class MovedTensor:
    """Autograd's handle on a view of a block."""

    __slots__ = ("block", "dtype", "offset", "shape", "stride", "unpacked", "version")

    def __init__(self, block: Block, tensor: torch.Tensor) -> None:
        self.block = block
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset()
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.version = tensor._version
        self.unpacked = False

    def check(self) -> None:
        """
        Raises:
            InplaceChangeError: the tensor was modified after it was saved.
        """
        check_version(self.dtype, self.shape, self.block.current_version, self.version)

    def view_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, with the same shape, strides and offset, in another storage with the same bytes."""
        tensor = empty(0, self.dtype, storage.device)
        return tensor.set_(storage, self.offset, self.shape, self.stride)


class KeptTensor:
    """Autograd's handle on a tensor that is not moved."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # A parameter itself, whose memory DeepSpeed replaces between forward and backward. Any other without its
        # place in the graph: an output of the node that saves it would keep that node, and itself, forever.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version

    def unpack(self) -> torch.Tensor:
        """
        Raises:
            InplaceChangeError: the tensor was modified after it was saved.
        """
        check_version(self.tensor.dtype, self.tensor.shape, self.tensor._version, self.version)
        return self.tensor


def check_version(dtype: torch.dtype, shape: Any, found: int, expected: int) -> None:
    """The check that autograd makes itself for tensors saved without hooks.

    Raises:
        InplaceChangeError: the versions differ.
    """
    if found != expected:
        raise InplaceChangeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: the "
            f"{str(dtype).removeprefix('torch.')} tensor of shape {list(shape)} is at version {found}; expected "
            f"version {expected} instead. Use the operation that is not in place, or clone the tensor before"
        )
