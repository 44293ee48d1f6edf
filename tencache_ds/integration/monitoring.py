# SPDX-License-Identifier: Apache-2.0
"""Gives the figures of each step to DeepSpeed's monitor."""

from __future__ import annotations

from typing import Any

from deepspeed import comm as dist

from tencache_ds.integration.adapters.installed import calls
from tencache_ds.observability.summary import monitor_events
from tencache_ds.runtime.session import Session


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
