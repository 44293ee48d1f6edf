# SPDX-License-Identifier: Apache-2.0
"""``"activations": "auto"`` for one engine: looks at GPU memory, and says in the log what becomes of activations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from tencache_ds.layout import gib
from tencache_ds.placement.activation_policy import ActivationRoom, RecordedPass
from tencache_ds.placement.places import GpuUsage, Place
from tencache_ds.profiling.waits import MoveCost, MoveWaits, StreamClock


class AutoPlaces:
    """Guarded by the lock of its :class:`~tencache_ds.activations.saved_tensors.SavedTensors`.

    Args:
        usage: of GPU memory, now.
        releasable_nbytes: optimizer state that leaves GPU memory when a pass needs it.
        say: tells the user, on one rank, what becomes of activations from now on.
    """

    def __init__(
        self, usage: Callable[[], GpuUsage], releasable_nbytes: Callable[[], int], say: Callable[[str], None]
    ) -> None:
        self._usage = usage
        self._releasable_nbytes = releasable_nbytes
        self._say = say
        self._room = ActivationRoom()
        self._backward_began, self._saved_any = True, False
        self._said: Literal["", "stay", "move"] = ""
        self.waits: MoveWaits | None = None
        """Measures what moves cost, if that is wanted at present."""
        self.leaving: frozenset[int] = frozenset()
        """Positions of blocks that move in any case."""

    # Passes

    @property
    def takes(self) -> bool:
        """Whether the tensors of this pass are taken from autograd."""
        return self._room.cause is not None

    @property
    def passed(self) -> bool:
        """Whether the next forward begins another pass, as far as can be told without its tensors."""
        return self.takes or self._backward_began

    def begin_pass(self, recorded: RecordedPass | None, elements: int) -> None:
        """A forward of another pass begins.

        Args:
            recorded: the pass before, if its tensors were taken and backward has needed any.
            elements: of its input.
        """
        usage = self._usage()
        self._room.passed(usage)
        if recorded is not None:
            blocks = recorded.blocks
            held_nbytes = sum(block.nbytes for block in blocks if block.held_elsewhere)
            self._room.record(sum(block.nbytes for block in blocks), held_nbytes)
        elif self.takes and self._backward_began and not self._saved_any:
            self._room.record(0, 0)  # there is nothing to take
        self._backward_began = self._saved_any = False
        self._room.begin_pass(usage, elements, self._releasable_nbytes())
        if not self.takes and self._said != "stay":
            self._said = "stay"
            self._say(
                f"activations stay in GPU memory from now on: a pass takes {gib(self._room.expected_nbytes)} with "
                f"them, of {gib(self._room.free_nbytes)} that are free"
            )

    # What a plan for all kinds of data decides

    def measure(self, clock: StreamClock) -> None:
        """In the next step all blocks move that can be back in time, and what each costs is measured."""
        if self.waits is None:
            self._say("activations are moved in some steps, to measure what that costs")
        self.waits = MoveWaits(clock)
        self.leaving = frozenset()
        self._room.wanted = True

    def measured(self) -> dict[int, MoveCost]:
        """Cost of each block that was moved in the last step, by its position."""
        return {} if self.waits is None else self.waits.costs()

    def follow(self, leaving: Iterable[int]) -> None:
        """From the next pass on these blocks move, and others only where they do not fit.

        Args:
            leaving: positions.
        """
        self.waits, self.leaving = None, frozenset(leaving)
        self._room.wanted = bool(self.leaving)
        self._said = ""

    def go_on(self, elements: int) -> None:
        """Another forward of the same pass begins."""
        self._room.go_on(elements)

    def begin_backward(self) -> None:
        """A backward pass begins."""
        self._backward_began = True

    def planned(self, places: Sequence[Place], nbytes: Sequence[int]) -> None:
        """The pass that begins is to have these places, for blocks that had these sizes in the recorded pass."""
        sums = dict.fromkeys(Place, 0)
        for place, each in zip(places, nbytes, strict=True):
            sums[place] += int(each * self._room.growth)
        if self._said == "move" or self.waits is not None or not (sums[Place.HOST] or sums[Place.NVME]):
            return
        self._said = "move"
        self._say(
            f"activations are moved from now on: of a pass {gib(sums[Place.HOST])} to RAM and {gib(sums[Place.NVME])} "
            f"to NVMe, {gib(sums[Place.GPU])} stay in GPU memory (it takes {gib(self._room.expected_nbytes)} with all "
            f"of them, of {gib(self._room.free_nbytes)} that are free: {self._room.cause})"
        )

    def step_done(self) -> None:
        """An optimizer step begins: the passes before it are over."""
        self._room.passed(self._usage())
        self._room.step_done()

    # Bytes

    @property
    def to_move_nbytes(self) -> int | None:
        """Bytes to move in this pass, counted in the recorded one; None: all that can be back in time."""
        return None if self.waits is not None else max(self._room.to_move_nbytes(), 0)

    @property
    def expected_nbytes(self) -> int:
        """What this pass is expected to save."""
        return self._room.saved_nbytes

    def saved(self, nbytes: int) -> None:
        """A block is being saved: looks at memory, unless that was done a moment ago."""
        self._saved_any = True
        t_start_s = time.monotonic()
        if self._room.saved(nbytes, t_start_s):
            usage = self._usage()
            t_end_s = time.monotonic()
            self._room.look(usage, t_end_s, t_end_s - t_start_s)

    @property
    def crowded(self) -> bool:
        """Whether what is saved from now on has to move."""
        return self._room.crowded

    @property
    def excess_nbytes(self) -> int:
        """Bytes kept on the GPU that must now be offloaded."""
        return self._room.excess_nbytes

    def kept(self, nbytes: int) -> None:
        """A block stays."""
        self._room.kept(nbytes)

    def moved(self, nbytes: int) -> None:
        """A block that had stayed is on its way."""
        self._room.moved(nbytes)
