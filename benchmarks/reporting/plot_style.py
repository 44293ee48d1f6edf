# SPDX-License-Identifier: Apache-2.0
"""How the plots look: palette, axes without decoration, names beside points.

matplotlib is imported where it is needed: without it everything else still works.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 8.0
INK = "#222222"
FAINT = "#8A8A8A"
OURS = ("#0072B2", "#56B4E9", "#004C78", "#3A8FC4", "#8CC9EF", "#00304D")
"""Of TenCache's configurations: blue, told apart by their lightness."""

PEERS = ("#D55E00", "#009E73", "#CC79A7", "#B8860B", "#7B6FB0", "#666666", "#8C3B00", "#4C8C2B")

SIDES = (
    (1, 0, "left", "center"), (0, 1, "center", "bottom"), (0, -1, "center", "top"), (0.8, 0.8, "left", "bottom"),
    (0.8, -0.8, "left", "top"), (-1, 0, "right", "center"), (-0.8, 0.8, "right", "bottom"),
    (-0.8, -0.8, "right", "top"),
)  # fmt: skip
"""Where a name may stand beside its point, the best place first: direction and alignment."""


def new_figure(height_in: float, title: str, *, rows: int = 1) -> tuple[Any, Any]:
    """A figure and its axes (an array of them for ``rows`` above 1)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    return figure, figure.subplots(rows, 1, sharex=False)


def bare(axes: Axes, *, grid: str) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(labelsize=8, color=FAINT, labelcolor=INK)
    axes.xaxis.label.set(size=8.5, color=INK)
    axes.yaxis.label.set(size=8.5, color=INK)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, color="#E6E6E6", linewidth=0.7)


def tint(colour: str, strength: float) -> tuple[float, float, float]:
    """``colour`` mixed with white: 1 is the colour itself."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return tuple(1 - strength * (1 - part) for part in (red, green, blue))  # type: ignore[return-value]


def plain_log_ticks(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", which="minor", length=0)


def label_points(
    figure: Figure,
    axes: Axes,
    points: Sequence[tuple[float, float, str, str]],
    *,
    lines: Sequence[Sequence[tuple[float, float]]] = (),
    legend: Any = None,
) -> None:
    """Names points so that no name lies on another, a point, a line, the legend or outside, as far as possible.

    Args:
        figure: on an Agg canvas, with its limits and scales set.
        axes: where the points are.
        points: x, y, name and colour.
        lines: corners of the lines that are drawn.
        legend: of the axes, or None.
    """
    from matplotlib.transforms import Bbox

    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    # The layout moves the axes: it has to be done before pixels mean anything.
    figure.draw_without_rendering()
    taken = [_square(axes, x, y, 7) for x, y, _, _ in points]
    for line in lines:
        pixels = [axes.transData.transform(corner) for corner in line]
        for (x0, y0), (x1, y1) in itertools.pairwise(pixels):
            for part in range(41):
                x, y = x0 + (x1 - x0) * part / 40, y0 + (y1 - y0) * part / 40
                taken.append(Bbox.from_extents(x - 2, y - 2, x + 2, y + 2))
    if legend is not None:
        taken.append(legend.get_window_extent(renderer))
    for x, y, name, colour in sorted(points):
        best: tuple[float, Any, Any] | None = None
        for distance, (dx, dy, horizontal, vertical) in itertools.product((8, 16, 26, 38, 54, 74), SIDES):
            note = axes.annotate(
                name, (x, y), (dx * distance, dy * distance), textcoords="offset points", ha=horizontal, va=vertical,
                fontsize=8, color=_shade(colour), zorder=4,
            )  # fmt: skip
            box = note.get_window_extent(renderer).padded(1.5)
            cost = _area(box) - _shared(box, axes.bbox) + 2 * sum(_shared(box, other) for other in taken)
            if best is not None and best[0] <= cost:
                note.remove()
                continue
            if best is not None:
                best[1].remove()
            best = (cost, note, box)
            if cost <= 0:
                break
        if best is not None:
            taken.append(best[2])


def _square(axes: Axes, x: float, y: float, half: float) -> Any:
    from matplotlib.transforms import Bbox

    column, row = axes.transData.transform((x, y))
    return Bbox.from_extents(column - half, row - half, column + half, row + half)


def _area(box: Any) -> float:
    return float(box.width * box.height)


def _shared(one: Any, other: Any) -> float:
    """Pixels that two boxes share."""
    wide = min(one.x1, other.x1) - max(one.x0, other.x0)
    high = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(wide * high) if wide > 0 and high > 0 else 0.0


def _shade(colour: str) -> tuple[float, float, float]:
    """``colour`` dark enough for text on white."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    brightness = 0.3 * red + 0.59 * green + 0.11 * blue
    factor = min(1.0, 0.42 / brightness) if brightness else 1.0
    return red * factor, green * factor, blue * factor
