# SPDX-License-Identifier: Apache-2.0
"""Recording whole steps of a running job: begins and ends at step boundaries, in every rank at the same step.

[Note: boundaries] A boundary is the moment at which an engine counts an optimizer step as done. A span that is still
open then (an update in the background, a request in flight) is split there: its first part belongs to the earlier step.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tencache_ds.errors import TenCacheError
from tencache_ds.observability import spans
from tencache_ds.observability.counters import Counters, StepRecord
from tencache_ds.observability.spans import RecordedSpan, Recorder


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step that was recorded.

    Attributes:
        step: its number.
        t_start_ns, t_end_ns: its boundaries.
        record: its figures, as a dict of :class:`~tencache_ds.observability.counters.StepRecord`.
    """

    step: int
    t_start_ns: int
    t_end_ns: int
    record: dict[str, Any]


class StepTrace:
    """One recording of steps of one engine, and of everything else in the process meanwhile.

    Args:
        counters: of the engine whose steps are counted.
        after_step: number of completed steps after which the recording begins.
        n_steps: steps to record.
        on_end: called on the training thread when the recording is over; must return at once.
    """

    def __init__(
        self, counters: Counters, after_step: int, n_steps: int, on_end: Callable[[StepTrace], None] | None = None
    ) -> None:
        if n_steps < 1:
            raise ValueError(f"a trace needs at least one step, not {n_steps}")
        self.counters = counters
        self.steps: list[TracedStep] = []
        self.training_thread = 0
        """Identifier of the thread that takes the steps."""
        self.over = threading.Event()
        """Set when the recording has ended: complete, or for the reason in :attr:`failure`."""
        self.failure = ""
        self._after_step = after_step
        self._n_steps = n_steps
        self._on_end = on_end
        self._recorder: Recorder | None = None
        self._t_boundary_ns = 0

    @property
    def spans(self) -> list[RecordedSpan]:
        """The spans recorded within the steps; spans that cross a boundary are clipped to it."""
        if self._recorder is None or not self.steps:
            return []
        t_first_ns, t_last_ns = self.steps[0].t_start_ns, self.steps[-1].t_end_ns
        return [
            span._replace(t_start_ns=max(span.t_start_ns, t_first_ns), t_end_ns=min(span.t_end_ns, t_last_ns))
            for span in list(self._recorder.spans)
            if span.t_end_ns > t_first_ns and span.t_start_ns < t_last_ns
        ]

    @property
    def threads(self) -> dict[int, str]:
        """Names of the threads that spans lie on."""
        return dict(self._recorder.threads) if self._recorder is not None else {}

    @property
    def n_dropped(self) -> int:
        """Spans that did not fit into the recorder's memory."""
        return self._recorder.n_dropped if self._recorder is not None else 0

    def boundary(self, record: StepRecord) -> None:
        """A step of the engine is over."""
        now_ns = time.perf_counter_ns()
        if self._recorder is not None:
            self.steps.append(TracedStep(record.step, self._t_boundary_ns, now_ns, asdict(record)))
            if len(self.steps) == self._n_steps:
                end(self)
        elif record.step >= self._after_step:
            self.training_thread = threading.get_ident()
            self._recorder = Recorder()
            spans.install(self._recorder)
        self._t_boundary_ns = now_ns

    def _close(self, failure: str) -> None:
        self.failure = failure
        if self._recorder is not None:
            spans.install(None)
            self._recorder.phase(None)
        self.over.set()
        if self._on_end is not None:
            self._on_end(self)


_lock = threading.Lock()
_current: StepTrace | None = None


def begin(trace: StepTrace) -> None:
    """Records from its first boundary on. Any thread.

    Raises:
        TenCacheError: this process is recording already.
    """
    global _current
    with _lock:
        if _current is not None:
            raise TenCacheError("another trace of this process is being recorded: wait for its end")
        _current = trace


def end(trace: StepTrace, failure: str = "") -> None:
    """Ends a recording, for a reason if it is incomplete. Does nothing if it is over. Any thread."""
    global _current
    with _lock:
        if _current is not trace:
            return
        _current = None
    trace._close(failure)


def boundary(counters: Counters, record: StepRecord) -> None:
    """An engine's step is over: called by it on the training thread."""
    trace = _current
    if trace is not None and trace.counters is counters:
        trace.boundary(record)


def _forget() -> None:
    """In a forked child: the recording is its parent's."""
    global _current, _lock
    _current, _lock = None, threading.Lock()
    spans.install(None)


os.register_at_fork(after_in_child=_forget)


def engine_closed(counters: Counters) -> None:
    """An engine takes no steps any more."""
    trace = _current
    if trace is not None and trace.counters is counters:
        end(trace, "the engine was destroyed before the steps were over")
