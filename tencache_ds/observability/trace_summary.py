# SPDX-License-Identifier: Apache-2.0
"""The summary of a trace: the training thread's time by cause, its longest waits, and the use of each link. Pure
arithmetic on the contents of a trace file; imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tencache_ds.observability.trace_file import spans_by_rank

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
