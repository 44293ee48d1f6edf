# SPDX-License-Identifier: Apache-2.0
"""Blocks: storages that autograd has saved tensors of, in host memory or on NVMe, and the handles that autograd keeps
in their place.

A storage is moved as a whole, because its memory is freed only as a whole: views of any shape, stride and dtype are
rebuilt from the same bytes, and tensors that share a storage are moved once.

[Note: lifetimes] Autograd owns the handles, the handles own their block, and the block owns its memory. When a graph is
dropped, with or without a backward pass, its memory on the device is freed at once by reference counting, like that
of any saved tensor. Host buffers and extents may still be in use by a copy or a request: what a block leaves behind
is put on a list, from which it is collected at the next call.

Blocks on NVMe are written from staging buffers once their copy has arrived there, and read into them again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tencache_ds.activations.copies import HostBuffers
from tencache_ds.errors import InplaceChangeError, TenCacheError
from tencache_ds.io import Extent, ExtentStore, Priority, Ticket
from tencache_ds.memory.lease import DeviceEvent
from tencache_ds.observability.counters import Counters, Link, Stall
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
    events: tuple[DeviceEvent, ...]
    tickets: tuple[Ticket, ...]

    @property
    def idle(self) -> bool:
        """Whether nothing accesses it any more."""
        return all(event.query() for event in self.events) and all(ticket.done for ticket in self.tickets)


class Block:
    """The bytes of one storage at one version. Its fields belong to
    :class:`~tencache_ds.activations.saved_tensors.SavedTensors`, those of NVMe to
    :class:`~tencache_ds.activations.blocks.StoredBlocks`, and those of the way back to the device to
    :class:`~tencache_ds.activations.saved_tensors.Reloads`.

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
        self.arriving: tuple[torch.UntypedStorage, DeviceEvent | None] | None = None
        self.buffers: HostBuffers | None = None
        self.host: torch.Tensor | None = None
        self.left: DeviceEvent | None = None
        self.arrived: DeviceEvent | None = None
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


class DroppedBlocks:
    """Guarded by its owner's lock, except for :attr:`queue`, to which any thread appends."""

    def __init__(self) -> None:
        self.queue: deque[Remains] = deque()
        """What blocks have left since the last :meth:`collect`."""
        self._busy: list[Remains] = []

    def collect(self, free: Callable[[Extent], None]) -> int:
        """Frees what nothing accesses any more.

        Args:
            free: takes back space on NVMe.

        Returns:
            Bytes of blocks newly found that were on their way to the device.
        """
        arriving_nbytes = 0
        while self.queue:
            remains = self.queue.popleft()
            arriving_nbytes += remains.arriving_nbytes
            self._busy.append(remains)
        still_busy = []
        for remains in self._busy:
            if not remains.idle:
                still_busy.append(remains)
                continue
            # A device that never answered may still write to the buffer.
            lost = any(ticket.given_up for ticket in remains.tickets)
            if remains.buffers is not None and remains.buffer is not None and not lost:
                remains.buffers.give(remains.buffer)
            if remains.extent is not None:
                free(remains.extent)
        self._busy = still_busy
        return arriving_nbytes

    def tickets(self) -> Iterator[Ticket]:
        """Tickets of requests that are not over yet, as far as :meth:`collect` has seen them."""
        return (ticket for remains in self._busy for ticket in remains.tickets if not ticket.done)

    def requests(self) -> Iterator[tuple[torch.Tensor, Ticket]]:
        """All of which no end was seen, with their buffers."""
        for remains in (*self.queue, *self._busy):
            if remains.buffer is not None:
                for ticket in remains.tickets:
                    yield remains.buffer, ticket

    def events(self) -> Iterator[DeviceEvent]:
        """Events of copies whose end was not seen."""
        return (event for remains in (*self.queue, *self._busy) for event in remains.events)

    def forget(self) -> None:
        """Leaves everything as it is: its memory and storage are closed by their owners."""
        self.queue.clear()
        self._busy.clear()


