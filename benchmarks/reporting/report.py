# SPDX-License-Identifier: Apache-2.0
"""A benchmark as a Markdown page with plots beside it: the answer first, then how it was measured, then the details.

The page is ``report.md.j2``; its figures are those of :mod:`.figures`.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from ..record import Benchmark, Outcome
from . import text
from .figures import Figures, LossComparison, Tier, all_figures, baseline_for, best_peer, compare_losses
from .plots import Plot, write_plots

MAX_ANSWERS = 6
"""TenCache configurations with a sentence of their own at the top; the rest is in the table."""

REPEATABLE = 0.05
"""Two measurements of a speed that differ by no more than this fraction count as the same."""

VERBS = {Outcome.failed: "failed", Outcome.cannot_run: "could not run"}

RESOURCES = {"nvme": "NVMe", "h2d": "host to GPU", "d2h": "GPU to host", "cpu": "CPU", "gpu": "GPU"}
"""Names of what can set a bound (``tencache_ds.planning.bound.Resource``)."""

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
)  # fmt: skip
_TEMPLATES.filters |= text.FILTERS


@dataclass(frozen=True, slots=True)
class Repeated:
    """A speed that was measured twice."""

    other: Figures
    again: Figures
    baseline: Figures
    first: float
    second: float

    @property
    def difference(self) -> float:
        """Between the two, as a fraction of the first."""
        return abs(self.second - self.first) / self.first


def write_report(
    benchmark: Benchmark, folder: Path, *, name: str, baseline: str | None = None, repeat: Benchmark | None = None
) -> Path:
    """Writes ``<folder>/<name>.md`` and its plots ``<folder>/<name>_<plot>.png``.

    Args:
        benchmark: what to report; anything in it may have failed.
        folder: made if it is not there.
        name: of the page, without a folder or an extension.
        baseline: name of the configuration that all speeds are relative to. None takes, for each configuration, the
            fastest one in the same tier that is not TenCache's.
        repeat: the same benchmark measured again on the same machine; adds a section on how well the speeds repeat.

    Returns:
        The page.

    Raises:
        ValueError: ``name`` is not a plain file name, or ``baseline`` is not a configuration that others compare to.
        OSError: the folder cannot be written.
    """
    if Path(name).name != name or not name:
        raise ValueError(f'the name of a report is a file name without a folder, got "{name}"')
    _check_baseline(benchmark, baseline)
    folder.mkdir(parents=True, exist_ok=True)
    plots = write_plots(benchmark, folder, name)
    page = folder / f"{name}.md"
    page.write_text(render(benchmark, plots, baseline=baseline, repeat=repeat))
    return page


def _check_baseline(benchmark: Benchmark, baseline: str | None) -> None:
    """None is left to the report.

    Raises:
        ValueError: it is not a configuration of the benchmark, or trains with other semantics.
    """
    semantics = {configuration.name: configuration.semantics for configuration in benchmark.configurations}
    if baseline is not None and baseline not in semantics:
        names = ", ".join(semantics)
        raise ValueError(f'the baseline "{baseline}" is not in this benchmark; its configurations are: {names}')
    if baseline is not None and semantics[baseline]:
        raise ValueError(f'"{baseline}" cannot be the baseline: it trains differently ({semantics[baseline]})')


def render(
    benchmark: Benchmark, plots: Sequence[Plot] = (), *, baseline: str | None = None, repeat: Benchmark | None = None
) -> str:
    """The page as text; ``plots`` lie beside it."""
    figures = all_figures(benchmark)
    compared = compare_losses(list(figures.values()))
    baselines = {name: baseline_for(figures, name, baseline) for name in figures}
    repeated = _repeated(figures, baselines, repeat) if repeat is not None else []
    sentences = _answers(benchmark, figures, baselines) + _caveats(benchmark, figures, compared)
    if repeat is not None:
        sentences.append(_repeat_sentence(repeated))
    footnotes: list[str] = []

    def note(words: str) -> str:
        """The mark of a footnote; the same text keeps its mark."""
        if words not in footnotes:
            footnotes.append(words)
        return f" <sup>{footnotes.index(words) + 1}</sup>"

    tokens = {f.label: f.balance_tokens for f in figures.values() if f.balance_tokens is not None}
    sides = {count < benchmark.workload.tokens_per_step for count in tokens.values()}
    slower = (
        "for some storage, for others arithmetic" if len(sides) > 1 else "arithmetic" if True in sides else "storage"
    )
    counted = [f for f in figures.values() if f.stats]
    return _TEMPLATES.get_template("report.md.j2").render(
        benchmark=benchmark, hardware=benchmark.hardware, workload=benchmark.workload,
        numel=max((run.numel for run in benchmark.runs), default=0), rates=_rates(benchmark),
        in_turns=any(step.turn for run in benchmark.runs for step in run.steps),
        sentences=sentences or ["Nothing was measured."],
        figures=list(figures.values()), labels={f.name: f.label for f in figures.values()},
        results=[_cells(benchmark, f, baselines[f.name], baseline, note) for f in figures.values()],
        baseline=figures[baseline] if baseline is not None else None,
        best_peers=[f"{peer.label} ({tier})" for tier in Tier if (peer := best_peer(figures, tier)) is not None],
        footnotes=footnotes, slower=slower,
        balance=[f"{label}: {float(f'{count:.2g}'):,.0f}" for label, count in tokens.items()],
        errors=[run for run in benchmark.runs if run.outcome is Outcome.failed],
        compared=compared, without=[figures[name].label for name in compared.without],
        groups=_loss_groups(compared, figures), scales=_loss_scales(list(figures.values())),
        counted=counted, rare=_rare_events(counted), trials={f.name: _trials(f) for f in figures.values() if f.trials},
        kinds=_names(counted, "accesses"),
        causes={cause: f"{cause.replace('_', ' ')} wait, s/step" for cause in _names(counted, "stall_seconds")},
        energy_known=any(f.per_run[["gpu_energy_j", "cpu_energy_j"]].notna().any(axis=None) for f in figures.values()),
        repeat=repeat, repeated=repeated, repeat_sentence=_repeat_sentence(repeated), REPEATABLE=REPEATABLE,
        unlike=_unlike(benchmark, repeat) if repeat is not None else [],
        plots=plots,
    )  # fmt: skip


def _answers(benchmark: Benchmark, figures: dict[str, Figures], baselines: dict[str, Figures | None]) -> list[str]:
    """The speed of TenCache's configurations."""
    sentences = []
    measured = [f for f in figures.values() if f.is_ours and f.measured]
    for f in measured[:MAX_ANSWERS]:
        sentence = f"**{f.label}**: {text.number(f.median_s)} s per step"
        against = baselines[f.name]
        ratio = f.speed_over(against) if against is not None and against is not f else None
        if against is not None and ratio is not None:
            slow = text.number(against.median_s)
            sentence += f", **{ratio.of_medians:.2f}x** the speed of {against.label} ({slow} s)"
        if pd.notna(f.bound_fraction):
            sentence += f", {f.bound_fraction:.2f} of the bound of this machine{_bottleneck(benchmark, f)}"
        sentences.append(f"{sentence}.")
    if len(measured) > MAX_ANSWERS:
        sentences.append(f"{len(measured) - MAX_ANSWERS} more TenCache configurations are in the table.")
    return sentences


