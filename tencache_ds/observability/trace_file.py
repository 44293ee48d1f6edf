# SPDX-License-Identifier: Apache-2.0
"""Traces as files in Chrome's trace-event format, which Perfetto and chrome://tracing open: a process per rank, a track
per thread, and as many tracks per resource as it had spans at a time. Imports neither torch nor DeepSpeed.

The summary of a trace: the training thread's time by cause, its longest waits, and the use of each link. Pure
arithmetic on the contents of a trace file; imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import heapq
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tencache_ds.errors import ConfigError
from tencache_ds.observability.recording import RankRecording, asdict_without_spans

FORMAT = 1
"""Version of the contents of ``otherData.tencache``."""

_WEIGHT = re.compile(r"weight id (\d+)")
_MODULE = re.compile(r"module id (\d+)")
_STEPS, _PHASES, _FIRST_THREAD, _FIRST_RESOURCE = 0, 1, 10, 1000  # track numbers, in the order in which they are shown


def trace_events(recordings: Sequence[RankRecording]) -> dict[str, Any]:
    """The contents of a trace file.

    Args:
        recordings: of the ranks; on one host, whose clock they share.
    """
    t_zero_ns = min(recording.steps[0]["t_start_ns"] for recording in recordings)
    events: list[dict[str, Any]] = []
    ranks = []
    for recording in sorted(recordings, key=lambda each: each.rank):
        training_tracks = _add_rank(events, recording, t_zero_ns)
        ranks.append(_header(recording) | {"training_tracks": training_tracks})
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"tencache": {"format": FORMAT, "t_zero_ns": t_zero_ns, "ranks": ranks}},
    }


def write_trace(path: Path, recordings: Sequence[RankRecording]) -> dict[str, Any]:
    """Writes a trace file, all of it or nothing, and returns its contents.

    Raises:
        OSError: it cannot be written.
    """
    contents = trace_events(recordings)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w") as file:
            json.dump(contents, file, separators=(",", ":"))
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return contents


def read_trace(path: Path) -> dict[str, Any]:
    """The contents of a trace file that TenCache has written.

    Raises:
        ConfigError: it is something else.
        OSError: it cannot be read.
    """
    try:
        contents = json.loads(path.read_bytes())
        if contents["otherData"]["tencache"]["format"] == FORMAT:
            return dict(contents)
    except (ValueError, KeyError, TypeError):
        pass
    raise ConfigError(f"{path} is not a trace of this version of `tencache trace`: record it again")


def spans_by_rank(contents: dict[str, Any]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The header of each rank and its spans.

    Args:
        contents: see :func:`trace_events`.
    """
    spans: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in contents["traceEvents"]:
        if event["ph"] == "X":
            spans[event["pid"]].append(event)
    return [(header, spans[header["rank"]]) for header in contents["otherData"]["tencache"]["ranks"]]


def _header(recording: RankRecording) -> dict[str, Any]:
    header = asdict_without_spans(recording)
    for name in ("weights", "modules", "threads", "training_thread"):
        del header[name]
    return header


def _add_rank(events: list[dict[str, Any]], recording: RankRecording, t_zero_ns: int) -> list[int]:
    """Adds a rank's events; returns the tracks of threads that compute."""
    rank = recording.rank
    _name_track(events, "process", rank, 0, f"rank {rank} on {recording.host} (pid {recording.pid})", rank)
    _name_track(events, "thread", rank, _STEPS, "steps", _STEPS)
    _name_track(events, "thread", rank, _PHASES, "phases", _PHASES)
    training = []
    tracks: dict[Any, int] = {"phases": _PHASES}
    threads = sorted(recording.threads.items(), key=lambda item: (int(item[0]) != recording.training_thread, item[1]))
    for number, (thread, name) in enumerate(threads, _FIRST_THREAD):
        is_training = int(thread) == recording.training_thread
        if is_training or not name:
            training.append(number)
        tracks[int(thread)] = number
        title = "training thread" if is_training else name or "thread of autograd"
        _name_track(events, "thread", rank, number, title, number)
    for step in recording.steps:
        args = {"seconds": step["record"]["seconds"], "update_seconds": step["record"]["update_seconds"]}
        events.append(
            _complete(
                f"step {step['step']}", "step", rank, _STEPS, step["t_start_ns"], step["t_end_ns"], t_zero_ns, args
            )
        )
    resources: dict[str, list[Sequence[Any]]] = {}
    for span in recording.spans:
        track = tracks.get(span[2])
        if track is None:
            resources.setdefault(str(span[2]), []).append(span)
        else:
            events.append(_event(span, recording, rank, track, t_zero_ns))
    first = _FIRST_RESOURCE
    for resource in sorted(resources):
        rows = _rows(resources[resource])
        n_rows = max(rows, default=0) + 1
        for row in range(n_rows):
            title = resource if n_rows == 1 else f"{resource} {row + 1}"
            _name_track(events, "thread", rank, first + row, title, first + row)
        for span, row in zip(resources[resource], rows, strict=True):
            events.append(_event(span, recording, rank, first + row, t_zero_ns))
        first += n_rows
    return training


