# SPDX-License-Identifier: Apache-2.0
"""Host memory of the weights that stay there, packed into slabs."""

from __future__ import annotations

import threading

import torch

from tencache_ds.memory.arena import HostArena

SLAB_NBYTES = 2 * 2**20
"""One registration with the driver per slab instead of one per small weight. Larger weights get their own memory, which
goes back when they move to GPU memory; that of a slab stays as long as one of its weights is in it."""

ALIGNMENT_NBYTES = 256


class ResidentMemory:
    """Hands out pieces of an arena, in any thread; pieces that are not returned are freed by the arena's owner."""

    def __init__(self, arena: HostArena) -> None:
        self.arena = arena
        self._lock = threading.Lock()
        self._slab: torch.Tensor | None = None
        self._used = 0
        self._pieces: dict[int, tuple[torch.Tensor, int]] = {}  # by storage: its slab, and how many pieces are in use

    def take(self, nbytes: int) -> torch.Tensor:
        """A zeroed 1-D uint8 tensor of ``nbytes``.

        Raises:
            MemoryLimitError, LockedMemoryError: the arena has no such memory.
        """
        with self._lock:
            length = -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
            if length >= SLAB_NBYTES:
                slab = self.arena.allocate(length, "resident weights")
                piece = slab[:length]
            else:
                if self._slab is None or self._used + length > self._slab.numel():
                    self._slab, self._used = self.arena.allocate(SLAB_NBYTES, "resident weights"), 0
                slab = self._slab
                piece = slab[self._used : self._used + length]
                self._used += length
            _, n_pieces = self._pieces.get(_address(slab), (slab, 0))
            self._pieces[_address(slab)] = slab, n_pieces + 1
        return piece.zero_()[:nbytes]

    def shares_pages(self, nbytes: int) -> bool:
        """Whether a piece of ``nbytes`` is in a slab with others."""
        return nbytes + ALIGNMENT_NBYTES <= SLAB_NBYTES

    def give_back(self, piece: torch.Tensor) -> None:
        """A piece is not needed any more. A slab goes back to the system when all of its pieces are, and when nothing
        refers to it any more; no device may still access it.

        Raises:
            LockedMemoryError: the driver refused; the memory stays mapped.
        """
        with self._lock:
            slab, n_pieces = self._pieces[_address(piece)]
            if n_pieces > 1:
                self._pieces[_address(piece)] = slab, n_pieces - 1
                return
            del self._pieces[_address(piece)]
            if self._slab is slab:
                self._slab = None
        self.arena.leave(slab)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
