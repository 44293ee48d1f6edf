# SPDX-License-Identifier: Apache-2.0
"""The counters of a TenCache engine, in a fixed vocabulary.

``Counters`` is written to by training threads, autograd threads and I/O lanes; ``Stats`` is the frozen snapshot that a
user gets from ``tencache_ds.stats(engine)``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tencache_ds.names import StrEnum
from tencache_ds.observability.paths import PathStats
from tencache_ds.observability.spans import Category, span


class Link(StrEnum):
    """A path that bytes move over."""

    NVME_READ = "nvme_read"
    NVME_WRITE = "nvme_write"
    H2D = "h2d"
    D2H = "d2h"


class Stall(StrEnum):
    """Why a training thread stood still."""

    WEIGHT_READ = "weight_read"
    """A weight was needed before its read was done."""

    OPTIMIZER_READ = "optimizer_read"
    """The update waited for a chunk's master weights and moments, or moved them itself: from and to files in memory."""

    BUFFER = "buffer"
    """Every staging buffer was taken: writes or copies had to finish first."""

    WRITE_BACK = "write_back"
    """Writes in flight had to end (checkpoint, shutdown)."""

    UPDATE = "update"
    """A weight was needed before an update in the background had come to it, or the next step before it was over."""

    ACTIVATION_READ = "activation_read"
    """Backward needed an activation before it was read from NVMe."""

    ACTIVATION_WRITE = "activation_write"
    """An activation had to be saved, but NVMe had not yet written those before it."""


class Access(StrEnum):
    """The place of a weight when training requested it."""

    RESIDENT = "resident"
    """In host memory for good."""

    PREFETCHED = "prefetched"
    """Read ahead, and there in time."""

    LATE = "late"
    """Read ahead, but the read was still going on."""

    DEMAND = "demand"
    """Not requested before: read while the training waited."""


