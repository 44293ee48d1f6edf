# SPDX-License-Identifier: Apache-2.0
"""``tencache bench``: the comparison with stock DeepSpeed, from the package's ``benchmarks``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any


def add_command(commands: Any) -> None:
    """Lists ``bench`` among the commands; :func:`run` gets its arguments unparsed."""
    commands.add_parser("bench", help="compare with stock DeepSpeed on this machine", add_help=False)


def make_parser() -> argparse.ArgumentParser:
    """The parser of ``tencache bench``.

    Raises:
        ModuleNotFoundError: a package of the extra ``bench`` is missing.
    """
    from tencache_ds.benchmarks import command

    parser = argparse.ArgumentParser(prog="tencache bench")
    command.add_arguments(parser)
    return parser


def run(argv: Sequence[str]) -> int:
    """Runs the benchmark that ``argv`` describe and returns the exit status."""
    try:
        from tencache_ds.benchmarks import command
        from tencache_ds.benchmarks.activations import command as activations
        from tencache_ds.benchmarks.inference import command as inference
        from tencache_ds.benchmarks.reporting import report  # noqa: F401  # now, not after hours of measuring
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is missing: pip install 'tencache-ds[bench]'", file=sys.stderr)
        return 1
    if argv[:1] == ["inference"]:
        return inference.run(list(argv[1:]))
    if argv[:1] == ["activations"]:
        return activations.run(list(argv[1:]))
    return command.run(make_parser().parse_args(argv), argv)
