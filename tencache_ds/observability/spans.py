# SPDX-License-Identifier: Apache-2.0
"""Spans: timed intervals of threads, storage and an optimizer's team, recorded only on request.

Nothing is recorded unless a :class:`Recorder` is installed (by :mod:`tencache_ds.observability.tracing`) or torch's
profiler is on. Then a span is a ``record_function`` range of torch's profiler, and with a recorder and a GPU in use
also an NVTX range. There is one recorder per process: threads, drives and cores are shared by its engines.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from tencache_ds.names import StrEnum

MAX_SPANS = 200_000
"""Spans that a recorder keeps, about 60 MB. Those that come later are counted and dropped."""

_profiler_enabled = torch._C._autograd._profiler_enabled


class Category(StrEnum):
    """What a span is about. Its exclusive time on the training thread is attributed accordingly."""

    PHASE = "phase"
    """A forward pass, a backward pass or an optimizer step."""

    STALL = "stall"
    """A thread waits: see :class:`~tencache_ds.observability.counters.Stall`."""

    FETCH = "fetch"
    """DeepSpeed gathers a module's weights: copies to the device and collectives."""

    COPY = "copy"
    """A copy between host and device memory, or its submission if it is asynchronous."""

    UPDATE = "update"
    """The optimizer's arithmetic."""

    NVME = "nvme"
    """A request of the extent store, from its submission to its end."""

    LANE = "lane"
    """A lane's part of a request."""


class RecordedSpan(NamedTuple):
    """One span.

    Attributes:
        category: a :class:`Category`.
        name: the same in every viewer.
        track: identifier of the thread, or the name of a resource whose spans may overlap.
        t_start_ns, t_end_ns: of ``time.perf_counter_ns()``.
        what: the weight, chunk or module that it is for; "" for none.
        nbytes: bytes moved or waited for; 0 for none.
        arguments: anything else worth showing.
    """

    category: str
    name: str
    track: int | str
    t_start_ns: int
    t_end_ns: int
    what: str
    nbytes: int
    arguments: dict[str, Any] | None


class Recorder:
    """Collects spans of all threads, without a lock: appending to a list is atomic.

    Args:
        limit: number of spans that are kept.
    """

    def __init__(self, limit: int = MAX_SPANS) -> None:
        self.spans: list[RecordedSpan] = []
        self.threads: dict[int, str] = {}
        """Names of threads that have recorded a span; "" for those that Python did not start (autograd's)."""
        self.uses_nvtx = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._limit = limit
        self._n_dropped = 0
        self._drops = itertools.count(1)
        self._phase: tuple[str, int] | None = None

    @property
    def n_dropped(self) -> int:
        """Spans that came after the limit was reached."""
        return self._n_dropped

    def add(
        self,
        category: Category,
        name: str,
        track: int | str,
        t_start_ns: int,
        t_end_ns: int,
        what: str = "",
        nbytes: int = 0,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        """Keeps a span that is over. Any thread."""
        if len(self.spans) >= self._limit:
            self._n_dropped = next(self._drops)
            return
        if not isinstance(track, str) and track not in self.threads:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            self.threads[track] = names.get(track, "")
        self.spans.append(RecordedSpan(category.value, name, track, t_start_ns, t_end_ns, what, nbytes, arguments))

    def phase(self, name: str | None) -> None:
        """Ends the phase under way and begins another, or none."""
        now_ns = time.perf_counter_ns()
        before, self._phase = self._phase, None if name is None else (name, now_ns)
        if before is not None:
            self.add(Category.PHASE, before[0], "phases", before[1], now_ns)


_recorder: Recorder | None = None


def install(recorder: Recorder | None) -> None:
    """Spans that begin from now on are recorded there, or nowhere."""
    global _recorder
    _recorder = recorder


def recorder() -> Recorder | None:
    """The one that is installed; for spans whose beginning and end are known only later."""
    return _recorder


def phase(name: str | None) -> None:
    """A phase of the training begins (None: the last one ends)."""
    if _recorder is not None:
        _recorder.phase(name)


def span(category: Category, name: str, what: str = "", nbytes: int = 0) -> AbstractContextManager[None]:
    """Times the block on the calling thread; costs well under a microsecond while nothing is recorded.

    Args:
        category: what it is about.
        name: for all viewers, with ``::`` between its parts.
        what: the weight, chunk or module; not part of the name.
        nbytes: bytes moved or waited for.
    """
    if _recorder is None and not _profiler_enabled():
        return _NOTHING
    return _Span(_recorder, category, name, what, nbytes)


_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class _Span:
    __slots__ = ("_category", "_in_profiler", "_name", "_nbytes", "_recorder", "_t_start_ns", "_what")

    def __init__(self, recorder: Recorder | None, category: Category, name: str, what: str, nbytes: int) -> None:
        self._recorder = recorder
        self._category = category
        self._name = f"tencache::{name}"
        self._what = what
        self._nbytes = nbytes
        self._in_profiler: Any = None
        self._t_start_ns = 0

    def __enter__(self) -> None:
        if _profiler_enabled():
            self._in_profiler = torch.profiler.record_function(self._name, self._what or None)
            self._in_profiler.__enter__()
        if self._recorder is not None and self._recorder.uses_nvtx:
            torch.cuda.nvtx.range_push(f"{self._name} {self._what}" if self._what else self._name)
        self._t_start_ns = time.perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        t_end_ns = time.perf_counter_ns()
        if self._recorder is not None:
            self._recorder.add(
                self._category, self._name, threading.get_ident(), self._t_start_ns, t_end_ns, self._what, self._nbytes
            )
            if self._recorder.uses_nvtx:
                torch.cuda.nvtx.range_pop()
        if self._in_profiler is not None:
            self._in_profiler.__exit__(None, None, None)
