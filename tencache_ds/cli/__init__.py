# SPDX-License-Identifier: Apache-2.0
"""The ``tencache`` command. ``tencache --help`` lists its subcommands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tencache_ds import __version__
from tencache_ds.cli import bench, doctor, plan, trace, tune, watch

__all__ = ["main", "make_parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``tencache`` command.

    Args:
        argv: arguments after the command's name; those of this process when omitted.

    Returns:
        The exit status: 0 if all is well, 1 if a command found a problem.

    Raises:
        SystemExit: with status 2 for arguments that cannot be understood, with 0 after ``--help`` and ``--version``.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["bench"]:  # has many arguments from a package that only it imports
        return bench.run(argv[1:])
    arguments = make_parser().parse_args(argv)
    return int(arguments.run(arguments))


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands but ``bench``, which has its own (:func:`tencache_ds.cli.bench.make_parser`)."""
    parser = argparse.ArgumentParser(prog="tencache", description="Tools for the TenCache offload engine.")
    parser.add_argument("--version", action="version", version=f"tencache {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    doctor.add_command(commands)
    tune.add_command(commands)
    plan.add_command(commands)
    watch.add_command(commands)
    trace.add_command(commands)
    bench.add_command(commands)
    return parser
