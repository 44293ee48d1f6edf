# SPDX-License-Identifier: Apache-2.0
"""The plots of a report, drawn with matplotlib.

Colours are safe for the colour-blind (Okabe and Ito's, darkened where they have to be read on white).
"""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import Any

import adjustText
import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from tencache_ds.plotting import BLUE, DPI, FAINT, GREEN, INK, ORANGE, PURPLE, SKY, VERMILION, new_figure

from ..record import Benchmark, Run, setting_label
from .figures import Figures, all_figures
from .text import GB, GIB, number

WIDTH_IN = 8.0
OURS = (BLUE, SKY, "#004C78", "#3A8FC4", "#8CC9EF", "#00304D")
"""Colours of TenCache's configurations: blue, told apart by their lightness."""

PEERS = (VERMILION, GREEN, PURPLE, "#B8860B", "#7B6FB0", "#666666", "#8C3B00", "#4C8C2B")
PHASES = {"forward": SKY, "backward": BLUE, "update": ORANGE}
ACCESS_COLOURS = {"resident": GREEN, "prefetched": SKY, "late": ORANGE, "demand": VERMILION}

LABEL_CHARACTERS = 36
"""In a line of a row's label: longer ones would leave no room for the bars."""

LEGEND: dict[str, Any] = {
    "loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": 9, "handlelength": 1.0, "columnspacing": 1.2
}  # fmt: skip
"""Above the axes."""

_GPU = "gpu_memory"
"""TenCache's limit of GPU memory: on the frontier, points of one limit make a line."""

MAX_BINS = 300
"""Points of a storage curve: more than that cannot be told apart."""

STYLE: Any = ["seaborn-v0_8-whitegrid", {
    "axes.edgecolor": FAINT, "axes.spines.right": False, "axes.spines.top": False,
    "font.size": 8, "axes.labelsize": 8.5, "axes.titlesize": 8.5, "legend.fontsize": 8,
    "xtick.labelsize": 8, "ytick.labelsize": 8, "text.color": INK, "axes.labelcolor": INK,
}]  # fmt: skip


def write_plots(benchmark: Benchmark, folder: Path, name: str) -> list[str]:
    """Draws every plot that has something to show, as ``<folder>/<name>_<plot>.png``; returns the names of plots.

    Raises:
        OSError: the folder cannot be written.
    """
    plots = {"step_time": step_time, "frontier": frontier, "storage": storage_bandwidth, "accesses": access_classes}
    written = []
    with matplotlib.style.context(STYLE):
        for plot, draw in plots.items():
            figure = draw(benchmark)
            if figure is not None:
                file = folder / f"{name}_{plot}.png"
                figure.savefig(file, dpi=DPI, metadata={"Software": None}, pil_kwargs={"optimize": True})
                written.append(plot)
    return written


def colours(figures: dict[str, Figures]) -> dict[str, str]:
    """Colour of each configuration: TenCache's are blue, the peers' are not."""
    ours, peers = itertools.cycle(OURS), itertools.cycle(PEERS)
    return {name: next(ours) if f.is_ours else next(peers) for name, f in figures.items()}


def step_time(benchmark: Benchmark) -> Figure | None:
    """Horizontal bars of the phases of a step, the bound as a mark; None when no step was measured."""
    # What was never run has no bar and no error to show: the table lists it.
    shown = [f for f in all_figures(benchmark).values() if f.measured or f.failure]
    if not any(f.measured for f in shown):
        return None
    bars = pd.DataFrame([f.steps[[f"{phase}_s" for phase in PHASES]].median() for f in shown]).fillna(0.0)
    bars.columns = list(PHASES)
    seconds = pd.DataFrame([f.steps.seconds.agg(["median", "min", "max"]) for f in shown], dtype=float)
    rest = seconds["median"].to_numpy() - bars.sum(axis=1)
    if (rest > 0.01 * seconds["median"].to_numpy()).any():
        bars["other"] = rest.clip(lower=0.0).fillna(0.0)
    bound_s, rows = np.array([f.bound_s for f in shown]), np.arange(len(shown))
    figure, axes = _bars(bars, [f.configuration.label for f in shown], "Step time by phase", {**PHASES, "other": FAINT})
    axes.hlines(rows, seconds["min"], seconds["max"], color=INK, linewidth=0.8)
    if np.isfinite(bound_s).any():
        axes.vlines(bound_s, rows - 0.42, rows + 0.42, color=INK, linewidth=2.2)
        axes.plot([], [], color=INK, linestyle="none", marker="|", markersize=11, markeredgewidth=2.2, label="bound")
    ends = np.nanmax([seconds["max"], bars.sum(axis=1), bound_s], axis=0)
    for row, f in enumerate(shown):
        note = f"{number(f.median_s)} s" + (f"   {f.bound_fraction:.2f} of bound" if f.bound_fraction > 0 else "")
        if f.failure:
            note = f.failure.outcome.value.replace("_", " ")
        axes.text(ends[row] + 0.012 * ends.max(), row, note, va="center", color=FAINT if f.failure else INK)
    axes.set(xlim=(0, 1.35 * ends.max()), xlabel="seconds per step")
    axes.grid(visible=False, axis="y")
    axes.legend(**LEGEND)
    return figure


