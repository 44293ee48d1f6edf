# SPDX-License-Identifier: Apache-2.0
"""The recorded steps of a rank as a timeline: phases, and the busy time of each kind of work, divided into exposed and
overlapped time. Pure arithmetic on the contents of a trace file; imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tencache_ds.observability.trace_file import spans_by_rank

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

_OF_CATEGORY = {"stall": "wait", "fetch": "gather", "copy": "copy", "update": "update"}
_OF_NAME = {"tencache::nvme::read": "read", "tencache::nvme::write": "write"}


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
        contents: see :func:`tencache_ds.observability.trace_file.trace_events`.
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
        kind = _OF_NAME.get(event["name"]) or _OF_CATEGORY.get(event["cat"])
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
