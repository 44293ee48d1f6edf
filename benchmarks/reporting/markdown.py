# SPDX-License-Identifier: Apache-2.0
"""How the report writes tables, numbers and errors in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MISSING = "-"
"""The text of a cell without a figure."""

GIB = 2**30
GB = 10**9

_ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|Timeout|Interrupt|Exit|Killed|Busy)\w*\b")
_PATH = re.compile(r"(?<![\w./])/(?:[\w.+@-]+/)+([\w.+@-]*)")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """A table.

    Args:
        header: names of the columns.
        rows: their cells.
        words: how many of the first columns hold words, which stand to the left; figures stand to the right.

    Raises:
        ValueError: a row has another number of cells than the header.
    """
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * words}{'---:|' * (len(header) - words)}"]
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"a row of {len(row)} cells in a table of {len(header)} columns: {row[0] if row else ''}")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def details(summary: str, body: str) -> str:
    """A part that a reader opens with a click. GitHub wants the blank lines."""
    return f"<details>\n<summary>{summary}</summary>\n\n{body}\n\n</details>"


def plain(text: str) -> str:
    """``text`` on one line, with nothing that Markdown or a table would take for its own."""
    text = " ".join(text.split())
    for character, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("*", "\\*"), ("`", "'")):
        text = text.replace(character, escaped)
    return text


def without_paths(text: str) -> str:
    """``text`` with absolute paths cut down to the file's name: a report says nothing of the machine's folders."""
    return _PATH.sub(lambda match: f".../{match.group(1)}", text)


def gist(error: str, limit: int = 200) -> str:
    """The line of an error that tells most, as plain text of at most about ``limit`` characters.

    Of a traceback that is the last line that names an exception; else it is the last line.
    """
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    if not lines:
        return "no message"
    named = [line for line in lines if _ERROR_LINE.match(line)]
    text = without_paths(named[-1] if named else lines[-1])
    return plain(text if len(text) <= limit else text[: limit - 3].rstrip() + "...")


def number(value: float | None, unit: str = "") -> str:
    """Three significant digits, or :data:`MISSING`."""
    if value is None:
        return MISSING
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 or size == 0 else 3
    # 9.996 has three digits as "10.0", not as "10.00".
    if digits and len(f"{size:.{digits}f}".replace(".", "").lstrip("0")) > 3:
        digits -= 1
    return f"{value:,.{digits}f}{unit}"


def gib(nbytes: float | None) -> str:
    """Bytes as GiB with one digit, or :data:`MISSING`."""
    return MISSING if nbytes is None else f"{nbytes / GIB:.1f}"


def gb(nbytes: float | None) -> str:
    """Bytes as GB with three significant digits, or :data:`MISSING`."""
    return MISSING if nbytes is None else number(nbytes / GB)


def percent(fraction: float | None, digits: int = 0) -> str:
    """A fraction in per cent, or :data:`MISSING`."""
    return MISSING if fraction is None else f"{100 * fraction:.{digits}f} %"


def joined(items: Sequence[str]) -> str:
    """Items as a list in a sentence: "a, b and c"; with semicolons where an item contains a comma."""
    comma, last = ("; ", "; and ") if any("," in item for item in items) else (", ", " and ")
    return last.join(filter(None, [comma.join(items[:-1]), items[-1]])) if items else ""
