# SPDX-License-Identifier: Apache-2.0
"""``tencache watch``: a running job's steps, memory, traffic and waits, live in the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from rich.console import Console
from rich.live import Live

from tencache_ds.cli.console import open_console, positive
from tencache_ds.cli.jobs import add_job_argument, as_it_is_now, find_job
from tencache_ds.cli.watch_view import render
from tencache_ds.errors import TenCacheError
from tencache_ds.observability.channel_client import Job


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
