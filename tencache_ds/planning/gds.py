# SPDX-License-Identifier: Apache-2.0
"""Whether weights are read straight into GPU memory: the policy. :mod:`tencache_ds.io.backends.gds` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tencache_ds.errors import ConfigError

COMPATIBILITY_GAIN = 1.25
"""How much faster than pinned staging compatibility mode has to be. It moves the same bytes the same way, through host
memory, but its copies wait for the GPU's work in progress, which the idle GPU of a trial does not show."""


@dataclass(frozen=True, slots=True)
class GdsTrial:
    """The results of a round trip through GPU memory.

    Attributes:
        problem: why GDS cannot be used here, or "".
        compatibility: why the bytes pass through host memory all the same, or "".
        gds_bytes_per_s: NVMe to GPU memory by GDS.
        staged_bytes_per_s: NVMe to GPU memory through pinned host memory.
    """

    problem: str = ""
    compatibility: str = ""
    gds_bytes_per_s: float = 0.0
    staged_bytes_per_s: float = 0.0

    @property
    def rates(self) -> str:
        """Both rates, formatted."""
        return f"{self.gds_bytes_per_s / 1e9:.2f} GB/s, staged {self.staged_bytes_per_s / 1e9:.2f} GB/s"


@dataclass(frozen=True, slots=True)
class GdsChoice:
    """The decision, and its reason.

    Attributes:
        use: weights are read into GPU memory.
        reason: human-readable.
        warning: for the log, or "".
    """

    use: bool
    reason: str
    warning: str = ""


def combined(trials: Sequence[GdsTrial]) -> GdsTrial:
    """One trial for several paths, which are read at the same time: the first problem, the sum of the rates."""
    return GdsTrial(
        next((trial.problem for trial in trials if trial.problem), ""),
        next((trial.compatibility for trial in trials if trial.compatibility), ""),
        sum(trial.gds_bytes_per_s for trial in trials),
        sum(trial.staged_bytes_per_s for trial in trials),
    )


def choose_gds(wanted: str, trial: GdsTrial) -> GdsChoice:
    """The decision that follows from a trial.

    Args:
        wanted: ``"auto"`` or ``"on"``.
        trial: of all paths together.

    Raises:
        ConfigError: ``"on"``, and GDS cannot be used; says why.
    """
    if wanted == "on":
        if trial.problem:
            raise ConfigError(
                f'"tencache.gds" is "on", but weights cannot be read into GPU memory: {trial.problem}. Set it to '
                '"auto" or "off" to read them through pinned host memory.'
            )
        warning = ""
        if trial.compatibility:
            warning = (
                f'"tencache.gds" is "on", but GPUDirect Storage does NOT work here: {trial.compatibility}. KvikIO runs '
                f"in COMPATIBILITY MODE, in which every byte still passes through host memory ({trial.rates}). Set "
                '"tencache.gds" to "auto" to let TenCache choose the faster way.'
            )
        mode = "compatibility mode, " if trial.compatibility else ""
        return GdsChoice(True, f"asked for, {mode}{trial.rates}", warning)
    if trial.problem:
        return GdsChoice(False, trial.problem)
    gain = COMPATIBILITY_GAIN if trial.compatibility else 1.0
    if trial.gds_bytes_per_s > gain * trial.staged_bytes_per_s:
        mode = f" in compatibility mode ({trial.compatibility})" if trial.compatibility else ""
        return GdsChoice(True, f"faster{mode}, {trial.rates}")
    mode = f"compatibility mode ({trial.compatibility})" if trial.compatibility else "it"
    return GdsChoice(False, f"{mode} is not {'clearly ' if trial.compatibility else ''}faster, {trial.rates}")
