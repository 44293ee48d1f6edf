# SPDX-License-Identifier: Apache-2.0
"""The figures of a report, as pandas frames of steps and runs: medians, spreads, ratios, memory, losses.

A ratio is a speed: the baseline's seconds per step over the other's, so more than 1 is faster than the baseline. A
figure that was not measured is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tencache_ds.names import StrEnum

from ..record import Benchmark, Caps, Configuration, DeviceProfile, Memory, Placement, Run, Step
from .text import gib, plain

PEAK_RSS = "peak RSS"
HOST_USED = "host memory in use"
PLACES = ("gpu_weight", "gpu_gradient", "gpu_state", "resident_weight", "resident_state", "stored")
"""Where TenCache keeps what, as its statistics name it."""

Losses = tuple[tuple[str, ...], ...]
"""Losses of each micro-step of each step: exact hexadecimal floats."""


class Tier(StrEnum):
    """The lowest tier that a configuration may use: like is compared with like."""

    gpu = "GPU"
    ram = "RAM"
    nvme = "NVMe"


class Peak(NamedTuple):
    """The largest memory use that was seen, and of which figure: :data:`PEAK_RSS` of a rank, or :data:`HOST_USED`."""

    nbytes: int
    source: str


class Ratio(NamedTuple):
    """How much faster than its baseline a configuration is."""

    of_medians: float  # ratio of the medians over all measured steps
    # the ratio of each turn of each round in which both have measured steps: machine drift cancels within it
    turns: pd.Series


class Figures:
    """One configuration of a benchmark, with everything that was found of it."""

    def __init__(self, benchmark: Benchmark, configuration: Configuration) -> None:
        self.configuration = configuration
        self.name, self.label = configuration.name, plain(configuration.label)  # the label is for Markdown
        # Whether it is TenCache: of the peer "tencache" or a variant of it, such as "tencache-ram".
        self.is_ours = configuration.peer.partition("-")[0] == "tencache"
        self.trials = [run for run in benchmark.tuning if run.configuration == self.name]
        self.started = [run for run in benchmark.runs if run.configuration == self.name]
        self.runs = benchmark.runs_of(self.name)  # those that ended well
        self.failure = benchmark.failure_of(self.name)
        # A line for each measured step of these.
        steps = [step.model_dump() | {"round": run.round} for run in self.runs for step in run.measured]
        self.steps = pd.DataFrame(steps, columns=[*Step.model_fields, "round"])
        self.measured = not self.steps.empty
        self.median_s = float(self.steps.seconds.median())  # seconds of a step
        self.per_run = _per_run(self.runs)
        self.bound_s = benchmark.bounds_s.get(self.name, np.nan)  # the shortest possible step
        self.bound_fraction = self.bound_s / (self.median_s or np.nan)
        self.limit = benchmark.limits.get(self.name)
        self.balance_tokens = benchmark.balance_tokens.get(self.name)
        self.tier = self._lowest_tier(benchmark.placements.get(self.name))
        # TenCache's statistics at the end of the last run that recorded some, and where it kept what.
        self.stats = next((run.tencache_stats for run in reversed(self.runs) if run.tencache_stats), {})
        self.kept_nbytes = [self.stats.get(f"{place}_nbytes") for place in PLACES]
        # Most host memory while it trains: the larger of the steady RSS and what the host had in use. On tmpfs only the
        # RSS: the files there, which stand for a drive's, are host memory in use.
        peaks = [Peak(run.memory.peak_rss_steady_nbytes, PEAK_RSS) for run in self.runs if run.memory]
        if not benchmark.on_tmpfs:
            peaks += [Peak(nbytes, HOST_USED) for nbytes in self.steps.host_used_nbytes]
        self.training_peak = max(peaks, default=None)
        # Caps, and what they are compared with: the most at any time, the start and failed runs included.
        self.caps = self.started[-1].caps if self.started else Caps()
        self.capped = bool(self.caps.host_nbytes or self.caps.gpu_nbytes)
        memories = [run.memory for run in self.started if run.memory]
        peaks = [Peak(max(m.peak_rss_start_nbytes, m.peak_rss_steady_nbytes), PEAK_RSS) for m in memories]
        peaks += [Peak(step.host_used_nbytes, HOST_USED) for run in self.started for step in run.steps]
        self.host_peak = max(peaks, default=None)
        self.gpu_peak_nbytes = max((memory.gpu_peak_nbytes for memory in memories), default=None)

    @property
    def excesses(self) -> list[str]:
        """By how much the caps were exceeded, for the report."""
        host = self.host_peak.nbytes if self.host_peak else None
        peaks = {"host": (host, self.caps.host_nbytes), "GPU": (self.gpu_peak_nbytes, self.caps.gpu_nbytes)}
        return [
            f"**EXCEEDED by {gib(peak - cap)} GiB of {of} memory**"
            for of, (peak, cap) in peaks.items()
            if peak and cap and peak > cap
        ]

    def total(self, kind: str) -> pd.Series:
        """TenCache's own counts of a kind (``tencache_ds.observability.counters``) by name, summed over the runs."""
        return _sums([run.tencache_stats["total"] for run in self.runs if run.tencache_stats], kind)

    @property
    def counts_warm_up(self) -> bool:
        """Whether :meth:`per_step` includes the warm-up: that of records in which it cannot be told apart."""
        return any(run.tencache_stats and not run.tencache_counts for run in self.runs)

    def per_step(self, kind: str) -> pd.Series:
        """Those counts of a kind for each step of these runs."""
        counts = [
            run.tencache_stats["total"] if self.counts_warm_up else run.tencache_counts
            for run in self.runs
            if run.tencache_stats
        ]
        return _sums(counts, kind) / (_sums(counts, "step").sum() or np.nan)

    def _lowest_tier(self, placed: Placement | None) -> Tier | None:
        """The lowest tier it may use; None when neither its placement nor its DeepSpeed config says.

        Of TenCache the config counts: ``offload_*.device`` is what it may use, whatever it then puts there. Of a peer
        the placement: not every peer reads DeepSpeed's offload section.
        """
        zeros = [run.deepspeed_config["zero_optimization"] for run in self.started if run.deepspeed_config]
        if zeros and (self.is_ours or placed is None):
            devices = {(zeros[0].get(key) or {}).get("device") for key in ("offload_param", "offload_optimizer")}
            return Tier.nvme if "nvme" in devices else Tier.ram if "cpu" in devices else Tier.gpu
        if placed is None:
            return None
        if placed.weights_nvme > 0 or placed.optimizer_nvme > 0:
            return Tier.nvme
        return Tier.gpu if placed.weights_gpu >= 1 and placed.optimizer_gpu >= 1 else Tier.ram

    def speed_over(self, baseline: Figures) -> Ratio | None:
        """How much faster than ``baseline`` it is; None when one of them has no measured step."""
        if not (self.measured and baseline.measured and self.median_s):
            return None
        slow, fast = (f.steps.groupby(["round", "turn"]).seconds.median() for f in (baseline, self))
        return Ratio(baseline.median_s / self.median_s, (slow / fast).dropna())