class Event(StrEnum):
    """Things worth counting that should be rare."""

    DIVERGENCE = "divergence"
    """The order of accesses differed from the recorded step."""

    OVERFLOW_BUFFER = "overflow_buffer"
    """A weight was read into ordinary memory for want of a staging buffer (a large ``GatheredParameters``)."""

    DISCARDED_READ = "discarded_read"
    """A weight was read ahead and dropped without being used."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Figures of one optimizer step: everything since the end of the previous one.

    Attributes:
        step: number of the step, from 1.
        seconds: from the end of the previous step to the end of this one.
        update_seconds: the part spent in the optimizer step before it returned.
        nbytes: bytes per link.
        stall_seconds: waits of training threads by cause.
        accesses: weight accesses by where the weight was.
        events: rare events.
        background_seconds: of the optimizer step after it returned. The training waits for a part of them in its next
            step (``stall_seconds["update"]``); the rest is hidden. Bytes and events of that part are this step's.
        background_stall_seconds: the part of them in which that update waited itself, by cause.
    """

    step: int
    seconds: float
    update_seconds: float
    nbytes: dict[str, int]
    stall_seconds: dict[str, float]
    accesses: dict[str, int]
    events: dict[str, int]
    background_seconds: float = 0.0
    background_stall_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stats:
    """Snapshot of an engine's counters.

    Attributes:
        total: everything since the weights were created or their last engine ended, as one record (``step`` is the
            number of completed steps).
        last_step: the last optimizer step, or None before the first; in an engine without optimizer the last forward
            pass.
        pinned_nbytes: pinned (locked or registered) host memory held now.
        pinned_peak_nbytes: most pinned host memory held at any time.
        planned_host_peak_nbytes: upper limit of resident host memory from the first weight of the model to the end of
            training, beyond what the process had before; see :mod:`tencache_ds.planning.budget`.
        planned_pinned_peak_nbytes: the same of pinned host memory.
        planned_gpu_peak_nbytes: the same of GPU memory of weights, gradients and optimizer state that live there.
        staging_nbytes: size of the staging pool, and the most of it leased at one time.
        staging_peak_nbytes: most bytes of the staging pool leased at one time.
        gpu_staging_nbytes: GPU memory that weights are read into with GPUDirect Storage; 0 without it.
        pool_waits: leases that had to wait for a buffer.
        stored_nbytes: bytes of scratch storage allocated on NVMe.
        stored_weight_nbytes: the part of them for weights.
        resident_weight_nbytes: weights kept in host memory.
        resident_state_nbytes: optimizer state kept in host memory.
        host_gradient_nbytes: host memory of gradients.
        gpu_weight_nbytes: weights kept in GPU memory.
        gpu_gradient_nbytes: gradients accumulated in GPU memory.
        gpu_state_nbytes: optimizer state kept, and updated, in GPU memory.
        state_nbytes: optimizer state in all places, at its size in memory; on NVMe split master weights take less.
        gpu_activation_nbytes: saved tensors of the last pass that stayed in GPU memory when its backward began, without
            those below ``activation_min_size``; 0 with ``"activations": "off"``. With ``auto``, in passes whose tensors
            autograd keeps itself, what they are expected to save.
        host_activation_nbytes: those in host memory.
        nvme_activation_nbytes: those on NVMe.
        checkpoint_nbytes: host memory for optimizer state that a checkpoint has yet to write.
        activation_buffer_nbytes: host memory allocated for activations, including those on their way to and from NVMe.
        placement: the latest decision about GPU memory, and its reason; "" before.
        activation_placement: the latest decision about activations with ``auto``, and its reason; "" before.
        predicted_seconds: predicted step time since then; None if unknown.
        settled: false in the first steps, until it is decided what lives in GPU memory: later ones take less time.
        healed_reads: reads that differed from the written data and were correct when repeated: a disk to watch.
        relocated_extents: how often a weight or chunk changed its NVMe path, for the paths' rates had changed.
        io_backend: name of the I/O backend in use, or "" when nothing is stored.
        paths: figures of each NVMe path.
    """

    total: StepRecord
    last_step: StepRecord | None
    pinned_nbytes: int = 0
    pinned_peak_nbytes: int = 0
    planned_host_peak_nbytes: int = 0
    planned_pinned_peak_nbytes: int = 0
    planned_gpu_peak_nbytes: int = 0
    staging_nbytes: int = 0
    staging_peak_nbytes: int = 0
    gpu_staging_nbytes: int = 0
    pool_waits: int = 0
    stored_nbytes: int = 0
    stored_weight_nbytes: int = 0
    resident_weight_nbytes: int = 0
    resident_state_nbytes: int = 0
    host_gradient_nbytes: int = 0
    gpu_weight_nbytes: int = 0
    gpu_gradient_nbytes: int = 0
    gpu_state_nbytes: int = 0
    state_nbytes: int = 0
    gpu_activation_nbytes: int = 0
    host_activation_nbytes: int = 0
    nvme_activation_nbytes: int = 0
    checkpoint_nbytes: int = 0
    activation_buffer_nbytes: int = 0
    placement: str = ""
    activation_placement: str = ""
    predicted_seconds: float | None = None
    settled: bool = True
    healed_reads: int = 0
    relocated_extents: int = 0
    io_backend: str = ""
    paths: tuple[PathStats, ...] = ()


@dataclass(slots=True)
class _Tally:
    nbytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys((link.value for link in Link), 0))
    stall_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys((stall.value for stall in Stall), 0))
    accesses: dict[str, int] = field(default_factory=lambda: dict.fromkeys((access.value for access in Access), 0))
    events: dict[str, int] = field(default_factory=lambda: dict.fromkeys((event.value for event in Event), 0))
    background_stall_ns: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys((stall.value for stall in Stall), 0)
    )
    update_ns: int = 0
    background_ns: int = 0

    def add(self, other: _Tally) -> None:
        for mine, theirs in (
            (self.nbytes, other.nbytes),
            (self.stall_ns, other.stall_ns),
            (self.accesses, other.accesses),
            (self.events, other.events),
            (self.background_stall_ns, other.background_stall_ns),
        ):
            for key, value in theirs.items():
                mine[key] += value
        self.update_ns += other.update_ns
        self.background_ns += other.background_ns

    def copy(self) -> _Tally:
        tally = _Tally()
        tally.add(self)
        return tally