def _event(span: Sequence[Any], recording: RankRecording, rank: int, track: int, t_zero_ns: int) -> dict[str, Any]:
    category, name, _, t_start_ns, t_end_ns, what, nbytes, arguments = span
    args: dict[str, Any] = dict(arguments or {})
    if what:
        args["what"] = _with_names(what, recording)
    if nbytes:
        args["bytes"] = nbytes
    return _complete(name, category, rank, track, t_start_ns, t_end_ns, t_zero_ns, args)


def _complete(
    name: str,
    category: str,
    rank: int,
    track: int,
    t_start_ns: int,
    t_end_ns: int,
    t_zero_ns: int,
    args: dict[str, Any],
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": rank,
        "tid": track,
        "ts": (t_start_ns - t_zero_ns) / 1000,
        "dur": (t_end_ns - t_start_ns) / 1000,
        "args": args,
    }


def _name_track(events: list[dict[str, Any]], kind: str, rank: int, track: int, name: str, order: int) -> None:
    for event, args in ((f"{kind}_name", {"name": name}), (f"{kind}_sort_index", {"sort_index": order})):
        events.append({"ph": "M", "name": event, "pid": rank, "tid": track, "args": args})


def _with_names(what: str, recording: RankRecording) -> str:
    """With the model's names of weights and modules in place of, or after, their identifiers."""
    what = _MODULE.sub(lambda match: recording.modules.get(match[1], match[0]), what)
    return _WEIGHT.sub(
        lambda match: f"{recording.weights[match[1]]}" if match[1] in recording.weights else match[0], what
    )


def _rows(spans: Iterable[Sequence[Any]]) -> list[int]:
    """For each span a row, as few as possible, so that no two spans of a row overlap."""
    spans = list(spans)
    rows = [0] * len(spans)
    busy: list[tuple[int, int]] = []  # end and number of rows that have one
    free: list[int] = []
    n_rows = 0
    for index in sorted(range(len(spans)), key=lambda i: (spans[i][3], spans[i][4])):
        while busy and busy[0][0] <= spans[index][3]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, n_rows = n_rows, n_rows + 1
        rows[index] = row
        heapq.heappush(busy, (spans[index][4], row))
    return rows


NOTHING = "unattributed"
"""Outside forward passes, backward passes and optimizer steps: data loading, the script, DeepSpeed."""

_CAUSES = {
    ("phase", "forward"): "forward: compute and the script",
    ("phase", "backward"): "backward: compute",
    ("phase", "optimizer step"): "optimizer step: norms, checks, placement",
    ("stall", "tencache::wait::weight_read"): "stall: weight_read",
    ("stall", "tencache::wait::optimizer_read"): "stall: optimizer_read",
    ("stall", "tencache::wait::buffer"): "stall: buffer",
    ("stall", "tencache::wait::write_back"): "stall: write_back",
    ("stall", "tencache::wait::update"): "stall: update",
}
_OF_CATEGORY = {
    "fetch": "gathering weights",
    "copy": "copies",
    "update": "update",
}
_LINKS = {"tencache::nvme::read": "NVMe read", "tencache::nvme::write": "NVMe write"}

Interval = tuple[float, float, str]
"""Start, end, cause."""


