# SPDX-License-Identifier: Apache-2.0
"""What the commands share at the console: types of arguments, the tables' width, findings, and what both plans of
``tencache plan`` print alike, of a model on this machine and of a running job. Imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tencache_ds.errors import ConfigError

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