def all_figures(benchmark: Benchmark) -> dict[str, Figures]:
    """The figures of every configuration, by name."""
    return {configuration.name: Figures(benchmark, configuration) for configuration in benchmark.configurations}


def _sums(counts: Iterable[dict[str, Any]], kind: str) -> pd.Series:
    values = [each.get(kind, {}) for each in counts]
    return pd.DataFrame(value if isinstance(value, dict) else {kind: value} for value in values).sum()


def _per_run(runs: list[Run]) -> pd.DataFrame:
    """A line for each run: its start, memory and profile, and energy and bytes on disk of one of its steps."""
    of_steps = ["gpu_energy_j", "cpu_energy_j", "disk_write_nbytes"]
    of_run = ["numel", "model_s", "initialize_s", *of_steps]
    rows = [
        {key: getattr(run, key) for key in of_run}
        | {key: value for part in (run.memory, run.device_profile) if part for key, value in part}
        for run in runs
    ]
    columns = [*of_run, *Memory.model_fields, *DeviceProfile.model_fields]
    frame = pd.DataFrame(rows, columns=columns).astype(float)
    frame[of_steps] = frame[of_steps].div([len(run.measured) or np.nan for run in runs], axis=0)
    frame["pinned_nbytes"] = frame.locked_nbytes + frame.torch_pinned_nbytes + frame.registered_nbytes
    for part in ("h2d", "d2h", "kernel"):
        frame[f"{part}_busy"] = frame[f"{part}_busy_s"] / frame.seconds.replace(0, np.nan)
    return frame


def group_by_losses(figures: Iterable[Figures]) -> tuple[int, dict[Losses, list[Run]]]:
    """The runs that ended well, by their losses, exactly, in the steps that all of them have.

    Returns:
        How many steps these are, warm-up steps included, and the runs with the same losses. The group of the first
        configuration with the usual semantics comes first.
    """
    # Sorting is stable: the usual semantics first, then the order of the configurations.
    runs = [run for f in sorted(figures, key=lambda f: bool(f.configuration.semantics)) for run in f.runs if run.steps]
    n_steps = min((len(run.steps) for run in runs), default=0)
    groups: dict[Losses, list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(tuple(step.losses) for step in run.steps[:n_steps]), []).append(run)
    return n_steps, groups
