# SPDX-License-Identifier: Apache-2.0
"""Results of micro-benchmarks, their formatting, and the alternation of variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np
import pandas as pd
from pydantic import JsonValue
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from tqdm import tqdm

from ..record import Record, write_at_once

SCHEMA: Final = 1

MIN_REPEATS = 5
"""Repeats below which a median says too little."""

Key = TypeVar("Key")
Sample = TypeVar("Sample")
Case = Mapping[str, str | int]


class Row(Record):
    """One figure: a variant in one case."""

    variant: str  # what was measured; the variants of a case were alternated
    quantity: str  # what the figure is
    case: dict[str, str | int]  # the setting, such as ``{"operation": "read", "lanes": 4}``
    # median of the samples; None where the variant does not exist on this machine, or does not apply
    value: float | None
    unit: str  # of the value; empty for a ratio
    spread: float | None  # interquartile range of the samples, in the unit of the value
    samples: list[float] = []  # in the order they were taken
    note: str = ""  # the reason for a missing value

    @classmethod
    def of(cls, variant: str, quantity: str, unit: str, case: Case, samples: Sequence[float]) -> Row:
        """The row of repeated measurements; a single exact figure has no spread.

        Raises:
            ValueError: there are no samples.
        """
        if not len(samples):
            raise ValueError(f"no samples of {quantity} for {variant}")
        lower, median, upper = map(float, np.percentile(samples, (25, 50, 75)))
        return cls(variant=variant, quantity=quantity, case=dict(case), value=median, unit=unit, spread=upper - lower,
                   samples=list(map(float, samples)))  # fmt: skip

    @classmethod
    def absent(cls, variant: str, quantity: str, unit: str, case: Case, reason: str) -> Row:
        """The row of something that cannot be measured here."""
        return cls(variant=variant, quantity=quantity, case=dict(case), value=None, unit=unit, spread=None, note=reason)

    @property
    def text(self) -> str:
        """The cell of a table."""
        if self.value is None:
            return "–"
        spread = f" ±{self.spread:.2g}" if len(self.samples) > 1 else ""
        return f"{self.value:,.0f}{spread}" if self.value >= 1000 else f"{self.value:.3g}{spread}"


class MicroResult(Record):
    """One micro-benchmark on one machine."""

    schema_version: Literal[1] = SCHEMA
    name: str  # of the benchmark
    parameters: dict[str, JsonValue]  # its settings, and context needed to interpret the figures
    rows: list[Row]  # its figures
    # the key of the cases whose values the table has in its columns; empty: it has the variants there
    columns: str = ""

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
        frame = pd.DataFrame(
            [{**row.case, "variant": row.variant, "note": row.note} for row in self.rows], dtype=object
        ).fillna("")
        keys = [key for key in frame if key not in ("variant", "note", self.columns)]
        frame["text"] = [row.text for row in self.rows]
        frame["figure"] = [f"{row.quantity} [{row.unit}]" if row.unit else row.quantity for row in self.rows]
        lines, column = ["figure", *keys], "variant"
        if self.columns:
            frame["figure"] = frame[self.columns].astype(str) + ": " + frame.figure
            lines, column = [*keys, "variant"], "figure"
        shown = frame.pivot_table(index=lines, columns=column, values="text", aggfunc="first", sort=False).fillna("–")
        shown = shown[(shown != "–").any(axis=1)]  # of the others the notes below say why
        cells = shown.reset_index().astype(str)
        headings = [Column("" if name in ("figure", "variant") else escape(name)) for name in lines]
        headings += [Column(escape(name), justify="right") for name in shown.columns]
        table = Table(*headings, title=f"{self.name}: median ± interquartile range")
        for line in cells.itertuples(index=False):
            table.add_row(*map(escape, line))
        console.print(table)
        remarks = [f"{key}: {value}" for key, value in self.parameters.items()]
        for note, absent in frame[frame.note != ""].groupby("note", sort=False):
            names = ", ".join(absent.variant.unique())
            # Only what all of them share tells which case it was.
            shared = [key for key in self.rows[absent.index[0]].case if absent[key].nunique() == 1]
            where = ", ".join(f"{key} {absent[key].iloc[0]}" for key in shared)
            remarks.append(f"no figure for {names}{f' ({where})' if where else ''}: {note}")
        for remark in remarks:
            console.print(f"  {remark}", markup=False, highlight=False, soft_wrap=True)


class MicroReport(Record):
    """The file that ``python -m benchmarks.micro --json`` writes."""

    schema_version: Literal[1] = SCHEMA
    results: list[MicroResult]

    def write(self, path: Path) -> None:
        """Writes the file at once: a reader sees the old one or the new one."""
        write_at_once(self, path)

    @classmethod
    def read(cls, path: Path) -> MicroReport:
        """The report in a file.

        Raises:
            pydantic.ValidationError: the file is not one of this schema.
            OSError: it cannot be read.
        """
        return cls.model_validate_json(path.read_text())


def progress(total: int, title: str) -> Any:
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
        start = index % max(len(names), 1)
        for name in names[start:] + names[:start]:
            sample = variants[name]()
            advance()
            if index >= 0:
                samples[name].append(sample)
    return samples
