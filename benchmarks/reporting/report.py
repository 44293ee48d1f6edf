# SPDX-License-Identifier: Apache-2.0
"""A benchmark as a Markdown page with plots beside it: the answer first, then how it was measured, then the details.

The page is ``report.md.j2``; its figures are those of :mod:`.figures`.
"""

from __future__ import annotations

import math
import string
from operator import attrgetter
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd

from ..record import Benchmark, Outcome
from . import text
from .figures import HOST_USED, PEAK_RSS, Figures, Tier, all_figures, group_by_losses
from .more_ram import predictions
from .plots import write_plots

REPEATABLE = 0.05
"""Two measurements of a speed that differ by no more than this fraction count as the same."""

VERBS = {Outcome.failed: "failed", Outcome.cannot_run: "could not run"}

RESOURCES = {"nvme": "NVMe", "h2d": "host to GPU", "d2h": "GPU to host", "cpu": "CPU", "gpu": "GPU"}
"""Names of what can set a bound (``tencache_ds.planning.forecast.Resource``)."""

RATES = {
    "read": "NVMe read", "write": "NVMe write", "mixed": "NVMe read + write together", "h2d": "host to GPU",
    "d2h": "GPU to host", "memory_copy": "memory copy", "cpu_adam": "CPU Adam", "gpu_adam": "GPU Adam",
    "matmul": "matmul",
}  # fmt: skip
"""Names of the probe's rates: without their units, the fields of ``Hardware`` and ``StorageRates``."""

UNITS = {"bytes": ("GB/s", 1e9), "params": ("Gparam/s", 1e9), "flops": ("TFLOP/s", 1e12)}

TOO_FAST = (
    "A fraction above 1: the run was faster than the rates of the probe allow, so the machine was slower while it was "
    "probed, or the placement on which the bound rests is not what the run had."
)


def write_report(
    benchmark: Benchmark, folder: Path, *, name: str, baseline: str | None = None, repeat: Benchmark | None = None
) -> Path:
    """Writes ``<folder>/<name>.md`` and its plots ``<folder>/<name>_<plot>.png``; returns the page.

    Args:
        benchmark: what to report; anything in it may have failed.
        folder: made if it is not there.
        name: of the page, without a folder or an extension.
        baseline: name of the configuration that all speeds are relative to; None takes the fastest peer of each tier.
        repeat: the same benchmark measured again; adds a section on how well the speeds repeat.

    Raises:
        ValueError: ``name`` is not a plain file name, or ``baseline`` is not a configuration that others compare to.
        OSError: the folder cannot be written.
    """
    if Path(name).name != name or not name:
        raise ValueError(f'the name of a report is a file name without a folder, got "{name}"')
    semantics = {configuration.name: configuration.semantics for configuration in benchmark.configurations}
    if baseline is not None and baseline not in semantics:
        names = ", ".join(semantics)
        raise ValueError(f'the baseline "{baseline}" is not in this benchmark; its configurations are: {names}')
    if baseline is not None and semantics[baseline]:
        raise ValueError(f'"{baseline}" cannot be the baseline: it trains differently ({semantics[baseline]})')
    folder.mkdir(parents=True, exist_ok=True)
    plots = write_plots(benchmark, folder, name)
    page = folder / f"{name}.md"
    page.write_text(render(benchmark, name=name, plots=plots, baseline=baseline, repeat=repeat))
    return page


