# SPDX-License-Identifier: Apache-2.0
"""Names: those that a user writes in a DeepSpeed config or in the environment, the known word that a misspelt one was
meant to be, and enums whose members are names.

This module needs only the standard library: the parse of every DeepSpeed config needs it, also in programs that do not
use TenCache, which must not depend on anything else of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum

ENGINE_KEY = "offload_engine"
ENGINE_NAME = "tencache"
OPTIONS_KEY = "tencache"
ZERO_KEY = "zero_optimization"
ENABLE_VARIABLE = "TENCACHE_ENABLE"
DISABLE_VARIABLE = "TENCACHE_DISABLE"
FAULTS_VARIABLE = "TENCACHE_FAULTS"

CUTOFF = 0.8


def closest(word: object, known: Iterable[str], cutoff: float = CUTOFF) -> str | None:
    """The known word closest to ``word``, ignoring case and separators; None if none is close.

    Args:
        word: the given word; values other than strings are close to nothing.
        known: words in lower case, with underscores.
        cutoff: smallest ratio of equal characters, from 0 to 1.
    """
    if not isinstance(word, str):
        return None
    plain = word.strip().lower().replace("-", "_").replace(" ", "_")
    matches = difflib.get_close_matches(plain, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`` Did you mean "…"?``, or nothing when no known word is close enough to be offered."""
    match = closest(word, known, cutoff=0.6)
    return f' Did you mean "{match}"?' if match is not None else ""


class StrEnum(str, Enum):
    """``enum.StrEnum``, which Python has from 3.11 on. Members are strings: they compare, print and format as their
    values."""

    def __str__(self) -> str:  # and format() with it: Enum's own say "Kind.eio", format() from Python 3.11 on
        return str.__str__(self)
