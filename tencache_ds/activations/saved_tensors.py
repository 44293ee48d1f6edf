# SPDX-License-Identifier: Apache-2.0
"""Moves the tensors that autograd saves to host memory and NVMe, and back before backward needs them.

The state machine of a block, the places of the blocks of a pass, and how blocks come back to the device.

[Note: one lock] The hooks hold the lock of :class:`SavedTensors` throughout, also while a read or write is waited for.
Everything else here is guarded by it. A garbage collection under it may end a graph, in the same thread, and so it is
reentrant; what dropped blocks leave behind needs no lock, see [Note: lifetimes] in
:mod:`tencache_ds.activations.blocks`.

Two walks go ahead of backward: reads from NVMe into host buffers, as far as there are buffers, and copies to the
device, as far as their window allows. Both follow the order of the recorded pass. What they have not brought is brought
when it is needed, so an order that differs costs time only.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tencache_ds.activations.auto_places import AutoPlaces
from tencache_ds.activations.blocks import Block, DroppedBlocks, KeptTensor, MovedTensor, StoredBlocks, alive
from tencache_ds.activations.copies import Copies, HostBuffers
from tencache_ds.errors import MemoryLimitError, TenCacheError
from tencache_ds.io import ExtentStore, Priority, Ticket
from tencache_ds.memory.lease import DeviceEvent
from tencache_ds.observability.counters import Counters, Link
from tencache_ds.observability.spans import Category, span
from tencache_ds.placement.activation_policy import (
    MOST_AHEAD_NBYTES,
    PassRecorder,
    RecordedPass,
    SavedBlock,
    place_unplanned,
    plan_places,
    reload_order,
    reload_window_nbytes,
)
from tencache_ds.placement.places import Place
from tencache_ds.profiling.waits import MoveWaits
from tencache_ds.tensors import empty

# Back to the device


class Reloads:
    """Guarded by its owner's lock, which is held while a read is waited for.

    Args:
        copies: between the device and host memory.
        stored: reads blocks from NVMe.
        counters: where bytes are counted.
    """

    def __init__(self, copies: Copies, stored: StoredBlocks, counters: Counters) -> None:
        self._copies = copies
        self._stored = stored
        self._counters = counters
        self.arriving_nbytes = 0
        """Bytes of blocks copied to the device, or being copied, that backward has not needed yet."""
        self.n_ahead = self.n_late = 0
        """Blocks of the pass that were on their way when they were needed, and those that were not."""
        self._blocks: Sequence[weakref.ref[Block]] = ()
        self._order: Sequence[int] = ()
        self._window_nbytes = 0
        self._turns: dict[int, int] = {}
        self._turn = self._next_read = self._next_copy = 0

    def begin_backward(self, blocks: Sequence[weakref.ref[Block]], order: Sequence[int], window_nbytes: int) -> None:
        """The backward pass of these blocks begins.

        Args:
            blocks: of the pass, by position.
            order: positions, in the order in which they are expected to be needed.
            window_nbytes: device memory for blocks that are not needed yet. A single block may be larger.
        """
        self._blocks, self._order, self._window_nbytes = blocks, order, window_nbytes
        self._turns = {position: turn for turn, position in enumerate(order)}
        self._turn = self._next_read = self._next_copy = 0
        self.n_ahead = self.n_late = 0

    def end_pass(self) -> None:
        """Nothing is brought ahead any more until the next backward pass begins."""
        self._blocks, self._order, self._turns = (), (), {}

    def dropped(self, nbytes: int) -> None:
        """So many bytes of blocks on their way to the device were dropped with their graphs."""
        self.arriving_nbytes -= nbytes

    def bring(self, block: Block, waits: MoveWaits | None) -> torch.UntypedStorage:
        """A moved block's bytes in new device memory, on which later work of the current stream may be issued.

        Args:
            block: which is not on the device, except by a copy ahead.
            waits: measures how long the device waits for it, if that is wanted.

        Raises:
            StorageError: it could not be read, or written before.
        """
        before = None if waits is None else waits.mark()
        arriving = block.arriving
        if arriving is not None:
            self.n_ahead += 1
        else:
            self.n_late += 1
            if block.host is None:
                self._stored.begin_read(block, Priority.URGENT)
            self._stored.finish_read(block)
            arriving = self._copy_back(block)
        storage, event = arriving
        self._copies.wait(event)
        if waits is not None:
            waits.waited(block.position, before)
        block.arriving = None
        self.arriving_nbytes -= block.nbytes
        return storage

    def _copy_back(self, block: Block) -> tuple[torch.UntypedStorage, DeviceEvent | None]:
        """Begins to copy a block, which is in host memory, to the device; returns what it then has as ``arriving``."""
        source = block.host_bytes
        with span(Category.COPY, "copy::activation_back", block.name, block.nbytes):
            filled, event = self._copies.back(source, block.left)
        self._counters.moved(Link.H2D, block.nbytes)
        arriving = block.arriving = filled.untyped_storage(), event
        block.arrived = event
        self.arriving_nbytes += block.nbytes
        if block.extent is not None and block.written is not None and block.written.done:
            block.leave_buffer()  # NVMe has it
        return arriving

    # Ahead

    def look_ahead(self, block: Block) -> None:
        """Reads from NVMe and copies to the device what comes after a block that was just needed.

        Raises:
            StorageError: a block after it could not be read, or written before.
        """
        turn = self._turns.get(block.position)
        if turn is None or not (block.position < len(self._blocks) and self._blocks[block.position]() is block):
            return
        if turn < self._turn:  # the graph is gone through once more
            self._next_read = self._next_copy = turn + 1
        self._turn = turn
        self._next_read = max(self._next_read, turn + 1)
        self._next_copy = max(self._next_copy, turn + 1)
        while self._next_read < len(self._order) and self._read_one_ahead(self._order[self._next_read]):
            self._next_read += 1
        while self._next_copy < len(self._order) and self._copy_one_ahead(self._order[self._next_copy]):
            self._next_copy += 1

    def _read_one_ahead(self, position: int) -> bool:
        """False if the walk has to stop here for now."""
        block = self._blocks[position]()
        if block is None or block.place is not Place.NVME or block.host is not None or block.extent is None:
            return True
        if block.storage is not None or block.arriving is not None:
            return True
        return self._stored.begin_read(block, Priority.BACKGROUND)

    def _copy_one_ahead(self, position: int) -> bool:
        """False if the walk has to stop here for now."""
        block = self._blocks[position]()
        if block is None or block.place is Place.GPU or block.storage is not None or block.arriving is not None:
            return True
        if self.arriving_nbytes and self.arriving_nbytes + block.nbytes > self._window_nbytes:
            return False
        if block.held_elsewhere() is not None:
            return True
        if block.host is None or (block.reading is not None and not block.reading.done):
            return False
        self._stored.finish_read(block)
        self._copy_back(block)
        return True


# What autograd saves


logger = logging.getLogger("DeepSpeed.tencache")


@dataclass(frozen=True, slots=True)
class ActivationFigures:
    """Figures of the last pass, taken when its backward began.

    Attributes:
        kept_nbytes: saved tensors of at least the smallest size that stayed in device memory.
        host_nbytes: in host memory.
        nvme_nbytes: on NVMe, or on their way there.
        n_ahead: blocks that had been reloaded, or were being copied to the device, when backward needed them.
        n_late: blocks that it had to wait for or to ask for.
    """

    kept_nbytes: int = 0
    host_nbytes: int = 0
    nvme_nbytes: int = 0
    n_ahead: int = 0
    n_late: int = 0


class SavedTensors:
    """The pack and unpack hooks of one engine. Any thread may call them: training saves, autograd's threads load.

    Args:
        device: whose tensors are moved.
        copies: between it and host memory.
        resident: host memory for blocks that stay there.
        staging: host memory that blocks pass through on their way to and from NVMe.
        open_store: opens storage on NVMe at its first use; None if there is none.
        counters: where bytes and stalls are counted.
        is_weight: whether a storage is that of a weight, which DeepSpeed manages.
        least_nbytes: smaller storages stay on the device.
        host_capacity: host memory for blocks that stay there, in bytes, taken and free.
        timeout_s: longest wait for a request.
        auto: decides which passes are taken and how much of them is moved; None: all of them, as much as possible.
        most_leaving_nbytes: device memory that is held for copies out; the compute stream waits for what exceeds it.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        copies: Copies,
        resident: HostBuffers,
        staging: HostBuffers,
        open_store: Callable[[], ExtentStore] | None,
        counters: Counters,
        is_weight: Callable[[torch.Tensor], bool],
        least_nbytes: int,
        host_capacity: Callable[[], int],
        timeout_s: float,
        auto: AutoPlaces | None = None,
        most_leaving_nbytes: int = MOST_AHEAD_NBYTES,
    ) -> None:
        self._device = device
        self._copies = copies
        self._resident = resident
        self._counters = counters
        self._is_weight = is_weight
        self._least_nbytes = max(least_nbytes, 1)
        self._host_capacity = host_capacity
        self._auto = auto
        self._n_reconsidered = 0
        self._most_leaving_nbytes = most_leaving_nbytes
        self._lock = threading.RLock()  # see [Note: one lock]
        self._closed = False
        self._warned = False
        self._dropped = DroppedBlocks()
        self._stored = StoredBlocks(open_store, staging, counters, timeout_s, self._dropped, self._collect)
        self._reloads = Reloads(copies, self._stored, counters)
        self._by_address: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        self._leaving: deque[tuple[weakref.ref[Block], torch.UntypedStorage, DeviceEvent | None]] = deque()
        self._leaving_nbytes = 0
        self._pass: list[weakref.ref[Block]] = []
        self._live: weakref.WeakSet[Block] = weakref.WeakSet()
        self.in_flight: list[tuple[torch.Tensor, Ticket]] = []
        """Requests that may not have been over at :meth:`close`, with their buffers."""
        self._recorder = PassRecorder()
        self._recorded: RecordedPass | None = None
        self._places: Sequence[Place] = ()
        self._moved_nbytes = 0
        self._figures = ActivationFigures()

    # Forward

    def begin_forward(self, elements: int = 0) -> bool:
        """A forward pass begins. The passes before it are recorded if their backward has begun, or forgotten if their
        graphs are gone; otherwise their backward is still to come, and this one is a part of the same pass.

        Args:
            elements: of its input; 0 if that is not known.

        Returns:
            Whether its tensors are to be given to :meth:`save`; autograd keeps them itself otherwise.
        """
        with self._lock:
            self._collect()
            is_over = self._recorder.in_backward or all(reference() is None for reference in self._pass)
            if self._auto is None or (is_over and self._auto.passed):
                if is_over:
                    self._begin_pass(elements)
            else:
                self._auto.go_on(elements)
            return self._auto is None or self._auto.takes

    def begin_backward(self) -> None:
        """A backward pass begins, whether or not it will need anything from here."""
        if self._auto is not None:
            with self._lock:
                self._auto.begin_backward()

    def save(self, tensor: torch.Tensor) -> MovedTensor | KeptTensor:
        """The pack hook: what autograd keeps instead of a tensor.

        Raises:
            StorageError: an activation could not be written.
            TenCacheError: after :meth:`close`.
        """
        if not self._may_move(tensor):
            return KeptTensor(tensor)
        with self._lock, torch.no_grad():
            self._check_open()
            self._collect()
            self._copies.saving()
            storage = tensor.untyped_storage()
            block = self._by_address.get(storage._cdata)
            if block is None or block.version != tensor._version or block.nbytes != storage.nbytes():
                block = self._save_block(tensor)
                self._by_address[storage._cdata] = block
            block.n_waiting += 1
            return MovedTensor(block, tensor)

    def _may_move(self, tensor: torch.Tensor) -> bool:
        # Exactly a tensor: a subclass may keep its bytes elsewhere, and a parameter is no activation.
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device != self._device:
            return False
        if isinstance(tensor._base, torch.nn.Parameter) or tensor.is_conj() or tensor.is_neg():
            return False
        return tensor.untyped_storage().nbytes() >= self._least_nbytes and not self._is_weight(tensor)

    def _save_block(self, tensor: torch.Tensor) -> Block:
        if self._recorder.in_backward:
            self._begin_pass()
        nbytes = tensor.untyped_storage().nbytes()
        position = self._recorder.saved(nbytes, time.perf_counter())
        place = self._place_of(position, nbytes)
        block = Block(tensor, position, place, self._dropped.queue)
        self._pass.append(weakref.ref(block))
        self._live.add(block)
        if block.place is not Place.GPU:
            self._move_out(block)
        if self._auto is not None:
            if block.place is Place.GPU:
                self._auto.kept(nbytes)
            self._make_room(self._auto)
        return block

    def _place_of(self, position: int, nbytes: int) -> Place:
        """The place of the block that a pass saves next."""
        auto = self._auto
        if auto is None:
            return self._places[position] if position < len(self._places) else self._place_off_device(nbytes)
        auto.saved(nbytes)
        place = self._places[position] if position < len(self._places) else Place.GPU
        if place is Place.GPU and auto.crowded and not self._is_held_elsewhere(position, nbytes):
            return self._place_off_device(nbytes)
        return place

    def _place_off_device(self, nbytes: int) -> Place:
        left_nbytes = self._host_capacity() - self._resident.used_nbytes
        return place_unplanned(nbytes, host_left_nbytes=left_nbytes, has_nvme=self._stored.available)

    def _make_room(self, auto: AutoPlaces) -> None:
        """Moves the earliest blocks that have stayed, which backward needs last, until the pass takes no more than it
        may."""
        while auto.excess_nbytes > 0 and self._n_reconsidered < len(self._pass):
            block = self._pass[self._n_reconsidered]()
            self._n_reconsidered += 1
            if block is None or block.place is not Place.GPU or block.current_version != block.version:
                continue
            if self._is_held_elsewhere(block.position, block.nbytes):
                continue
            block.place = self._place_off_device(block.nbytes)
            if block.place is not Place.GPU:
                self._move_out(block)
            if block.place is not Place.GPU:
                auto.moved(block.nbytes)

    def _move_out(self, block: Block) -> None:
        storage = block.storage
        if storage is None or not self._take_buffer(block):
            block.place = Place.GPU
            return
        target = block.host_bytes
        with span(Category.COPY, "copy::activation_out", block.name, block.nbytes):
            block.left = self._copies.out(target, _bytes_of(storage))
        self._counters.moved(Link.D2H, block.nbytes)
        if self._waits is not None:
            self._waits.moved(block.position, block.nbytes, block.place)
        self._moved_nbytes += block.nbytes
        self._leaving.append((weakref.ref(block), storage, block.left))
        self._leaving_nbytes += block.nbytes
        if block.place is Place.NVME:
            self._stored.write(block)
        del storage
        self._let_leave()
        self._stored.proceed()

    def _take_buffer(self, block: Block) -> bool:
        """A host buffer for a block that leaves the device; False if there is none, so that it has to stay."""
        try:
            if block.place is Place.HOST:
                block.buffers, block.host = self._resident, self._resident.take(block.nbytes)
                if block.host is not None or not self._stored.available:
                    return block.host is not None
                block.place = Place.NVME
            self._stored.take_buffer(block)
        except MemoryLimitError as error:
            if not self._warned:
                self._warned = True
                logger.warning("an activation stays in device memory, for want of host memory: %s", error)
            return False
        return True

    def _let_leave(self) -> None:
        """Frees device memory whose copy is done, and by order of streams that of the oldest copies if there are many.
        The newest does not count: waiting for it would leave no work that its copy could run beside. See [Note:
        streams] in :mod:`tencache_ds.activations.copies`."""
        while self._leaving:
            reference, storage, event = self._leaving[0]
            if event is not None and not event.query():
                if self._leaving_nbytes - self._leaving[-1][1].nbytes() <= self._most_leaving_nbytes:
                    return
                before = None if self._waits is None else self._waits.mark()
                self._copies.wait(event)
                if self._waits is not None and (leaving := reference()) is not None:
                    self._waits.waited(leaving.position, before)
            self._leaving.popleft()
            self._leaving_nbytes -= storage.nbytes()
            block = reference()
            if block is not None:
                block.storage = None

    # Backward

    def load(self, saved: MovedTensor) -> torch.Tensor:
        """The unpack hook of a moved tensor: the same bytes, shape and strides. It may be called more than once.

        Raises:
            InplaceChangeError: the tensor was modified after it was saved.
            StorageError: the activation could not be read, or written before; names it.
            TenCacheError: after :meth:`close`.
        """
        saved.check()
        block = saved.block
        with self._lock, torch.no_grad():
            self._check_open()
            self._let_leave()
            self._stored.proceed()
            if not self._recorder.in_backward:
                self._begin_backward()
            storage = self._bring(block)
            if not saved.unpacked:
                saved.unpacked = True
                block.n_waiting -= 1
            if block.place is not Place.GPU and block.storage is not storage:
                # Kept for the other handles on it; afterwards as long as the nodes that use it now.
                block.reloaded = StorageWeakRef(storage)
                block.storage = storage if block.n_waiting else None
            elif block.place is not Place.GPU and not block.n_waiting and not self._is_leaving(block):
                block.storage = None
            self._reloads.look_ahead(block)
            return saved.view_of(storage)

    def _is_leaving(self, block: Block) -> bool:
        return any(reference() is block for reference, _, _ in self._leaving)

    def _begin_backward(self) -> None:
        order = reload_order(self._recorder.n_saved, self._recorded)
        self._reloads.begin_backward(self._pass, order, reload_window_nbytes(self._moved_nbytes))
        nbytes = dict.fromkeys(Place, 0)
        for reference in self._pass:
            block = reference()
            if block is not None:
                nbytes[block.place] += block.nbytes
        self._figures = ActivationFigures(nbytes[Place.GPU], nbytes[Place.HOST], nbytes[Place.NVME])

    def _bring(self, block: Block) -> torch.UntypedStorage:
        """A block's storage, on which later work of the current stream may be issued."""
        now_s, storage, is_held = time.perf_counter(), block.storage, False
        if storage is None and block.reloaded is not None:
            storage = alive(block.reloaded)
        if storage is None and block.arriving is None:
            storage = block.held_elsewhere()
            is_held = storage is not None
        elif block.place is Place.GPU:
            is_held = self._is_held_elsewhere(block.position, block.nbytes)
        if block.position < len(self._pass) and self._pass[block.position]() is block:
            self._recorder.needed(block.position, now_s, held_elsewhere=is_held)
        return self._reloads.bring(block, self._waits) if storage is None else storage

    def _is_held_elsewhere(self, position: int, nbytes: int) -> bool:
        """Whether the training held the memory of this block in the recorded pass. Of one that stayed for that reason,
        nothing can be seen any more, so it goes on."""
        return self._recorded is not None and self._recorded.is_held_elsewhere(position, nbytes)

    # Passes

    @property
    def _waits(self) -> MoveWaits | None:
        return None if self._auto is None else self._auto.waits

    def _begin_pass(self, elements: int = 0) -> None:
        """Plans the next pass with what is known of the last one."""
        recorded: RecordedPass | None = None
        if self._recorder.in_backward:
            recorded = self._recorded = self._recorder.result()
            self._figures = replace(self._figures, n_ahead=self._reloads.n_ahead, n_late=self._reloads.n_late)
        if self._auto is not None:
            self._auto.begin_pass(recorded, elements)
            self._plan_auto(self._auto)
        elif recorded is not None:
            self._places = self._plan(recorded.blocks, None)
        self._recorder = PassRecorder()
        self._pass = []
        self._reloads.end_pass()
        self._moved_nbytes = self._n_reconsidered = 0

    def _plan_auto(self, auto: AutoPlaces) -> None:
        if not auto.takes:
            self._places = ()
            self._figures = ActivationFigures(kept_nbytes=auto.expected_nbytes)
        elif self._recorded is not None:
            blocks, to_move_nbytes = self._recorded.blocks, auto.to_move_nbytes
            if to_move_nbytes == 0 and not auto.leaving:
                self._places = (Place.GPU,) * len(blocks)
            else:
                self._places = self._plan(blocks, to_move_nbytes, auto.leaving)
            auto.planned(self._places, [block.nbytes for block in blocks])

    def _plan(
        self, blocks: Sequence[SavedBlock], to_move_nbytes: int | None, leaving: Collection[int] = ()
    ) -> Sequence[Place]:
        return plan_places(
            blocks,
            self._copies.rates(),
            host_nbytes=self._host_capacity(),
            has_nvme=self._stored.available,
            to_move_nbytes=to_move_nbytes,
            leaving=leaving,
        )

    def _collect(self) -> None:
        """Frees what dropped blocks have left behind, as far as nothing accesses it any more."""
        self._reloads.dropped(self._dropped.collect(self._stored.free))

    # Reporting and lifetime

    @property
    def figures(self) -> ActivationFigures:
        """Figures of the last pass. Any thread."""
        return self._figures

    @property
    def host_nbytes(self) -> int:
        """Host memory allocated for activations: their buffers, used and free."""
        return self._resident.allocated_nbytes + self._stored.buffer_nbytes

    @property
    def live_nbytes(self) -> int:
        """Bytes of the blocks that a graph still needs, wherever they are."""
        with self._lock:
            return sum(block.nbytes for block in self._live)

    def step_done(self) -> None:
        """An optimizer step begins, so that passes are over: frees what dropped graphs have left.

        Raises:
            StorageError: a write of an activation failed that nobody has read.
        """
        with self._lock:
            self._let_leave()
            self._stored.proceed()
            self._stored.check()
            if self._auto is not None:
                self._auto.step_done()
                if not self._auto.takes:
                    self.trim()

    def trim(self) -> None:
        """Frees host memory that no block is in."""
        with self._lock:
            self._collect()
            self._resident.trim()

    def close(self) -> None:
        """Ends it; the store is closed by its owner, before the memory of the buffers is freed. Graphs that still need
        a moved tensor cannot be run backward any more. Idempotent."""
        with self._lock:
            self._closed = True
            self.in_flight = self._requests()
            # Device memory that is freed now is reused by work that comes after the copies.
            for event in (*(event for _, _, event in self._leaving), *self._dropped.events()):
                self._copies.wait(event)
            self._leaving.clear()
            self._stored.close()
            self._dropped.forget()
            self._pass = []

    def _requests(self) -> list[tuple[torch.Tensor, Ticket]]:
        """Requests that may be under way, with their buffers."""
        found = list(self._dropped.requests())
        for block in self._live:
            if block.host is not None:
                found += [(block.host, ticket) for ticket in (block.written, block.reading) if ticket is not None]
        return found

    def _check_open(self) -> None:
        if self._closed:
            raise TenCacheError(
                "this DeepSpeed engine was destroyed, and the activations that it had moved with it: run backward "
                "before destroy()"
            )


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, as a 1-D uint8 tensor."""
    return empty(0, torch.uint8, storage.device).set_(storage)
