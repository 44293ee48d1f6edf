# SPDX-License-Identifier: Apache-2.0
"""Places of the tensors that a forward pass saves for backward: where each is kept, the order of reloads, and how many
bytes have to leave GPU memory.

[Note: places by position] Pure decisions from one recorded pass. They are applied by position: the i-th block that a
pass saves goes where the i-th of the recorded pass should have gone, whatever its size is now. A wrong guess costs
time, never data.

[Note: room for activations] Nothing is known about the first pass, and what its backward is going to take cannot be
told from its forward: with checkpointing it may be several times what that has saved. So its tensors stay only until it
has taken an eighth of the memory that was free when it began. From then on everything that it has saved and is going to
save is moved. This costs time in one pass only; running out of memory would end the training.

Once a pass is over, two figures of it are known: what it saved, which grows with its input and can be moved, and what
it took beside that, which cannot. Together they are what a pass would take if everything stayed. Where that fits,
autograd keeps its tensors itself, which costs nothing, and memory is looked at only when a pass begins. Three things
end that: an input larger than any recorded one, less free memory than a pass needs, and an allocation that failed. The
following pass is then recorded like the first. After one of the latter two it takes a number of quiet steps until
everything stays again, and twice as many if that was wrong.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tencache_ds.names import StrEnum
from tencache_ds.placement.gpu_policy import LOST_SHARE
from tencache_ds.placement.memory_watch import Patience, pause_s
from tencache_ds.placement.places import GpuUsage, Place

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


UNKNOWN_SHARE = 0.125
"""Share of the memory free at the start of a pass that it may take before its activations move, if nothing is known."""

FORWARD_SHARE = 0.5
"""The same for a pass whose size was predicted: what it may take before activations move that were to stay."""

SPARE_SHARE = 0.25
"""Where activations have to move, so much more than a pass is expected to take is made free."""

LOOKS = 32
"""Memory is looked at when a pass has saved this part of what was free, however short ago the last look was."""

FIRST_PATIENCE, LONGEST_PATIENCE = 16, 4096
"""Steps before everything stays again, the first time and at most."""


class Cause(StrEnum):
    """Why tensors are taken from autograd."""

    UNKNOWN = "no pass has been recorded"
    LARGER = "its input is larger than any before"
    SHORT = "less GPU memory is free than such a pass takes"
    FAILED = "an allocation of GPU memory failed"
    PLANNED = "the memory saves more time with weights and optimizer state in it"


class ActivationRoom:
    """The memory of one GPU over passes; decides nothing but numbers of bytes. One thread at a time."""

    def __init__(self) -> None:
        self.cause: Cause | None = Cause.UNKNOWN
        """Why the tensors of the pass are taken; None: autograd keeps them."""
        self.crowded = False
        """Whether tensors that this pass saves from now on have to move, wherever they were to be."""
        self.wanted = False
        """Whether tensors are to be taken even where everything fits."""
        self._whole = False  # taken from the beginning of the pass
        self._is_over = True  # its peak has been seen
        self._elements = 0  # of the pass, so far
        self._start_nbytes = self._free_nbytes = self._peak_nbytes = self._n_failures = 0
        self._has_failed = False
        self._now_nbytes = 0  # taken by the pass when it was looked at last
        self._kept_nbytes = 0  # of what it has saved
        self._other_nbytes = 0  # the most that it took beside that
        self._unseen_nbytes = 0  # saved since then
        self._t_next_look_s = 0.0
        self._most_elements = self._last_elements = 0  # of recorded passes
        self._saved_nbytes = self._beside_nbytes = 0  # by the largest of them, and beside that by any
        self._is_recorded = False
        self._patience = Patience(FIRST_PATIENCE, LONGEST_PATIENCE)
        self._was_short = False

    # A pass begins

    def begin_pass(self, usage: GpuUsage, elements: int, releasable_nbytes: int = 0) -> None:
        """The first forward of a pass; afterwards :attr:`cause` says whether its tensors are taken.

        Args:
            usage: at present.
            elements: of its input; 0 if that is not known.
            releasable_nbytes: of optimizer state, which leaves when a pass needs the memory.
        """
        failed, partly = self._has_failed, self.cause is not None and not self._whole
        self._elements, self._whole, self._is_over, self.crowded = elements, True, False, False
        self._has_failed, self._n_failures = False, usage.n_failures
        self._start_nbytes, self._free_nbytes = usage.allocated_nbytes, usage.available_nbytes
        self._peak_nbytes = usage.peak_nbytes
        self._now_nbytes = self._kept_nbytes = self._other_nbytes = self._unseen_nbytes = 0
        self._t_next_look_s = 0.0
        if not self._is_recorded:
            self.cause = Cause.FAILED if failed else Cause.UNKNOWN
        elif failed:
            self._disturbed(Cause.FAILED)
        elif elements > self._most_elements or partly:
            self.cause = Cause.LARGER
        elif self.cause is None:
            if not self._fits(releasable_nbytes):
                self._disturbed(Cause.SHORT)
        elif self._was_short and not self._patience.over:
            if not self._fits(0, SPARE_SHARE):
                self._patience.undone()
        elif self._fits(0, SPARE_SHARE if self._was_short else LOST_SHARE):
            self.cause = None
            if self._was_short:
                self._patience.tried()
        else:
            self._disturbed(Cause.SHORT)
        if self.cause is None and self.wanted:
            self.cause = Cause.PLANNED

    def go_on(self, elements: int) -> None:
        """Another forward of the same pass, before its backward."""
        self._elements += elements
        if self.cause is None and self._elements > self._most_elements > 0:
            self.cause, self._whole = Cause.LARGER, False

    def _disturbed(self, cause: Cause) -> None:
        self.cause, self._was_short = cause, True
        self._patience.undone()

    def _fits(self, releasable_nbytes: int, share: float = LOST_SHARE) -> bool:
        """Whether the pass is expected to, with everything that it saves."""
        return (1 + share) * self.expected_nbytes <= self._free_nbytes + releasable_nbytes

    @property
    def expected_nbytes(self) -> int:
        """What the pass is expected to take if everything stays. Of what passes take beside saved tensors, a part grows
        with their input and another does not, such as gathered weights."""
        ratio = self._ratio(self._most_elements)
        return int(ratio * self._saved_nbytes + max(ratio, 1.0) * self._beside_nbytes)

    @property
    def saved_nbytes(self) -> int:
        """The part of that which the pass is expected to save."""
        return int(self._ratio(self._most_elements) * self._saved_nbytes)

    @property
    def free_nbytes(self) -> int:
        """When the pass began."""
        return self._free_nbytes

    def to_move_nbytes(self) -> int:
        """What of this pass is to move, in bytes of the last recorded pass, which may have been of another size."""
        if self._fits(0):
            return 0
        to_move_nbytes = self.expected_nbytes - int(self._free_nbytes / (1 + SPARE_SHARE))
        return math.ceil(to_move_nbytes / self.growth)

    @property
    def growth(self) -> float:
        """The size of this pass relative to the last recorded one."""
        return self._ratio(self._last_elements)

    def _ratio(self, elements: int) -> float:
        """The size of this pass relative to one with so many elements; 1 where one of the two is not known."""
        return self._elements / elements if self._elements and elements else 1.0

    # Within the pass

    def saved(self, nbytes: int, now_s: float) -> bool:
        """Whether memory is to be looked at: so many more bytes were saved."""
        self._unseen_nbytes += nbytes
        return now_s >= self._t_next_look_s or self._unseen_nbytes * LOOKS >= self._free_nbytes

    def look(self, usage: GpuUsage, now_s: float, cost_s: float) -> None:
        """
        Args:
            usage: at present.
            now_s: the time.
            cost_s: what finding out took.
        """
        self._t_next_look_s, self._unseen_nbytes = now_s + pause_s(cost_s), 0
        self._now_nbytes = usage.allocated_nbytes - self._start_nbytes
        self._other_nbytes = max(self._other_nbytes, self._now_nbytes - self._kept_nbytes)
        self._see_peak(usage)
        # Another process may have taken some.
        self._free_nbytes = min(self._free_nbytes, usage.available_nbytes + max(self._now_nbytes, 0))
        self.crowded = self.crowded or self._now_nbytes > self._limit_nbytes

    @property
    def excess_nbytes(self) -> int:
        """Bytes kept on the GPU that must now be offloaded: everything if nothing is known about the pass; otherwise 0
        or less until half of the rest is taken as well."""
        if self._is_unknown:
            return self._kept_nbytes if self.crowded else 0
        if self._now_nbytes <= (self._limit_nbytes + self._free_nbytes) // 2:
            return 0
        return self._now_nbytes - self._limit_nbytes

    @property
    def _limit_nbytes(self) -> int:
        """What a pass may take in forward before anything has to move that was to stay."""
        if self._is_unknown:
            return int(UNKNOWN_SHARE * self._free_nbytes)
        growth = max(self._ratio(self._most_elements), 1.0)
        left_nbytes = max(self._free_nbytes - int((1 + SPARE_SHARE) * growth * self._beside_nbytes), 0)
        forward_nbytes = int(FORWARD_SHARE * self._free_nbytes)
        if self.cause is Cause.LARGER:  # nothing was planned for it
            return min(forward_nbytes, left_nbytes)
        return max(forward_nbytes, min(left_nbytes, int(self._free_nbytes / (1 + LOST_SHARE))))

    @property
    def _is_unknown(self) -> bool:
        """Whether recorded passes tell nothing about what this one takes."""
        return self.cause in (Cause.UNKNOWN, Cause.FAILED)

    def kept(self, nbytes: int) -> None:
        """Records ``nbytes`` kept on the GPU."""
        self._kept_nbytes += nbytes

    def moved(self, nbytes: int) -> None:
        """So much of what had stayed is on its way."""
        self._kept_nbytes -= nbytes
        self._now_nbytes -= nbytes

    # Its end

    def passed(self, usage: GpuUsage) -> None:
        """Backward is over, and nothing else has taken memory since; only the first call for a pass counts."""
        if self._is_over:
            return
        self._is_over = True
        self._see_peak(usage)
        if usage.n_failures > self._n_failures:
            self._has_failed = True
            stayed_nbytes = self._limit_nbytes
            if self.cause is None:
                stayed_nbytes = int(self._ratio(self._most_elements) * self._saved_nbytes)
            self._beside_nbytes = max(self._beside_nbytes, self._free_nbytes - stayed_nbytes)

    def _see_peak(self, usage: GpuUsage) -> None:
        """Called before blocks move that had stayed, so that what was kept then is what was kept at a new peak."""
        if usage.peak_nbytes > self._peak_nbytes:  # it counts from the start of recording: this pass has set it
            self._peak_nbytes = usage.peak_nbytes
            taken_nbytes = usage.peak_nbytes - self._start_nbytes
            self._other_nbytes = max(self._other_nbytes, taken_nbytes - self._kept_nbytes)

    def record(self, saved_nbytes: int, held_nbytes: int) -> None:
        """A pass of which tensors were taken is over; after :meth:`passed`.

        Args:
            saved_nbytes: what it has saved.
            held_nbytes: the part of that which the training held anyway, so that it took nothing.
        """
        self._beside_nbytes = max(self._beside_nbytes, self._other_nbytes + held_nbytes)
        if not self._whole:
            return
        saved_nbytes -= held_nbytes
        if self._elements >= self._most_elements or saved_nbytes > self._saved_nbytes:
            self._saved_nbytes = saved_nbytes
            self._most_elements = max(self._elements, self._most_elements)
        self._last_elements = self._elements
        self._is_recorded = True

    def step_done(self) -> None:
        """An optimizer step is over."""
        self._patience.step_done()
