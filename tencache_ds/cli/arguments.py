# SPDX-License-Identifier: Apache-2.0
"""Shared argument types of the commands, and their consoles. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

from rich.console import Console

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