def render(benchmark: Benchmark, *, baseline: str | None = None, repeat: Benchmark | None = None, **plots: Any) -> str:
    """The page as text; ``plots`` are the ``name`` of the page and the ``plots`` beside it, if there are any."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    templates.filters |= text.FILTERS
    return templates.get_template("report.md.j2").render(
        page=Page(benchmark, baseline, repeat), benchmark=benchmark, hardware=benchmark.hardware,
        workload=benchmark.workload, repeat=repeat, VERBS=VERBS, HOST_USED=HOST_USED, PEAK_RSS=PEAK_RSS,
        REPEATABLE=REPEATABLE, **({"plots": ()} | plots),
    )  # fmt: skip


class Page:
    """What the template shows, apart from what it takes from the record and the figures itself."""

    def __init__(self, benchmark: Benchmark, baseline: str | None, repeat: Benchmark | None) -> None:
        self.benchmark = benchmark
        self.figures = all_figures(benchmark)
        self.baseline = self.figures[baseline] if baseline is not None else None
        # The fastest configuration of each tier that is not TenCache's and trains with the same semantics.
        peers = [f for f in self.figures.values() if not f.is_ours and not f.configuration.semantics and f.measured]
        by_tier = {tier: [f for f in peers if f.tier is tier] for tier in Tier}
        self.best_peers = {tier: min(fs, key=lambda f: f.median_s) for tier, fs in by_tier.items() if fs}
        self.peers = [f"{f.label} ({tier})" for tier, f in self.best_peers.items()]
        self.in_turns = any(step.turn for run in benchmark.runs for step in run.steps)
        self.n_loss_steps, self.loss_groups = group_by_losses(self.figures.values())
        self.counted = [f for f in self.figures.values() if f.stats]
        self.more_ram = predictions(self.figures.values())
        energy = [f.per_run[["gpu_energy_j", "cpu_energy_j"]] for f in self.figures.values()]
        self.energy_known = any(frame.notna().any(axis=None) for frame in energy)
        self.repeated = self._repeated(repeat) if repeat is not None else pd.DataFrame()
        self.footnotes: list[str] = []
        self.results = [self._cells(f) for f in self.figures.values()]

    def baseline_of(self, f: Figures) -> Figures | None:
        """What the speed of a configuration is relative to: the chosen baseline, or else the best peer in its tier.

        None for a configuration with other semantics, or when its tier has no peer that was measured.
        """
        if f.configuration.semantics:
            return None
        return self.baseline or (self.best_peers.get(f.tier) if f.tier is not None else None)

    def rates(self) -> dict[str, str]:
        """What the probe measured, by name."""
        hardware = self.benchmark.hardware
        found = hardware.storage.model_dump() if hardware.storage is not None else {}
        rates = {}
        for field, rate in (found | hardware.model_dump()).items():
            if field.endswith("_per_s") and rate:
                what, amount = field.removesuffix("_per_s").rsplit("_", 1)
                unit, scale = UNITS[amount]
                rates[RATES[what]] = f"{text.number(rate, scale)} {unit}"
        return rates

    def _cells(self, f: Figures) -> list[str]:
        """The row of a configuration in the main table."""
        label, missing = f.label, text.MISSING
        if f.configuration.semantics:
            label += self._note(f"Different semantics, in no ratio: {text.plain(f.configuration.semantics)}.")
        if f.failure is not None:
            return [label, f"{VERBS[f.failure.outcome]}: {text.gist(f.failure.error)}", *[missing] * 10]
        if not f.runs:
            return [label, "not run", *[missing] * 10]
        if lost := [run for run in f.started if run.outcome is not Outcome.ok]:
            label += self._note(f"{len(lost)} of {len(f.started)} runs failed: {text.gist(lost[-1].error)}.")
        steps, per_run, seconds = f.steps, f.per_run, f.steps.seconds
        time, phases, moved, tokens = "no measured step", missing, missing, missing
        if f.measured:
            spread = text.percent((seconds.max() - seconds.min()) / 2 / f.median_s if f.median_s else 0.0, 1)
            extremes = f"{text.number(seconds.min())}-{text.number(seconds.max())}"
            time = f"**{text.number(f.median_s)}** ({extremes}, ±{spread})"
            phases = " / ".join(text.number(steps[key].median()) for key in ("forward_s", "backward_s", "update_s"))
            if numel := per_run.numel.median():
                moved = " + ".join(f"{steps[f'nvme_{way}_nbytes'].mean() / numel:.1f}" for way in ("read", "write"))
            tokens = f"{self.benchmark.workload.tokens_per_step / f.median_s:,.0f}" if f.median_s else missing
        rss = [text.gib(per_run[f"peak_rss_{when}_nbytes"].max()) for when in ("start", "steady")]
        fraction = text.fixed(f.bound_fraction, 2)
        if fraction != missing:
            fraction += self.bottleneck(f) + (self._note(TOO_FAST) if round(f.bound_fraction, 2) > 1 else "")
        return [
            label, time, self._speed(f), phases, moved, text.number(steps.storage_wait_s.median()),
            " / ".join(rss) if missing not in rss else missing, text.gib(per_run.pinned_nbytes.max()),
            text.gib(per_run.gpu_peak_nbytes.max()),
            f"{text.number(per_run.model_s.median())} + {text.number(per_run.initialize_s.median())}", tokens, fraction,
        ]  # fmt: skip

    def _note(self, words: str) -> str:
        """The mark of a footnote; the same text keeps its mark."""
        if words not in self.footnotes:
            self.footnotes.append(words)
        return f" <sup>{self.footnotes.index(words) + 1}</sup>"

    def bottleneck(self, f: Figures) -> str:
        """What sets the bound of a configuration, in brackets."""
        if f.limit == "gpu" and not self.benchmark.hardware.gpus:
            return " (arithmetic)"
        return f" ({RESOURCES.get(f.limit, f.limit)})" if f.limit else ""

    def _speed(self, f: Figures) -> str:
        """The speed of a configuration and how it varies between rounds, or between the turns of rounds."""
        against = self.baseline_of(f)
        ratio = f.speed_over(against) if against is not None else None
        if ratio is None:
            return text.MISSING
        if against is f:
            return "1 (baseline)" if self.baseline else f"1 (baseline, {f.tier} tier)"
        turns = ratio.turns
        varies = f"{turns.median():.2f}x, {turns.min():.2f}x-{turns.max():.2f}x"
        return f"**{ratio.of_medians:.2f}x** ({ {0: 'no round in common', 1: 'one round'}.get(turns.size, varies) })"

    def losses(self) -> list[tuple[list[str], list[str]]]:
        """The members of each group of losses, and its row: how it differs from the first one."""
        rows: list[tuple[list[str], list[str]]] = []
        reference = np.array(next(iter(self.loss_groups), ()))
        for losses, runs in self.loss_groups.items():
            members = []
            for name in dict.fromkeys(run.configuration for run in runs):
                rounds = [str(run.round + 1) for run in runs if run.configuration == name]
                some = f" (round{'s' if len(rounds) > 1 else ''} {text.joined(rounds)})"
                members.append(self.figures[name].label + (some if len(rounds) < len(self.figures[name].runs) else ""))
            differ = reference != np.array(losses)
            cells = ["the reference", text.MISSING, text.MISSING]
            if differ.any():
                pairs = zip(reference[differ], np.array(losses)[differ], strict=True)
                before, found = np.array([[float.fromhex(loss) for loss in pair] for pair in pairs]).T
                with np.errstate(divide="ignore", invalid="ignore"):
                    relative = np.abs(found - before) / np.abs(before)
                step, micro_step = np.argwhere(differ)[0] + 1
                sizes = (f"{size:.1e}" if np.isfinite(size) else "not finite" for size in (relative[0], relative.max()))
                cells = [f"step {step}, micro-step {micro_step}", *sizes]
            letter = string.ascii_uppercase[len(rows) % 26] * (1 + len(rows) // 26)
            rows.append((members, [f"{letter}: {', '.join(members)}", *cells]))
        return rows

    def loss_scales(self) -> list[list[str]]:
        """Skipped steps and loss scales of each run; empty if no step was skipped and all scales are alike."""
        runs = [(f.label, run) for f in self.figures.values() for run in f.runs]
        length = min((len(run.steps) for _, run in runs), default=0)
        scales = {tuple(step.loss_scale for step in run.steps[:length]) for _, run in runs}
        if len(scales) <= 1 and not any(step.skipped for _, run in runs for step in run.steps):
            return []
        rows = []
        for label, run in runs:
            skipped = [str(number) for number, step in enumerate(run.steps, start=1) if step.skipped]
            known = pd.Series([step.loss_scale for step in run.steps], dtype=float).dropna()
            changes = [f"{scale:g}" for scale in known[known != known.shift()]]
            rows.append(
                [f"{label}, round {run.round + 1}", ", ".join(skipped) or "none", " then ".join(changes) or "-"]
            )
        return rows

    def names(self, kind: str) -> list[str]:
        """The names of all of TenCache's counts of a kind."""
        return list(dict.fromkeys(name for f in self.counted for name in f.total(kind).index))

    def waits(self) -> dict[str, str]:
        """The headings of the waits that TenCache counts, by cause."""
        return {cause: f"{cause.replace('_', ' ')} wait, s/step" for cause in self.names("stall_seconds")}

    def rare_events(self) -> list[str]:
        """What TenCache counts because it should not happen often, of the configurations where it did."""
        events = {f.label: found[found > 0] for f in self.counted if (found := f.total("events")).any()}
        return [
            f"{label}: {text.joined([f'{count:.0f} x {event}' for event, count in found.items()])}"
            for label, found in events.items()
        ]

    def trials(self, f: Figures) -> tuple[list[str], list[list[str]]]:
        """The knobs that a search varied, and for each trial their values and the seconds per step or the error."""
        knobs = pd.DataFrame([trial.knobs for trial in f.trials], dtype=object).map(repr)
        varied = list(knobs.columns[knobs.nunique() > 1])
        best_s = min(trial.step_s for trial in f.trials)
        rows = []
        for index, trial in enumerate(f.trials, start=1):
            ended = "no measured step" if trial.outcome is Outcome.ok else text.gist(trial.error, 120)
            if math.isfinite(trial.step_s):
                mark = "**" if trial.step_s == best_s else ""
                ended = f"{mark}{text.number(trial.step_s)}{mark}"
            rows.append([str(index), *(text.setting(trial.knobs.get(knob)) for knob in varied), ended])
        return [text.plain(knob) for knob in varied], rows

    def _repeated(self, repeat: Benchmark) -> pd.DataFrame:
        """A line for every speed that both measurements have, each relative to the baseline it has in the first."""
        again, rows = all_figures(repeat), []
        for name, f in self.figures.items():
            baseline = self.baseline_of(f)
            if baseline is None or baseline is f or not {name, baseline.name} <= again.keys():
                continue
            first, second = f.speed_over(baseline), again[name].speed_over(again[baseline.name])
            if first is not None and second is not None:
                seconds, ratios = (f.median_s, again[name].median_s), (first.of_medians, second.of_medians)
                rows.append((f.label, baseline.label, *seconds, *ratios))
        frame = pd.DataFrame(rows, columns=["label", "baseline", "first_s", "second_s", "first", "second"])
        return frame.assign(difference=(frame["second"] - frame["first"]).abs() / frame["first"])

    def repeatability(self) -> str:
        """The difference in speed between two measurements."""
        if self.repeated.empty:
            return "**Nothing was measured twice**: the second measurement has no speed in common with the first."
        worst = self.repeated.loc[self.repeated.difference.idxmax()]
        difference = text.percent(worst.difference, 1)
        if worst.difference <= REPEATABLE:
            return f"Measured twice, all speeds agree within {difference}."
        return f"**Measured twice, the speeds differ** by up to {difference} ({worst.label})."

    def unlike(self, other: Benchmark) -> list[str]:
        """Differences that make this no repetition. Rates vary from probe to probe and are left out."""
        aspects = ("workload", "storage", "versions", "hardware.cpu", "hardware.cores", "hardware.gpu", "hardware.gpus")
        differ = (aspect for aspect in aspects if attrgetter(aspect)(self.benchmark) != attrgetter(aspect)(other))
        return [aspect.removeprefix("hardware.") for aspect in differ]
