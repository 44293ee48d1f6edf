# SPDX-License-Identifier: Apache-2.0
"""Observes the steps that a plan is made from: their times, and of the last one what it waits for. They are steps like
all others: the update of the one before goes on beside the forward pass, and its figures are known when that is over.

The length of later steps is predicted from some of the first ones. The first two build what later steps find, and take
up to twice as long. Those after them still vary, on a virtual machine by a third in both directions. So the typical one
counts, and where steps are short, more of them are observed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from tencache_ds.observability.counters import Stall, StepRecord
from tencache_ds.profiling.waits import (
    CudaIdle,
    CudaStreamClock,
    FetchRecorder,
    FetchWait,
    HostClock,
    StreamClock,
    SynchronousIdle,
)

WARM_UP_STEPS = 2
"""Steps before the first that is observed."""

LEAST_STEPS = 2
"""So many are always observed."""

MOST_STEPS = 6
"""No more than so many are."""

ENOUGH_SECONDS = 4.0
"""Once they have taken so long, fewer will do: what the plan gains is missing in each."""

LEAST_SETTLED_STEPS = 4
"""With so many, it no longer matters whether steps still become faster."""

STILL_FASTER = 0.9
"""A step that takes less than this share of the time of the one before it is still part of the warm-up."""

PASSES_STILL_FASTER = 0.5
"""So is one whose passes do, which may be a small part of it: an update that waits for a drive can be slower than the
one before while the passes are far from what they will be."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of one step, in seconds.

    Attributes:
        forward: of its first forward pass, without waits for an update.
        other_passes: of what follows that until the update, the same.
        update: of an update, also of what goes on beside the next forward pass.
        arithmetic: of these, without waits for NVMe.
        exposed: what the step took longer for updates: its own before it returned, and waits for the one before.
    """

    forward: float
    other_passes: float
    update: float
    arithmetic: float
    exposed: float

    @property
    def passes(self) -> float:
        """Seconds of the step without what it took longer for updates."""
        return self.forward + self.other_passes

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.passes + self.exposed

    @property
    def without_update(self) -> float:
        """Seconds of the step in which no update goes on."""
        return max(self.total - self.update, 0.0)


class ObservedSteps:
    """Those after the warm-up, in order."""

    def __init__(self) -> None:
        self._steps: list[StepTimes] = []

    def add(self, step: StepTimes) -> None:
        """One more."""
        self._steps.append(step)

    @property
    def are_enough(self) -> bool:
        """Whether no more have to be observed."""
        n_steps = len(self._steps)
        if n_steps >= MOST_STEPS:
            return True
        if n_steps < LEAST_STEPS or sum(step.total for step in self._steps) < ENOUGH_SECONDS:
            return False
        return n_steps >= LEAST_SETTLED_STEPS or not self._become_faster

    @property
    def next_may_be_last(self) -> bool:
        """Whether the next one may be the last that has to be observed, if it takes as long as the one before."""
        n_steps = len(self._steps) + 1
        if n_steps >= MOST_STEPS:
            return True
        return n_steps >= LEAST_STEPS and sum(step.total for step in self._steps) + self.last.total >= ENOUGH_SECONDS

    @property
    def _become_faster(self) -> bool:
        before, last = self._steps[-2:]
        return last.total < STILL_FASTER * before.total or last.passes < PASSES_STILL_FASTER * before.passes

    @property
    def last(self) -> StepTimes:
        """The last one."""
        return self._steps[-1]

    @property
    def typical(self) -> StepTimes:
        """The median of each time by itself: what lengthens one part of a step leaves the others as they are."""
        times = {
            field.name: statistics.median(getattr(step, field.name) for step in self._steps)
            for field in fields(StepTimes)
        }
        return StepTimes(**times)


_LEAST_LIFETIME_S = 10.0
_LIFETIME_FACTOR = 4.0
"""How long the device is observed, in the times of the step before: a step that takes longer is not typical, or has
failed."""


class StepObserver:
    """Used by the training thread, between two steps.

    Args:
        on_cuda: whether the compute device works beside the host.
        record_fetches: sets the recorder of weight fetches, or none.
        update_waits: seconds that this process has waited for updates so far.
    """

    def __init__(
        self,
        on_cuda: bool,
        record_fetches: Callable[[FetchRecorder | None], None],
        update_waits: Callable[[], float],
    ) -> None:
        self._on_cuda = on_cuda
        self._record_fetches = record_fetches
        self._update_waits = update_waits
        self._steps = ObservedSteps()
        self._observes = self._updated = False
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
            idle = CudaIdle(lifetime_s) if self._on_cuda else SynchronousIdle()
            self._recorder = FetchRecorder(clock, idle, update_waits=self._update_waits)
            self._record_fetches(self._recorder)
        return clock

    def step_done(
        self, record: StepRecord, before: StepRecord, seconds: float, update_seconds: float, forward_seconds: float
    ) -> None:
        """It is over but for its update, and the device was waited for. A step that was not observed does not count,
        nor does one that was skipped, as with fp16 and an overflow, or that follows such a step: it says nothing about
        the update.

        Args:
            record: its figures.
            before: those of the step before, with its update.
            seconds: of it, without planning at its start.
            update_seconds: what the optimizer took of it before it returned; 0 if the step was skipped.
            forward_seconds: of its first forward pass, without waits for an update.
        """
        updated_before, self._updated = self._updated, bool(update_seconds)
        if not (self._observes and self._updated and updated_before):
            return
        exposed = update_seconds + record.stall_seconds[Stall.UPDATE]
        passes_seconds = max(seconds - exposed, 0.0)
        forward_seconds = min(forward_seconds, passes_seconds)
        update = update_seconds + before.background_seconds
        stalls = (record.stall_seconds, before.background_stall_seconds)
        waiting = sum(each.get(cause, 0.0) for each in stalls for cause in (Stall.OPTIMIZER_READ, Stall.BUFFER))
        arithmetic = max(update - waiting, 0.0)
        other_seconds = passes_seconds - forward_seconds
        self._steps.add(StepTimes(forward_seconds, other_seconds, update, arithmetic, exposed))

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
