# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import threading

import pytest

from tencache_ds.errors import TenCacheError
from tencache_ds.observability import spans, tracing
from tencache_ds.observability.counters import Counters
from tencache_ds.observability.spans import Category, span
from tencache_ds.observability.tracing import StepTrace


def step(counters: Counters) -> None:
    with span(Category.UPDATE, "update", f"step {counters.n_steps + 1}"):
        pass
    tracing.boundary(counters, counters.step_done(0))


@pytest.fixture
def counters() -> Counters:
    return Counters()


def test_whole_steps_are_recorded_from_the_one_asked_for(counters: Counters):
    ended = []
    trace = StepTrace(counters, after_step=2, n_steps=3, on_end=ended.append)
    tracing.begin(trace)
    for _ in range(7):
        step(counters)
    assert [each.step for each in trace.steps] == [3, 4, 5]
    assert [span.what for span in trace.spans] == ["step 3", "step 4", "step 5"]
    assert all(a.t_end_ns == b.t_start_ns for a, b in zip(trace.steps, trace.steps[1:], strict=False))
    assert [each.record["step"] for each in trace.steps] == [3, 4, 5]
    assert trace.over.is_set()
    assert ended == [trace]
    assert trace.training_thread == threading.get_ident()
    assert spans.recorder() is None


def test_spans_that_cross_a_boundary_are_cut_there(counters: Counters):
    trace = StepTrace(counters, 1, 1)
    tracing.begin(trace)
    step(counters)
    recorder = spans.recorder()
    assert recorder is not None
    recorder.add(Category.NVME, "read", "NVMe read", 0, 2**62)
    recorder.add(Category.NVME, "read", "NVMe read", 0, 1)  # over before the step began
    step(counters)
    read, update = trace.spans
    assert (read.t_start_ns, read.t_end_ns) == (trace.steps[0].t_start_ns, trace.steps[0].t_end_ns)
    assert update.what == "step 2"


def test_steps_of_another_engine_do_not_count(counters: Counters):
    trace = StepTrace(counters, 0, 1)
    tracing.begin(trace)
    other = Counters()
    for _ in range(3):
        step(other)
    assert not trace.steps
    step(counters)
    step(other)
    step(counters)
    assert len(trace.steps) == 1
    assert [span.what for span in trace.spans] == ["step 4", "step 2"], "what else the process does is shown"


def test_one_trace_at_a_time(counters: Counters):
    first = StepTrace(counters, 0, 1)
    tracing.begin(first)
    with pytest.raises(TenCacheError, match="another trace"):
        tracing.begin(StepTrace(counters, 0, 1))
    tracing.end(first, "enough")
    assert first.failure == "enough"
    second = StepTrace(counters, 0, 1)
    tracing.begin(second)
    tracing.end(first, "too late to matter")
    assert not second.over.is_set()
    tracing.end(second)


def test_an_engine_that_is_destroyed_ends_its_trace(counters: Counters):
    trace = StepTrace(counters, 0, 5)
    tracing.begin(trace)
    step(counters)
    assert spans.recorder() is not None
    tracing.engine_closed(Counters())
    assert not trace.over.is_set()
    tracing.engine_closed(counters)
    assert "destroyed" in trace.failure
    assert spans.recorder() is None


def test_a_forked_child_records_nothing(counters: Counters):
    trace = StepTrace(counters, 0, 1)
    tracing.begin(trace)
    step(counters)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if spans.recorder() is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert spans.recorder() is not None
    tracing.end(trace)
