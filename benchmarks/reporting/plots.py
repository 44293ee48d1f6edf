# SPDX-License-Identifier: Apache-2.0
"""The plots of a report. matplotlib is imported where it is needed: without it everything else still works.

Figures are made through matplotlib's object API on the Agg canvas: no display, no global state, any thread. Colours are
safe for the colour-blind (Okabe and Ito's, darkened where they have to be read on white); a configuration has the same
colour in every plot.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..record import Benchmark, Configuration, Run, Sample
from .markdown import GB, GIB, joined, number, plain
from .peaks import HOST_USED, PEAK_RSS, training_peak
from .plot_style import FAINT, INK, OURS, PEERS, WIDTH_IN, bare, label_points, new_figure, plain_log_ticks, tint
from .report_sections import tencache_totals
from .spread import bound_fraction, is_ours, step_seconds, step_spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 120

ACCESS_COLOURS = {"resident": "#009E73", "prefetched": "#56B4E9", "late": "#E69F00", "demand": "#D55E00"}

LABEL_CHARACTERS = 36
"""In a line of a row's label: longer ones would leave no room for the bars."""

MAX_BINS = 300
"""Points of a storage curve: more than that cannot be told apart."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot that was written.

    Attributes:
        path: the PNG.
        title: what it shows, for those who do not see it.
        caption: how to read it.
        width_px: width at which its text has the size of the page's.
    """

    path: Path
    title: str
    caption: str
    width_px: int


