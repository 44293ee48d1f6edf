# SPDX-License-Identifier: Apache-2.0
"""Largest memory use of a configuration over its runs, and whether it kept to its caps."""

from __future__ import annotations

from dataclasses import dataclass

from ..record import Benchmark, Caps, Run

PEAK_RSS = "peak RSS"
HOST_USED = "host memory in use"


@dataclass(frozen=True, slots=True)
class Peak:
    """A memory figure.

    Attributes:
        nbytes: the largest seen.
        source: which figure was the largest: :data:`PEAK_RSS` (of one rank) or :data:`HOST_USED` (of the host).
    """

    nbytes: int
    source: str


@dataclass(frozen=True, slots=True)
class CapCheck:
    """A cap and what was used of it. A use of None was not recorded."""

    caps: Caps
    host: Peak | None
    gpu_nbytes: int | None

    @property
    def host_excess_nbytes(self) -> int:
        """Host memory beyond the cap; 0 when there is none, no cap, or no figure."""
        if self.caps.host_nbytes is None or self.host is None:
            return 0
        return max(0, self.host.nbytes - self.caps.host_nbytes)

    @property
    def gpu_excess_nbytes(self) -> int:
        """GPU memory beyond the cap; 0 when there is none, no cap, or no figure."""
        if self.caps.gpu_nbytes is None or self.gpu_nbytes is None:
            return 0
        return max(0, self.gpu_nbytes - self.caps.gpu_nbytes)

    @property
    def exceeded(self) -> bool:
        """Whether either cap was exceeded."""
        return self.host_excess_nbytes > 0 or self.gpu_excess_nbytes > 0


def training_peak(benchmark: Benchmark, name: str) -> Peak | None:
    """Most host memory of a configuration while it trains: the larger of the steady RSS and what the host had in use.

    On tmpfs only the RSS: the files there, which stand for a drive's, are host memory in use.

    Returns:
        None when no run that ended well recorded either.
    """
    peaks = [peak for run in benchmark.runs_of(name) for peak in _peaks(run, start=False)]
    return _largest([peak for peak in peaks if peak.source == PEAK_RSS or not benchmark.on_tmpfs])


def check_caps(benchmark: Benchmark, name: str) -> CapCheck | None:
    """The cap of a configuration and its peak, including the start: a cap applies from the first byte.

    Runs that failed count too. The caps are those of the last run; None when nothing was run.
    """
    runs = [run for run in benchmark.runs if run.configuration == name]
    if not runs:
        return None
    return CapCheck(
        runs[-1].caps,
        _largest([peak for run in runs for peak in _peaks(run, start=True)]),
        max((run.memory.gpu_peak_nbytes for run in runs if run.memory is not None), default=None),
    )


def _peaks(run: Run, *, start: bool) -> list[Peak]:
    peaks = []
    if run.memory is not None:
        peaks.append(Peak(run.memory.peak_rss_steady_nbytes, PEAK_RSS))
        if start:
            peaks.append(Peak(run.memory.peak_rss_start_nbytes, PEAK_RSS))
    steps = run.steps if start else run.measured
    if steps:
        peaks.append(Peak(max(step.host_used_nbytes for step in steps), HOST_USED))
    return peaks


def _largest(peaks: list[Peak]) -> Peak | None:
    return max(peaks, key=lambda peak: peak.nbytes, default=None)
