# SPDX-License-Identifier: Apache-2.0
"""The recorded step: in which order items (weights) are asked for.

A forward and backward pass ask for the same items in the same order each time, until they do not (a layer skipped at
random, an evaluation in between). :class:`AccessTrace` follows the pass through the last recorded cycle, says what
comes next, and finds its place again after a divergence. It is pure bookkeeping: items are hashable values, nothing
moves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

RESYNC_WINDOW = 256
"""How far ahead an unexpected item is looked for before the whole cycle is searched."""


class AccessTrace(Generic[Item]):
    """Order of accesses in the last complete cycle, and the position in it.

    Not thread-safe: the owner serialises calls.
    """

    def __init__(self, initial_order: Sequence[Item] = ()) -> None:
        """Starts from ``initial_order`` (a guess, such as the order of definition) until a cycle has been recorded."""
        self._order: tuple[Item, ...] = tuple(initial_order)
        self._position = 0
        self._recording: list[Item] = []
        self._divergences = 0

    @property
    def divergences(self) -> int:
        """How often an access differed from the predicted one."""
        return self._divergences

    @property
    def order(self) -> tuple[Item, ...]:
        """The cycle that predictions come from."""
        return self._order

    def begin_cycle(self) -> None:
        """Marks the start of a pass (a forward): what was recorded since the last call becomes the predicted cycle.

        A cycle shorter than the predicted one and equal to its beginning (a forward without a backward, as in an
        evaluation) does not replace it.
        """
        recorded, self._recording = tuple(self._recording), []
        if recorded and recorded != self._order[: len(recorded)]:
            self._order = recorded
        self._position = 0

    def access(self, item: Item) -> bool:
        """Records an access; returns whether it was the predicted one."""
        self._recording.append(item)
        order = self._order
        if self._position < len(order) and order[self._position] == item:
            self._position += 1
            return True
        found = self._find(item)
        if found is not None:
            self._position = found + 1
        self._divergences += 1
        return False

    def upcoming(self, limit: int | None = None, *, wrap: bool = False) -> Iterator[Item]:
        """Items predicted next, nearest first, without repeats; with ``wrap`` beyond the end of the cycle."""
        order, start = self._order, self._position
        length = len(order) if wrap else len(order) - start

        def unique() -> Iterator[Item]:
            seen: set[Item] = set()
            for step in range(length):
                item = order[(start + step) % len(order)]
                if item not in seen:
                    seen.add(item)
                    yield item

        return islice(unique(), limit)

    def _find(self, item: Item) -> int | None:
        order, start = self._order, self._position
        near = range(start, min(start + RESYNC_WINDOW, len(order)))
        for index in near:
            if order[index] == item:
                return index
        for index in (*range(near.stop, len(order)), *range(0, start)):
            if order[index] == item:
                return index
        return None
