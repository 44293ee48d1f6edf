# SPDX-License-Identifier: Apache-2.0
"""What a run reports: messages to the user, and the figures of each step to DeepSpeed's monitor.

Messages are shown exactly once, whatever levels, handlers and filters a framework gives to loggers. They are printed,
not logged: DeepSpeed's logger hides INFO by default, and its level alone does not tell whether anything is written.
transformers, for one, sets the logger to INFO and leaves DeepSpeed's handler at WARNING.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from typing import Any

from deepspeed import comm as dist

from tencache_ds.config import Log, TenCacheConfig
from tencache_ds.integration.adapters.installed import calls
from tencache_ds.observability.counters import Stats
from tencache_ds.observability.summary import monitor_events, summary
from tencache_ds.runtime.session import Session

_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
"""Sessions whose summary has not been printed yet."""

_pid = os.getpid()


def announce(message: str, options: TenCacheConfig) -> None:
    """Prints the message on rank 0, unless ``log`` is ``quiet``."""
    if options.log == Log.normal and dist.get_rank() == 0:
        _say(message)


def announce_summary_at_end(session: Session) -> None:
    """Prints a summary of the run on rank 0 when the engine is destroyed, or else when the process ends."""
    if session.options.log == Log.normal and session.surroundings.rank == 0:
        session.before_close = _say_summary
        _open_sessions.add(session)


@atexit.register
def _say_what_is_left() -> None:
    if os.getpid() != _pid:
        return
    for session in list(_open_sessions):
        if not session.closed:
            _say_summary(session.stats())


def _say_summary(stats: Stats) -> None:
    for line in summary(stats):
        _say(f"TenCache: {line}")


def _say(message: str) -> None:
    # A closed stream or a terminal that is gone must not end the training, no more than it does for a logger.
    with contextlib.suppress(OSError, ValueError):
        print(message, flush=True)


class StepMonitor:
    """Used by the training thread."""

    def __init__(self) -> None:
        self._samples: int | None = None  # of the last step, if its figures are still to be written

    def step_done(self, deepspeed_engine: Any) -> None:
        """A step is over, perhaps but for what continues in the background."""
        if deepspeed_engine is not None and deepspeed_engine.monitor.enabled and dist.get_rank() == 0:
            self._samples = samples_after_step(deepspeed_engine)

    def write(self, deepspeed_engine: Any, session: Session | None) -> None:
        """Writes the figures of the last step, once nothing of it continues. Does nothing the second time."""
        samples, self._samples = self._samples, None
        if samples is None or deepspeed_engine is None or session is None:
            return
        record = session.counters.last_step
        if record is not None:
            deepspeed_engine.monitor.write_events(monitor_events(record, session.stats(), samples))


def samples_after_step(deepspeed_engine: Any) -> int:
    """What ``global_samples`` will be, at which DeepSpeed's own events of the step are: it is raised only after the
    optimizer's step has returned."""
    return int(deepspeed_engine.global_samples + calls.step_samples(deepspeed_engine))
