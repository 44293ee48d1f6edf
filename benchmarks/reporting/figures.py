# SPDX-License-Identifier: Apache-2.0
"""The figures of a report, as pandas frames of steps and runs: medians, spreads, ratios, memory, losses.

A ratio is a speed: the baseline's seconds per step over the other's, so more than 1 is faster than the baseline. A
figure that was not measured is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..record import Benchmark, Caps, Configuration, Outcome, Placement, Run, Step
from .text import gib, plain

PEAK_RSS = "peak RSS"
HOST_USED = "host memory in use"


class Tier(StrEnum):
    """The lowest tier that a configuration may use: like is compared with like."""

    gpu = "GPU"
    ram = "RAM"
    nvme = "NVMe"


class Peak(NamedTuple):
    """The largest memory use that was seen, and of which figure: :data:`PEAK_RSS` of a rank, or :data:`HOST_USED`."""

    nbytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """How much faster than its baseline a configuration is."""

    of_medians: float  # ratio of the medians over all measured steps
    # the ratio of each turn of each round in which both have measured steps: machine drift cancels within it
    turns: pd.Series


@dataclass(frozen=True, slots=True)
class CapCheck:
    """The caps of a configuration, the peaks, and the bytes beyond the caps. A peak of None was not recorded."""

    caps: Caps
    host: Peak | None
    gpu_nbytes: int | None

    @property
    def host_excess_nbytes(self) -> int:
        """0 when there is none, no cap, or no figure."""
        return max(0, self.host.nbytes - self.caps.host_nbytes) if self.host and self.caps.host_nbytes else 0

    @property
    def gpu_excess_nbytes(self) -> int:
        """0 when there is none, no cap, or no figure."""
        return max(0, self.gpu_nbytes - self.caps.gpu_nbytes) if self.gpu_nbytes and self.caps.gpu_nbytes else 0

    @property
    def excesses(self) -> list[str]:
        """By how much the caps were exceeded, for the report."""
        excesses = {"host": self.host_excess_nbytes, "GPU": self.gpu_excess_nbytes}
        return [f"**EXCEEDED by {gib(nbytes)} GiB of {of} memory**" for of, nbytes in excesses.items() if nbytes]

    @property
    def unknown(self) -> bool:
        """Whether something is capped that was not recorded."""
        host, gpu = self.caps.host_nbytes, self.caps.gpu_nbytes
        return (host is not None and self.host is None) or (gpu is not None and self.gpu_nbytes is None)


class Figures:
    """One configuration of a benchmark.

    Attributes:
        name: of the configuration.
        label: for Markdown.
        started: all of its runs.
        runs: those that ended well.
        steps: a line for each measured step of these, with the fields of :class:`..record.Step` and ``round``.
    """

    def __init__(self, benchmark: Benchmark, configuration: Configuration) -> None:
        self.configuration = configuration
        self.name, self.label = configuration.name, plain(configuration.label)
        self.started = [run for run in benchmark.runs if run.configuration == self.name]
        self.runs = benchmark.runs_of(self.name)
        self.failure = benchmark.failure_of(self.name)
        self.trials = [run for run in benchmark.tuning if run.configuration == self.name]
        self.limit = benchmark.limits.get(self.name)
        self.bound_s = benchmark.bounds_s.get(self.name, np.nan)
        self.balance_tokens = benchmark.balance_tokens.get(self.name)
        self._placement = benchmark.placements.get(self.name)
        self._on_tmpfs = benchmark.on_tmpfs
        steps = [step.model_dump() | {"round": run.round} for run in self.runs for step in run.measured]
        self.steps = pd.DataFrame(steps, columns=[*Step.model_fields, "round"])

    @property
    def is_ours(self) -> bool:
        """Whether it is TenCache: of the peer "tencache" or a variant of it, such as "tencache-ram"."""
        return self.configuration.peer.partition("-")[0] == "tencache"

    @property
    def measured(self) -> bool:
        """Whether it has a measured step."""
        return not self.steps.empty

    @property
    def lost(self) -> list[Run]:
        """Its runs that did not end well."""
        return [run for run in self.started if run.outcome is not Outcome.ok]

    @property
    def median_s(self) -> float:
        """Median seconds of a measured step."""
        return float(self.steps.seconds.median())

    @property
    def bound_fraction(self) -> float:
        """The shortest possible step over the median step."""
        return self.bound_s / self.median_s if self.measured and self.median_s else np.nan

    @cached_property
    def per_run(self) -> pd.DataFrame:
        """A line for each run that ended well: its start, memory, and energy and profiled figures of one step."""
        rows = []
        for run in self.runs:
            memory, profile, n_steps = run.memory, run.device_profile, len(run.measured) or np.nan
            row: dict[str, Any] = {key: getattr(run, key) for key in ("numel", "model_s", "initialize_s")}
            for key in ("gpu_energy_j", "cpu_energy_j", "disk_write_nbytes"):
                row[key] = np.nan if getattr(run, key) is None else getattr(run, key) / n_steps
            if memory is not None:
                row |= memory.model_dump() | {"pinned_nbytes": memory.pinned_nbytes}
            if profile is not None:
                row |= {key: getattr(profile, key) for key in ("h2d_nbytes", "d2h_nbytes")}
                seconds = profile.seconds or np.nan
                row |= {key: getattr(profile, f"{key}_s") / seconds for key in ("h2d_busy", "d2h_busy", "kernel_busy")}
            rows.append(row)
        columns = (
            "numel", "model_s", "initialize_s", "gpu_energy_j", "cpu_energy_j", "disk_write_nbytes",
            "peak_rss_start_nbytes", "peak_rss_steady_nbytes", "pinned_nbytes", "gpu_peak_nbytes",
            "h2d_nbytes", "d2h_nbytes", "h2d_busy", "d2h_busy", "kernel_busy",
        )  # fmt: skip
        return pd.DataFrame(rows, columns=columns).astype(float)

    @property
    def stats(self) -> dict[str, Any] | None:
        """TenCache's statistics at the end of the last run that recorded some."""
        return next((run.tencache_stats for run in reversed(self.runs) if run.tencache_stats), None)

    @property
    def kept_nbytes(self) -> list[int | None]:
        """Where TenCache kept what at the end, as :attr:`stats` name it; None for what they do not mention."""
        kinds = ("gpu_weight", "gpu_gradient", "gpu_state", "resident_weight", "resident_state", "stored")
        return [(self.stats or {}).get(f"{kind}_nbytes") for kind in kinds]

    @property
    def n_counted_steps(self) -> float:
        """The steps that :meth:`total` is over; NaN for none."""
        return self.total("step").sum() or np.nan

    def total(self, kind: str) -> pd.Series:
        """TenCache's own counts of a kind (``tencache_ds.observability.counters``) by name, summed over the runs."""
        totals = [run.tencache_stats["total"].get(kind, {}) for run in self.runs if run.tencache_stats]
        return pd.DataFrame(value if isinstance(value, dict) else {kind: value} for value in totals).sum()

    @cached_property
    def tier(self) -> Tier | None:
        """The lowest tier it may use; None when neither its placement nor its DeepSpeed config says.

        Of TenCache the config counts: ``offload_*.device`` is what it may use, whatever it then puts there. Of a peer
        the placement: not every peer reads DeepSpeed's offload section.
        """
        configs = (_tier_of_config(run.deepspeed_config) for run in self.started)
        configured = next((tier for tier in configs if tier is not None), None)
        placed = _tier_of_placement(self._placement)
        return (configured or placed) if self.is_ours else (placed or configured)

    @cached_property
    def training_peak(self) -> Peak | None:
        """Most host memory while it trains: the larger of the steady RSS and what the host had in use.

        On tmpfs only the RSS: the files there, which stand for a drive's, are host memory in use.
        """
        peaks = [peak for run in self.runs for peak in _peaks(run, start=False)]
        return max((peak for peak in peaks if peak.source == PEAK_RSS or not self._on_tmpfs), default=None, key=_size)

    @cached_property
    def cap_check(self) -> CapCheck | None:
        """The caps of the last run, and the peaks, including the start and failed runs; None when nothing was run."""
        if not self.started:
            return None
        gpu = [run.memory.gpu_peak_nbytes for run in self.started if run.memory is not None]
        host = max((peak for run in self.started for peak in _peaks(run, start=True)), default=None, key=_size)
        return CapCheck(self.started[-1].caps, host, max(gpu, default=None))

    def speed_over(self, baseline: Figures) -> Ratio | None:
        """How much faster than ``baseline`` it is; None when one of them has no measured step."""
        if not (self.measured and baseline.measured and self.median_s):
            return None
        slow, fast = (f.steps.groupby(["round", "turn"]).seconds.median() for f in (baseline, self))
        return Ratio(baseline.median_s / self.median_s, (slow / fast).dropna())