class Counters:
    """Thread-safe counters of one engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._here = threading.local()
        self._tally = _Tally()
        self._at_last_step = _Tally()
        self._at_step_before = _Tally()
        self._beside: _Tally | None = None  # of the thread in :meth:`in_background`
        self._steps = 0
        self._t_start_ns = time.perf_counter_ns()
        self._t_last_step_ns = self._t_start_ns
        self._last_step: StepRecord | None = None

    def moved(self, link: Link, nbytes: int) -> None:
        """Counts ``nbytes`` moved over ``link``."""
        with self._lock:
            self._current().nbytes[link.value] += nbytes

    def accessed(self, access: Access) -> None:
        """Counts one access to a weight."""
        with self._lock:
            self._current().accesses[access.value] += 1

    def happened(self, event: Event, times: int = 1) -> None:
        """Counts a rare event."""
        with self._lock:
            self._current().events[event.value] += times

    @contextmanager
    def stall(self, cause: Stall, what: str = "", nbytes: int = 0) -> Iterator[None]:
        """Times a wait of the calling thread; shows in traces as ``tencache::wait::<cause>``.

        Args:
            cause: of the wait.
            what: the weight or chunk waited for, for traces.
            nbytes: its bytes.
        """
        t_start_ns = time.perf_counter_ns()
        try:
            with span(Category.STALL, f"wait::{cause.value}", what, nbytes):
                yield
        finally:
            self.waited(cause, time.perf_counter_ns() - t_start_ns)

    def waited(self, cause: Stall, ns: int) -> None:
        """Counts a wait of the calling thread that was timed elsewhere."""
        with self._lock:
            self._current().stall_ns[cause.value] += ns

    def stalled_seconds(self, cause: Stall) -> float:
        """What training threads have waited for a cause so far. Any thread; costs next to nothing."""
        return self._tally.stall_ns[cause.value] / 1e9

    @contextmanager
    def in_background(self, n_steps: int) -> Iterator[None]:
        """Counts for an update on the calling thread, concurrent with training; one at a time. All of it belongs
        to the step that it is part of, although that may be over before.

        Args:
            n_steps: :attr:`n_steps` when it was begun, so without its own.
        """
        with self._lock:
            self._beside = beside = _Tally()
        self._here.in_background = True
        t_start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self._here.in_background = False
            with self._lock:
                self._beside = None
                beside.background_ns = time.perf_counter_ns() - t_start_ns
                beside.background_stall_ns, beside.stall_ns = beside.stall_ns, _Tally().stall_ns
                self._tally.add(beside)
                if self._steps > n_steps and self._last_step is not None:
                    self._at_last_step.add(beside)
                    elapsed_ns = round(self._last_step.seconds * 1e9)
                    self._last_step = _record(self._steps, elapsed_ns, self._at_last_step, self._at_step_before)

    def _current(self) -> _Tally:
        """Where the calling thread counts."""
        beside = self._beside
        return self._tally if beside is None or not getattr(self._here, "in_background", False) else beside

    @property
    def n_steps(self) -> int:
        """Steps that are over."""
        return self._steps

    @property
    def seconds_in_step(self) -> float:
        """Since the end of the last step."""
        return (time.perf_counter_ns() - self._t_last_step_ns) / 1e9

    def add(self, others: Counters) -> None:
        """Adds the counts of others, which are finished, to the current step."""
        with others._lock, self._lock:
            self._tally.add(others._tally)

    def step_done(self, update_ns: int) -> StepRecord:
        """Closes an optimizer step that spent ``update_ns`` in the update and returns its record."""
        now_ns = time.perf_counter_ns()
        with self._lock:
            self._steps += 1
            self._tally.update_ns += update_ns
            record = _record(self._steps, now_ns - self._t_last_step_ns, self._tally, self._at_last_step)
            self._at_step_before, self._at_last_step = self._at_last_step, self._tally.copy()
            self._t_last_step_ns = now_ns
            self._last_step = record
        return record

    def total(self) -> StepRecord:
        """Everything since the creation of the counters, as one record."""
        with self._lock:
            return _record(self._steps, time.perf_counter_ns() - self._t_start_ns, self._tally, _Tally())

    @property
    def last_step(self) -> StepRecord | None:
        """Record of the last optimizer step; its background part is added when it is over."""
        return self._last_step


def _record(step: int, elapsed_ns: int, now: _Tally, before: _Tally) -> StepRecord:
    return StepRecord(
        step=step,
        seconds=elapsed_ns / 1e9,
        update_seconds=(now.update_ns - before.update_ns) / 1e9,
        nbytes={key: value - before.nbytes[key] for key, value in now.nbytes.items()},
        stall_seconds={key: (value - before.stall_ns[key]) / 1e9 for key, value in now.stall_ns.items()},
        accesses={key: value - before.accesses[key] for key, value in now.accesses.items()},
        events={key: value - before.events[key] for key, value in now.events.items()},
        background_seconds=(now.background_ns - before.background_ns) / 1e9,
        background_stall_seconds={
            key: (value - before.background_stall_ns[key]) / 1e9 for key, value in now.background_stall_ns.items()
        },
    )
