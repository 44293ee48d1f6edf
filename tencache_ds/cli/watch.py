# SPDX-License-Identifier: Apache-2.0
"""``tencache watch``: a running job's steps, memory, traffic and waits, live in the terminal, a column per rank."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tencache_ds.cli.console import (
    add_job_argument,
    as_it_is_now,
    find_job,
    format_nbytes,
    latest_engine,
    open_console,
    positive,
    ranks_here,
    stored_nbytes,
)
from tencache_ds.errors import TenCacheError
from tencache_ds.observability.binding import binding, shares
from tencache_ds.observability.channel_client import Job, Process

LINKS = {"nvme_read": "NVMe read", "nvme_write": "NVMe write", "h2d": "host to device", "d2h": "device to host"}
STALLS = {
    "weight_read": "weight_read",
    "optimizer_read": "optimizer_read",
    "buffer": "buffer",
    "write_back": "write_back",
    "update": "update",
    "activation_read": "activation_read",
    "activation_write": "activation_write",
}
ACCESSES = ("resident", "prefetched", "late", "demand")


@dataclass(frozen=True, slots=True)
class _Column:
    """One engine of one rank.

    Attributes:
        engine: its figures.
        before: seconds since earlier figures, and those; None at first.
    """

    engine: dict[str, Any]
    before: tuple[float, dict[str, Any]] | None

    @property
    def stats(self) -> dict[str, Any]:
        """All figures."""
        return dict(self.engine["stats"])

    @property
    def last(self) -> dict[str, Any] | None:
        """The last step's."""
        record = self.stats["last_step"]
        return None if record is None else dict(record)

    def rate(self, link: str) -> float | None:
        """Bytes per second over a link since the earlier figures, or in the last step."""
        if self.before is not None and self.before[0] > 0:
            seconds, engine = self.before
            moved = self.stats["total"]["nbytes"][link] - engine["stats"]["total"]["nbytes"][link]
            return float(max(moved, 0) / seconds)
        return None if not self.last or not self.last["seconds"] else self.last["nbytes"][link] / self.last["seconds"]


def _figure(name: str) -> Callable[[dict[str, Any]], int]:
    return lambda stats: int(stats[name])


_PLACES: tuple[tuple[str, tuple[tuple[str, Callable[[dict[str, Any]], int]], ...]], ...] = (
    (
        "GPU memory",
        (
            ("weights", lambda stats: int(stats["gpu_weight_nbytes"] + stats["gpu_staging_nbytes"])),
            ("gradients", _figure("gpu_gradient_nbytes")),
            ("optimizer state", _figure("gpu_state_nbytes")),
            ("activations, last pass", _figure("gpu_activation_nbytes")),
        ),
    ),
    (
        "RAM",
        (
            ("weights", _figure("resident_weight_nbytes")),
            ("gradients", _figure("host_gradient_nbytes")),
            ("optimizer state", _figure("resident_state_nbytes")),
            ("activation buffers", _figure("activation_buffer_nbytes")),
            ("checkpoint being written", _figure("checkpoint_nbytes")),
            ("staging", _figure("staging_nbytes")),
        ),
    ),
    (
        "NVMe",
        (
            ("weights", partial(stored_nbytes, kind="weights")),
            ("optimizer state", partial(stored_nbytes, kind="optimizer")),
            ("activations, last pass", _figure("nvme_activation_nbytes")),
        ),
    ),
)
"""Places, and what is in each: its bytes from a rank's figures."""