def all_figures(benchmark: Benchmark) -> dict[str, Figures]:
    """The figures of every configuration, by name."""
    return {configuration.name: Figures(benchmark, configuration) for configuration in benchmark.configurations}


def _peaks(run: Run, *, start: bool) -> list[Peak]:
    peaks = [Peak(step.host_used_nbytes, HOST_USED) for step in (run.steps if start else run.measured)]
    if run.memory is not None:
        nbytes = [run.memory.peak_rss_steady_nbytes, *([run.memory.peak_rss_start_nbytes] if start else [])]
        peaks = [Peak(max(nbytes), PEAK_RSS), *peaks]
    return peaks


def _size(peak: Peak) -> int:
    return peak.nbytes


def _tier_of_config(config: dict[str, Any]) -> Tier | None:
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        return None
    devices = {(zero.get(key) or {}).get("device") for key in ("offload_param", "offload_optimizer")}
    return Tier.nvme if "nvme" in devices else Tier.ram if "cpu" in devices else Tier.gpu


def _tier_of_placement(placement: Placement | None) -> Tier | None:
    if placement is None:
        return None
    if placement.weights_nvme > 0 or placement.optimizer_nvme > 0:
        return Tier.nvme
    return Tier.gpu if placement.weights_gpu >= 1 and placement.optimizer_gpu >= 1 else Tier.ram


