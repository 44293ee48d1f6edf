# SPDX-License-Identifier: Apache-2.0
"""``tencache trace --plot``: the recorded steps of each rank as a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tencache_ds.observability.timeline import LANES, Span, Timeline, length
from tencache_ds.plotting import (
    BLUE,
    DPI,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    bare,
    new_figure,
    tint,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PHASES = {"forward": GREEN, "backward": YELLOW, "optimizer step": FAINT}
COLOURS = {"wait": VERMILION, "gather": GREEN, "copy": PURPLE, "update": ORANGE, "read": BLUE, "write": SKY}
OVERLAPPED = 0.35
"""Strength of the colour of overlapped time."""

WIDTH_IN = 11.0
LANE_IN = 0.27
NARROWEST = 0.06
"""Share of the width below which a phase has no name in its band."""


def write_plot(path: Path, title: str, ranks: Sequence[Timeline]) -> None:
    """Draws the steps of each rank: phases as a band, below them one lane per kind of work.

    Args:
        path: the file; its suffix determines the format.
        title: of the figure.
        ranks: one panel each.
    """
    heights = [len(rank.lanes) + 2.2 for rank in ranks]
    figure = new_figure(WIDTH_IN, LANE_IN * sum(heights) + 1.1, title)
    panels = figure.subplots(len(ranks), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, rank in zip(panels, ranks, strict=True):
        _draw_rank(axes, rank)
    panels[-1].set_xlabel("ms; at the right: busy time per step, and the exposed part of it")
    _add_legend(figure)
    figure.savefig(path, dpi=DPI)


def _draw_rank(axes: Axes, rank: Timeline) -> None:
    start, end = rank.steps[0][1][0], rank.steps[-1][1][1]
    for name, span in rank.phases:
        _draw(axes, 0, [span], tint(PHASES.get(name, FAINT), 0.6), start)
        if span[1] - span[0] > NARROWEST * (end - start):
            axes.text(_ms(sum(span) / 2, start), 0, name, ha="center", va="center", fontsize=8, color=INK)
    for row, lane in enumerate(rank.lanes, 1):
        _draw(axes, row, lane.overlapped, tint(COLOURS[lane.kind], OVERLAPPED), start)
        _draw(axes, row, lane.exposed, COLOURS[lane.kind], start)
        exposed = length(lane.exposed)
        busy = exposed + length(lane.overlapped)
        axes.text(
            1.005, row, f"{1e3 * busy / len(rank.steps):.3g} ms, {100 * exposed / busy if busy else 0:.0f} %",
            transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=INK,
        )  # fmt: skip
    for number, span in rank.steps:
        axes.axvline(_ms(span[0], start), color=FAINT, linewidth=0.8, zorder=0)
        axes.text(_ms(span[0], start), -0.6, f" step {number}", fontsize=8, color=INK, va="bottom")
    axes.axvline(_ms(end, start), color=FAINT, linewidth=0.8, zorder=0)
    axes.set_yticks(range(len(rank.lanes) + 1), ["phases", *(LANES[lane.kind] for lane in rank.lanes)])
    axes.set_ylim(len(rank.lanes) + 0.6, -1.5)
    axes.set_xlim(0, _ms(end, start))
    axes.set_ylabel(f"rank {rank.rank}")
    bare(axes)
    axes.tick_params(axis="y", length=0)


def _draw(axes: Axes, row: int, spans: Sequence[Span], colour: Any, t_zero: float) -> None:
    bars = [(_ms(start, t_zero), 1e3 * (end - start)) for start, end in spans]
    axes.broken_barh(bars, (row - 0.4, 0.8), color=colour, linewidth=0)


def _ms(seconds: float, t_zero: float) -> float:
    return 1e3 * (seconds - t_zero)


def _add_legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=INK, label="exposed: the training thread waits, or does this itself"),
        Patch(color=tint(INK, OVERLAPPED), label="overlapped with other work of the training thread"),
    ]
    figure.legend(handles=handles, ncols=2, loc="outside upper right", fontsize=8, frameon=False)
