# SPDX-License-Identifier: Apache-2.0
"""The distance at which weights are read and handed over ahead of their use, and the buffer to reclaim first.

Pure bookkeeping on an :class:`~tencache_ds.profiling.access_trace.AccessTrace`: items are hashable values, nothing
moves. What a look costs does not depend on how many items are in memory already: every place of the recorded order is
visited once, and an item that left memory again is visited once more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from heapq import heappop, heappush
from typing import Generic, TypeVar

from tencache_ds.profiling.access_trace import AccessTrace

Item = TypeVar("Item", bound=Hashable)

GROWTH_PER_FETCH = 2
"""By how many places, or by as many as the fetch itself takes if these are more, the distance at which weights are
handed over grows with each fetch after a start: the first ones wait for what they need themselves, not for a whole
bucket that could not be read ahead."""


class Walk(Generic[Item]):
    """Goes through the recorded order ahead of the training, each place once, nearest first.

    One thread at a time uses it, but for :meth:`gone` and :meth:`next_use`, which any thread may call at any time.

    Args:
        trace: the recorded order and the training's place in it.
    """

    def __init__(self, trace: AccessTrace[Item]) -> None:
        self._trace = trace
        self._epoch = -1
        self._cursor = 0  # first place not visited yet
        self._again: list[int] = []  # heap of places before the cursor whose items left memory since
        self._gone: deque[Item] = deque()
        self._stopped_at = 0

    def gone(self, item: Item) -> None:
        """An item is no longer where the last visit left it: its next use is visited again."""
        self._gone.append(item)

    def next_use(self, item: Item) -> int | None:
        """The place of an item's next use; None when none is predicted."""
        return self._trace.next_use(item)

    def worth_keeping(self, item: Item, *, skip: int = 0) -> bool:
        """Whether an item that is in memory now should stay there, because it will leave the device and be used again.

        It should if the last :meth:`go` got beyond that use, which then comes before that of every item that waits for
        memory.

        Args:
            item: which.
            skip: uses ahead that the device has it for already.
        """
        trace = self._trace
        if self._epoch != trace.epoch:
            return False
        while (place := trace.next_use(item, skip=skip)) is not None and place < self._stopped_at:
            if not trace.is_held(place):
                return True
            skip += 1
        return False

    def go(self, visit: Callable[[Item], bool], end: int) -> None:
        """Calls ``visit(item)`` for the items of all places before ``end`` that are due, nearest first.

        Args:
            visit: returns False to stop here: the next walk begins with the same item.
            end: first place that is too far away.
        """
        trace, now = self._trace, self._trace.now
        if trace.epoch != self._epoch:
            self._epoch, self._cursor = trace.epoch, now
            self._again.clear()
            self._gone.clear()
        self._cursor = max(self._cursor, now)
        while self._gone:
            place = trace.next_use(self._gone.popleft())
            if place is not None and place < self._cursor:
                heappush(self._again, place)
        while True:
            while self._again and self._again[0] < now:  # used meanwhile
                heappop(self._again)
            place = self._again[0] if self._again else self._cursor  # items due again lie before the cursor
            self._stopped_at = place
            if place >= end or not visit(trace.item_at(place)):
                return
            if self._again and place == self._again[0]:
                heappop(self._again)
            else:
                self._cursor = place + 1


class Reach(Generic[Item]):
    """The longest stretch of the recorded order, from the training's place on, whose items do not exceed a limit.

    Args:
        trace: the recorded order.
        size: of one item; never changes.
        limit: of all items of the stretch together; an item counts as often as it occurs.
    """

    def __init__(self, trace: AccessTrace[Item], size: Callable[[Item], int], limit: int) -> None:
        self._trace = trace
        self._size = size
        self._limit = limit
        self._epoch = -1
        self._start = self._end = self._sum = 0

    def end(self) -> int:
        """The first place beyond the stretch; at most the end of the cycle."""
        trace, now = self._trace, self._trace.now
        if trace.epoch != self._epoch or now > self._end:
            self._epoch, self._start, self._end, self._sum = trace.epoch, now, now, 0
        while self._start < now:
            self._sum -= self._size(trace.item_at(self._start))
            self._start += 1
        while self._end < trace.cycle_end:
            size = self._size(trace.item_at(self._end))
            if self._sum + size > self._limit:
                break
            self._sum += size
            self._end += 1
        return self._end


class CommitWindow(Generic[Item]):
    """The distance ahead of their use at which weights are handed to DeepSpeed, which gathers them.

    A function of the recorded order and of figures that all ranks agree on: it is the same on each of them, whatever
    their disks do. It ends with the prefetch bucket or with half of what can be read ahead, whichever is nearer, so
    that what is handed over has been asked for long before; after a start it grows by a few places per fetch.

    Args:
        trace: the recorded order.
        numel: elements of a whole weight.
        nbytes: bytes of a rank's shard of it.
        bucket_numel: DeepSpeed's prefetch bucket, in elements of whole weights.
        read_ahead_nbytes: the memory that shards are read ahead into, the smallest of any rank's.
    """

    def __init__(
        self,
        trace: AccessTrace[Item],
        numel: Callable[[Item], int],
        nbytes: Callable[[Item], int],
        *,
        bucket_numel: int,
        read_ahead_nbytes: int,
    ) -> None:
        self._trace = trace
        self._bucket = Reach(trace, numel, bucket_numel)
        self._memory = Reach(trace, nbytes, read_ahead_nbytes // 2)
        self._epoch = -1
        self._now = 0
        self._distance = 0

    def end(self) -> int:
        """The first place not to hand over yet. Called once per fetch."""
        trace, now = self._trace, self._trace.now
        if trace.epoch != self._epoch:
            self._epoch, self._now, self._distance = trace.epoch, now, 0
        farthest = min(self._bucket.end(), self._memory.end())
        self._distance = min(self._distance + max(GROWTH_PER_FETCH, now - self._now), farthest - now)
        self._now = now
        return now + self._distance


def farthest_first(items: Iterable[Item], next_use: Callable[[Item], int | None]) -> list[Item]:
    """Items in the order in which they are given up: no use predicted, then the farthest next use; of equals, the last.

    Source: Belady's rule, which is optimal for a known order of accesses.
    """

    def distance(item: Item) -> float:
        place = next_use(item)
        return math.inf if place is None else place

    return sorted(items, key=distance)[::-1]
