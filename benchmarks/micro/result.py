# SPDX-License-Identifier: Apache-2.0
"""Results of micro-benchmarks, their formatting, and the alternation of variants."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import JsonValue
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from ..record import Record

SCHEMA = 1

MIN_REPEATS = 5
"""Repeats below which a median says too little."""

Key = TypeVar("Key")
Sample = TypeVar("Sample")


class Row(Record):
    """One figure: a variant in one case."""

    variant: str
    """The measurements; the variants of a case were alternated."""

    quantity: str
    case: dict[str, str | int]
    """The setting, such as ``{"operation": "read", "lanes": 4}``."""

    value: float | None
    """Median of the samples; None where the variant does not exist on this machine, or does not apply."""

    unit: str
    spread: float | None
    """Interquartile range of the samples, in the unit of the value."""

    samples: list[float] = []
    """In the order they were taken."""

    note: str = ""
    """The reason for a missing value."""

    @classmethod
    def of(cls, variant: str, quantity: str, unit: str, case: Mapping[str, str | int], samples: Sequence[float]) -> Row:
        """The row of repeated measurements; a single exact figure has no spread.

        Raises:
            ValueError: there are no samples.
        """
        if not samples:
            raise ValueError(f"no samples of {quantity} for {variant}")
        spread = 0.0
        if len(samples) > 1:
            lower, _, upper = statistics.quantiles(samples, n=4, method="inclusive")
            spread = upper - lower
        return cls(
            variant=variant,
            quantity=quantity,
            case=dict(case),
            value=statistics.median(samples),
            unit=unit,
            spread=spread,
            samples=list(samples),
        )

    @classmethod
    def absent(cls, variant: str, quantity: str, unit: str, case: Mapping[str, str | int], reason: str) -> Row:
        """The row of something that cannot be measured here."""
        return cls(variant=variant, quantity=quantity, case=dict(case), value=None, unit=unit, spread=None, note=reason)


class MicroResult(Record):
    """One micro-benchmark on one machine."""

    schema_version: int = SCHEMA
    name: str
    parameters: dict[str, JsonValue]
    """Its settings, and context needed to interpret the figures."""

    rows: list[Row]
    columns: str = ""
    """The key of the cases whose values the table has in its columns; empty: it has the variants there."""

    def value(self, variant: str, quantity: str, **case: str | int) -> float | None:
        """The value of the first row of that variant and quantity whose case holds ``case``.

        Raises:
            KeyError: unknown row.
        """
        for row in self.rows:
            if row.variant == variant and row.quantity == quantity and case.items() <= row.case.items():
                return row.value
        raise KeyError(f"{self.name} has no {quantity} of {variant} for {case}")

    def show(self, console: Console) -> None:
        """Prints a table and, below it, why figures are missing.

        A line is a quantity in a case, with a column per variant; with :attr:`columns`, a variant in a case without
        that key, with a column per value of the key and quantity.
        """
        keys = [key for key in dict.fromkeys(key for row in self.rows for key in row.case) if key != self.columns]
        lines: dict[tuple[str, ...], dict[str, Row]] = {}
        for row in self.rows:
            title = f"{row.quantity} [{row.unit}]" if row.unit else row.quantity
            case = tuple(str(row.case.get(key, "")) for key in keys)
            if self.columns:
                line, column = (*case, row.variant), f"{row.case.get(self.columns, '')}: {title}"
            else:
                line, column = (title, *case), row.variant
            lines.setdefault(line, {})[column] = row
        columns = list(dict.fromkeys(column for cells in lines.values() for column in cells))
        table = Table(title=f"{self.name}: median ± interquartile range")
        for heading in (*keys, "") if self.columns else ("", *keys):
            table.add_column(heading)
        for column in columns:
            table.add_column(_escaped(column), justify="right")
        for line, cells in lines.items():
            if all(row.value is None for row in cells.values()):
                continue  # the notes below say why
            table.add_row(*map(_escaped, line), *(_cell(cells.get(column)) for column in columns))
        console.print(table)
        for key, value in self.parameters.items():
            console.print(f"  {key}: {value}", markup=False, highlight=False, soft_wrap=True)
        for note in dict.fromkeys(row.note for row in self.rows if row.note):
            of = [row for row in self.rows if row.note == note]
            names = ", ".join(dict.fromkeys(row.variant for row in of))
            # Only what all of them share tells which case it was.
            shared = ", ".join(f"{key} {value}" for key, value in of[0].case.items() if _all_have(of, key, value))
            console.print(
                f"  no figure for {names}{f' ({shared})' if shared else ''}: {note}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


class MicroReport(Record):
    """The file that ``python -m benchmarks.micro --json`` writes."""

    schema_version: int = SCHEMA
    results: list[MicroResult]

    def write(self, path: Path) -> None:
        """Writes the file at once: a reader sees the old one or the new one."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text(self.model_dump_json(indent=1))
        os.replace(partial, path)

    @classmethod
    def read(cls, path: Path) -> MicroReport:
        """The report in a file.

        Raises:
            pydantic.ValidationError: the file is not one of this schema.
            OSError: it cannot be read.
        """
        return cls.model_validate_json(path.read_text())


def _all_have(rows: Sequence[Row], key: str, value: str | int) -> bool:
    return all(row.case.get(key) == value for row in rows)


def _escaped(text: str) -> str:
    """Rich reads square brackets as markup."""
    return text.replace("[", "\\[")


def _cell(row: Row | None) -> str:
    if row is None or row.value is None:
        return "–"
    spread = f" ±{row.spread:.2g}" if len(row.samples) > 1 else ""
    return f"{row.value:,.0f}{spread}" if row.value >= 1000 else f"{row.value:.3g}{spread}"


def progress(total: int, title: str) -> tqdm:  # type: ignore[type-arg]
    """A progress bar on a terminal, nothing elsewhere; to be used in a ``with`` block."""
    return tqdm(total=total, desc=title, disable=None, leave=False)


def alternate(
    variants: Mapping[Key, Callable[[], Sample]], repeats: int, advance: Callable[[], object]
) -> dict[Key, list[Sample]]:
    """Runs the variants in turn, ``repeats`` times, after one round that does not count.

    Each round begins with another variant, so that none always follows the same one.

    Args:
        variants: takes one sample each.
        repeats: samples of each variant.
        advance: called after every run.

    Raises:
        ValueError: fewer than :data:`MIN_REPEATS` repeats.
    """
    if repeats < MIN_REPEATS:
        raise ValueError(f"a median needs at least {MIN_REPEATS} repeats, not {repeats}")
    names = list(variants)
    samples: dict[Key, list[Sample]] = {name: [] for name in names}
    for index in range(-1, repeats):
        for name in _rotated(names, index):
            sample = variants[name]()
            advance()
            if index >= 0:
                samples[name].append(sample)
    return samples


def _rotated(names: Sequence[Key], by: int) -> Iterable[Key]:
    start = by % max(len(names), 1)
    return [*names[start:], *names[:start]]