def _caveats(benchmark: Benchmark, figures: dict[str, Figures], compared: LossComparison) -> list[str]:
    """What has to be known to believe the answers."""
    failures = [(f, f.failure) for f in figures.values() if f.failure is not None]
    sentences = [f"**{f.label} {VERBS[run.outcome]}**: {text.gist(run.error)}" for f, run in failures if f.is_ours]
    for outcome, verb in VERBS.items():
        if labels := [f.label for f, run in failures if run.outcome is outcome and not f.is_ours]:
            sentences.append(f"{text.joined(labels)} {verb}: see the table.")
    n_runs = sum(len(rounds) for group in compared.groups for rounds in group.rounds.values())
    if len(compared.groups) > 1:
        sentences.append(f"**Losses differ**: {len(compared.groups)} groups of runs, see [Losses](#losses).")
    elif n_runs > 1:
        sentences.append(f"Losses of all {n_runs} runs are identical bit for bit over {compared.steps} steps.")
    if skipped := sum(step.skipped for run in benchmark.runs for step in run.measured):
        sentences.append(f"**{skipped} measured steps were skipped by the loss scaler**, see [Losses](#losses).")
    if over := [f.label for f in figures.values() if f.cap_check is not None and f.cap_check.excesses]:
        sentences.append(f"**Memory cap exceeded** by {text.joined(over)}, see [Memory caps](#memory-caps).")
    if benchmark.on_tmpfs:
        sentences.append("**Storage is tmpfs**: host memory that stands in for a fast NVMe array, not a drive.")
    return sentences


def _bottleneck(benchmark: Benchmark, figures: Figures) -> str:
    """What sets the bound of a configuration, in brackets."""
    if figures.limit == "gpu" and not benchmark.hardware.gpus:
        return " (arithmetic)"
    return f" ({RESOURCES.get(figures.limit, figures.limit)})" if figures.limit else ""


