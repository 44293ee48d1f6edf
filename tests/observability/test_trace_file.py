# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.cli import main
from tencache_ds.errors import ConfigError
from tencache_ds.observability.trace_file import RankRecording, read_trace, trace_events, write_trace

TRAINING, BACKGROUND, AUTOGRAD = 11, 12, 13
MS = 1_000_000


def recording(spans: list[list[Any]], *, rank: int = 0, n_dropped: int = 0) -> RankRecording:
    record = {"step": 5, "seconds": 0.1, "update_seconds": 0.02, "nbytes": {"h2d": 4096, "d2h": 0}}
    return RankRecording(
        rank=rank,
        world_size=2,
        pid=100 + rank,
        host="host",
        run_id="run-1",
        training_thread=TRAINING,
        steps=[{"step": 5, "t_start_ns": 10 * MS, "t_end_ns": 110 * MS, "record": record}],
        threads={str(TRAINING): "MainThread", str(BACKGROUND): "tencache-update_0", str(AUTOGRAD): ""},
        weights={"3": "layers.0.weight"},
        modules={"4": "layers.0"},
        n_dropped=n_dropped,
        spans=spans,
    )


def span(name: str, category: str, track: int | str, start_ms: float, end_ms: float, what: str = "", nbytes: int = 0):
    return [category, f"tencache::{name}", track, round(start_ms * MS), round(end_ms * MS), what, nbytes, None]


def check_format(contents: dict[str, Any]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """What Perfetto's importer asks of complete and metadata events; returns the spans of each track."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    named = set()
    for event in contents["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["args"]
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert tracks.keys() <= named
    return tracks


def assert_nested(spans: list[tuple[float, float]]) -> None:
    open_until: list[float] = []
    for start, end in sorted(spans, key=lambda each: (each[0], -each[1])):
        while open_until and open_until[-1] <= start + 1e-6:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 1e-6, "two spans of a track overlap in part"
        open_until.append(end)


def test_ranks_are_processes_and_threads_are_tracks(tmp_path: Path):
    spans = [
        span("fetch", "fetch", TRAINING, 10, 30, "module id 4"),
        span("wait::weight_read", "stall", TRAINING, 12, 20, "weight id 3 (8x8)", 4096),
        span("wait::optimizer_read", "stall", BACKGROUND, 12, 20, "optimizer chunk 0.1"),
        span("fetch", "fetch", AUTOGRAD, 40, 50, "module id 9"),
        ["phase", "forward", "phases", 10 * MS, 40 * MS, "", 0, None],
    ]
    path = tmp_path / "trace.json"
    write_trace(path, [recording(spans, rank=1), recording(spans)])
    contents = read_trace(path)
    assert contents == json.loads(path.read_text())
    for track in check_format(contents).values():
        assert_nested(track)
    names = {e["tid"]: e["args"]["name"] for e in contents["traceEvents"] if e["name"] == "thread_name"}
    assert {"training thread", "tencache-update_0", "thread of autograd", "steps", "phases"} == set(names.values())
    processes = {e["pid"]: e["args"]["name"] for e in contents["traceEvents"] if e["name"] == "process_name"}
    assert processes == {0: "rank 0 on host (pid 100)", 1: "rank 1 on host (pid 101)"}
    (wait,) = [e for e in contents["traceEvents"] if e["name"] == "tencache::wait::weight_read" and e["pid"] == 0]
    assert (wait["ts"], wait["dur"]) == (2000.0, 8000.0)
    assert wait["args"] == {"what": "layers.0.weight (8x8)", "bytes": 4096}
    fetches = [e["args"]["what"] for e in contents["traceEvents"] if e["name"] == "tencache::fetch" and e["pid"] == 0]
    assert fetches == ["layers.0", "module id 9"]
    training = contents["otherData"]["tencache"]["ranks"][0]["training_tracks"]
    assert {names[track] for track in training} == {"training thread", "thread of autograd"}


@given(st.lists(st.tuples(st.integers(10, 100), st.integers(0, 10)), max_size=40))
def test_requests_that_overlap_get_rows(requests: list[tuple[int, int]]):
    spans = [span("nvme::read", "nvme", "NVMe read", start, start + length) for start, length in requests]
    tracks = check_format(trace_events([recording(spans)]))
    assert sum(len(track) for track in tracks.values()) == len(spans) + 1  # the step
    most = max((sum(a <= at < a + n for a, n in requests) for at in range(10, 111)), default=0)
    assert len(tracks) - 1 <= max(most, 1) + sum(length == 0 for _, length in requests)
    for track in tracks.values():
        ordered = sorted(track)
        assert all(a[1] <= b[0] + 1e-6 for a, b in zip(ordered, ordered[1:], strict=False))


def test_a_recording_survives_its_way_to_the_command():
    spans = [span("nvme::read", "nvme", "NVMe read", 10 + i / 100, 11 + i / 100, f"chunk {i}") for i in range(1000)]
    lines = [json.loads(json.dumps(line)) for line in recording(spans, n_dropped=7).lines()]
    assert len(lines) > 4, "a line is too long"
    assert RankRecording.from_lines(lines) == recording(spans, n_dropped=7)
    for cut in (lines[:-1], lines[:-2] + lines[-1:], []):
        with pytest.raises(ValueError, match="incomplete"):
            RankRecording.from_lines(cut)


def test_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for text in ("", "{}", "[]", '{"traceEvents": []}', "\0\1"):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ConfigError, match=r"other\.json is not a trace"):
            read_trace(tmp_path / "other.json")
    assert main(["trace", "--summary", str(tmp_path / "other.json")]) == 1
    assert main(["trace", "--summary", str(tmp_path / "missing.json")]) == 1
    assert "tencache trace: " in capsys.readouterr().err


def test_the_summary_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    spans = [span("wait::weight_read", "stall", TRAINING, 20, 45, "weight id 3 (8x8)", 4096)]
    write_trace(tmp_path / "trace.json", [recording(spans, n_dropped=3)])
    assert main(["trace", "--summary", str(tmp_path / "trace.json")]) == 0
    printed = capsys.readouterr().out
    assert "25.0 ms (25.0%)" in printed
    assert "layers.0.weight (8x8)" in printed
    assert "3 spans did not fit" in printed
