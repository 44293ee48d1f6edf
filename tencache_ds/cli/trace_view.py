# SPDX-License-Identifier: Apache-2.0
"""The summary that ``tencache trace`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tencache_ds.cli.console import format_nbytes
from tencache_ds.observability.trace_summary import NOTHING, RankSummary

SHOWN_WAITS = 8
SHOWN_RANKS = 8
_WIDEST = 44


def render(ranks: Sequence[RankSummary]) -> RenderableType:
    """Tables of where the time went, the longest waits, and the links; ranks beyond the first few are left out."""
    shown = list(ranks[:SHOWN_RANKS])
    parts: list[RenderableType] = [_times(shown)]
    if len(ranks) > len(shown):
        parts.append(Text(f"{len(ranks) - len(shown)} more ranks are in the file"))
    slowest = max(ranks, key=lambda rank: sum(wait.seconds for wait in rank.waits))
    if slowest.waits:
        parts.append(_waits(slowest))
    parts.append(_links(shown))
    parts += [
        Text(
            f"rank {rank.rank}: {rank.n_dropped} spans did not fit into the recorder's memory and are missing; record "
            "fewer steps",
            style="yellow",
        )
        for rank in ranks
        if rank.n_dropped
    ]
    return Group(*parts)


def _times(ranks: Sequence[RankSummary]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("training thread, per step")
    for rank in ranks:
        table.add_column(f"rank {rank.rank}", justify="right")
    causes = sorted(
        {cause for rank in ranks for cause in rank.seconds},
        key=lambda cause: (cause == NOTHING, -max(rank.seconds.get(cause, 0.0) for rank in ranks)),
    )
    for cause in causes:
        table.add_row(cause, *(_part(rank.seconds.get(cause, 0.0), rank.step_seconds) for rank in ranks))
    steps = f"step (average of {ranks[0].n_steps})"
    table.add_row(Text(steps, style="bold"), *(_seconds(rank.step_seconds) for rank in ranks), end_section=True)
    return table


def _waits(rank: RankSummary) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(f"rank {rank.rank} waited", no_wrap=True)
    table.add_column("for", no_wrap=True, max_width=_WIDEST)
    table.add_column("times", justify="right", no_wrap=True)
    table.add_column("per step", justify="right", no_wrap=True)
    for wait in rank.waits[:SHOWN_WAITS]:
        table.add_row(wait.cause, Text(wait.what or "-"), str(wait.count), _part(wait.seconds, rank.step_seconds))
    return table


def _links(ranks: Sequence[RankSummary]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("link", "rank", "bytes per step", "rate while busy", "busy"):
        table.add_column(title, justify="left" if title == "link" else "right")
    for rank in ranks:
        for use in rank.links:
            busy = use.busy_seconds
            rate = f"{format_nbytes(use.nbytes / busy)}/s" if busy else "-"
            share = "-" if busy is None else f"{busy / rank.step_seconds:.0%}"
            table.add_row(use.link, str(rank.rank), format_nbytes(use.nbytes), rate, share)
    return table


def _part(seconds: float, whole: float) -> str:
    return f"{_seconds(seconds)} ({seconds / whole:.1%})" if seconds else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