def _repeat_sentence(repeated: list[Repeated]) -> str:
    """The difference in speed between two measurements."""
    if not repeated:
        return "**Nothing was measured twice**: the second measurement has no speed in common with the first."
    worst = max(repeated, key=lambda one: one.difference)
    difference = text.percent(worst.difference, 1)
    if worst.difference <= REPEATABLE:
        return f"Measured twice, all speeds agree within {difference}."
    return f"**Measured twice, the speeds differ** by up to {difference} ({worst.other.label})."


def _cells(
    benchmark: Benchmark, f: Figures, against: Figures | None, chosen: str | None, note: Callable[[str], str]
) -> list[str]:
    """The row of a configuration in the main table."""
    label, missing = f.label, text.MISSING
    if f.configuration.semantics:
        label += note(f"Different semantics, in no ratio: {text.plain(f.configuration.semantics)}.")
    if f.failure is not None:
        return [label, f"{VERBS[f.failure.outcome]}: {text.gist(f.failure.error)}", *[missing] * 10]
    if not f.runs:
        return [label, "not run", *[missing] * 10]
    if f.lost:
        label += note(f"{len(f.lost)} of {len(f.started)} runs failed: {text.gist(f.lost[-1].error)}.")
    steps, per_run, seconds = f.steps, f.per_run, f.steps.seconds
    time, phases, moved, tokens = "no measured step", missing, missing, missing
    if f.measured:
        spread = text.percent((seconds.max() - seconds.min()) / 2 / f.median_s if f.median_s else 0.0, 1)
        extremes = f"{text.number(seconds.min())}-{text.number(seconds.max())}"
        time = f"**{text.number(f.median_s)}** ({extremes}, ±{spread})"
        phases = " / ".join(text.number(steps[key].median()) for key in ("forward_s", "backward_s", "update_s"))
        numel = per_run.numel.median()
        if numel:
            moved = " + ".join(f"{steps[f'nvme_{way}_nbytes'].mean() / numel:.1f}" for way in ("read", "write"))
        tokens = f"{benchmark.workload.tokens_per_step / f.median_s:,.0f}" if f.median_s else missing
    rss = [text.gib(per_run[f"peak_rss_{when}_nbytes"].max()) for when in ("start", "steady")]
    fraction = text.fixed(f.bound_fraction, 2)
    if fraction != missing:
        fraction += _bottleneck(benchmark, f)
    if round(f.bound_fraction, 2) > 1:
        fraction += note(
            "A fraction above 1: the run was faster than the rates of the probe allow, so the machine was slower "
            "while it was probed, or the placement on which the bound rests is not what the run had."
        )
    return [
        label, time, _speed(f, against, chosen), phases, moved, text.number(steps.storage_wait_s.median()),
        " / ".join(rss) if missing not in rss else missing, text.gib(per_run.pinned_nbytes.max()),
        text.gib(per_run.gpu_peak_nbytes.max()),
        f"{text.number(per_run.model_s.median())} + {text.number(per_run.initialize_s.median())}", tokens, fraction,
    ]  # fmt: skip


def _speed(f: Figures, against: Figures | None, chosen: str | None) -> str:
    """The speed of a configuration and how it varies between rounds, or between the turns of rounds."""
    if against is None:
        return text.MISSING
    if against is f:
        tier = f", {f.tier} tier" if f.tier is not None and chosen is None else ""
        return f"1 (baseline{tier})" if f.measured else text.MISSING
    ratio = f.speed_over(against)
    if ratio is None:
        return text.MISSING
    turns = ratio.turns
    varies = f"{turns.median():.2f}x, {turns.min():.2f}x-{turns.max():.2f}x"
    return f"**{ratio.of_medians:.2f}x** ({ {0: 'no round in common', 1: 'one round'}.get(turns.size, varies) })"


