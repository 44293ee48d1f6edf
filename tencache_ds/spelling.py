# SPDX-License-Identifier: Apache-2.0
"""The known word that a misspelt one was meant to be. Needs only the standard library."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

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
