# SPDX-License-Identifier: Apache-2.0
"""``tencache plan --job``: where a running job keeps everything, what limits its step, and what more RAM would give."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tencache_ds.cli.console import MORE_NBYTES, format_nbytes, format_step, places_table
from tencache_ds.cli.jobs import as_it_is_now, find_job, latest_engine, ranks_here, stored_nbytes
from tencache_ds.cli.residency_plot import by_layer, write_residency_plot
from tencache_ds.errors import TenCacheError
from tencache_ds.observability.binding import NVME_STALLS
from tencache_ds.observability.channel_client import Job
from tencache_ds.planning.outlook import ObservedStep, Outlook, outlook
from tencache_ds.profiling.host import available_nbytes

POLL_S = 0.2
"""Between two looks at the job; of shorter steps some are missed."""

ANSWER_S = 30.0
"""Longest wait for where everything is."""

WARM_UP_STEPS = 8
"""Until then step time still changes, and longer where the contents of GPU memory are not settled."""

_LIMITS = {
    "passes_seconds": "forward and backward", "nvme_seconds": "waits for NVMe", "arithmetic_seconds": "update"
}  # fmt: skip


@dataclass(slots=True)
class _Rank:
    """One rank while it was observed: the latest figures, and the steps by number."""

    stats: dict[str, Any]
    records: dict[int, dict[str, Any]] = field(default_factory=dict)


def plan_job(wanted: str, seconds: float, file: Path | None, plot: Path | None, console: Console) -> None:
    """Observes a job and prints the figures.

    Args:
        wanted: a pid or a run id; "" if only one job is running.
        seconds: how long to observe; a step that is longer counts when it was the last one before.
        file: also gets the figures, as JSON; None for no file.
        plot: also gets a drawing of what is where, layer by layer; None for no drawing.
        console: for the output.

    Raises:
        TenCacheError: the job cannot be found, or has not finished a step.
    """
    job = find_job(wanted or None, console)
    ranks = _observe(job, seconds)
    steps = [observed(list(rank.records.values()), rank.stats) for rank in ranks]
    rows = [[outlook(step, more) for step in steps] for more in amounts(steps)]
    _show(job, ranks, rows, console)
    if file is not None:
        content = {
            "run_id": job.run_id,
            "ranks": [asdict(step) for step in steps],
            "rows": [[asdict(each) for each in row] for row in rows],
        }
        file.write_text(json.dumps(content, indent=2) + "\n")
    if plot is not None:
        _draw(job, plot, console)


def _draw(job: Job, plot: Path, console: Console) -> None:
    ranks = []
    for process in job.processes:
        request = {"command": "residency", "engine": latest_engine(process)["number"]}
        with contextlib.closing(process.endpoint.ask(request, ANSWER_S)) as answer:
            line = answer.next()
        if line is None:
            raise TenCacheError(f"rank {process.rank} of job {job.run_id} has ended")
        ranks.append(line["weights"])
    write_residency_plot(plot, f"Run {job.run_id}, {ranks_here(job)}: where everything lives", by_layer(ranks))
    console.print(f"layers drawn in {plot}", highlight=False, soft_wrap=True)


def _observe(job: Job, seconds: float) -> list[_Rank]:
    endpoints = [process.endpoint for process in job.processes]
    ranks: dict[int, _Rank] = {}
    t_end_s = time.monotonic() + seconds
    current: Job | None = job
    while current is not None:
        for process in current.processes:
            stats = latest_engine(process)["stats"]
            rank = ranks.setdefault(process.rank, _Rank(stats))
            rank.stats, record = stats, stats["last_step"]
            if record is not None:
                rank.records[record["step"]] = record
        if time.monotonic() >= t_end_s:
            break
        time.sleep(POLL_S)
        current = as_it_is_now(current, endpoints)
    waiting = [number for number, rank in ranks.items() if not rank.records]
    if waiting:
        raise TenCacheError(
            f"rank {waiting[0]} of job {job.run_id} has not finished a step yet: try again when it has made some"
        )
    return [rank for _, rank in sorted(ranks.items())]


def observed(records: Sequence[Mapping[str, Any]], stats: Mapping[str, Any]) -> ObservedStep:
    """A rank's step in the steady state.

    Args:
        records: of one or more steps (:class:`~tencache_ds.observability.counters.StepRecord` as dicts).
        stats: the rank's latest figures (:class:`~tencache_ds.observability.counters.Stats` as a dict).
    """
    weights, state = stored_nbytes(stats, "weights"), stored_nbytes(stats, "optimizer")
    whole = stats["state_nbytes"] - stats["resident_state_nbytes"] - stats["gpu_state_nbytes"]

    def median(value: Any) -> float:
        return float(statistics.median(value(record) for record in records))

    def stalls(record: Mapping[str, Any], *causes: str, beside: bool = False) -> float:
        waits = record["background_stall_seconds" if beside else "stall_seconds"]
        return float(sum(waits.get(cause, 0.0) for cause in causes))

    # Buffers are for weights as well as for state: most waits for them are those of the passes.
    passes, update = (("weight_read", "buffer"), ()) if weights else (("weight_read",), ("buffer",))
    return ObservedStep(
        seconds=median(lambda record: record["seconds"]),
        weight_wait_seconds=median(lambda record: stalls(record, *passes)),
        update_seconds=median(lambda record: record["update_seconds"] + record["background_seconds"]),
        update_wait_seconds=median(
            lambda record: stalls(record, "optimizer_read", *update) + stalls(record, *NVME_STALLS, beside=True)
        ),
        behind_seconds=median(lambda record: record["background_seconds"]),
        behind_wait_seconds=median(lambda record: stalls(record, "update")),
        nvme_nbytes=median(lambda record: record["nbytes"]["nvme_read"] + record["nbytes"]["nvme_write"]),
        stored_weight_nbytes=weights,
        stored_state_nbytes=state,
        state_in_memory_nbytes=max(whole, 0) if state else 0,
        staging_nbytes=stats["staging_nbytes"],
    )


def amounts(steps: Sequence[ObservedStep]) -> list[int]:
    """Additional host memory per rank worth a line, ascending: none, some, and enough for everything."""
    everything = max(step.stored_nbytes for step in steps)
    some = [MORE_NBYTES, 2 * MORE_NBYTES] if everything > MORE_NBYTES else [everything // 2]
    return sorted({0, *(min(more, everything) for more in some), everything})


def _show(job: Job, ranks: Sequence[_Rank], rows: Sequence[Sequence[Outlook]], console: Console) -> None:
    host = job.processes[0].snapshot["host"]
    console.print(f"run {job.run_id}, {ranks_here(job)} on {host}", highlight=False, markup=False, soft_wrap=True)
    console.print(_places([rank.stats for rank in ranks]))
    now = max(rows[0], key=lambda each: each.seconds)
    last = max(rank.stats["total"]["step"] for rank in ranks)
    count = max(len(rank.records) for rank in ranks)
    parts = ", ".join(f"{name} {format_step(getattr(now, part))}" for part, name in _LIMITS.items())
    of = f"step {last}" if count == 1 else f"median of {count} steps up to step {last}"
    lines = [f"a step takes {format_step(now.seconds)} ({of}): {parts}"]
    if last < WARM_UP_STEPS or not all(rank.stats["settled"] for rank in ranks):
        lines.append("The job is still warming up: ask again in some steps.")
    console.print(*lines, sep="\n", highlight=False, soft_wrap=True)
    if len(rows) > 1:
        console.print(_table(rows))
        lines = [
            "RAM per rank beyond what the job has now; it takes effect when the job starts with a larger host_memory. "
            f"{format_nbytes(available_nbytes())} are available on this host, for all of its ranks together.",
        ]
    else:
        lines = ["Nothing is on NVMe: more RAM would not make it faster."]
    lines += [f"GPU memory: {rank.stats['placement']}" for rank in ranks[:1] if rank.stats["placement"]]
    console.print(*lines, sep="\n", highlight=False, markup=False, soft_wrap=True)


def _places(stats: Sequence[Mapping[str, Any]]) -> Table:
    def total(name: str) -> int:
        return sum(each[name] for each in stats)

    def stored(kind: str) -> int:
        return sum(stored_nbytes(each, kind) for each in stats)

    rows = (
        ("weights", (total("gpu_weight_nbytes"), total("resident_weight_nbytes"), stored("weights"))),
        ("gradients", (total("gpu_gradient_nbytes"), total("host_gradient_nbytes"), 0)),
        ("optimizer state", (total("gpu_state_nbytes"), total("resident_state_nbytes"), stored("optimizer"))),
    )
    return places_table("on this host", rows)


def _table(rows: Sequence[Sequence[Outlook]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("RAM per rank")
    for name in ("NVMe GB/step", "s/step", "most of it"):
        table.add_column(name, justify="right")
    for row in rows:
        slowest = max(row, key=lambda each: each.seconds)
        most = max(_LIMITS, key=lambda part: getattr(slowest, part))
        more = row[0].more_nbytes
        table.add_row(
            f"+ {format_nbytes(more)}" if more else "as now",
            f"{sum(each.nvme_nbytes for each in row) / 1e9:.1f}",
            format_step(slowest.seconds),
            f"{_LIMITS[most]} {format_step(getattr(slowest, most))}",
        )
    return table
