# SPDX-License-Identifier: Apache-2.0
"""Blocks readers of a weight until its update is published, and no longer.

A weight's gradient is read by the same chunks, so the same gate keeps the next backward pass from overwriting it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from tencache_ds.errors import TenCacheError
from tencache_ds.observability.counters import Counters, Stall
from tencache_ds.runtime.step_guard import StepGuard

TIMEOUT_S = 3600.0
"""An update of a chunk takes milliseconds; where a weight takes this long, nothing else gets on either."""

_NAMED = 2


class UpdateGate:
    """Opened by the thread that updates, awaited by any other.

    Args:
        counters: where waits are counted.
        guard: knows why an update has failed.
    """

    def __init__(self, counters: Counters, guard: StepGuard) -> None:
        self._counters = counters
        self._guard = guard
        self._changed = threading.Condition()
        self._chunks_left: Counter[int] = Counter()  # of each weight that is not up to date
        self._failed = False

    def close(self, chunks: Iterable[Iterable[int]]) -> None:
        """An update is about to begin.

        Args:
            chunks: of each chunk the weights (keys) that it has elements of.
        """
        with self._changed:
            self._failed = False
            self._chunks_left = Counter(key for keys in chunks for key in keys)

    def updated(self, keys: Iterable[int]) -> None:
        """A chunk with elements of these weights has its new values, and its gradient is not needed any more."""
        with self._changed:
            opened = False
            for key in keys:
                self._chunks_left[key] -= 1
                if not self._chunks_left[key]:
                    del self._chunks_left[key]
                    opened = True
            if opened:
                self._changed.notify_all()

    def failed(self) -> None:
        """The update ended early, and the step is void: who waits for a weight that is left gets an error."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def wait_for(self, keys: Iterable[int]) -> None:
        """Returns when weights have their new values; at once if no update is under way.

        Raises:
            VoidStepError: the update failed.
            TenCacheError: it takes too long.
        """
        if not self._chunks_left:
            return
        with self._changed:
            wanted = [key for key in keys if key in self._chunks_left]
            if not wanted:
                return
            with self._counters.stall(Stall.UPDATE, _named(wanted)):
                ended = self._changed.wait_for(
                    lambda: self._failed or not any(key in self._chunks_left for key in wanted), TIMEOUT_S
                )
            if self._failed:
                self._guard.check()
            if not ended:
                raise TenCacheError(f"the optimizer step did not reach a weight within {TIMEOUT_S:.0f} s")


def _named(keys: Sequence[int]) -> str:
    """Weights, for traces; of many the first few."""
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return ", ".join(f"weight id {key}" for key in keys[:_NAMED]) + more
