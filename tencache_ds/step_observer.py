# SPDX-License-Identifier: Apache-2.0
"""Observes the steps that a plan is made from: their times, and of the last one what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tencache_ds.observability.counters import Stall, StepRecord
from tencache_ds.planning.observed_steps import ObservedSteps, StepTimes
from tencache_ds.profiling.device_idle import CudaIdle, SynchronousIdle
from tencache_ds.profiling.fetch_waits import CudaStreamClock, FetchRecorder, FetchWait, HostClock, StreamClock

_LEAST_LIFETIME_S = 10.0
_LIFETIME_FACTOR = 4.0
"""How long the device is observed, in the times of the step before: a step that takes longer is not typical, or has
failed."""


class StepObserver:
    """Used by the training thread, between two steps.

    Args:
        on_cuda: whether the compute device works beside the host.
        record_fetches: sets the recorder of weight fetches, or none.
    """

    def __init__(self, on_cuda: bool, record_fetches: Callable[[FetchRecorder | None], None]) -> None:
        self._on_cuda = on_cuda
        self._record_fetches = record_fetches
        self._steps = ObservedSteps()
        self._observes = False
        self._recorder: FetchRecorder | None = None

    def begin_step(self, seconds: float) -> StreamClock:
        """The next step is observed; returns the clock of the device. Recording what it waits for takes time of its
        hooks: only the last one is recorded, and its waits count as in a typical one.

        Args:
            seconds: of the step before.
        """
        self.close()
        self._observes = True
        clock = CudaStreamClock() if self._on_cuda else HostClock()
        if self._steps.next_may_be_last:
            lifetime_s = max(_LIFETIME_FACTOR * seconds, _LEAST_LIFETIME_S)
            self._recorder = FetchRecorder(clock, CudaIdle(lifetime_s) if self._on_cuda else SynchronousIdle())
            self._record_fetches(self._recorder)
        return clock

    def step_done(self, record: StepRecord, seconds: float, update_seconds: float, forward_seconds: float) -> None:
        """It is over, and the device was waited for. A step that was not observed does not count, nor does one that
        was skipped, as with fp16 and an overflow: it says nothing about the update.

        Args:
            record: its figures.
            seconds: of it, without planning at its start.
            update_seconds: what the optimizer took of it; 0 if the step was skipped.
            forward_seconds: of its first forward pass.
        """
        if not self._observes or not update_seconds:
            return
        passes_seconds = max(seconds - update_seconds, 0.0)
        forward_seconds = min(forward_seconds, passes_seconds)
        waiting = record.stall_seconds[Stall.OPTIMIZER_READ] + record.stall_seconds[Stall.BUFFER]
        arithmetic = max(update_seconds - waiting, 0.0)
        self._steps.add(StepTimes(forward_seconds, passes_seconds - forward_seconds, update_seconds, arithmetic))

    @property
    def observes(self) -> bool:
        """Whether the step that goes on, or is next, is observed."""
        return self._observes

    @property
    def has_enough(self) -> bool:
        """Whether no more steps have to be observed."""
        return self._steps.are_enough and self._recorder is not None

    @property
    def typical(self) -> StepTimes:
        """The times of a typical step, once some were observed."""
        return self._steps.typical

    @property
    def typical_share(self) -> float:
        """Factor that scales a time of the last observed step to a typical step."""
        return self._steps.typical.passes / max(self._steps.last.passes, 1e-6)

    def waits(self) -> Mapping[int, FetchWait]:
        """Wait for each weight in the last observed step."""
        return {} if self._recorder is None else self._recorder.waits()

    def close(self) -> None:
        """No more is observed until another step begins. Idempotent."""
        self._observes = False
        if self._recorder is not None:
            self._record_fetches(None)
            self._recorder.close()
            self._recorder = None
