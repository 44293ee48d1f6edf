# SPDX-License-Identifier: Apache-2.0
"""Figures of variants that were measured in alternation, and their table."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

import numpy as np
import pandas as pd
from pydantic import JsonValue
from tqdm import trange

from ..record import Record

REPEATS = 5
"""Rounds of an alternation; fewer make a median that says too little."""

Sample = TypeVar("Sample")
Case = Mapping[str, str | int]


class Row(Record):
    """One figure: a variant in one case."""

    variant: str  # what was measured; the variants of a case were alternated
    quantity: str  # what the figure is; empty where a variant has none at all in this case
    case: dict[str, str | int]  # the setting, such as ``{"operation": "read", "lanes": 4}``
    value: float | None = None  # median of the samples
    unit: str = ""  # of the value; empty for a ratio
    spread: float | None = None  # interquartile range of the samples, in the unit of the value
    samples: list[float] = []  # in the order they were taken
    note: str = ""  # the reason for a missing value

    @property
    def text(self) -> str:
        """The cell of a table."""
        spread = f" ±{self.spread:.2g}" if len(self.samples) > 1 else ""
        return (f"{self.value:,.0f}" if self.value >= 1000 else f"{self.value:.3g}") + spread


class MicroResult(Record):
    """One micro-benchmark on one machine."""

    schema_version: Literal[1] = 1
    name: str  # of the benchmark
    parameters: dict[str, JsonValue]  # its settings, and context needed to interpret the figures
    rows: list[Row] = []  # its figures
    # the key of the cases whose values the table has in its columns; empty: it has the variants there
    columns: str = ""

    def add(self, quantity: str, unit: str, case: Case, samples: Mapping[str, Sequence[float]] | pd.DataFrame) -> None:
        """Adds a figure of each variant from its samples, by the name of the variant."""
        for variant, taken in samples.items():
            lower, median, upper = map(float, np.percentile(taken, (25, 50, 75)))
            self.rows.append(
                Row(variant=variant, quantity=quantity, case=dict(case), value=median, unit=unit,
                    spread=upper - lower, samples=list(map(float, taken)))
            )  # fmt: skip

    def lack(self, variant: str, case: Case, reason: str) -> None:
        """Adds that a variant cannot be measured in a case."""
        self.rows.append(Row(variant=variant, quantity="", case=dict(case), note=reason))

    def value(self, variant: str, quantity: str, **case: str | int) -> float | None:
        """The value of the first row of that variant and quantity whose case holds ``case``.

        Raises:
            KeyError: unknown row.
        """
        for row in self.rows:
            if row.variant == variant and row.quantity == quantity and case.items() <= row.case.items():
                return row.value
        raise KeyError(f"{self.name} has no {quantity} of {variant} for {case}")

    def table(self) -> str:
        """The figures, and below them the parameters and why some are missing.

        A line is a quantity in a case, with a column per variant; with :attr:`columns`, a variant in a case without
        that key, with a column per value of the key and quantity.
        """
        present = [row for row in self.rows if row.value is not None]
        cases = [{**row.case, "variant": row.variant, "text": row.text} for row in present]
        frame = pd.DataFrame(cases, dtype=object).fillna("")
        frame["figure"] = [f"{row.quantity} [{row.unit}]" if row.unit else row.quantity for row in present]
        keys = [key for key in frame if key not in ("variant", "text", "figure", self.columns)]
        lines, columns = ["figure", *keys], ["variant"]
        if self.columns:
            lines, columns = [*keys, "variant"], [self.columns, "figure"]
        cells = frame.pivot_table(index=lines, columns=columns, values="text", aggfunc="first", sort=False)
        said = [f"{self.name}: median ± interquartile range", cells.fillna("–").to_string()]
        said += [f"  {key}: {value}" for key, value in self.parameters.items()]
        for note in dict.fromkeys(row.note for row in self.rows if row.note):
            names = dict.fromkeys(row.variant for row in self.rows if row.note == note)
            said.append(f"  no figure for {', '.join(names)}: {note}")
        return "\n".join(said)


class MicroReport(Record):
    """The file that ``python -m benchmarks.micro --json`` writes."""

    schema_version: Literal[1] = 1
    results: list[MicroResult]


def alternate(title: str, variants: Mapping[str, Callable[[], Sample]], repeats: int) -> dict[str, list[Sample]]:
    """Samples of each variant: the variants take turns, after one round that does not count.

    Each round begins with another variant, so that none always follows the same one. On a terminal there is a bar.

    Args:
        title: of the bar.
        variants: takes one sample each.
        repeats: samples of each variant.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in variants}
    order = deque(variants)
    for _ in trange(1 + repeats, desc=title, disable=None, leave=False):
        for name in order:
            samples[name].append(variants[name]())
        order.rotate(-1)
    return {name: taken[1:] for name, taken in samples.items()}
