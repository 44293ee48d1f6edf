# SPDX-License-Identifier: Apache-2.0
"""``tencache plan --plot``: what would be where, and what memory is worth, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tencache_ds.errors import ConfigError

if TYPE_CHECKING:
    from tencache_ds.planning.forecast import Forecast

GIB = 2**30
SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = {"weights": "#0072B2", "gradients": "#56B4E9", "optimizer state": "#E69F00"}
"""Okabe and Ito's, which the colour-blind can tell apart."""

DPI = 120


def check_plot_file(path: Path | None) -> None:
    """Before anything is measured.

    Raises:
        ConfigError: it cannot be written there, or there is no matplotlib.
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
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error


def write_plot(path: Path, title: str, chosen: Forecast, curve: Sequence[Forecast], *, limit: str, ranks: int) -> None:
    """Bytes by place of one plan, and the shortest step over host memory.

    Args:
        path: the file; its suffix says its format.
        title: of the picture.
        chosen: the plan, drawn by place and marked on the curve.
        curve: for ascending host memory.
        limit: name of the resource that limits the chosen plan.
        ranks: of the host.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    places, steps = figure.subplots(1, 2, width_ratios=(1, 1.1))
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    _draw_places(places, chosen)
    _draw_steps(steps, chosen, curve, limit, ranks)
    for axes in (places, steps):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=DPI)


def _draw_places(axes: Any, chosen: Forecast) -> None:
    kinds = {"weights": chosen.weights, "gradients": chosen.gradients, "optimizer state": chosen.state}
    names = ("NVMe", "RAM", "GPU memory")
    left = [0.0] * len(names)
    for kind, placed in kinds.items():
        widths = [nbytes / GIB for nbytes in (placed.nvme_nbytes, placed.host_nbytes, placed.gpu_nbytes)]
        axes.barh(names, widths, left=left, color=COLOURS[kind], label=kind, height=0.6)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axes.annotate(f" {total:.1f}", (total, row), va="center", fontsize=9)
    axes.set_xlim(0, 1.15 * max(*left, 1.0))
    axes.set_xlabel("GiB on this machine")
    axes.legend(frameon=False, fontsize=8, loc="best")


def _draw_steps(axes: Any, chosen: Forecast, curve: Sequence[Forecast], limit: str, ranks: int) -> None:
    axes.plot(
        [each.budget_nbytes / ranks / GIB for each in curve],
        [each.bound.seconds for each in curve],
        color="#444444",
        linewidth=1.5,
    )
    here = (chosen.budget_nbytes / ranks / GIB, chosen.bound.seconds)
    axes.plot(*here, "o", color=COLOURS["optimizer state"], markersize=7)
    axes.annotate(f"  {chosen.bound.seconds:.3g} s, limited by {limit}", here, fontsize=9, va="bottom")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("host_memory per rank, GiB")
    axes.set_ylabel("step at best, s")
