# SPDX-License-Identifier: Apache-2.0
"""Traces as files in Chrome's trace-event format, which Perfetto and chrome://tracing open: a process per rank, a track
per thread, and as many tracks per resource as it had spans at a time. Imports neither torch nor DeepSpeed.

The summary of a trace: the training thread's time by cause, its longest waits, and the use of each link. And the
recorded steps of a rank as a timeline: phases, and the busy time of each kind of work, exposed and overlapped.
"""

from __future__ import annotations

import heapq
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tencache_ds.errors import ConfigError

# A rank's recorded steps


SPANS_PER_LINE = 256
"""Encoding this many takes about a millisecond, for which the training threads may have to wait."""


@dataclass(slots=True)
class RankRecording:
    """What one rank recorded.

    Attributes:
        rank, world_size, pid, host, run_id: of the process.
        training_thread: identifier of the thread that takes steps.
        steps: ``step``, ``t_start_ns``, ``t_end_ns`` and ``record`` of each recorded step.
        threads: names of threads by identifier; "" for those that Python did not start.
        weights: names of parameters by their id in weights' names.
        modules: names of modules by their id.
        n_dropped: spans that did not fit into the recorder's memory.
        spans: ``category, name, track, t_start_ns, t_end_ns, what, nbytes, arguments`` of each.
    """

    rank: int
    world_size: int
    pid: int
    host: str
    run_id: str
    training_thread: int
    steps: list[dict[str, Any]]
    threads: dict[str, str]
    weights: dict[str, str]
    modules: dict[str, str]
    n_dropped: int
    spans: list[Sequence[Any]] = field(default_factory=list)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Its parts, each small enough to be encoded without a noticeable pause."""
        spans = self.spans
        yield {"recording": asdict_without_spans(self)}
        for start in range(0, len(spans), SPANS_PER_LINE):
            yield {"spans": spans[start : start + SPANS_PER_LINE]}
        yield {"end": len(spans)}

    @classmethod
    def from_lines(cls, lines: Iterable[dict[str, Any]]) -> RankRecording:
        """The recording whose :meth:`lines` these are.

        Raises:
            ValueError: they are incomplete.
        """
        recording: RankRecording | None = None
        for line in lines:
            if "recording" in line:
                recording = cls(**line["recording"])
            elif recording is not None and "spans" in line:
                recording.spans.extend(line["spans"])
            elif recording is not None and line.get("end") == len(recording.spans):
                return recording
        raise ValueError("the recording is incomplete")


def asdict_without_spans(recording: RankRecording) -> dict[str, Any]:
    """The fields but for the spans."""
    spans, recording.spans = recording.spans, []
    try:
        fields = asdict(recording)
    finally:
        recording.spans = spans
    del fields["spans"]
    return fields


# Files


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
        contents: see :func:`trace_events`.
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


# Timelines


Span = tuple[float, float]
"""Start and end in seconds since the start of the trace."""

LANES = {
    "wait": "wait",
    "gather": "gather weights",
    "copy": "copy",
    "update": "update",
    "read": "NVMe read",
    "write": "NVMe write",
}
"""Kinds of work and their titles, in the order of the plot."""

_LANE_OF_CATEGORY = {"stall": "wait", "fetch": "gather", "copy": "copy", "update": "update"}
_LANE_OF_NAME = {"tencache::nvme::read": "read", "tencache::nvme::write": "write"}


@dataclass(frozen=True, slots=True)
class Lane:
    """The busy time of one kind of work. The two tuples are disjoint; their spans are sorted and do not overlap.

    Attributes:
        kind: a key of :data:`LANES`.
        exposed: while the training threads do this work themselves, or wait for anything.
        overlapped: in parallel with other work of the training threads.
    """

    kind: str
    exposed: tuple[Span, ...]
    overlapped: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The recorded steps of one rank.

    Attributes:
        rank: global rank.
        steps: number and span of each step.
        phases: name and span of each forward pass, backward pass and optimizer step, within the steps.
        lanes: one per kind of work that occurred, in the order of :data:`LANES`.
    """

    rank: int
    steps: tuple[tuple[int, Span], ...]
    phases: tuple[tuple[str, Span], ...]
    lanes: tuple[Lane, ...]


def timelines(contents: dict[str, Any]) -> list[Timeline]:
    """The timeline of each rank in a trace file.

    Args:
        contents: see :func:`trace_events`.
    """
    t_zero_ns = contents["otherData"]["tencache"]["t_zero_ns"]
    return [_timeline(rank, spans, t_zero_ns) for rank, spans in spans_by_rank(contents)]


def _timeline(rank: dict[str, Any], events: Sequence[dict[str, Any]], t_zero_ns: int) -> Timeline:
    steps = tuple(
        (int(step["step"]), ((step["t_start_ns"] - t_zero_ns) / 1e9, (step["t_end_ns"] - t_zero_ns) / 1e9))
        for step in rank["steps"]
    )
    whole = [(steps[0][1][0], steps[-1][1][1])]
    training = set(rank["training_tracks"])
    phases = []
    busy: dict[str, list[Span]] = defaultdict(list)
    own: dict[str, list[Span]] = defaultdict(list)  # on the training threads
    for event in events:
        span = (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        if event["cat"] == "phase":
            phases += [(str(event["name"]), part) for part in intersection([span], whole)]
        kind = _LANE_OF_NAME.get(event["name"]) or _LANE_OF_CATEGORY.get(event["cat"])
        if kind is None:
            continue
        busy[kind].append(span)
        if event["tid"] in training:
            own[kind].append(span)
    lanes = []
    for kind in LANES:
        if busy[kind]:
            spans = intersection(union(busy[kind]), whole)
            exposed = intersection(spans, union(own["wait"] + own[kind]))
            lanes.append(Lane(kind, tuple(exposed), tuple(difference(spans, exposed))))
    return Timeline(rank["rank"], steps, tuple(sorted(phases, key=lambda phase: phase[1])), tuple(lanes))


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments as sorted spans that neither overlap nor touch."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def intersection(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """The moments in both; the spans of each argument are sorted and do not overlap."""
    common = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            common.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(spans: Sequence[Span], removed: Sequence[Span]) -> list[Span]:
    """The moments of ``spans`` without those of ``removed``; each is sorted and without overlaps."""
    rest = []
    j = 0
    for start, end in spans:
        while j < len(removed) and removed[j][1] <= start:
            j += 1
        position, k = start, j
        while k < len(removed) and removed[k][0] < end:
            if position < removed[k][0]:
                rest.append((position, removed[k][0]))
            position = max(position, removed[k][1])
            k += 1
        if position < end:
            rest.append((position, end))
    return rest


def length(spans: Iterable[Span]) -> float:
    """The sum of the lengths."""
    return sum(end - start for start, end in spans)
