# SPDX-License-Identifier: Apache-2.0
"""An optimizer step that continues while the next forward pass runs.

The gradient norm is known, and so are all other inputs of the step; the remaining work is arithmetic and
transfers. They follow the order in which the forward pass needs the weights, and each weight is awaited by its own
users at an :class:`~tencache_ds.tiers.background_update.UpdateGate`. The numbers are those of a step that ends first.

[Note: gate] Blocks readers of a weight until its update is published, and no longer.

A weight's gradient is read by the same chunks, so the same gate keeps the next backward pass from overwriting it.

[Note: weights in GPU memory] Their new values are copied there on a stream of the update's own. It first waits for the
stream of the training as it is when the update begins: kernels of the last backward pass may still read the old values.
Whoever passes the gate has the current stream wait for the copies that have been issued by then. The thread that
updates waits for all of them before it ends, so nothing is left on the stream when :meth:`BackgroundUpdate.finish`
returns.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        self._copied: torch.cuda.Event | None = None  # behind the copies to the device that were issued last
        self._failed = False

    def close(self, chunks: Iterable[Iterable[int]]) -> None:
        """An update is about to begin.

        Args:
            chunks: of each chunk the weights (keys) that it has elements of.
        """
        with self._changed:
            self._failed = False
            self._chunks_left = Counter(key for keys in chunks for key in keys)

    def updated(self, keys: Iterable[int], copied: torch.cuda.Event | None = None) -> None:
        """A chunk with elements of these weights has its new values, and its gradient is not needed any more.

        Args:
            keys: the weights.
            copied: an event behind the copies to the device so far, for those of them that are there.
        """
        with self._changed:
            self._copied = copied
            opened = False
            for key in keys:
                self._chunks_left[key] -= 1
                if not self._chunks_left[key]:
                    del self._chunks_left[key]
                    opened = True
            if opened:
                self._changed.notify_all()

    def copies_ended(self) -> None:
        """The device has all new values that were sent to it: streams need not wait any more."""
        self._copied = None

    def failed(self) -> None:
        """The update ended early, and the step is void: who waits for a weight that is left gets an error."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def wait_for(self, keys: Iterable[int]) -> None:
        """Returns when weights have their new values; at once if no update is under way. In the memory of a device
        they have them when its current stream comes to this point.

        Raises:
            VoidStepError: the update failed.
            TenCacheError: it takes too long.
        """
        if self._chunks_left:
            self._wait_for(keys)
        copied = self._copied
        if copied is not None:
            torch.cuda.current_stream(copied.device).wait_event(copied)

    def _wait_for(self, keys: Iterable[int]) -> None:
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
        stream: for copies to weights in device memory, see [Note: weights in GPU memory]; None without such a device.
    """

    def __init__(
        self,
        update: ChunkedUpdate,
        gate: UpdateGate,
        guard: StepGuard,
        keys_of: Callable[[Chunk], Sequence[int]],
        counters: Counters,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._update = update
        self._gate = gate
        self._guard = guard
        self._keys_of = keys_of
        self._counters = counters
        self._stream = stream
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
        """Starts an update; the one before must be finished. Weights keep their old values for what the current stream
        has been given so far."""
        self.finish()
        self._gate.close(self._keys_of(chunk) for _, chunks in work for chunk in chunks)
        self._guard.update_begins()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
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
            if not running.done():
                with self._counters.stall(Stall.UPDATE, "the end of the optimizer step"):
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
            with torch.no_grad(), self._counters.in_background(n_steps), self._copying():
                self._update.run(work, self._finished)
        except BaseException as error:
            self._guard.update_failed(error)
            self._gate.failed()
            raise
        self._guard.update_ended()

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """Within the block work for the device is issued to the update's stream, and is over when it ends, with an
        error too: what a load then writes must not be overwritten."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._issued().synchronize()
                self._gate.copies_ended()

    def _issued(self) -> torch.cuda.Event:
        """An event behind everything issued to the update's stream; to wait for it takes no processor."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def _finished(self, chunk: Chunk) -> None:
        self._gate.updated(self._keys_of(chunk), None if self._stream is None else self._issued())
