# SPDX-License-Identifier: Apache-2.0
"""Where the tensors that a forward pass saves for backward are kept, and in which order they are reloaded.

Pure decisions from one recorded pass. They are applied by position: the i-th block that a pass saves goes where the
i-th of the recorded pass should have gone, whatever its size is now. A wrong guess costs time, never data.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tencache_ds.placement.places import Place

MOST_AHEAD_NBYTES = 128 * 2**20
"""Device memory for blocks that are reloaded before backward needs them: at 50 GB/s, 2.7 ms of copies."""

LEAST_ROUNDS_AHEAD = 8
"""Parts of the moved bytes of a pass, at most one of which is reloaded ahead."""


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """One block of a recorded pass, in the order in which they were saved.

    Attributes:
        nbytes: its size.
        t_saved_s: when it was saved.
        t_needed_s: when backward first needed it; None if it did not.
        held_elsewhere: the training still held its memory when it was needed, so that moving it freed nothing.
    """

    nbytes: int
    t_saved_s: float
    t_needed_s: float | None
    held_elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class RecordedPass:
    """A forward and backward pass.

    Attributes:
        blocks: in the order in which they were saved.
        order: positions in ``blocks``, in the order in which backward first needed them.
    """

    blocks: tuple[SavedBlock, ...]
    order: tuple[int, ...]

    def is_held_elsewhere(self, position: int, nbytes: int) -> bool:
        """Whether the training held the memory of the block at this position, if it had this size."""
        if position >= len(self.blocks):
            return False
        block = self.blocks[position]
        return block.held_elsewhere and block.nbytes == nbytes


class PassRecorder:
    """Takes down what one pass saves and when backward needs it, as it happens. Not thread-safe."""

    def __init__(self) -> None:
        self._saved: list[tuple[int, float]] = []
        self._needed: dict[int, float] = {}
        self._held_elsewhere: set[int] = set()

    @property
    def n_saved(self) -> int:
        """Blocks saved so far: the position of the next one."""
        return len(self._saved)

    @property
    def in_backward(self) -> bool:
        """Whether one of them has been needed."""
        return bool(self._needed)

    def saved(self, nbytes: int, t_s: float) -> int:
        """A block was saved; returns its position."""
        self._saved.append((nbytes, t_s))
        return len(self._saved) - 1

    def needed(self, position: int, t_s: float, *, held_elsewhere: bool) -> None:
        """Backward needs a block; only the first time counts."""
        if position not in self._needed:
            self._needed[position] = t_s
            if held_elsewhere:
                self._held_elsewhere.add(position)

    def result(self) -> RecordedPass:
        """The pass as it was."""
        blocks = tuple(
            SavedBlock(nbytes, t_s, self._needed.get(position), position in self._held_elsewhere)
            for position, (nbytes, t_s) in enumerate(self._saved)
        )
        return RecordedPass(blocks, tuple(self._needed))


@dataclass(frozen=True, slots=True)
class MoveRates:
    """Measured bandwidths.

    Attributes:
        out_bytes_per_s: from device to host memory.
        back_bytes_per_s: from host to device memory.
    """

    out_bytes_per_s: float
    back_bytes_per_s: float


def plan_places(
    blocks: Sequence[SavedBlock],
    rates: MoveRates | None,
    *,
    host_nbytes: int,
    has_nvme: bool,
    to_move_nbytes: int | None = None,
    leaving: Collection[int] = (),
) -> tuple[Place, ...]:
    """The place of each block of the next pass.

    A block stays on the device if its bytes cannot be out and back again before it is needed, as for those saved last,
    or if moving it frees nothing. Of the others, the last saved go to host memory and the rest, which are needed last,
    to NVMe. Without NVMe the earliest saved go to host memory and the rest stay.

    Args:
        blocks: of the recorded pass.
        rates: None if unknown: then every block is assumed to be out in time.
        host_nbytes: host memory for all of them together.
        has_nvme: whether there is NVMe storage for them.
        to_move_nbytes: what has to leave the device, as far as moving it frees anything: the earliest blocks, at first
            of those that are back in time. None: all that are back in time.
        leaving: positions of blocks that leave in any case and count towards ``to_move_nbytes``.
    """
    moving = _out_in_time(blocks, rates)
    if to_move_nbytes is not None:
        moving = _least(blocks, moving, to_move_nbytes, leaving)
    places = [Place.GPU] * len(blocks)
    left_nbytes = host_nbytes
    for index in reversed(moving) if has_nvme else moving:
        nbytes = blocks[index].nbytes
        if nbytes <= left_nbytes:
            places[index] = Place.HOST
            left_nbytes -= nbytes
        else:
            # No later one in this order takes what is left: distances decide, not sizes.
            left_nbytes = -1
            places[index] = Place.NVME if has_nvme else Place.GPU
    return tuple(places)


def _least(blocks: Sequence[SavedBlock], in_time: Sequence[int], nbytes: int, leaving: Collection[int]) -> list[int]:
    """Indices of as many blocks as have so many bytes together: those that leave in any case, then the earliest of
    those in time, then of the others."""
    known = set(in_time)
    late = [index for index, block in enumerate(blocks) if not block.held_elsewhere and index not in known]
    found = {index for index in leaving if index < len(blocks) and not blocks[index].held_elsewhere}
    nbytes -= sum(blocks[index].nbytes for index in found)
    for index in (*in_time, *late):
        if nbytes <= 0:
            break
        if index not in found:
            found.add(index)
            nbytes -= blocks[index].nbytes
    return sorted(found)


def _out_in_time(blocks: Sequence[SavedBlock], rates: MoveRates | None) -> list[int]:
    """Indices of the blocks whose memory is worth freeing, with one copy at a time in each direction."""
    found = []
    t_out_s = float("-inf")
    for index, block in enumerate(blocks):
        if block.held_elsewhere:
            continue
        if rates is not None:
            t_left_s = max(t_out_s, block.t_saved_s) + block.nbytes / rates.out_bytes_per_s
            t_back_s = t_left_s + block.nbytes / rates.back_bytes_per_s
            if block.t_needed_s is not None and t_back_s > block.t_needed_s:
                continue
            t_out_s = t_left_s
        found.append(index)
    return found


def place_unplanned(nbytes: int, *, host_left_nbytes: int, has_nvme: bool) -> Place:
    """The place of a block that no recorded pass says anything about: the fastest off the device that has room."""
    if nbytes <= host_left_nbytes:
        return Place.HOST
    return Place.NVME if has_nvme else Place.GPU


def reload_order(n_saved: int, recorded: RecordedPass | None) -> tuple[int, ...]:
    """Positions of the blocks in the order in which backward is expected to need them.

    Args:
        n_saved: blocks that this pass has saved.
        recorded: the last pass, if there was one. Its order is taken where it has saved as many blocks and backward
            has needed any; otherwise, the reverse order of saving.
    """
    if recorded is not None and recorded.order and len(recorded.blocks) == n_saved:
        return recorded.order
    return tuple(reversed(range(n_saved)))


def reload_window_nbytes(moved_nbytes: int) -> int:
    """Device memory for blocks that are reloaded ahead of their use, out of the bytes that a pass has moved. A single
    block may be larger."""
    return min(MOST_AHEAD_NBYTES, moved_nbytes // LEAST_ROUNDS_AHEAD)
