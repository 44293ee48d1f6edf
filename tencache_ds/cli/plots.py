# SPDX-License-Identifier: Apache-2.0
"""Plots of ``tencache trace`` and ``tencache plan``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tencache_ds.cli.console import PLACES
from tencache_ds.observability.trace_file import LANES, Span, Timeline, length
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

    from tencache_ds.planning.forecast import Forecast

PHASES = {"forward": GREEN, "backward": YELLOW, "optimizer step": FAINT}
LANE_COLOURS = {"wait": VERMILION, "gather": GREEN, "copy": PURPLE, "update": ORANGE, "read": BLUE, "write": SKY}
OVERLAPPED = 0.35
"""Strength of the colour of overlapped time."""

WIDTH_IN = 11.0
LANE_IN = 0.27
NARROWEST = 0.06
"""Share of the width below which a phase has no name in its band."""


def write_trace_plot(path: Path, title: str, ranks: Sequence[Timeline]) -> None:
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
        _draw(axes, row, lane.overlapped, tint(LANE_COLOURS[lane.kind], OVERLAPPED), start)
        _draw(axes, row, lane.exposed, LANE_COLOURS[lane.kind], start)
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


# A plan


GIB = 2**30
KIND_COLOURS = {"weights": BLUE, "gradients": SKY, "optimizer state": ORANGE}


def write_plan_plot(
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
        axes.barh(names, widths, left=left, color=KIND_COLOURS[kind], label=kind, height=0.6)
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


# A running job


PLACE_COLOURS = (BLUE, ORANGE, VERMILION)
"""Colours of :data:`PLACES`."""

KINDS = ("weights", "gradients", "optimizer state")

ROW_IN = 0.17
"""Height of a layer's bar, in inches."""

Residency = Mapping[str, Mapping[str, Sequence[int]]]
"""For each weight or layer, the bytes of each kind by place."""


def layer_of(name: str) -> str:
    """The layer that a weight belongs to: the part of its name up to the first number, or else its module."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return ".".join(parts[:-1]) or name


def by_layer(ranks: Iterable[Residency]) -> dict[str, dict[str, list[int]]]:
    """The sums of all ranks' bytes for each layer, in the order of the model."""
    layers: dict[str, dict[str, list[int]]] = {}
    for rank in ranks:
        for name, kinds in rank.items():
            sums = layers.setdefault(layer_of(name), {kind: [0] * len(PLACES) for kind in KINDS})
            for kind in KINDS:
                sums[kind] = [total + nbytes for total, nbytes in zip(sums[kind], kinds[kind], strict=True)]
    return layers


def write_residency_plot(path: Path, title: str, layers: Residency) -> None:
    """Draws a bar for each layer and kind, divided by place; the first layer is on top.

    Args:
        path: the file; its suffix determines the format.
        title: of the figure.
        layers: of :func:`by_layer`.
    """
    height_in = 1.5 + ROW_IN * len(layers)
    figure = new_figure(9.6, height_in, title)
    rows = range(len(layers))
    for axes, kind in zip(figure.subplots(1, len(KINDS), sharey=True), KINDS, strict=True):
        left = [0.0] * len(layers)
        for place, (name, colour) in enumerate(zip(PLACES, PLACE_COLOURS, strict=True)):
            widths = [kinds[kind][place] / GIB for kinds in layers.values()]
            axes.barh(rows, widths, left=left, color=colour, label=name, height=0.8)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_title(f"{kind}, {sum(left):.2f} GiB", fontsize=8.5, color=INK, loc="left")
        axes.set_xlim(0, 1.05 * max([*left, 1e-9]))
        axes.set_xlabel("GiB per layer")
        axes.set_yticks(rows, layers)
        axes.set_ylim(len(layers) - 0.4, -0.6)
        bare(axes)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, fontsize=8, ncols=len(PLACES), loc="outside lower center")
    figure.savefig(path, dpi=DPI)
