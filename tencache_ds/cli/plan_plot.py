# SPDX-License-Identifier: Apache-2.0
"""``tencache plan --plot``: residency by place, and the frontier of memory and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tencache_ds.plotting import BLUE, DPI, INK, ORANGE, SKY, VERMILION, bare, new_figure, tint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tencache_ds.planning.forecast import Forecast

GIB = 2**30
COLOURS = {"weights": BLUE, "gradients": SKY, "optimizer state": ORANGE}


def write_plot(
    path: Path,
    title: str,
    chosen: Forecast,
    frontier: Mapping[int, Sequence[Forecast]],
    *,
    limit: str,
    ranks: int,
) -> None:
    """Draws the bytes by place of one plan, and the shortest step over host memory for several GPU memory budgets.

    Args:
        path: the file; its suffix determines the format.
        title: of the figure.
        chosen: the plan, drawn by place and marked in the frontier.
        frontier: for each GPU memory budget of all ranks (bytes), the forecasts for ascending host memory.
        limit: name of the resource that limits the chosen plan.
        ranks: of the host.
    """
    figure = new_figure(9.6, 3.8, title)
    places, steps = figure.subplots(1, 2, width_ratios=(1, 1.1))
    _draw_places(places, chosen)
    _draw_frontier(steps, chosen, frontier, limit, ranks)
    figure.savefig(path, dpi=DPI)


def _draw_places(axes: Axes, chosen: Forecast) -> None:
    kinds = {"weights": chosen.weights, "gradients": chosen.gradients, "optimizer state": chosen.state}
    names = ("NVMe", "RAM", "GPU memory")
    left = [0.0] * len(names)
    for kind, placed in kinds.items():
        widths = [nbytes / GIB for nbytes in (placed.nvme_nbytes, placed.host_nbytes, placed.gpu_nbytes)]
        axes.barh(names, widths, left=left, color=COLOURS[kind], label=kind, height=0.6)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axes.annotate(f" {total:.1f}", (total, row), va="center", fontsize=8, color=INK)
    axes.set_xlim(0, 1.15 * max(*left, 1.0))
    axes.set_xlabel("GiB on this machine")
    bare(axes)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1.0))


def _draw_frontier(
    axes: Axes, chosen: Forecast, frontier: Mapping[int, Sequence[Forecast]], limit: str, ranks: int
) -> None:
    for number, (gpu_nbytes, curve) in enumerate(sorted(frontier.items()), 1):
        axes.plot(
            [each.budget_nbytes / ranks / GIB for each in curve],
            [each.bound.seconds for each in curve],
            color=tint(BLUE, number / len(frontier)),
            linewidth=1.5 + 1.2 * (len(frontier) - number),  # curves that coincide stay visible
            label=f"{gpu_nbytes / ranks / GIB:.3g} GiB",
        )
    x, y = chosen.budget_nbytes / ranks / GIB, chosen.bound.seconds
    axes.plot(x, y, "o", color=VERMILION, markersize=7)
    right = x > 0.6 * axes.get_xlim()[1]  # the text goes to the wider side
    text = f"{y:.0f} s, limited by {limit}" if y >= 100 else f"{y:.3g} s, limited by {limit}"
    axes.annotate(
        text, (x, y), (-8 if right else 8, 6), textcoords="offset points", fontsize=8, color=INK,
        ha="right" if right else "left",
    )  # fmt: skip
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.set_xlim(left=0)
    axes.set_xlabel("host_memory per rank, GiB")
    axes.set_ylabel("predicted lower bound of the step, s")
    bare(axes, grid="y")
    if len(frontier) > 1:
        axes.legend(frameon=False, fontsize=8, title="GPU memory per rank", title_fontsize=8)
