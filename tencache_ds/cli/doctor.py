# SPDX-License-Identifier: Apache-2.0
"""``tencache doctor``: checks TenCache's prerequisites on this machine and suggests fixes."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from tencache_ds.cli import checks
from tencache_ds.cli.checks import check_nvme_path
from tencache_ds.cli.console import Finding, Level, open_console

_MARKS = {
    Level.OK: "[green]ok[/green]",
    Level.WARNING: "[yellow]warning[/yellow]",
    Level.PROBLEM: "[red]problem[/red]",
}


def add_command(commands: Any) -> None:
    """Registers ``doctor`` with what :meth:`argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check prerequisites on this machine and suggest fixes",
        description="Checks TenCache's prerequisites on this machine. Exit status 1 if there is a problem.",
    )
    parser.add_argument(
        "--nvme-path",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="FOLDER",
        help="also check these folders as nvme_path and nvme_paths",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints all findings; returns 1 if one of them is a problem, else 0."""
    console = open_console()
    findings = examine(arguments.nvme_path)
    console.print(render(findings))
    problems, warnings = (sum(f.level is level for f in findings) for level in (Level.PROBLEM, Level.WARNING))
    if problems or warnings:
        console.print(f"{problems} problem(s), {warnings} warning(s)")
    else:
        console.print("No problems found.")
    return 1 if problems else 0


def examine(nvme_paths: Sequence[Path] = ()) -> list[Finding]:
    """Every check of this machine, in the order shown. Takes about two seconds; imports neither torch nor DeepSpeed."""
    findings = [
        *checks.check_versions(),
        *checks.check_eight_bit(),
        checks.check_autoload(),
        *checks.check_build_tools(),
        *checks.check_build_locks(),
        checks.check_cpu(),
        checks.check_memory(),
        checks.check_locked_memory(),
        *checks.check_gpus(),
        checks.check_gds(),
    ]
    for path in nvme_paths:
        findings.extend(check_nvme_path(path))
    return findings


def render(findings: Iterable[Finding]) -> Table:
    """A table with a line for each finding and, under it, the remedy where there is one."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = escape(finding.text)
        if finding.remedy:
            text += f"\n[bold]{escape(finding.remedy)}[/bold]"
        table.add_row(_MARKS[finding.level], finding.subject, text)
    return table
