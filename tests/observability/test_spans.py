# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tencache_ds.observability import spans
from tencache_ds.observability.counters import Counters, Stall
from tencache_ds.observability.spans import Category, RecordedSpan, Recorder, span


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    instance = Recorder()
    spans.install(instance)
    yield instance
    spans.install(None)


def test_nothing_is_recorded_while_nobody_looks():
    recorder = Recorder()
    with span(Category.UPDATE, "update", "chunk"):
        spans.phase("forward")
    spans.phase(None)
    assert recorder.spans == []
    assert spans.recorder() is None
    assert span(Category.UPDATE, "a") is span(Category.FETCH, "b"), "a span that is off costs an object"


def test_a_span_that_is_off_is_cheap():
    n = 20_000

    def seconds() -> float:
        t_start = time.process_time()
        for _ in range(n):
            with span(Category.UPDATE, "update", "chunk"):
                pass
        return time.process_time() - t_start

    assert min(seconds() for _ in range(5)) / n < 5e-6  # about 0.4 us on an idle core


def test_spans_of_a_thread_are_nested(recorder: Recorder):
    with span(Category.FETCH, "outer", "module"), span(Category.STALL, "inner", "weight", 4096):
        time.sleep(0.001)
    inner, outer = recorder.spans
    assert (inner.name, inner.category, inner.what, inner.nbytes) == ("tencache::inner", "stall", "weight", 4096)
    assert outer.t_start_ns <= inner.t_start_ns < inner.t_end_ns <= outer.t_end_ns
    assert inner.t_end_ns - inner.t_start_ns >= 1_000_000
    assert inner.track == outer.track == threading.get_ident()
    assert recorder.threads[threading.get_ident()] == "MainThread"


def test_a_span_ends_with_an_exception(recorder: Recorder):
    with pytest.raises(KeyError), span(Category.UPDATE, "update"):
        raise KeyError
    assert len(recorder.spans) == 1


def test_many_threads_lose_nothing(recorder: Recorder):
    def work() -> None:
        for _ in range(500):
            with span(Category.LANE, "lane"):
                pass

    threads = [threading.Thread(target=work, name=f"lane-{index}") for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.spans) == 4000
    assert recorder.n_dropped == 0
    assert set(recorder.threads.values()) <= {thread.name for thread in threads} | {""}


def test_memory_is_bounded_and_what_is_missing_counted():
    recorder = Recorder(limit=10)
    for index in range(25):
        recorder.add(Category.NVME, "read", "NVMe read", index, index + 1)
    assert len(recorder.spans) == 10
    assert recorder.n_dropped == 15


def test_phases_follow_each_other(recorder: Recorder):
    for name in ("forward", "backward", None, "optimizer step", None):
        spans.phase(name)
    assert [span.name for span in recorder.spans] == ["forward", "backward", "optimizer step"]
    forward, backward, _ = recorder.spans
    assert forward.t_end_ns == backward.t_start_ns


def test_stalls_are_spans_with_what_was_waited_for(recorder: Recorder):
    with Counters().stall(Stall.WEIGHT_READ, "weight id 3 (8x8)", 4096):
        pass
    (span,) = recorder.spans
    assert isinstance(span, RecordedSpan)
    assert (span.name, span.what, span.nbytes) == ("tencache::wait::weight_read", "weight id 3 (8x8)", 4096)


def test_the_profiler_of_torch_shows_spans_without_a_recorder():
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profile, span(Category.UPDATE, "update::chunk", "optimizer chunk 0.0"):
        torch.ones(1).add_(1)
    assert "tencache::update::chunk" in {event.name for event in profile.events()}