@dataclass(frozen=True, slots=True)
class Wait:
    """All waits of the training threads for one thing.

    Attributes:
        cause: of the stall.
        what: the weight or chunk.
        count: how often.
        seconds: together, per step.
    """

    cause: str
    what: str
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What moved over a link, per step.

    Attributes:
        link: its name.
        nbytes: bytes per step.
        busy_seconds: per step, with at least one transfer under way; None where only the bytes are known.
    """

    link: str
    nbytes: float
    busy_seconds: float | None


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank's recorded steps.

    Attributes:
        rank: global rank.
        n_steps: recorded.
        step_seconds: of one step, on average.
        seconds: per step and cause, on the training thread; they add up to ``step_seconds``.
        waits: the longest, by cause and awaited item.
        links: traffic.
        n_dropped: spans that are missing.
    """

    rank: int
    n_steps: int
    step_seconds: float
    seconds: dict[str, float]
    waits: tuple[Wait, ...]
    links: tuple[LinkUse, ...]
    n_dropped: int


def summarize(contents: dict[str, Any]) -> list[RankSummary]:
    """Summary of each rank in a trace file.

    Args:
        contents: see :func:`tencache_ds.observability.trace_file.trace_events`.
    """
    t_zero_ns = contents["otherData"]["tencache"]["t_zero_ns"]
    return [_summarize(rank, spans, t_zero_ns) for rank, spans in spans_by_rank(contents)]


def _summarize(rank: dict[str, Any], events: Sequence[dict[str, Any]], t_zero_ns: int) -> RankSummary:
    steps, training = rank["steps"], set(rank["training_tracks"])
    n_steps = len(steps)
    start = (steps[0]["t_start_ns"] - t_zero_ns) / 1e9
    end = (steps[-1]["t_end_ns"] - t_zero_ns) / 1e9
    intervals: list[Interval] = []
    waits: dict[tuple[str, str], list[float]] = defaultdict(list)
    transfers: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        category, name = event["cat"], event["name"]
        if name in _LINKS:
            transfers[_LINKS[name]].append(event)
        cause = _CAUSES.get((category, name)) or _OF_CATEGORY.get(category)
        if cause is None or not (category == "phase" or event["tid"] in training):
            continue
        intervals.append((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, cause))
        if category == "stall":
            waits[name.rpartition("::")[2], event["args"].get("what", "")].append(event["dur"] / 1e6)
    longest = sorted(waits.items(), key=lambda item: -sum(item[1]))
    return RankSummary(
        rank=rank["rank"],
        n_steps=n_steps,
        step_seconds=(end - start) / n_steps,
        seconds={cause: seconds / n_steps for cause, seconds in exclusive(intervals, start, end).items()},
        waits=tuple(Wait(*key, len(times), sum(times) / n_steps) for key, times in longest),
        links=tuple(_links(transfers, steps)),
        n_dropped=rank["n_dropped"],
    )


def _links(transfers: dict[str, list[dict[str, Any]]], steps: Sequence[dict[str, Any]]) -> Iterable[LinkUse]:
    n_steps = len(steps)
    for link in _LINKS.values():
        requests = transfers.get(link, [])
        nbytes = sum(event["args"].get("bytes", 0) for event in requests)
        busy = covered((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in requests)
        if nbytes:
            yield LinkUse(link, nbytes / n_steps, busy / n_steps)
    for key, link in (("h2d", "host to device"), ("d2h", "device to host")):
        nbytes = sum(step["record"]["nbytes"].get(key, 0) for step in steps)
        if nbytes:
            yield LinkUse(link, nbytes / n_steps, None)


def exclusive(intervals: Iterable[Interval], start: float, end: float) -> dict[str, float]:
    """The time between ``start`` and ``end`` by cause: each moment belongs to the interval that began last of those
    that cover it, or to :data:`NOTHING`. The values add up to ``end - start``.
    """
    clipped = sorted(
        (max(a, start), min(b, end), cause) for a, b, cause in intervals if b > start and a < end and b > a
    )
    totals: dict[str, float] = defaultdict(float)
    active: list[tuple[float, float, float, str]] = []  # the one that began last first; of those, the shortest
    now = start

    def advance(until: float) -> None:
        nonlocal now
        while now < until:
            while active and active[0][2] <= now:
                heapq.heappop(active)
            if not active:
                totals[NOTHING] += until - now
                now = until
            else:
                stop = min(until, active[0][2])
                totals[active[0][3]] += stop - now
                now = stop

    for a, b, cause in clipped:
        advance(a)
        heapq.heappush(active, (-a, b - a, b, cause))
    advance(end)
    return dict(totals)


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for a, b in sorted(intervals):
        if b > reached:
            total += b - max(a, reached)
            reached = b
    return total