class StoredBlocks:
    """Guarded by its owner's lock.

    Args:
        open_store: opens storage on NVMe at its first use; None if there is none.
        staging: host memory that blocks pass through on their way to and from NVMe.
        counters: where bytes and stalls are counted.
        timeout_s: longest wait for a request.
        dropped: blocks that are gone.
        collect: frees what these have left, as far as nothing accesses it.
    """

    def __init__(
        self,
        open_store: Callable[[], ExtentStore] | None,
        staging: HostBuffers,
        counters: Counters,
        timeout_s: float,
        dropped: DroppedBlocks,
        collect: Callable[[], None],
    ) -> None:
        self._open_store = open_store
        self._store: ExtentStore | None = None
        self._staging = staging
        self._counters = counters
        self._timeout_s = timeout_s
        self._dropped = dropped
        self._collect = collect
        self._unwritten: deque[weakref.ref[Block]] = deque()
        self._writing: deque[tuple[weakref.ref[Block], Ticket]] = deque()

    @property
    def available(self) -> bool:
        """Whether there is NVMe storage."""
        return self._open_store is not None

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of staging buffers, used and free."""
        return self._staging.allocated_nbytes

    def take_buffer(self, block: Block) -> None:
        """Gives a block a staging buffer, after waiting for writes if none is free.

        Raises:
            MemoryLimitError, LockedMemoryError: the system has no such memory.
            StorageError: a write failed.
        """
        block.buffers, block.host = self._staging, self._staging.take(block.nbytes)
        while block.host is None:
            waited = self._wait_for_a_write()
            block.host = self._staging.take(block.nbytes, regardless=not waited)

    def write(self, block: Block) -> None:
        """Has a block written by :meth:`proceed`, once its copy to the staging buffer is over."""
        self._unwritten.append(weakref.ref(block))

    def proceed(self) -> None:
        """Submits the writes of blocks that are in host memory by now, and gives up the buffers of those written.

        Raises:
            StorageError: a write failed.
        """
        while self._unwritten:
            block = self._unwritten[0]()
            if block is not None and block.left is not None and not block.left.query():
                break
            self._unwritten.popleft()
            if block is not None:
                self._submit(block)
            del block
        while self._writing and self._writing[0][1].done:
            reference, ticket = self._writing.popleft()
            ticket.wait(0)
            block = reference()
            if block is not None and block.written is ticket:
                block.leave_buffer()
            del block
        self._collect()

    def begin_read(self, block: Block, priority: Priority) -> bool:
        """Begins to read a block into a staging buffer; False if there is none and nobody waits for it.

        Raises:
            MemoryLimitError, LockedMemoryError: the system has no such memory.
            StorageError: no request is accepted any more.
        """
        host = self._staging.take(block.nbytes, regardless=priority is Priority.URGENT)
        if host is None:
            return False
        block.buffers, block.host = self._staging, host
        extent = block.extent
        if extent is None:
            raise TenCacheError(f"{block.name} is neither in host memory nor on NVMe")
        self._counters.moved(Link.NVME_READ, extent.allocated_nbytes)
        block.reading = self._require_store().read(extent, host[: extent.allocated_nbytes], priority=priority)
        return True

    def finish_read(self, block: Block) -> None:
        """Waits until a block that is being read is in host memory.

        Raises:
            StorageError: the read failed, or the write before it.
        """
        ticket = block.reading
        if ticket is None:
            return
        try:
            if ticket.done:
                ticket.wait(0)
            else:
                with self._counters.stall(Stall.ACTIVATION_READ, block.name, block.nbytes):
                    ticket.wait(self._timeout_s)
        except BaseException:
            block.leave_buffer()
            block.reading = None
            raise
        block.reading = None

    def free(self, extent: Extent) -> None:
        """Takes back the space of a block that is gone."""
        if self._store is not None:
            self._store.free(extent)

    def check(self) -> None:
        """
        Raises:
            StorageError: a write failed that nobody has read.
        """
        if self._store is not None:
            self._store.check()

    def close(self) -> None:
        """Forgets what is still to be written; the store is closed by its owner."""
        self._open_store = None
        self._unwritten.clear()
        self._writing.clear()

    def _submit(self, block: Block) -> None:
        if block.host is None:
            raise TenCacheError(f"{block.name} has lost its staging buffer")
        store = self._require_store()
        block.extent = store.allocate(block.nbytes, block.name)
        nbytes = block.extent.allocated_nbytes
        self._counters.moved(Link.NVME_WRITE, nbytes)
        block.written = store.write(block.extent, block.host[:nbytes])
        self._writing.append((weakref.ref(block), block.written))

    def _wait_for_a_write(self) -> bool:
        """Waits until a staging buffer may have come back; False if none is on its way to NVMe."""
        self.proceed()
        if not self._writing and self._unwritten:
            block = self._unwritten[0]()
            if block is not None and block.left is not None:
                with self._counters.stall(Stall.ACTIVATION_WRITE, block.name, block.nbytes):
                    block.left.synchronize()
            del block
            self.proceed()
        # The second kind is written for nobody: a graph was dropped.
        ticket = self._writing[0][1] if self._writing else next(self._dropped.tickets(), None)
        if ticket is None:
            return False
        with self._counters.stall(Stall.ACTIVATION_WRITE, ticket.tag, ticket.nbytes):
            ticket.wait(self._timeout_s)
        self.proceed()
        return True

    def _require_store(self) -> ExtentStore:
        if self._store is None:
            if self._open_store is None:
                raise TenCacheError("an activation is to go to NVMe, but there is no store")
            self._store = self._open_store()
        return self._store
