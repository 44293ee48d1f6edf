# SPDX-License-Identifier: Apache-2.0
"""Train the same model three times with the stock ``deepspeed`` launcher and compare.

1. stock DeepSpeed, weights and optimizer state in RAM: the reference for the losses;
2. stock ZeRO-Infinity, both on NVMe;
3. the second config with one line added, ``"offload_engine": "tencache"``.

    python examples/demo.py [--nvme-path FOLDER] [--size small|medium|large] [--steps N]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tencache_ds import configs
from tencache_ds.profiling.filesystem import file_system_of

TRAINING_SCRIPT = Path(__file__).resolve().parent / "train_bytes.py"
WARM_UP_STEPS = 2
LARGEST_WEIGHT = {"small": 768 * 2048, "medium": 1024 * 2816, "large": 2048 * 5632}  # elements
LOG_TAIL_LINES = 30
NARROWEST_COLUMNS = 100  # of a log file: rich would assume 80 and break the table's lines
ACTIVATION_LINE = re.compile(r"TenCache \d")


@dataclass(frozen=True, slots=True)
class Run:
    """The output of one training run."""

    name: str
    parameters: int
    steps: tuple[dict[str, Any], ...]

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]

    @property
    def peak_rss_bytes(self) -> int:
        return max(step["peak_rss"] for step in self.steps)

    def median(self, field: str) -> float:
        """Median over the steps after the warm-up."""
        return statistics.median(step[field] for step in self.steps[WARM_UP_STEPS:])


class RunFailed(Exception):
    """A training run ended with an error or printed no losses."""


def stock_nvme_config(size: str, nvme_path: Path) -> dict[str, Any]:
    """``configs/zero_infinity_nvme.json`` without TenCache, with buffers fit for the model."""
    config: dict[str, Any] = json.loads(configs.path("zero_infinity_nvme").read_text())
    del config["zero_optimization"]["offload_engine"]
    largest = LARGEST_WEIGHT[size]
    zero = config["zero_optimization"]
    zero["sub_group_size"] = max(5_000_000, 2 * largest)
    # DeepSpeed keeps smaller weights resident; its default of 1e5 elements would be a large part of a small model.
    zero["stage3_param_persistence_threshold"] = 10_000
    zero["offload_param"] |= {"nvme_path": str(nvme_path), "buffer_count": 32, "buffer_size": largest}
    zero["offload_optimizer"] |= {"nvme_path": str(nvme_path)}
    config["optimizer"]["params"]["lr"] = 6e-4
    return config


def in_ram(config: dict[str, Any]) -> dict[str, Any]:
    """The same training with stock CPU offload."""
    config = copy.deepcopy(config)
    config["zero_optimization"] |= {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    return config


def with_tencache(config: dict[str, Any], host_memory: str | None) -> dict[str, Any]:
    """The same training with the one line added (and the RAM budget, if the user gave one)."""
    config = copy.deepcopy(config)
    config["zero_optimization"]["offload_engine"] = "tencache"
    if host_memory is not None:
        config["tencache"] = {"host_memory": host_memory}
    return config


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launcher_command(config_file: Path, port: int, arguments: argparse.Namespace) -> list[str]:
    beside_python = Path(sys.executable).parent / "deepspeed"
    launcher = str(beside_python) if beside_python.exists() else shutil.which("deepspeed")
    if launcher is None:
        raise RunFailed("the `deepspeed` launcher is not on PATH: install the package first")
    return [
        *(launcher, "--num_accelerators", "1", "--master_port", str(port)),
        *(str(TRAINING_SCRIPT), "--size", arguments.size, "--steps", str(arguments.steps)),
        *("--deepspeed", "--deepspeed_config", str(config_file)),
    ]


def train(name: str, config: dict[str, Any], arguments: argparse.Namespace, console: Console, scratch: Path) -> Run:
    """Runs the launcher once and follows it.

    Raises:
        RunFailed: it failed; the message holds the end of its log.
    """
    slug = name.lower().replace(" ", "-").replace(",", "")
    config_file, log_file = scratch / f"{slug}.json", scratch / f"{slug}.log"
    config_file.write_text(json.dumps(config, indent=2))
    # ninja, which DeepSpeed calls to build its operators, is beside the interpreter and not always on PATH.
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    # Without a GPU, torch computes on OpenMP threads that spin while they wait for each other. Where another process
    # keeps a core busy that more than doubles a step, unless libgomp counts more threads than cores, as it happens to
    # do in some of these runs and not in others.
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    port = free_port()
    with log_file.open("w") as log:
        process = subprocess.Popen(
            launcher_command(config_file, port, arguments),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        try:
            parameters, steps = follow(process, name, arguments.steps, console, log)
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=60)
            # Without a GPU, DeepSpeed's collectives leave 67 MB of shared memory behind in each run.
            for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
                buffer.unlink(missing_ok=True)
    if code != 0 or len(steps) != arguments.steps:
        tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        raise RunFailed(f"{name}: exit code {code} after {len(steps)} of {arguments.steps} steps.\n{tail}")
    with_tencache = "offload_engine" in config["zero_optimization"]
    if with_tencache and not ACTIVATION_LINE.search(log_file.read_text(errors="replace")):
        raise RunFailed(f"{name}: DeepSpeed ran without it. `tencache doctor` says why")
    return Run(name, parameters, tuple(steps))


def follow(
    process: subprocess.Popen[str], name: str, total: int, console: Console, log: TextIO
) -> tuple[int, list[dict[str, Any]]]:
    """Shows progress while ``process`` prints; returns the number of parameters and the record of each step."""
    parameters, steps = 0, []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    if process.stdout is None:
        raise RunFailed(f"{name}: no output to follow")
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{name}: starting", total=total)
        if not console.is_terminal:
            console.print(f"{name}: starting")
        for line in process.stdout:
            log.write(line)
            log.flush()
            if line.startswith('{"parameters"'):
                parameters = json.loads(line)["parameters"]
            elif line.startswith('{"step"'):
                record = json.loads(line)
                steps.append(record)
                text = f"{name}: loss {record['loss']:.3f}"
                progress.update(task, completed=record["step"], description=text)
                if not console.is_terminal and (record["step"] % 10 == 0 or record["step"] == total):
                    console.print(f"{text}, step {record['step']} of {total}, {record['seconds']:.2f} s")
    return parameters, steps


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.0f} MB"


def comparison(reference: Run, stock: Run, tencache: Run) -> Table:
    """The closing table."""
    runs = (reference, stock, tencache)
    table = Table(title=f"{reference.parameters / 1e6:.1f} M parameters, {len(reference.steps)} steps")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    table.add_column("ratio", justify="right")

    def ratio(of_stock: float, of_tencache: float) -> str:
        return f"{of_stock / of_tencache:.2f}x" if of_tencache > 0 else "-"

    def bytes_row(label: str, field: str) -> None:
        values = [run.median(field) for run in runs]
        table.add_row(label, *map(megabytes, values), ratio(values[1], values[2]))

    def same(run: Run) -> str:
        differing = [i for i, (a, b) in enumerate(zip(run.losses, reference.losses, strict=True), 1) if a != b]
        return f"[red]differ at step {differing[0]}[/red]" if differing else "[green]identical[/green]"

    table.add_row("first loss", *(f"{run.losses[0]:.6f}" for run in runs), "")
    table.add_row("last loss", *(f"{run.losses[-1]:.6f}" for run in runs), "")
    table.add_row("losses against RAM", "reference", same(stock), same(tencache), "")
    seconds = [run.median("seconds") for run in runs]
    table.add_row("seconds per step", *(f"{value:.3f}" for value in seconds), ratio(seconds[1], seconds[2]))
    bytes_row("NVMe read per step", "read_bytes")
    bytes_row("NVMe written per step", "written_bytes")
    totals = [run.median("read_bytes") + run.median("written_bytes") for run in runs]
    per_parameter = [f"{total / run.parameters:.1f} B" for total, run in zip(totals, runs, strict=True)]
    table.add_row("NVMe per parameter", *per_parameter, ratio(totals[1], totals[2]))
    peaks = [run.peak_rss_bytes for run in runs]
    table.add_row("peak RAM", *map(megabytes, peaks), ratio(peaks[1], peaks[2]))
    return table


def parse_arguments() -> argparse.Namespace:
    default_size = "small" if os.environ.get("DS_ACCELERATOR") == "cpu" or not shutil.which("nvidia-smi") else "medium"
    parser = argparse.ArgumentParser(
        description="Trains the same model with stock ZeRO-Infinity and with TenCache, and compares them."
    )
    parser.add_argument("--nvme-path", type=Path, default=Path(".tencache_demo"), help="folder on the disk to use")
    parser.add_argument("--size", choices=LARGEST_WEIGHT, default=default_size)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--host-memory", help='RAM that TenCache may use instead of NVMe, such as "0" or "2GiB"')
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be more than {WARM_UP_STEPS}: the first {WARM_UP_STEPS} are not timed")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    console = Console()
    if not console.is_terminal:
        console = Console(width=NARROWEST_COLUMNS)
    arguments.nvme_path.mkdir(parents=True, exist_ok=True)
    file_system = file_system_of(arguments.nvme_path)
    console.print(f"NVMe path: {arguments.nvme_path.resolve()} ({file_system.kind} on {file_system.device})")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="run-", dir=arguments.nvme_path) as folder:
        scratch = Path(folder).resolve()
        stock = stock_nvme_config(arguments.size, scratch)
        try:
            runs = [
                train("Stock, RAM", in_ram(stock), arguments, console, scratch),
                train("Stock, NVMe", stock, arguments, console, scratch),
                train("TenCache", with_tencache(stock, arguments.host_memory), arguments, console, scratch),
            ]
        except RunFailed as failure:
            console.print(f"[bold red]The demo stopped.[/bold red] {escape(str(failure))}", highlight=False)
            return 1
    console.print(comparison(*runs))
    if file_system.in_memory:
        console.print(
            f"The path is on {file_system.kind}: the kernel counts no disk traffic there, so NVMe bytes are shown as 0."
        )
    console.print(
        f"Medians, excluding the first {WARM_UP_STEPS} steps. Ratio: stock NVMe over TenCache. NVMe bytes as "
        f"the kernel counts them for the process (/proc/self/io). Took {time.perf_counter() - started:.0f} s."
    )
    return 0 if runs[2].losses == runs[0].losses else 1


if __name__ == "__main__":
    sys.exit(main())