def available() -> bool:
    """Whether matplotlib can be imported."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def write_plots(benchmark: Benchmark, folder: Path, name: str) -> list[Plot]:
    """Draws every plot that has something to show, as ``<folder>/<name>_<plot>.png``.

    Raises:
        ImportError: matplotlib is not installed; ask :func:`available` first.
        OSError: the folder cannot be written.
    """
    written = []
    for stem, draw, title, caption in (
        (
            "step_time", step_time, "Step time by phase",
            "Medians of the measured steps; the thin line goes from the fastest to the slowest step, the black mark is "
            "the bound: the shortest step possible on this machine with this placement.",
        ),
        (
            "frontier", frontier, "Step time against host memory",
            f"{_memory_sources(benchmark)} Down and to the left is better. A hollow mark has different semantics.",
        ),
        (
            "storage", storage_bandwidth, "Storage bandwidth over time",
            "Measured steps of the last run of each configuration on rank 0: reads up, writes down, the grey line is "
            "both together, to be compared with the dashed line: what the probe reached reading and writing together. "
            "Dotted lines are the ends of steps.",
        ),
        (
            "accesses", access_classes, "Where TenCache found the weights",
            "Share of the weight accesses on rank 0; late and demand accesses are those that the training waits for.",
        ),
    ):  # fmt: skip
        figure = draw(benchmark)
        if figure is not None:
            path = folder / f"{name}_{stem}.png"
            figure.savefig(path, dpi=DPI, metadata={"Software": None}, pil_kwargs={"optimize": True})
            written.append(Plot(path, title, caption, round(WIDTH_IN * 100)))
    return written


def _memory_sources(benchmark: Benchmark) -> str:
    """Which figure the memory axis shows for whom."""
    peaks = {c.label: peak for c in benchmark.configurations if (peak := training_peak(benchmark, c.name)) is not None}
    if benchmark.on_tmpfs:
        return (
            "Host memory is the peak RSS of a rank while it trains: what the host had in use counts the files on tmpfs."
        )
    text = "Host memory is the larger of the peak RSS of a rank while it trains and of what the host had in use: "
    if len({peak.source for peak in peaks.values()}) == 1:
        return f"{text}here {next(iter(peaks.values())).source} for all."
    used = [plain(label) for label, peak in peaks.items() if peak.source == HOST_USED]
    return f"{text}{HOST_USED} for {joined(used)}, {PEAK_RSS} for the others."


def colours(benchmark: Benchmark) -> dict[str, str]:
    """Colour of each configuration: TenCache's are blue, the peers' are not."""
    ours, peers = itertools.cycle(OURS), itertools.cycle(PEERS)
    return {
        configuration.name: next(ours) if is_ours(configuration) else next(peers)
        for configuration in benchmark.configurations
    }


def step_time(benchmark: Benchmark) -> Figure | None:
    """Horizontal bars of the phases of a step, the bound as a mark; None when no step was measured."""
    if not any(step_seconds(benchmark, configuration.name) for configuration in benchmark.configurations):
        return None
    # What was never run has no bar and no error to show: the table lists it.
    shown = [c for c in benchmark.configurations if step_seconds(benchmark, c.name) or benchmark.failure_of(c.name)]
    figure, axes = new_figure(1.15 + 0.42 * len(shown), "Step time by phase")
    colour = colours(benchmark)
    longest = max(spread.most for c in shown if (spread := step_seconds(benchmark, c.name)) is not None)
    for row, configuration in enumerate(shown):
        name = configuration.name
        seconds = step_seconds(benchmark, name)
        if seconds is None:
            failure = benchmark.failure_of(name)
            verb = failure.outcome.value.replace("_", " ") if failure is not None else ""
            axes.text(0.008 * longest, row, verb, va="center", color=FAINT, fontsize=8, style="italic")
            continue
        left = 0.0
        for phase, strength in (("forward_s", 0.30), ("backward_s", 0.60), ("update_s", 1.0)):
            spread = step_spread(benchmark, name, lambda step, phase=phase: getattr(step, phase))
            width = spread.median if spread is not None else 0.0
            axes.barh(row, width, left=left, height=0.62, color=tint(colour[name], strength), linewidth=0)
            left += width
        rest = seconds.median - left
        if rest > 0.01 * seconds.median:
            axes.barh(row, rest, left=left, height=0.62, color="#DDDDDD", linewidth=0)
        axes.plot([seconds.least, seconds.most], [row, row], color=INK, linewidth=0.8, solid_capstyle="butt")
        bound_s = benchmark.bounds_s.get(name)
        if bound_s is not None:
            axes.plot([bound_s, bound_s], [row - 0.42, row + 0.42], color=INK, linewidth=2.2, solid_capstyle="butt")
        fraction = bound_fraction(benchmark, name)
        note = f"{number(seconds.median)} s" + (f"   {fraction:.2f} of bound" if fraction is not None else "")
        end = max(seconds.most, left, bound_s or 0.0)
        axes.text(end + 0.012 * longest, row, note, va="center", color=INK, fontsize=8)
    axes.set_yticks(range(len(shown)), [textwrap.fill(c.label, LABEL_CHARACTERS) for c in shown])
    axes.set_ylim(len(shown) - 0.45, -0.55)
    axes.set_xlim(0, 1.35 * max(longest, *(benchmark.bounds_s.get(c.name, 0.0) for c in shown), 0.0))
    axes.set_xlabel("seconds per step")
    bare(axes, grid="x")
    axes.tick_params(axis="y", length=0)
    _phase_legend(figure, axes, bool(benchmark.bounds_s))
    return figure


def _phase_legend(figure: Figure, axes: Axes, bounds: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(color=tint("#555555", strength), label=label)
        for label, strength in (("forward", 0.30), ("backward", 0.60), ("update", 1.0))
    ]
    if bounds:
        handles.append(Line2D([], [], color=INK, linewidth=2.2, linestyle="none", marker="|", markersize=11,
                              markeredgewidth=2.2, label="bound"))  # fmt: skip
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles), frameon=False,
                fontsize=8, handlelength=1.0, columnspacing=1.2)  # fmt: skip


def frontier(benchmark: Benchmark) -> Figure | None:
    """Step time against peak host memory; None when no configuration has both."""
    points = {}
    for configuration in benchmark.configurations:
        seconds, peak = step_seconds(benchmark, configuration.name), training_peak(benchmark, configuration.name)
        if seconds is not None and peak is not None and peak.nbytes > 0:
            points[configuration.name] = (peak.nbytes / GIB, seconds.median, configuration)
    if not points:
        return None
    figure, axes = new_figure(4.6, "Step time against host memory")
    colour = colours(benchmark)
    line = sorted((x, y, c.name) for x, y, c in points.values() if is_ours(c))
    if len(line) > 1:
        xs, ys = [x for x, _, _ in line], [y for _, y, _ in line]
        axes.plot(xs, ys, color=OURS[0], linewidth=1.6, zorder=2, label="TenCache")
    bounded = [(x, benchmark.bounds_s[name]) for x, _, name in line if name in benchmark.bounds_s]
    if bounded:
        axes.plot(
            [x for x, _ in bounded], [y for _, y in bounded], color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)),
            marker="_", markersize=9, markeredgewidth=1.6, zorder=1, label="bound of each TenCache point",
        )  # fmt: skip
    for name, (x, y, configuration) in points.items():
        axes.plot(
            x, y, linestyle="none", marker="o" if is_ours(configuration) else "s", markersize=7, color=colour[name],
            markerfacecolor="white" if configuration.semantics else colour[name], markeredgewidth=1.5, zorder=3,
        )  # fmt: skip
    times = [y for _, y, _ in points.values()] + [y for _, y in bounded]
    if max(times) > 10 * min(times) > 0:
        axes.set_yscale("log")
        axes.set_ylim(min(times) / 1.6, max(times) * 1.6)
        plain_log_ticks(axes)
    else:
        axes.set_ylim(0, 1.15 * max(times))
    largest = max(x for x, _, _ in points.values())
    axes.set_xlim(0, 1.12 * largest)
    axes.set_xlabel("peak host memory while training, GiB")
    axes.set_ylabel("seconds per step")
    bare(axes, grid="both")
    legend = axes.legend(loc="upper right", frameon=False, fontsize=8) if len(line) > 1 or bounded else None
    named = [(x, y, configuration.label, colour[name]) for name, (x, y, configuration) in points.items()]
    label_points(figure, axes, named, lines=[[(x, y) for x, y, _ in line], bounded], legend=legend)
    return figure


def storage_bandwidth(benchmark: Benchmark) -> Figure | None:
    """Reads and writes over time, a panel for each configuration that used storage; None when none did."""
    panels: list[tuple[Configuration, Run]] = []
    for configuration in benchmark.configurations:
        sampled = [run for run in benchmark.runs_of(configuration.name) if _moved(run.timeline)]
        if sampled:
            panels.append((configuration, sampled[-1]))
    if not panels:
        return None
    title = "Storage bandwidth over time" + (", on tmpfs in place of a drive" if benchmark.on_tmpfs else "")
    figure, first = new_figure(0.75 + 1.15 * len(panels), title, rows=len(panels))
    axes_list: Sequence[Any] = first if len(panels) > 1 else [first]
    colour = colours(benchmark)
    storage = benchmark.hardware.storage
    ranks = benchmark.workload.ranks
    mixed = storage.mixed_bytes_per_s / ranks / GB if storage is not None else None
    highest, lowest = mixed or 0.0, 0.0
    for axes, (configuration, run) in zip(axes_list, panels, strict=True):
        edges, read, write = _rates(run.timeline)
        both = [r + w for r, w in zip(read, write, strict=True)]
        axes.stairs(read, edges, fill=True, color=colour[configuration.name], linewidth=0)
        axes.stairs([-w for w in write], edges, fill=True, color=tint(colour[configuration.name], 0.5), linewidth=0)
        axes.stairs(both, edges, baseline=None, color="#555555", linewidth=0.9)
        for end in itertools.accumulate(step.seconds for step in run.measured[:-1]):
            if end < edges[-1]:
                axes.axvline(end, color=FAINT, linewidth=0.8, linestyle=":")
        if mixed is not None:
            axes.axhline(mixed, color=INK, linewidth=1.0, linestyle=(0, (5, 3)))
        axes.axhline(0, color=INK, linewidth=0.6)
        axes.set_title(configuration.label, loc="left", fontsize=8.5, pad=3)
        axes.set_xlim(0, edges[-1])
        bare(axes, grid="y")
        highest, lowest = max(highest, *both), min(lowest, *(-w for w in write))
    for axes in axes_list:
        axes.set_ylim(1.12 * lowest, 1.12 * highest)
        axes.locator_params(axis="y", nbins=4)
        axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    axes_list[-1].set_xlabel("seconds since the first measured step")
    axes_list[len(panels) // 2].set_ylabel("write   GB/s   read")
    if mixed is not None:
        share = " / ranks" if ranks > 1 else ""
        axes_list[0].text(
            1.0, 1.03, f"dashed: probe, read + write{share} {mixed:.3g} GB/s", transform=axes_list[0].transAxes,
            ha="right", va="bottom", fontsize=7.5, color=FAINT,
        )  # fmt: skip
    return figure


def access_classes(benchmark: Benchmark) -> Figure | None:
    """Stacked shares of TenCache's weight accesses by class; None when no run counted any."""
    rows = [
        (configuration.label, totals["accesses"])
        for configuration in benchmark.configurations
        if (totals := tencache_totals(benchmark, configuration.name)) is not None and sum(totals["accesses"].values())
    ]
    if not rows:
        return None
    figure, axes = new_figure(1.15 + 0.42 * len(rows), "Where TenCache found the weights")
    classes = list(dict.fromkeys(kind for _, counts in rows for kind in counts))
    lefts = [0.0] * len(rows)
    for kind in classes:
        widths = [100 * counts.get(kind, 0) / sum(counts.values()) for _, counts in rows]
        colour = ACCESS_COLOURS.get(kind, FAINT)
        axes.barh(range(len(rows)), widths, left=lefts, height=0.62, linewidth=0, label=kind, color=colour)
        for row, (left, width) in enumerate(zip(lefts, widths, strict=True)):
            if width >= 4:
                ink = "white" if kind in ("resident", "demand") else INK
                axes.text(left + width / 2, row, f"{width:.0f} %", ha="center", va="center", fontsize=8, color=ink)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of weight accesses")
    bare(axes, grid="")
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(classes), frameon=False, fontsize=8,
                handlelength=1.0, columnspacing=1.2)  # fmt: skip
    return figure


# Data of the storage curves


def _moved(timeline: list[Sample]) -> bool:
    if len(timeline) < 2:
        return False
    first, last = timeline[0], timeline[-1]
    return (last.nvme_read_nbytes, last.nvme_write_nbytes) != (first.nvme_read_nbytes, first.nvme_write_nbytes)


def _rates(timeline: list[Sample]) -> tuple[list[float], list[float], list[float]]:
    """Edges in seconds, and GB/s read and written between them: samples thinned to at most :data:`MAX_BINS`."""
    ordered = sorted(timeline, key=lambda sample: sample.t_s)
    every = -(-(len(ordered) - 1) // MAX_BINS)
    kept = ordered[::every] if (len(ordered) - 1) % every == 0 else [*ordered[::every], ordered[-1]]
    edges, read, write = [kept[0].t_s], [], []
    for before, after in itertools.pairwise(kept):
        duration_s = after.t_s - before.t_s
        if duration_s > 0:
            edges.append(after.t_s)
            read.append((after.nvme_read_nbytes - before.nvme_read_nbytes) / duration_s / GB)
            write.append((after.nvme_write_nbytes - before.nvme_write_nbytes) / duration_s / GB)
    return edges, read, write
