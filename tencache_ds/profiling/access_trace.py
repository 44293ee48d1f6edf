# SPDX-License-Identifier: Apache-2.0
"""The recorded step: the order of accesses to items (weights).

Forward and backward passes access the same items in the same order each time, except when they diverge (a layer skipped
at random). A forward pass alone, in evaluation or generation, is a cycle of another kind. :class:`AccessTrace` follows
the pass through the last recorded cycle of its kind, predicts the next accesses, and resynchronizes after a divergence.
It is pure bookkeeping: items are hashable values, nothing moves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

RESYNC_WINDOW = 256
"""The distance searched ahead for an unexpected item before the whole cycle is searched."""


@dataclass(frozen=True, slots=True)
class _Cycle(Generic[Item]):
    """A recorded pass: the items in order of use, and whether each was still on the device from its previous use."""

    order: tuple[Item, ...]
    held: tuple[bool, ...]


class AccessTrace(Generic[Item]):
    """Order of accesses in the last complete cycle of each kind, and the place in the one under way.

    Places count accesses and only ever grow: cycle follows cycle, and the item at a place is the one predicted there.
    Predictions made before :attr:`epoch` changed are void.

    Not thread-safe: the owner serialises calls, but for :meth:`next_use`, which other threads may call for a guess.
    """

    def __init__(self, initial_order: Sequence[Item] = ()) -> None:
        """Starts from ``initial_order`` (a guess, such as the order of definition) until a cycle has been recorded."""
        self._recording: list[Item] = []
        self._held_recording: list[bool] = []
        self._held: tuple[bool, ...] = ()  # of each place of the order, if there is one for each
        self._kind: Hashable = None
        self._cycles: dict[Hashable, _Cycle[Item]] = {None: _Cycle(tuple(initial_order), ())}  # the last of each kind
        self._divergences = 0
        self._start = 0  # place of the first item of the cycle
        self._position = 0  # accesses since
        self._epoch = -1
        self._learn(tuple(initial_order))

    @property
    def divergences(self) -> int:
        """How often an access differed from the predicted one."""
        return self._divergences

    @property
    def order(self) -> tuple[Item, ...]:
        """The cycle that predictions come from."""
        return self._order

    @property
    def epoch(self) -> int:
        """Changes when places ahead mean something else than before: another order, or a jump back in it."""
        return self._epoch

    @property
    def now(self) -> int:
        """The place of the next access."""
        return self._start + self._position

    @property
    def cycle_end(self) -> int:
        """The first place of the next cycle."""
        return self._start + len(self._order)

    def item_at(self, place: int) -> Item:
        """The prediction at a position; requires a recorded order."""
        return self._order[(place - self._start) % len(self._order)]

    def next_use(self, item: Item, *, skip: int = 0) -> int | None:
        """The place of an item's next use (the one after ``skip`` others), in this cycle or a later one; None if it is
        not in the order.
        """
        order, indices = self._order, self._indices.get(item)
        if not indices:
            return None
        cycles, which = divmod(bisect_left(indices, self._position) + skip, len(indices))
        return self._start + cycles * len(order) + indices[which]

    def is_held(self, place: int) -> bool:
        """Whether the item at a place is still on the device from its use before, as it was in the last cycle.

        True when that is not known.
        """
        return len(self._held) != len(self._order) or self._held[(place - self._start) % len(self._order)]

    def begin_cycle(self, kind: Hashable = None) -> None:
        """Marks the start of a pass (a forward): the accesses recorded since the last call become the predicted cycle
        of its kind, and the last one of the new kind is predicted.

        A cycle shorter than the last of its kind and equal to its beginning (a forward pass that was abandoned) does
        not replace it.

        Args:
            kind: of the pass that begins, such as training or evaluation. Until one of it has been recorded, the last
                cycle of any kind is predicted.
        """
        recorded, self._recording = tuple(self._recording), []
        held, self._held_recording = tuple(self._held_recording), []
        follows = self._position == len(self._order)
        self._start, self._position = self.now, 0
        last = self._cycles.get(self._kind, _Cycle((), ()))
        if recorded and (not last.order or recorded != last.order[: len(recorded)]):
            last = self._cycles[self._kind] = _Cycle(recorded, held)
        elif recorded and len(recorded) == len(last.order):
            last = self._cycles[self._kind] = _Cycle(last.order, held)
        self._kind = kind
        predicted = self._cycles.get(kind, last)
        if predicted.order and predicted.order != self._order:
            self._learn(predicted.order)
        elif not follows:
            self._epoch += 1
        if predicted.order:
            self._held = predicted.held

    def access(self, item: Item, *, held: bool = False) -> bool:
        """Records an access; returns whether it was the predicted one.

        Args:
            item: the item accessed.
            held: whether it was still on the device from its use before.
        """
        self._recording.append(item)
        self._held_recording.append(held)
        order = self._order
        if self._position < len(order) and order[self._position] == item:
            self._position += 1
            return True
        index = self._find(item)
        if index is not None:
            if index < self._position:  # back: the position continues to grow, with a different meaning
                self._start += self._position - index
                self._epoch += 1
            self._position = index + 1
        self._divergences += 1
        return False

    def _learn(self, order: tuple[Item, ...]) -> None:
        self._order = order
        indices: dict[Item, list[int]] = {}
        for index, item in enumerate(order):
            indices.setdefault(item, []).append(index)
        self._indices = indices
        self._epoch += 1

    def _find(self, item: Item) -> int | None:
        order, start = self._order, self._position
        window = range(start, min(start + RESYNC_WINDOW, len(order)))
        for index in window:
            if order[index] == item:
                return index
        for index in (*range(window.stop, len(order)), *range(0, start)):
            if order[index] == item:
                return index
        return None
