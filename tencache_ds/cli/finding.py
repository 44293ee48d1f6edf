# SPDX-License-Identifier: Apache-2.0
"""The result of one check of ``tencache doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warning"
    """Training works, but slower or not in every way of starting it."""

    PROBLEM = "problem"
    """Training with TenCache does not work on this machine as it is."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

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