def frontier(benchmark: Benchmark) -> Figure | None:
    """Step time against peak host memory; None when no configuration has both."""
    figures = all_figures(benchmark)
    peaks = {f: f.training_peak.nbytes / GIB for f in figures.values() if f.measured and f.training_peak}
    peaks = {f: memory for f, memory in peaks.items() if memory}
    if not peaks:
        return None
    rows = [
        (memory, f.median_s, f.bound_s, f.stats.get("predicted_seconds"), f.is_ours, f.configuration.knobs.get(_GPU))
        for f, memory in peaks.items()
    ]
    points = pd.DataFrame(rows, columns=["memory", "seconds", "bound", "predicted", "ours", "gpu"])
    points["predicted"] = points.predicted.astype(float)
    ours = points[points.ours].sort_values("memory")
    bounded, predicted = ours.dropna(subset="bound"), ours.dropna(subset="predicted")
    figure, axes = _figure(4.6, "Step time against host memory")
    lines = [(limit, line) for limit, line in ours.groupby("gpu", dropna=False) if len(line) > 1]
    one_limit = ours.gpu.nunique(dropna=False) == 1
    texts = ["TenCache" if one_limit else f"TenCache, {_gpu_limit(limit)}" for limit, _ in lines]
    for colour, text, (_, line) in zip(itertools.cycle(OURS), texts, lines, strict=False):
        axes.plot(line.memory, line.seconds, color=colour, linewidth=1.6, label=text)
    if not predicted.empty:
        axes.plot(predicted.memory, predicted.predicted, "x", color=INK, markersize=5, zorder=4, label="predicted")
    if not bounded.empty:
        style: Any = (0, (4, 3)) if len(lines) < 2 else "none"
        axes.plot(bounded.memory, bounded.bound, color=FAINT, linewidth=1.2, linestyle=style, marker="_",
                  markersize=9, markeredgewidth=1.6, label="bound of each TenCache point")  # fmt: skip
    for f, memory in peaks.items():
        colour = colours(figures)[f.name]
        axes.plot(
            memory, f.median_s, linestyle="none", marker="o" if f.is_ours else "s", markersize=7, color=colour,
            markerfacecolor="white" if f.configuration.semantics else colour, markeredgewidth=1.5, zorder=3,
        )  # fmt: skip
    times = pd.concat([points.seconds, bounded.bound, predicted.predicted])
    if times.max() > 10 * times.min() > 0:
        axes.set(yscale="log", ylim=(times.min() / 1.6, times.max() * 1.6))
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, 1.15 * times.max())
    axes.set(
        xlim=(0, 1.12 * points.memory.max()), xlabel="peak host memory while training, GiB", ylabel="seconds per step"
    )
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**LEGEND | {"ncols": 3})
    common = [f"{text}, " for text in texts] if len(texts) > 1 else []
    names = [
        axes.text(memory, f.median_s, textwrap.fill(_without(common, f.configuration.label), LABEL_CHARACTERS))
        for f, memory in peaks.items()
    ]
    figure.draw_without_rendering()  # the layout moves the axes: before it pixels mean nothing
    adjustText.adjust_text(
        names, x=points.memory.to_numpy(), y=points.seconds.to_numpy(), ax=axes, expand=(1.2, 1.8),
        ensure_inside_axes=True, arrowprops={"arrowstyle": "-", "color": FAINT, "lw": 0.6},
    )  # fmt: skip
    return figure


def _gpu_limit(limit: Any) -> str:
    if pd.isna(limit):
        return f"{_GPU} automatic"
    return setting_label(_GPU, limit if isinstance(limit, str) else int(limit))


def _without(beginnings: list[str], label: str) -> str:
    """A label without what the legend says of its line."""
    for beginning in beginnings:
        label = label.removeprefix(beginning)
    return label


