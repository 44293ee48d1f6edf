# SPDX-License-Identifier: Apache-2.0
"""The common style of all plots: figures, axes and colours, and the check of ``--plot`` before the work begins.

matplotlib is imported where it is needed: everything else works without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tencache_ds.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")
DPI = 120
INK = "#222222"
FAINT = "#8A8A8A"
GRID = "#E6E6E6"
BLUE, SKY, ORANGE, VERMILION, GREEN, YELLOW, PURPLE = (
    "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#F0E442", "#CC79A7",
)  # fmt: skip
"""The palette of Okabe and Ito, which is safe for colour-blind readers."""


def check_plot_file(path: Path | None) -> None:
    """Checks the value of ``--plot`` before anything is measured or recorded.

    Raises:
        ConfigError: unknown format, missing folder, or matplotlib is not installed.
    """
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: name a file that ends with {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: {path.absolute().parent} is not a folder")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'tencache-ds[bench]'") from error


def new_figure(width_in: float, height_in: float, title: str) -> Any:
    """An empty figure with a title, independent of matplotlib's global state. Sizes in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    return figure


def bare(axes: Axes, *, grid: str = "") -> None:
    """Removes decoration from axes; ``grid``: ``"x"``, ``"y"``, ``"both"`` or none."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(labelsize=8, color=FAINT, labelcolor=INK)
    axes.xaxis.label.set(size=8.5, color=INK)
    axes.yaxis.label.set(size=8.5, color=INK)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, color=GRID, linewidth=0.7)  # type: ignore[arg-type, unused-ignore]


def tint(colour: str, strength: float) -> tuple[float, float, float]:
    """``colour`` mixed with white: 1 is the colour itself."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return 1 - strength * (1 - red), 1 - strength * (1 - green), 1 - strength * (1 - blue)
