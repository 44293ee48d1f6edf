# SPDX-License-Identifier: Apache-2.0
"""``tencache plan``: whether a model fits this machine, its placement, and the gain from more memory; with ``--job``,
where a running job keeps everything, what limits its step, and what more RAM would give.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tencache_ds.cli.console import (
    MORE_NBYTES,
    as_it_is_now,
    at_least_one,
    check_json_file,
    find_job,
    format_nbytes,
    format_step,
    latest_engine,
    open_console,
    places_table,
    positive,
    ranks_here,
    size,
    stored_nbytes,
)
from tencache_ds.cli.plots import by_layer, write_plan_plot, write_residency_plot
from tencache_ds.errors import ConfigError, TenCacheError
from tencache_ds.observability.binding import NVME_STALLS
from tencache_ds.observability.channel_client import Job
from tencache_ds.planning.budget import AUTO_HOST_SHARE
from tencache_ds.planning.step_prediction import ObservedStep, Outlook, outlook
from tencache_ds.plotting import check_plot_file
from tencache_ds.profiling.filesystem import existing_parent
from tencache_ds.profiling.host import available_nbytes

# A running job


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
    console.print(_places_of_job([rank.stats for rank in ranks]))
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


def _places_of_job(stats: Sequence[Mapping[str, Any]]) -> Table:
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


# A model on this machine


if TYPE_CHECKING:  # they need pydantic, which other commands do without
    from tencache_ds.planning.budget import PeakMemory
    from tencache_ds.planning.forecast import Forecast, Resource, Training
    from tencache_ds.profiling.hardware import Hardware

PLOTTED = 64
"""Points of each curve over host memory."""

_STATE_NBYTES = {"adamw": (12.0, 0.0), "adamw8bit": (6 + 8 / 256, 1 / 8)}
"""Of each optimizer the bytes of state per parameter, scales included, and those of marks of split master weights."""

_COUNT = re.compile(r"([\d.]+(?:e\d+)?)([KMBT]?)", re.IGNORECASE)
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def add_command(commands: Any) -> None:
    """Registers ``plan`` with what :meth:`argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="check whether a model fits this machine; show its placement and the gain from more memory",
        description="Measures this machine for some seconds and shows the placement of a model's weights, gradients "
        "and optimizer state in GPU memory, in RAM and on NVMe, and the resulting lower bound of the step time. Exit "
        "status 1 if the model does not fit. With --job it observes a running job instead: the placement, what limits "
        "the step, and the step with more RAM.",
    )
    parser.add_argument(
        "--job", nargs="?", const="", metavar="PID|RUN_ID",
        help="a running job instead of a model; without a value, the only one that is running",
    )  # fmt: skip
    model = parser.add_argument_group("model, in one of three ways")
    model.add_argument("--params", type=_count, metavar="N", help="number of parameters, such as 6.7B")
    model.add_argument("--model", metavar="NAME", help="a Hugging Face config.json, its folder, or a name on the hub")
    model.add_argument("--layers", type=at_least_one, help="layers of a Llama-like model, with --hidden")
    model.add_argument("--hidden", type=at_least_one, help="hidden size of the Llama-like model")
    model.add_argument(
        "--vocabulary", type=at_least_one, default=32000, help="its vocabulary size (default: %(default)s)"
    )
    step = parser.add_argument_group("step")
    step.add_argument("--ranks", type=at_least_one, default=1, help="GPUs of this machine (default: %(default)s)")
    step.add_argument("--micro-batch", type=at_least_one, default=1, help="sequences per GPU (default: %(default)s)")
    step.add_argument("--sequence", type=at_least_one, default=2048, help="tokens per sequence (default: %(default)s)")
    step.add_argument(
        "--accumulation", type=at_least_one, default=1, help="micro-steps per step (default: %(default)s)"
    )
    step.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    step.add_argument(
        "--optimizer", choices=tuple(_STATE_NBYTES), default="adamw",
        help="adamw, or bitsandbytes' adamw8bit, whose update is taken to be as fast (default: %(default)s)",
    )  # fmt: skip
    place = parser.add_argument_group("memory")
    place.add_argument(
        "--split-master", action="store_true", help="tencache.split_master: two bytes less per parameter whose weight "
        "is in RAM, on NVMe, and in RAM without GPU memory",
    )  # fmt: skip
    place.add_argument("--nvme-path", type=Path, metavar="FOLDER", help="folder on the drive that training would use")
    place.add_argument(
        "--host-memory", type=_size, metavar="SIZE",
        help="RAM per rank, as tencache.host_memory (default: 80 %% of the available memory)",
    )  # fmt: skip
    place.add_argument(
        "--gpu-memory", type=size, default=0, metavar="SIZE",
        help="memory of each GPU that training leaves idle, as tencache.gpu_memory; the automatic value is only known "
        "after the first step of a training run (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=positive, default=10.0,
        help="duration of the measurement, or of the observation of a job (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan to this file")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE",
        help="also draw it, as PNG, SVG or PDF: bytes by place, and the step over RAM for several GPU memory sizes; "
        "of a running job what each layer keeps where",
    )  # fmt: skip
    parser.set_defaults(run=run, unset=vars(parser.parse_args([])))


def _count(text: str) -> int:
    match = _COUNT.fullmatch(text)
    value = round(float(match.group(1)) * _FACTORS[match.group(2).upper()]) if match is not None else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters: write 6.7B, 350M or 7e9")
    return value


def _size(text: str) -> int:
    from tencache_ds.config import parse_host_memory

    try:
        return parse_host_memory(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints; returns 1 if the model does not fit or something cannot be measured, else 0."""
    console = open_console()
    try:
        return _plan(arguments, console)
    except (TenCacheError, OSError) as error:
        print(f"tencache plan: {error}", file=sys.stderr)
        return 1


def _plan(arguments: argparse.Namespace, console: Console) -> int:
    check_json_file(arguments.json)
    check_plot_file(arguments.plot)
    if arguments.job is not None:
        check_job_alone(arguments)
        plan_job(arguments.job, arguments.seconds, arguments.json, arguments.plot, console)
        return 0
    numel = numel_of(arguments)
    from tencache_ds.io import free_nbytes
    from tencache_ds.planning.chunks import automatic_chunk_nbytes
    from tencache_ds.planning.forecast import Training, forecast, peak_of_forecast
    from tencache_ds.profiling.probe import probe

    available = available_nbytes()
    per_rank = arguments.host_memory
    if per_rank is None:
        per_rank = int(available * AUTO_HOST_SHARE) // arguments.ranks
    hardware = probe(
        None if arguments.nvme_path is None else _measured_folder(arguments.nvme_path),
        seconds=arguments.seconds,
        progress=lambda line: print(line, file=sys.stderr),
    )
    training = Training(
        numel=numel,
        **_state(arguments, numel, per_rank * arguments.ranks),
        ranks=arguments.ranks,
        tokens_per_step=arguments.ranks * arguments.micro_batch * arguments.sequence * arguments.accumulation,
        micro_steps=arguments.accumulation,
        activation_recompute=arguments.checkpointing,
    )
    gpu_nbytes = arguments.gpu_memory * arguments.ranks
    at_start = forecast(training, per_rank * arguments.ranks, hardware)
    chosen = forecast(training, at_start.budget_nbytes, hardware, gpu_budget_nbytes=gpu_nbytes)
    others = budgets(training, chosen.budget_nbytes)
    forecasts = [forecast(training, budget, hardware, gpu_budget_nbytes=gpu_nbytes) for budget in others]
    free = None if arguments.nvme_path is None else free_nbytes(str(arguments.nvme_path))
    problems = what_is_missing(at_start, available, free, gpu_nbytes)
    peak = peak_of_forecast(
        training,
        at_start,
        host_budget=per_rank,
        gpu_limit=arguments.gpu_memory,
        chunk=automatic_chunk_nbytes(may_be_stored=arguments.nvme_path is not None),
        may_use_nvme=arguments.nvme_path is not None,
        pinned=hardware.gpu is not None,
    )
    show(training, chosen, forecasts, hardware, peak, console)
    for problem in problems:
        console.print(f"[red]does not fit:[/red] {problem}", soft_wrap=True, highlight=False)
    if arguments.json is not None:
        content = {
            "training": asdict(training),
            "hardware": hardware.model_dump(),
            "chosen": asdict(chosen),
            "peak_per_rank": asdict(peak),
            "others": [asdict(each) for each in forecasts],
            "problems": problems,
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    if arguments.plot is not None:
        most = max(training.nbytes, chosen.budget_nbytes)
        points = [most * index // PLOTTED for index in range(PLOTTED + 1)]
        frontier = {
            gpu: [forecast(training, budget, hardware, gpu_budget_nbytes=gpu) for budget in points]
            for gpu in gpu_budgets(gpu_nbytes, (hardware.gpu_memory_nbytes or 0) * training.ranks)
        }
        title = f"{numel / 1e9:.3g} billion parameters on {training.ranks} x {hardware.gpu or hardware.cpu}"
        limit = _resource_names("the GPU" if hardware.gpu else "arithmetic")[chosen.bound.limit]
        write_plan_plot(arguments.plot, title, chosen, frontier, limit=limit, ranks=training.ranks)
    return 1 if problems else 0


def _state(arguments: argparse.Namespace, numel: int, host_nbytes: int) -> dict[str, Any]:
    """What the optimizer and its options say of a :class:`Training`.

    Raises:
        ConfigError: they do not go together.
    """
    from tencache_ds.planning.forecast import WEIGHT_NBYTES

    state_nbytes, marks_nbytes = _STATE_NBYTES[arguments.optimizer]
    on_gpu = arguments.optimizer == "adamw"
    if arguments.gpu_memory and not on_gpu:
        raise ConfigError(f"the plan puts nothing into GPU memory with {arguments.optimizer}: leave --gpu-memory out")
    split_nbytes = 2 - marks_nbytes if arguments.split_master else 0.0
    if not arguments.gpu_memory and numel * WEIGHT_NBYTES <= host_nbytes:  # then state in RAM is split as well
        state_nbytes, split_nbytes = state_nbytes - split_nbytes, 0.0
    return {"state_nbytes": state_nbytes, "split_nbytes": split_nbytes, "state_on_gpu": on_gpu}


def _measured_folder(path: Path) -> Path:
    """The folder on the drive that exists: training creates the one that it is given."""
    folder = existing_parent(path)
    if folder != path.expanduser().resolve():
        print(f"{path} will be created in {folder}, where the drive is measured", file=sys.stderr)
    return folder


def check_job_alone(arguments: argparse.Namespace) -> None:
    """Refuses options that describe a model, a step or memory beside ``--job``: the job has its own.

    Raises:
        ConfigError: names them.
    """
    meant_for_jobs = {"job", "seconds", "json", "plot"}
    given = [
        f"--{name.replace('_', '-')}"
        for name, value in arguments.unset.items()
        if name not in meant_for_jobs and getattr(arguments, name) != value
    ]
    if given:
        raise ConfigError(f"--job shows a running job as it is: leave {', '.join(given)} out")


def numel_of(arguments: argparse.Namespace) -> int:
    """Parameters of the model that the arguments describe.

    Raises:
        ConfigError: they describe none or several, or the model cannot be counted.
    """
    ways = [arguments.params is not None, arguments.model is not None, arguments.layers is not None]
    if sum(ways) != 1 or (arguments.layers is None) != (arguments.hidden is None):
        raise ConfigError("give exactly one model: --params N, or --model NAME, or --layers N with --hidden N")
    if arguments.params is not None:
        return int(arguments.params)
    if arguments.layers is not None:
        # Attention 4 h^2, a gated feed-forward of 8/3 h 8 h^2, two embeddings.
        return int(12 * arguments.layers * arguments.hidden**2 + 2 * arguments.vocabulary * arguments.hidden)
    return count_parameters(arguments.model)


def count_parameters(name: str) -> int:
    """Parameters of a Hugging Face model, from its config alone: none of its weights is loaded.

    Raises:
        ConfigError: transformers is missing, or knows no such model.
    """
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing: pip install transformers, or give --params") from error
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--model {name}: {error}") from error
    return sum(parameter.numel() for parameter in model.parameters())  # tied ones are there once


def budgets(training: Training, chosen_nbytes: int) -> list[int]:
    """Budgets worth a line, ascending: nothing, the chosen one, some more, and everything."""
    everything = training.nbytes
    return sorted({0, min(chosen_nbytes, everything), min(chosen_nbytes + MORE_NBYTES, everything), everything})


def gpu_budgets(chosen_nbytes: int, memory_nbytes: int) -> list[int]:
    """GPU memory budgets of the frontier, ascending: nothing, the chosen one, and others for comparison.

    Args:
        chosen_nbytes: the value of --gpu-memory, all ranks together.
        memory_nbytes: the size of all GPUs together; 0 without one.
    """
    others = [chosen_nbytes // 2, 2 * chosen_nbytes] if chosen_nbytes else [memory_nbytes // 4, memory_nbytes // 2]
    if memory_nbytes:
        others = [min(each, memory_nbytes) for each in others]
    return sorted({0, chosen_nbytes, *others})


def what_is_missing(chosen: Forecast, available: int, free: int | None, gpu_nbytes: int) -> list[str]:
    """Human-readable problems, one for each place that is too small.

    Args:
        chosen: the forecast that has to fit at the start, before anything moves to GPU memory.
        available: bytes of host memory.
        free: bytes on the drive; None where none was named.
        gpu_nbytes: GPU memory for optimizer state that fits nowhere else.
    """
    spilled = min(gpu_nbytes, chosen.state.nvme_nbytes)
    problems = []
    if chosen.host_nbytes > available:
        problems.append(
            f"{format_nbytes(chosen.host_nbytes)} of RAM are needed, {format_nbytes(available)} are available: lower "
            "--host-memory (gradients stay in RAM in any case)"
        )
    if free is None and chosen.nvme_nbytes > spilled:
        problems.append(f"{format_nbytes(chosen.nvme_nbytes)} do not fit in RAM: name a drive with --nvme-path")
    if free is not None and chosen.nvme_nbytes - spilled > free:
        problems.append(
            f"{format_nbytes(chosen.nvme_nbytes)} of NVMe are needed, {format_nbytes(free)} are free: free some, raise "
            '--host-memory, or add drives with "tencache.nvme_paths"'
        )
    return problems


def show(
    training: Training,
    chosen: Forecast,
    forecasts: Sequence[Forecast],
    hardware: Hardware,
    peak: PeakMemory,
    console: Console,
) -> None:
    """Prints a plan."""
    device = hardware.gpu or hardware.cpu
    console.print(
        f"{training.numel / 1e9:.3g} billion parameters on {training.ranks} x {device}, "
        f"{training.tokens_per_step} tokens per step",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_places(chosen))
    console.print(
        f"per rank at most, including start-up and moves: {format_nbytes(peak.host_nbytes)} of RAM beyond the program "
        f"itself, {format_nbytes(peak.pinned_nbytes)} of it pinned, and {format_nbytes(peak.gpu_nbytes)} of GPU memory "
        "for weights, gradients and optimizer state, and for the update of state without its weights",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_steps(training, chosen, forecasts, "GPU" if hardware.gpu else "arithmetic"))
    console.print(
        "Seconds of each resource on its own; a step takes at least as long as the busiest one. GPU memory is the "
        "value of --gpu-memory: the active layers, activations and DeepSpeed's buckets need additional memory. "
        "Weights and gradients there also keep their RAM; optimizer state does not.",
        highlight=False,
        soft_wrap=True,
    )


def _places(chosen: Forecast) -> Table:
    rows = (
        ("16-bit weights", chosen.weights),
        ("gradients", chosen.gradients),
        ("optimizer state", chosen.state),
        ("total", chosen),
    )
    return places_table(
        "on this machine", ((name, (each.gpu_nbytes, each.host_nbytes, each.nvme_nbytes)) for name, each in rows)
    )


def _resource_names(device: str) -> dict[Resource, str]:
    """The name of each resource in the output; ``device`` is that of the training device."""
    from tencache_ds.planning.forecast import Resource

    return {
        Resource.NVME: "NVMe",
        Resource.H2D: "to GPU",
        Resource.D2H: "from GPU",
        Resource.CPU: "CPU Adam",
        Resource.GPU: device,
    }


def _steps(training: Training, chosen: Forecast, forecasts: Sequence[Forecast], device: str) -> Table:
    names = _resource_names(device)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("host_memory per rank")
    for name in ("NVMe GB/step", *(names[resource] for resource in chosen.bound.by_resource), "shortest step"):
        table.add_column(name, justify="right")
    table.add_column("")
    for each in forecasts:
        moved = each.demand.nvme_read_nbytes + each.demand.nvme_write_nbytes
        table.add_row(
            format_nbytes(each.budget_nbytes / training.ranks),
            f"{moved / 1e9:.1f}",
            *(format_step(seconds) for seconds in each.bound.by_resource.values()),
            format_step(each.bound.seconds),
            "chosen" if each.budget_nbytes == min(chosen.budget_nbytes, training.nbytes) else "",
        )
    return table