def _loss_groups(compared: LossComparison, figures: dict[str, Figures]) -> list[dict[str, Any]]:
    """The groups as the page shows them."""
    groups = []
    for index, group in enumerate(compared.groups):
        members = []
        for name, rounds in group.rounds.items():
            some = f" (round{'s' if len(rounds) > 1 else ''} {text.joined([str(index + 1) for index in rounds])})"
            members.append(figures[name].label + (some if len(rounds) < len(figures[name].runs) else ""))
        sizes = [f"{size:.1e}" if math.isfinite(size) else "not finite" for size in (group.there, group.largest)]
        letter = string.ascii_uppercase[index % 26] * (1 + index // 26)
        groups.append(
            {"letter": letter, "members": members, "first": group.first, "there": sizes[0], "largest": sizes[1]}
        )
    return groups


def _loss_scales(figures: list[Figures]) -> list[tuple[str, list[int], list[str]]]:
    """Of each run its skipped steps and its loss scales; empty where no step was skipped and all scales are alike."""
    runs = [(f.label, run) for f in figures for run in f.runs]
    length = min((len(run.steps) for _, run in runs), default=0)
    scales = {tuple(step.loss_scale for step in run.steps[:length]) for _, run in runs}
    if len(scales) <= 1 and not any(step.skipped for _, run in runs for step in run.steps):
        return []
    found = []
    for label, run in runs:
        skipped = [index for index, step in enumerate(run.steps, start=1) if step.skipped]
        known = pd.Series([step.loss_scale for step in run.steps], dtype=float).dropna()
        changes = [f"{scale:g}" for scale in known[known != known.shift()]]
        found.append((f"{label}, round {run.round + 1}", skipped, changes))
    return found


def _names(counted: list[Figures], kind: str) -> list[str]:
    """The names of all of TenCache's counts of a kind."""
    return list(dict.fromkeys(name for f in counted for name in f.total(kind).index))


def _rare_events(counted: list[Figures]) -> list[str]:
    """What TenCache counts because it should not happen often, of the configurations where it did."""
    events = {f.label: f.total("events") for f in counted}
    return [
        f"{label}: {text.joined([f'{count:.0f} x {event}' for event, count in found[found > 0].items()])}"
        for label, found in events.items()
        if found.any()
    ]


def _trials(f: Figures) -> list[list[str]]:
    """Header and rows of the table of a search: the knobs that were varied, and seconds per step or the error."""
    knobs = pd.DataFrame([trial.knobs for trial in f.trials], dtype=object).map(repr)
    varied = knobs.columns[knobs.nunique() > 1]
    seconds = [t.median_s if t.outcome is Outcome.ok and t.measured else math.inf for t in f.trials]
    rows = [["trial", *map(text.plain, varied), "s/step"]]
    for index, (trial, median_s) in enumerate(zip(f.trials, seconds, strict=True), start=1):
        ended = "no measured step" if trial.outcome is Outcome.ok else text.gist(trial.error, 120)
        if math.isfinite(median_s):
            ended = f"**{text.number(median_s)}**" if median_s == min(seconds) else text.number(median_s)
        rows.append([str(index), *(text.setting(trial.knobs.get(knob)) for knob in varied), ended])
    return rows


def _rates(benchmark: Benchmark) -> dict[str, str]:
    hardware, storage = benchmark.hardware, benchmark.hardware.storage
    rates: list[tuple[str, float | None, str, float]] = [
        ("host to GPU", hardware.h2d_bytes_per_s, "GB/s", 1e9),
        ("GPU to host", hardware.d2h_bytes_per_s, "GB/s", 1e9),
        ("memory copy", hardware.memory_copy_bytes_per_s, "GB/s", 1e9),
        ("CPU Adam", hardware.cpu_adam_params_per_s, "Gparam/s", 1e9),
        ("GPU Adam", hardware.gpu_adam_params_per_s, "Gparam/s", 1e9),
        ("matmul", hardware.matmul_flops_per_s, "TFLOP/s", 1e12),
    ]
    if storage is not None:
        rates = [
            ("NVMe read", storage.read_bytes_per_s, "GB/s", 1e9),
            ("NVMe write", storage.write_bytes_per_s, "GB/s", 1e9),
            ("NVMe read + write together", storage.mixed_bytes_per_s, "GB/s", 1e9),
            *rates,
        ]
    return {what: f"{text.number(rate, scale)} {unit}" for what, rate, unit, scale in rates if rate}


def _repeated(figures: dict[str, Figures], baselines: dict[str, Figures | None], repeat: Benchmark) -> list[Repeated]:
    """Every speed that both measurements have, each relative to the baseline it has in the first."""
    again, found = all_figures(repeat), []
    for name, other in figures.items():
        baseline = baselines[name]
        if baseline is None or baseline is other or not {name, baseline.name} <= again.keys():
            continue
        first, second = other.speed_over(baseline), again[name].speed_over(again[baseline.name])
        if first is not None and second is not None:
            found.append(Repeated(other, again[name], baseline, first.of_medians, second.of_medians))
    return found


def _unlike(first: Benchmark, second: Benchmark) -> list[str]:
    """Differences that make this no repetition. Rates vary from probe to probe and are left out."""
    aspects: dict[str, Callable[[Benchmark], object]] = {
        "workload": lambda b: b.workload,
        "storage": lambda b: b.storage,
        "versions": lambda b: b.versions,
        "CPU": lambda b: (b.hardware.cpu, b.hardware.cores),
        "GPU": lambda b: (b.hardware.gpu, b.hardware.gpus),
    }
    return [what for what, aspect in aspects.items() if aspect(first) != aspect(second)]