def storage_bandwidth(benchmark: Benchmark) -> Figure | None:
    """Reads and writes over time, a panel for each configuration that used storage; None when none did."""
    figures = all_figures(benchmark)
    panels = [(f, sampled[-1]) for f in figures.values() if (sampled := list(filter(_moved, f.runs)))]
    if not panels:
        return None
    title = "Storage bandwidth over time" + (", on tmpfs in place of a drive" if benchmark.on_tmpfs else "")
    figure, first = _figure(0.75 + 1.15 * len(panels), title, nrows=len(panels), sharey=True, squeeze=False)
    storage, ranks = benchmark.hardware.storage, benchmark.workload.ranks
    mixed = storage.mixed_bytes_per_s / ranks / GB if storage is not None else None
    for axes, (f, run) in zip(first[:, 0], panels, strict=True):
        edges, read, write = storage_rates(run)
        colour = colours(figures)[f.name]
        axes.stairs(read, edges, fill=True, color=colour, linewidth=0)
        axes.stairs(-write, edges, fill=True, color=(colour, 0.5), linewidth=0)
        axes.stairs(read + write, edges, baseline=None, color="#555555", linewidth=0.9)
        for end in np.cumsum([step.seconds for step in run.measured[:-1]]):
            axes.axvline(end, color=FAINT, linewidth=0.8, linestyle=":")
        if mixed is not None:
            axes.axhline(mixed, color=INK, linewidth=1.0, linestyle=(0, (5, 3)))
        axes.axhline(0, color=INK, linewidth=0.6)
        axes.set_title(f.configuration.label, loc="left", pad=3)
        axes.set_xlim(0, edges[-1])
        axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    axes.set_xlabel("seconds since the first measured step")
    figure.supylabel("write   GB/s   read", fontsize=8.5)
    if mixed is not None:
        words = f"dashed: probe, read + write{' / ranks' if ranks > 1 else ''} {mixed:.3g} GB/s"
        first[0, 0].set_title(words, loc="right", pad=3, fontsize=7.5, color=FAINT)
    return figure


def access_classes(benchmark: Benchmark) -> Figure | None:
    """Stacked shares of TenCache's weight accesses by class; None when no run counted any."""
    counts = pd.DataFrame({f.configuration.label: f.per_step("accesses") for f in all_figures(benchmark).values()}).T
    counts = counts[counts.sum(axis=1) > 0]
    if counts.empty:
        return None
    shares = 100 * counts.div(counts.sum(axis=1), axis=0).fillna(0.0)
    figure, axes = _bars(shares, list(shares.index), "Where TenCache found the weights", ACCESS_COLOURS)
    axes.grid(visible=False)
    for bars in axes.containers:
        axes.bar_label(bars, fmt=lambda share: f"{share:.0f} %" if share >= 4 else "", label_type="center", fontsize=8)
    axes.set(xlim=(0, 100), xlabel="% of weight accesses")
    axes.legend(**LEGEND)
    return figure


def _figure(height_in: float, title: str, **options: Any) -> tuple[Figure, Any]:
    figure = new_figure(WIDTH_IN, height_in, title)
    return figure, figure.subplots(**options)


def _bars(widths: pd.DataFrame, labels: list[str], title: str, colours: dict[str, str]) -> tuple[Figure, Any]:
    """Stacked horizontal bars, a row for each label, the first at the top."""
    figure, axes = _figure(1.15 + 0.42 * len(widths), title)
    colour = [colours.get(part, FAINT) for part in widths]
    widths.plot.barh(ax=axes, stacked=True, width=0.62, color=colour, linewidth=0, legend=False)
    axes.set_yticks(range(len(labels)), [textwrap.fill(label, LABEL_CHARACTERS) for label in labels])
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    return figure, axes


def _moved(run: Run) -> bool:
    ends = [(sample.nvme_read_nbytes, sample.nvme_write_nbytes) for sample in (run.timeline[:1] + run.timeline[-1:])]
    return len(set(ends)) > 1


def storage_rates(run: Run) -> tuple[Any, Any, Any]:
    """Edges in seconds, and GB/s read and written between them, of a run's samples in at most :data:`MAX_BINS` bins."""
    samples = pd.DataFrame([sample.model_dump() for sample in run.timeline]).groupby("t_s").max()
    t_s = samples.index.to_numpy()
    edges = np.linspace(t_s[0], t_s[-1], min(len(t_s) - 1, MAX_BINS) + 1)
    read, write = (
        np.diff(np.interp(edges, t_s, samples[key])) / np.diff(edges) / GB
        for key in ("nvme_read_nbytes", "nvme_write_nbytes")
    )
    return edges, read, write
