# SPDX-License-Identifier: Apache-2.0
"""What both plans of ``tencache plan`` print alike: of a model on this machine, and of a running job."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from tencache_ds.cli.finding import format_nbytes

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
