# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.cli import main
from tencache_ds.observability.trace_file import (
    difference,
    intersection,
    length,
    timelines,
    trace_events,
    union,
    write_trace,
)
from tests.observability.test_trace_file import BACKGROUND, MS, TRAINING, recording, span

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=12)


def phase(name: str, start_ms: int, end_ms: int) -> list[object]:
    return ["phase", name, "phases", start_ms * MS, end_ms * MS, "", 0, None]


STEP = [
    phase("forward", 10, 50),
    phase("backward", 50, 90),
    phase("optimizer step", 90, 110),
    span("wait::weight_read", "stall", TRAINING, 20, 30, "weight id 3"),
    span("update::adam", "update", TRAINING, 90, 100),
    span("update::adam", "update", BACKGROUND, 25, 45),
    span("nvme::read", "nvme", "NVMe read", 15, 40, "weight id 3", 4096),
    span("nvme::read", "nvme", "NVMe read", 35, 60, "weight id 3", 4096),
    span("nvme::write", "nvme", "NVMe write", 100, 150, "weight id 3", 4096),
]


def moments(spans: list[tuple[int, int]]) -> set[int]:
    return {moment for start, end in spans for moment in range(start, end)}


@given(SPANS, SPANS)
def test_spans_are_sets_of_moments(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    one, other = ([(start, start + size) for start, size in spans] for spans in (first, second))
    a, b = union(one), union(other)
    assert moments(a) == moments(one)
    assert all(end < start for (_, end), (start, _) in zip(a, a[1:], strict=False)), "they do not touch"
    assert moments(intersection(a, b)) == moments(one) & moments(other)
    assert moments(difference(a, b)) == moments(one) - moments(other)
    assert length(intersection(a, b)) + length(difference(a, b)) == length(a)


def test_exposed_and_overlapped_time_of_a_step() -> None:
    (rank,) = timelines(trace_events([recording(STEP)]))
    assert [name for name, _ in rank.phases] == ["forward", "backward", "optimizer step"]
    assert [(number, pytest.approx(ends)) for number, ends in rank.steps] == [(5, (0.0, 0.1))]
    busy = {lane.kind: (length(lane.exposed), length(lane.overlapped)) for lane in rank.lanes}
    assert list(busy) == ["wait", "update", "read", "write"], "no lane without work"
    assert busy["wait"] == pytest.approx((0.010, 0.0))
    assert busy["update"] == pytest.approx((0.015, 0.015)), "exposed on the training thread and while it waits"
    assert busy["read"] == pytest.approx((0.010, 0.035)), "requests at the same time count once"
    assert busy["write"] == pytest.approx((0.0, 0.010)), "cut at the end of the recording"


def test_a_picture_from_a_trace_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "timeline.svg"
    write_trace(trace, [recording(STEP), recording(STEP, rank=1)])
    with mpl.rc_context({"svg.fonttype": "none"}):
        assert main(["trace", "--summary", str(trace), "--plot", str(picture)]) == 0
    assert str(picture) in capsys.readouterr().out.replace("\n", "")
    drawn = picture.read_text()
    for text in ("rank 0", "rank 1", "step 5", "backward", "NVMe read", "45 ms, 22 %"):
        assert text in drawn


@pytest.mark.parametrize(("name", "problem"), [("a.txt", "ends with .png"), ("no/a.png", "is not a folder")])
def test_a_picture_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, problem: str
) -> None:
    assert main(["trace", "--plot", str(tmp_path / name)]) == 1, "before a job is looked for"
    assert problem in capsys.readouterr().err


def test_a_picture_without_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["trace", "--plot", str(tmp_path / "a.png")]) == 1
    assert "pip install 'tencache-ds[bench]'" in capsys.readouterr().err
