# SPDX-License-Identifier: Apache-2.0
"""Writes the results of benchmarks as rows of a CSV file, to be kept for longer than their records:

    python -m benchmarks.results benchmark_results/benchmark.json --report disk_h100_2026-11-25 --csv results.csv

A row for each run, whether it ended well or not; ``docs/benchmarks/results.csv`` holds those behind the reports. Units
are bytes and seconds, as in the names of the columns; times of a step are medians over the measured ones.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .record import Benchmark, Run
from .reporting.text import gist

TIMES = ("forward_s", "backward_s", "update_s", "storage_wait_s")
TRAFFIC = ("nvme_read_nbytes", "nvme_write_nbytes")
PEAKS = ("peak_rss_start_nbytes", "peak_rss_steady_nbytes", "gpu_peak_nbytes")
COLUMNS = (
    "report", "date", "gpu", "ranks", "cores", "storage", "torch", "deepspeed", "model", "parameters", "micro_batch",
    "sequence", "accumulation", "activation_checkpointing", "busy_cores", "deterministic", "configuration", "label",
    "settings", "round", "outcome", "error", "steps", "step_s", "fastest_s", "slowest_s", *TIMES, *TRAFFIC, *PEAKS,
    "h2d_nbytes", "d2h_nbytes", "bound_s", "first_loss", "last_loss",
)  # fmt: skip


def rows(benchmark: Benchmark, report: str) -> Iterator[dict[str, Any]]:
    """A row for each run of a benchmark, in their order.

    Args:
        benchmark: its record.
        report: file of the report, without suffix.
    """
    workload = benchmark.workload
    common = {
        "report": report,
        "date": benchmark.started_at[:10],
        "gpu": benchmark.hardware.gpu or benchmark.hardware.cpu,
        "ranks": workload.ranks,
        "cores": benchmark.hardware.cores,
        "storage": benchmark.storage,
        "model": workload.model,
        **{name: benchmark.versions.get(name, "") for name in ("torch", "deepspeed")},
        **{name: getattr(workload, name) for name in ("micro_batch", "sequence", "accumulation", "busy_cores")},
        **{name: getattr(workload, name) for name in ("activation_checkpointing", "deterministic")},
    }
    labels = {configuration.name: configuration.label for configuration in benchmark.configurations}
    for run in benchmark.runs:
        yield (
            common
            | {
                "configuration": run.configuration,
                "label": labels.get(run.configuration, ""),
                "settings": json.dumps(run.knobs) if run.knobs else "",
                "bound_s": _short(benchmark.bounds_s.get(run.configuration)),
            }
            | _row(run)
        )


def _row(run: Run) -> dict[str, Any]:
    measured = run.measured
    row: dict[str, Any] = {
        "round": run.round,
        "outcome": run.outcome.value,
        "error": gist(run.error) if run.error else "",
        "parameters": run.numel,
        "steps": len(measured),
    }
    if measured:
        seconds = [step.seconds for step in measured]
        row |= {"step_s": _short(run.step_s), "fastest_s": _short(min(seconds)), "slowest_s": _short(max(seconds))}
        row |= {name: _short(statistics.median(getattr(step, name) for step in measured)) for name in TIMES}
        row |= {name: statistics.median_low(getattr(step, name) for step in measured) for name in TRAFFIC}
        losses = [float.fromhex(loss) for step in run.steps for loss in step.losses]
        row |= {"first_loss": losses[0], "last_loss": losses[-1]} if losses else {}
    for part, names in ((run.memory, PEAKS), (run.device_profile, ("h2d_nbytes", "d2h_nbytes"))):
        row |= {name: getattr(part, name) for name in names} if part is not None else {}
    return row


def _short(seconds: float | None) -> float | str:
    return "" if seconds is None else float(f"{seconds:.5g}")


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file; none if there is no such file.

    Raises:
        ValueError: it has other columns.
    """
    if not path.exists():
        return []
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path} has other columns than this version writes: {reader.fieldnames}")
        return list(reader)


def write(path: Path, all_rows: list[dict[str, Any]]) -> None:
    """Writes a file with these rows."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(all_rows)


def main(arguments: list[str] | None = None) -> None:
    """Replaces the rows of a report in a CSV file, or adds them."""
    parser = argparse.ArgumentParser(prog="benchmarks.results", description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path, help="benchmark.json of tencache bench")
    parser.add_argument("--report", required=True, help="name of the report that it belongs to")
    parser.add_argument("--csv", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    others: list[dict[str, Any]] = [row for row in read(options.csv) if row["report"] != options.report]
    write(options.csv, [*others, *rows(Benchmark.read(options.record), options.report)])


if __name__ == "__main__":
    main()
