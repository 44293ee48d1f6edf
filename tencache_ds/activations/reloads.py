# SPDX-License-Identifier: Apache-2.0
"""Brings blocks back to the device: when backward needs them, and ahead of that.

Two walks go ahead of backward: reads from NVMe into host buffers, as far as there are buffers, and copies to the
device, as far as their window allows. Both follow the order of the recorded pass. What they have not brought is brought
when it is needed, so an order that differs costs time only.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from tencache_ds.activations.blocks import Block, StoredBlocks
from tencache_ds.activations.copies import Copies
from tencache_ds.io import Priority
from tencache_ds.memory.lease import DeviceEvent
from tencache_ds.observability.counters import Counters, Link
from tencache_ds.observability.spans import Category, span
from tencache_ds.placement.places import Place
from tencache_ds.profiling.waits import MoveWaits


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
