# SPDX-License-Identifier: Apache-2.0
"""An optimizer step that continues while the next forward pass runs.

The gradient norm is known, and so are all other inputs of the step; the remaining work is arithmetic and
transfers. They follow the order in which the forward pass needs the weights, and each weight is awaited by its own
users at an :class:`~tencache_ds.tiers.background_update.UpdateGate`. The numbers are those of a step that ends first.

[Note: gate] Blocks readers of a weight until its update is published, and no longer.

A weight's gradient is read by the same chunks, so the same gate keeps the next backward pass from overwriting it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.observability.counters import Counters, Stall
from tencache_ds.planning.chunks import Chunk
from tencache_ds.runtime.step_guard import StepGuard
from tencache_ds.tiers.update import ChunkedUpdate, Work

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


class BackgroundUpdate:
    """Runs one update at a time on a separate thread. Used by the training thread, except for :meth:`finish`.

    Args:
        update: of chunks, with exclusive use of their tiers while it runs.
        gate: opened weight by weight.
        guard: knows that the step is void if this update fails.
        keys_of: the weights (keys) that a chunk has elements of.
        counters: waits of the update are not those of the training.
    """

    def __init__(
        self,
        update: ChunkedUpdate,
        gate: UpdateGate,
        guard: StepGuard,
        keys_of: Callable[[Chunk], Sequence[int]],
        counters: Counters,
    ) -> None:
        self._update = update
        self._gate = gate
        self._guard = guard
        self._keys_of = keys_of
        self._counters = counters
        self._lock = threading.Lock()
        self._running: Future[None] | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tencache-update")

    @property
    def running(self) -> bool:
        """Whether an update was started and not yet waited for."""
        return self._running is not None

    def busy(self, seconds: float) -> bool:
        """Waits at most so long until nothing is under way; returns whether something still is. Any thread may call
        it."""
        running = self._running
        return running is not None and bool(wait([running], seconds).not_done)

    def begin(self, work: Work) -> None:
        """Starts an update; the one before must be finished."""
        self.finish()
        self._gate.close(self._keys_of(chunk) for _, chunks in work for chunk in chunks)
        self._guard.update_begins()
        self._running = self._executor.submit(self._run, work, self._counters.n_steps)

    def run_in_background(self, job: Callable[[], None]) -> None:
        """Runs something else with the tiers to itself, which changes nothing and raises no error: behind the update
        that is under way, whether that succeeds or not. No weight waits for it."""
        self._running = self._executor.submit(job)

    def finish(self) -> None:
        """Returns when nothing is under way. Any thread may call it, also without an update.

        Raises:
            VoidStepError: the update failed, or the step did before.
        """
        running = self._running
        if running is not None:
            wait([running])
            with self._lock:
                if self._running is running:
                    self._running = None
        self._guard.check()

    def abandon(self) -> None:
        """Weights and state are about to be replaced: nobody waits for those of the last update any more, which has
        ended, with or without an error."""
        if self._running is not None:
            wait([self._running])
        self._running = None
        self._gate.close(())

    def close(self) -> None:
        """Ends the thread, after the update that it is at. Idempotent."""
        self._executor.shutdown(wait=True)
        self._running = None

    def _run(self, work: Work, n_steps: int) -> None:
        try:
            with torch.no_grad(), self._counters.in_background(n_steps):
                self._update.run(work, self._finished)
        except BaseException as error:
            self._guard.update_failed(error)
            self._gate.failed()
            raise
        self._guard.update_ended()

    def _finished(self, chunk: Chunk) -> None:
        self._gate.updated(self._keys_of(chunk))
