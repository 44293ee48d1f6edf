# SPDX-License-Identifier: Apache-2.0
"""What the commands share at the console: types of arguments, the tables' width, findings, and what both plans of
``tencache plan`` print alike, of a model on this machine and of a running job. And which running job a command is for.
Imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tencache_ds.errors import ConfigError, TenCacheError
from tencache_ds.observability.channel_client import Endpoint, Job, Process, jobs, select

_NARROWEST_COLUMNS = 100


def positive(text: str) -> float:
    """A number above 0, for :mod:`argparse`."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def at_least_one(text: str) -> int:
    """A whole number above 0, for :mod:`argparse`."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def size(text: str) -> int:
    """Bytes, such as ``32GiB``, for :mod:`argparse`."""
    from tencache_ds.config import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_json_file(file: Path | None) -> None:
    """Says before anything is measured that the result could not be written.

    Raises:
        ConfigError: names the file and the remedy.
    """
    if file is not None and not os.access(file.resolve().parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--json {file} cannot be written: name a file in an existing folder that is writable for this user"
        )


def open_console() -> Console:
    """Standard output, wide enough for the tables if it is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=_NARROWEST_COLUMNS)


class Level(Enum):
    """How much a finding of ``tencache doctor`` matters."""

    OK = "ok"
    WARNING = "warning"
    """Training works, but slower or not in every way of starting it."""

    PROBLEM = "problem"
    """Training with TenCache does not work on this machine as it is."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of ``tencache doctor``: one line of its report."""

    level: Level
    subject: str
    text: str
    remedy: str = ""
    """The remedy; empty exactly when ``level`` is OK."""


def format_nbytes(nbytes: float) -> str:
    """``nbytes`` in the largest binary unit that leaves at least 1: ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


MORE_NBYTES = 8 * 2**30
"""The step of memory whose worth is shown."""

PLACES = ("GPU memory", "RAM", "NVMe")
"""In the order of :class:`tencache_ds.placement.places.Place`."""


def places_table(where: str, rows: Iterable[tuple[str, tuple[int, int, int]]]) -> Table:
    """Bytes by kind and place.

    Args:
        where: heads the first column.
        rows: of each kind its name and its bytes in GPU memory, in RAM and on NVMe.
    """
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(where)
    for name in PLACES:
        table.add_column(name, justify="right")
    for name, sizes in rows:
        table.add_row(name, *map(format_nbytes, sizes))
    return table


def format_step(seconds: float) -> str:
    """A step's time, or a part of it."""
    return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


# Running jobs


_NONE_FOUND = (
    "no training with TenCache was found on this host for this user. A job is found once its engine is built, by the "
    "user who started it, and inside the container that it runs in"
)


def add_job_argument(parser: argparse.ArgumentParser) -> None:
    """The positional argument that names a job."""
    parser.add_argument(
        "job",
        nargs="?",
        metavar="PID|RUN_ID",
        help="a process of the job, or its run id; may be left out if only one job is running",
    )


def find_job(wanted: str | None, console: Console) -> Job:
    """The job that is meant. If there are several, they are listed first.

    Raises:
        TenCacheError: there is none, or not exactly one.
    """
    running, silent = jobs()
    job = select(running, wanted)
    if job is not None:
        return job
    if running:
        console.print(table_of(running))
    problems = "".join(f"\n  {error}" for error in silent)
    if wanted is not None:
        raise TenCacheError(f"no job {wanted} was found on this host{problems}")
    if running:
        raise TenCacheError(f"{len(running)} jobs are running: name one of them by its run id or a pid")
    raise TenCacheError(f"{_NONE_FOUND}{problems}")


def as_it_is_now(job: Job, endpoints: Sequence[Endpoint]) -> Job | None:
    """A job that was found before; None once it has ended. While it is busy, its last figures stay.

    Args:
        job: as it was.
        endpoints: of all its processes here.
    """
    running, silent = jobs(endpoints)
    latest = next((each for each in running if each.run_id == job.run_id), None)
    if latest is None and not silent:
        return None
    return Job(job.run_id, (latest or job).processes, tuple(silent))


def ranks_here(job: Job) -> str:
    """Which ranks of a job are meant, and whether there are more on other hosts."""
    ranks = [process.rank for process in job.processes]
    consecutive = ranks == list(range(ranks[0], ranks[-1] + 1))
    text = (
        str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}" if consecutive else ", ".join(map(str, ranks))
    )
    here = f"rank{'s' if len(ranks) > 1 else ''} {text} of {job.world_size}"
    return here if len(ranks) == job.world_size else f"{here} (the others are on other hosts, or did not answer)"


def table_of(running: list[Job]) -> Table:
    """A line for each job."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("run id", "pids", "ranks", "step", "program"):
        table.add_column(title)
    for job in running:
        first = job.processes[0].snapshot
        pids = ", ".join(str(process.pid) for process in job.processes)
        steps = str(max(engine["steps"] for engine in first["engines"]))
        table.add_row(escape(job.run_id), pids, ranks_here(job), steps, escape(first["program"]))
    return table


def latest_engine(process: Process) -> dict[str, Any]:
    """The engine of a process that took the last step, where there are several."""
    return min(process.snapshot["engines"], key=lambda engine: (engine["steps"] == 0, engine["seconds_in_step"]))


def stored_nbytes(stats: Mapping[str, Any], kind: str) -> int:
    """Bytes on the NVMe paths of a rank, as stored.

    Args:
        stats: the rank's figures (:class:`~tencache_ds.observability.counters.Stats` as a dict).
        kind: as in :class:`~tencache_ds.observability.paths.Contents`.
    """
    held = (content for path in stats["paths"] for content in path["contents"])
    return sum(int(content["nbytes"]) for content in held if content["kind"] == kind)
