# SPDX-License-Identifier: Apache-2.0
"""``tencache trace``: records steps of a running job into a file for Perfetto, and summarizes them."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tencache_ds.cli.console import (
    add_job_argument,
    at_least_one,
    find_job,
    format_nbytes,
    latest_engine,
    open_console,
    ranks_here,
)
from tencache_ds.cli.plots import write_trace_plot
from tencache_ds.errors import ConfigError, TenCacheError
from tencache_ds.observability.channel_client import Answer, Job, Process, snapshot_of
from tencache_ds.observability.trace_file import (
    NOTHING,
    RankRecording,
    RankSummary,
    read_trace,
    summarize,
    timelines,
    write_trace,
)
from tencache_ds.plotting import check_plot_file

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


MARGIN_S = 0.5
"""Lead time: the ranks learn one after another at which step to begin, so that step must be far enough ahead."""

ATTEMPTS = 5

SILENCE_S = 600.0
"""A step that takes longer than this without any message from the process counts as a hang."""


class _LateError(Exception):
    """A rank had passed the step at which the recording was to begin."""


def add_command(commands: Any) -> None:
    """Registers ``trace`` with what :meth:`argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "trace",
        help="record steps of a running job for Perfetto, and summarize where their time goes",
        description="Records whole optimizer steps of all ranks on this host, without restarting them, into one file "
        "for https://ui.perfetto.dev (or chrome://tracing), and prints where their time goes.",
    )
    add_job_argument(parser)
    parser.add_argument("--steps", type=at_least_one, default=2, metavar="N", help="whole steps to record (default: 2)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where to write the trace (default: tencache-RUN_ID-stepN.json)"
    )
    parser.add_argument("--summary", type=Path, metavar="FILE", help="summarize this trace; record nothing")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw the steps as a timeline, as PNG, SVG or PDF (matplotlib)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Records and summarizes; returns 1 if that is not possible, else 0."""
    console = open_console()
    try:
        check_plot_file(arguments.plot)
        if arguments.summary is not None:
            contents = read_trace(arguments.summary)
            console.print(render(summarize(contents)))
            _plot(arguments.plot, contents, console)
            return 0
        _check_output(arguments.output)
        job = find_job(arguments.job, console)
        console.print(
            f"recording {arguments.steps} steps of {ranks_here(job)} of run {job.run_id} (Ctrl-C stops it) ..."
        )
        recordings = record(job, arguments.steps)
        output = arguments.output or Path(f"tencache-{job.run_id}-step{recordings[0].steps[0]['step']}.json")
        contents = write_trace(output, recordings)
        console.print(render(summarize(contents)))
        _say_where(output, console)
        _plot(arguments.plot, contents, console)
    except (TenCacheError, OSError) as error:
        print(f"tencache trace: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tencache trace: stopped; nothing was written", file=sys.stderr)
        return 1
    return 0


def _say_where(output: Path, console: Console) -> None:
    size = output.stat().st_size / 2**20
    console.print(f"written to {output} ({size:.1f} MiB): open it at https://ui.perfetto.dev", soft_wrap=True)


def _plot(path: Path | None, contents: dict[str, Any], console: Console) -> None:
    if path is not None:
        write_trace_plot(path, title_of(contents), timelines(contents))
        console.print(f"timeline drawn in {path}", soft_wrap=True)


def title_of(contents: dict[str, Any]) -> str:
    """The title of a trace's timeline."""
    ranks = contents["otherData"]["tencache"]["ranks"]
    steps = [step["step"] for step in ranks[0]["steps"]]
    return f"Steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"Step {steps[0]}"


def _check_output(output: Path | None) -> None:
    """Before anything is recorded.

    Raises:
        ConfigError: the file could not be written.
    """
    folder = Path.cwd() if output is None else output.absolute().parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder} is not a writable folder: name another one with --output")
    if output is not None and output.is_dir():
        raise ConfigError(f"--output {output} is a folder: name a file")


def record(job: Job, steps: int) -> list[RankRecording]:
    """Records steps of all ranks of a job on this host, the same steps on each.

    Raises:
        TenCacheError: a rank ended, refused or did not answer.
    """
    margin_s = MARGIN_S
    for _ in range(ATTEMPTS):
        try:
            return _record_once(job, steps, margin_s)
        except _LateError:
            margin_s *= 2  # the steps have become shorter, or the host is busy
            time.sleep(2 * MARGIN_S)  # until the ranks that were ready have noticed
    raise TenCacheError(f"the ranks did not begin at the same step in {ATTEMPTS} attempts: try again")


def _record_once(job: Job, steps: int, margin_s: float) -> list[RankRecording]:
    ranks = [(process, _latest(process)) for process in job.processes]
    last_seconds = [engine["stats"]["last_step"]["seconds"] for _, engine in ranks if engine["stats"]["last_step"]]
    quickest_s = max(min(last_seconds, default=margin_s), 1e-4)
    after_step = max(engine["steps"] for _, engine in ranks) + max(1, math.ceil(margin_s / quickest_s))
    limit_s = SILENCE_S + 4 * max(last_seconds, default=0.0) * (steps + 2)
    with contextlib.ExitStack() as stack:
        executor = stack.enter_context(ThreadPoolExecutor(len(ranks)))
        parts: list[Future[RankRecording]] = []
        for process, engine in ranks:
            request = {"command": "trace", "engine": engine["number"], "after_step": after_step, "steps": steps}
            answer = process.endpoint.ask(request, limit_s)
            stack.callback(answer.close)  # before the executor waits for its threads
            first = answer.next()
            if first is None:
                raise TenCacheError(f"rank {process.rank} has ended")
            if "late" in first:
                raise _LateError
            # All at the same time: a rank whose recording is not read would have to keep it in memory.
            parts.append(executor.submit(_receive, process.rank, answer))
        recordings = [part.result() for part in parts]
    if len({tuple(step["step"] for step in recording.steps) for recording in recordings}) > 1:
        raise _LateError
    return recordings


def _latest(process: Process) -> dict[str, Any]:
    """The engine of a process that takes steps, as it is now."""
    now = snapshot_of(process.endpoint)
    if now is None or not now.snapshot["engines"]:
        raise TenCacheError(f"rank {process.rank} has ended")
    return latest_engine(now)


def _receive(rank: int, answer: Answer) -> RankRecording:
    try:
        return RankRecording.from_lines(answer)
    except ValueError as error:
        raise TenCacheError(f"rank {rank} ended before the steps were over") from error