def best_peer(figures: dict[str, Figures], tier: Tier | None) -> Figures | None:
    """The fastest configuration in ``tier`` that is not TenCache's and trains with the same semantics."""
    peers = (f for f in figures.values() if not f.is_ours and not f.configuration.semantics and f.measured)
    return min((f for f in peers if tier is not None and f.tier is tier), key=lambda f: f.median_s, default=None)


def baseline_for(figures: dict[str, Figures], name: str, chosen: str | None = None) -> Figures | None:
    """What the speed of a configuration is relative to: ``chosen``, or else the best peer in its tier.

    None for a configuration with other semantics, or when its tier has no peer that was measured.
    """
    if figures[name].configuration.semantics:
        return None
    return figures[chosen] if chosen is not None else best_peer(figures, figures[name].tier)


@dataclass(frozen=True, slots=True)
class LossGroup:
    """Runs whose losses are identical bit for bit."""

    rounds: dict[str, list[int]]  # rounds of each configuration's runs in the group, by the configuration's name
    # step and micro-step, from 1, of the first difference from the first group; None for that group itself
    first: tuple[int, int] | None = None
    there: float = 0.0  # size of that difference, as a fraction of the reference; not finite where a loss is not
    largest: float = 0.0  # the largest in any step


@dataclass(frozen=True, slots=True)
class LossComparison:
    """All runs that ended well, by their losses."""

    steps: int  # how many steps were compared, warm-up steps included: as many as every run has
    groups: list[LossGroup]  # the group of the first configuration that trains with the usual semantics comes first
    without: list[str]  # names of configurations with a run that recorded no losses


def compare_losses(figures: Sequence[Figures]) -> LossComparison:
    """Groups the runs that ended well by their losses, compared exactly over the steps that all of them have."""
    # Sorting is stable: the usual semantics first, then the order of the configurations.
    runs = [run for f in sorted(figures, key=lambda f: bool(f.configuration.semantics)) for run in f.runs]
    recorded = [run for run in runs if run.steps and all(step.losses for step in run.steps)]
    steps = min((len(run.steps) for run in recorded), default=0)
    members: dict[tuple[tuple[str, ...], ...], dict[str, list[int]]] = {}
    for run in recorded:
        losses = tuple(tuple(step.losses) for step in run.steps[:steps])
        members.setdefault(losses, {}).setdefault(run.configuration, []).append(run.round)
    reference = next(iter(members), ())
    groups = [_group(rounds, np.array(reference), np.array(losses)) for losses, rounds in members.items()]
    return LossComparison(steps, groups, list(dict.fromkeys(run.configuration for run in runs if run not in recorded)))


def _group(rounds: dict[str, list[int]], reference: Any, losses: Any) -> LossGroup:
    """The group of ``losses``, hexadecimal floats of shape (steps, micro-steps)."""
    differ = reference != losses
    if not differ.any():
        return LossGroup(rounds)
    expected, found = (np.array([float.fromhex(loss) for loss in texts[differ]]) for texts in (reference, losses))
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.abs(found - expected) / np.abs(expected)
    step, micro_step = np.argwhere(differ)[0] + 1
    return LossGroup(rounds, (int(step), int(micro_step)), float(relative[0]), float(relative.max()))
