# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.observability.trace_file import NOTHING, covered, exclusive, summarize, trace_events
from tests.observability.test_trace_file import AUTOGRAD, BACKGROUND, TRAINING, recording, span


def test_each_moment_belongs_to_the_innermost_interval():
    result = exclusive([(0, 10, "forward"), (2, 6, "fetch"), (3, 5, "stall"), (12, 20, "backward")], 0, 15)
    assert result == pytest.approx({"forward": 6, "fetch": 2, "stall": 2, "backward": 3, NOTHING: 2})


def test_what_began_before_the_first_step_is_cut():
    assert exclusive([(-5, 3, "forward"), (8, 99, "backward")], 0, 10) == {"forward": 3, NOTHING: 5, "backward": 2}


@given(st.lists(st.tuples(st.integers(-5, 25), st.integers(0, 12), st.sampled_from("abc")), max_size=30))
def test_the_parts_add_up_to_the_whole(spans: list[tuple[int, int, str]]):
    intervals = [(start, start + length, cause) for start, length, cause in spans]
    result = exclusive(intervals, 0, 20)
    assert sum(result.values()) == pytest.approx(20)
    inside = [(max(a, 0), min(b, 20)) for a, b, _ in intervals if b > 0 and a < 20]
    assert covered(inside) == pytest.approx(20 - result.get(NOTHING, 0.0))


def test_intervals_that_overlap_are_covered_once():
    assert covered([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4
    assert covered([]) == 0


def test_a_step_by_cause():
    spans = [
        ["phase", "forward", "phases", 10_000_000, 50_000_000, "", 0, None],
        ["phase", "backward", "phases", 50_000_000, 90_000_000, "", 0, None],
        ["phase", "optimizer step", "phases", 90_000_000, 105_000_000, "", 0, None],
        span("fetch", "fetch", TRAINING, 10, 20),
        span("wait::weight_read", "stall", TRAINING, 12, 18, "weight id 3 (8x8)"),
        span("wait::weight_read", "stall", AUTOGRAD, 60, 64, "weight id 3 (8x8)"),
        span("wait::update", "stall", TRAINING, 30, 33, "weight id 3, weight id 8"),
        span("update::sub_group", "update", TRAINING, 92, 100),
        span("wait::optimizer_read", "stall", BACKGROUND, 20, 40, "optimizer chunk 0.1"),
        span("nvme::read", "nvme", "NVMe read", 20, 40, "optimizer chunk 0.1", 1000),
        span("nvme::read", "nvme", "NVMe read", 30, 50, "optimizer chunk 0.2", 2000),
    ]
    (summary,) = summarize(trace_events([recording(spans)]))
    ms = {cause: seconds * 1000 for cause, seconds in summary.seconds.items()}
    assert ms == pytest.approx(
        {
            "gathering weights": 4,
            "stall: weight_read": 10,
            "stall: update": 3,
            "forward: compute and the script": 27,
            "backward: compute": 36,
            "optimizer step: norms, checks, placement": 7,
            "update": 8,
            NOTHING: 5,
        }
    )
    assert sum(summary.seconds.values()) == pytest.approx(summary.step_seconds) == pytest.approx(0.1)
    assert [(wait.cause, wait.what, wait.count) for wait in summary.waits] == [
        ("weight_read", "layers.0.weight (8x8)", 2),
        ("update", "layers.0.weight, weight id 8", 1),
    ]
    read, to_device = summary.links
    assert (read.link, read.nbytes) == ("NVMe read", 3000)
    assert read.busy_seconds == pytest.approx(0.03)
    assert (to_device.link, to_device.nbytes, to_device.busy_seconds) == ("host to device", 4096, None)