def render(job: Job, before: tuple[float, Job] | None) -> RenderableType:
    """A job as a table.

    Args:
        job: its latest figures.
        before: seconds since earlier figures and those, for rates; without them rates are those of the last step.
    """
    columns = [_column(process, before) for process in job.processes]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for process in job.processes:
        table.add_column(f"rank {process.rank}", justify="right")

    def row(name: str, value: Callable[[_Column], str]) -> None:
        table.add_row(name, *(value(column) for column in columns))

    def section(name: str) -> None:
        table.add_row(Text(name, style="bold cyan"))

    _steps(row)
    for title, parts in _PLACES:
        if any(part(column.stats) for _, part in parts for column in columns):
            section(title)
            for name, part in parts:
                row(f"  {name}", lambda column, part=part: _size(part(column.stats)))  # type: ignore[misc]
    section("Links, per second" if before is not None else "Links, per second of the last step")
    for link, name in LINKS.items():
        row(f"  {name}", lambda column, link=link: _rate(column.rate(link)))  # type: ignore[misc]
    section("Weights, last step")
    for access in ACCESSES:
        row(f"  {access}", lambda column, access=access: _count(column, access))  # type: ignore[misc]
    section("Stalls, share of the last step")
    for stall, name in STALLS.items():
        row(f"  {name}", lambda column, stall=stall: _stall(column, stall))  # type: ignore[misc]
    section("Last step spent on")
    for resource in ("compute", "NVMe", "update"):
        row(f"  {resource}", lambda column, resource=resource: _share(column, resource))  # type: ignore[misc]
    row("  bound by", _binding)
    first = job.processes[0].snapshot
    title = f"[bold]TenCache[/bold] run {escape(job.run_id)}, {ranks_here(job)} on {escape(first['host'])}"
    lines: list[RenderableType] = [Text.from_markup(title), table]
    placement = columns[0].stats["placement"]
    if placement:
        lines.append(Text(f"placement: {placement}"))
    lines += [Text(error, style="yellow") for error in job.silent]
    return Group(*lines)


def _column(process: Process, before: tuple[float, Job] | None) -> _Column:
    engine = latest_engine(process)
    if before is not None:
        seconds, job = before
        for other in job.processes:
            for each in other.snapshot["engines"]:
                if other.pid == process.pid and each["number"] == engine["number"]:
                    return _Column(engine, (seconds, each))
    return _Column(engine, None)


def _steps(row: Callable[[str, Callable[[_Column], str]], None]) -> None:
    row("steps", lambda column: str(column.engine["steps"]))
    row("last step", lambda column: _seconds(None if column.last is None else column.last["seconds"]))
    row("  predicted", lambda column: _seconds(column.stats["predicted_seconds"]))
    row("  optimizer step", lambda column: _seconds(None if column.last is None else column.last["update_seconds"]))
    row("since then", lambda column: _seconds(column.engine["seconds_in_step"]))


def _size(nbytes: int) -> str:
    return format_nbytes(nbytes) if nbytes else "-"


def _rate(bytes_per_s: float | None) -> str:
    return "-" if not bytes_per_s else f"{format_nbytes(bytes_per_s)}/s"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _count(column: _Column, access: str) -> str:
    if column.last is None:
        return "-"
    accesses = column.last["accesses"]
    total = sum(accesses.values())
    return f"{accesses[access]} ({accesses[access] / total:.0%})" if accesses[access] else "-"


def _stall(column: _Column, cause: str) -> str:
    if column.last is None or not column.last["stall_seconds"].get(cause):
        return "-"
    return _part(column.last["stall_seconds"][cause], column.last["seconds"])


def _share(column: _Column, resource: str) -> str:
    return "-" if column.last is None else _part(shares(column.last)[resource], column.last["seconds"])


def _part(seconds: float, whole: float) -> str:
    return f"{_seconds(seconds)} ({seconds / whole:.1%})" if whole else "-"


def _binding(column: _Column) -> str:
    return "-" if column.last is None else binding(column.last)[0]


def add_command(commands: Any) -> None:
    """Registers ``watch`` with what :meth:`argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "watch",
        help="watch a running job: step time, memory, traffic, stalls",
        description="Shows what the ranks of a running job on this host do, until Ctrl-C or the end of the job.",
    )
    add_job_argument(parser)
    parser.add_argument("--once", action="store_true", help="print the figures once, for logs and scripts")
    parser.add_argument(
        "--interval", type=positive, default=1.0, metavar="SECONDS", help="between two refreshes (default: 1)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Shows the job; returns 1 if it cannot be found, else 0."""
    console = open_console()
    try:
        job = find_job(arguments.job, console)
        if arguments.once:
            console.print(render(job, None))
        else:
            _watch(job, console, arguments.interval)
    except TenCacheError as error:
        print(f"tencache watch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _watch(job: Job, console: Console, interval_s: float) -> None:
    endpoints = [process.endpoint for process in job.processes]
    before: tuple[float, Job] | None = None
    t_next = time.monotonic()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            now = time.monotonic()
            live.update(render(job, None if before is None else (now - before[0], before[1])), refresh=True)
            before = now, job
            t_next = max(t_next + interval_s, now)
            time.sleep(t_next - now)
            latest = as_it_is_now(job, endpoints)
            if latest is None:
                break
            job = latest
    console.print("The job has ended.")
