# SPDX-License-Identifier: Apache-2.0
"""How the report writes numbers, errors and settings: the filters of its template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

MISSING = "-"
"""The text of a cell without a figure."""

GIB = 2**30
GB = 10**9

_ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|Timeout|Interrupt|Exit|Killed|Busy)\w*\b")
_PATH = re.compile(r"(?<![\w./])/(?:[\w.+@-]+/)+([\w.+@-]*)")
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "\\|", "*": "\\*", "`": "'"})


def plain(text: str) -> str:
    """``text`` on one line, with nothing that Markdown or a table would take for its own."""
    return " ".join(text.split()).translate(_ESCAPES)


def without_paths(text: str) -> str:
    """``text`` with absolute paths cut down to the file's name: a report says nothing of the machine's folders."""
    return _PATH.sub(r".../\1", text)


def gist(error: str, limit: int = 200) -> str:
    """The line of an error that tells most, as plain text of at most about ``limit`` characters.

    Of a traceback that is the last line that names an exception; else it is the last line.
    """
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["no message"]
    text = without_paths(([line for line in lines if _ERROR_LINE.match(line)] or lines)[-1])
    return plain(text if len(text) <= limit else text[: limit - 3].rstrip() + "...")


def fixed(value: float | None, digits: int = 1, scale: float = 1) -> str:
    """``value / scale`` with a fixed number of decimals, or :data:`MISSING` for None and NaN."""
    return MISSING if value is None or pd.isna(value) else f"{value / scale:,.{digits}f}"


def number(value: float | None, scale: float = 1) -> str:
    """``value / scale`` with three significant digits, but at most three decimals, or :data:`MISSING`."""
    exponent = 0 if value is None or pd.isna(value) else int(f"{value / scale:.2e}".partition("e")[2])
    return fixed(value, min(max(2 - exponent, 0), 3), scale)


def gb(nbytes: float | None) -> str:
    """Bytes as GB with three significant digits, or :data:`MISSING`."""
    return number(nbytes, GB)


def gib(nbytes: float | None, digits: int = 1) -> str:
    """Bytes as GiB, or :data:`MISSING`."""
    return fixed(nbytes, digits, GIB)


def percent(fraction: float | None, digits: int = 0) -> str:
    """A fraction in per cent, or :data:`MISSING`."""
    return MISSING if fraction is None or pd.isna(fraction) else f"{100 * fraction:.{digits}f} %"


def joined(items: Sequence[str]) -> str:
    """Items as a list in a sentence: "a, b and c"; with semicolons where an item contains a comma."""
    comma, last = ("; ", "; and ") if any("," in item for item in items) else (", ", " and ")
    return last.join(filter(None, [comma.join(items[:-1]), *items[-1:]]))


def plural(count: int, noun: str) -> str:
    """The number and the noun: "1 round", "2 rounds"."""
    return f"{count} {noun}{'s' if count != 1 else ''}"


def setting(value: Any) -> str:
    """A setting as a reader writes it: 200,000,000 and not 200000000."""
    if value is None:
        return MISSING
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return plain(without_paths(str(value)))


def each(values: Iterable[Any], name: str, *arguments: Any) -> list[str]:
    """The values by another of these filters."""
    return [FILTERS[name](value, *arguments) for value in values]


FILTERS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (plain, without_paths, gist, number, gb, fixed, gib, percent, joined, plural, setting, each)
}
