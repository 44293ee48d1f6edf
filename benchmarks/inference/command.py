# SPDX-License-Identifier: Apache-2.0
"""The command line of ``tencache bench inference``."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from tencache_ds.cli.arguments import at_least_one
from tencache_ds.errors import ConfigError
from tencache_ds.layout import gib
from tencache_ds.profiling.hardware import Hardware

from ..comparison.machine import Machine
from ..comparison.process import PACKAGE, environment, free_port, last_error
from ..workloads import SPECS, Census, census
from .result import Generation
from .systems import BASELINE, DEFAULT, SYSTEMS, System, parse

EXIT_PROBLEM = 1
WIDTH = 160
"""Of the table in a file."""

DESCRIPTION = """\
Compares generation with a model that is offloaded, on one GPU: TenCache, DeepSpeed's ZeRO-Inference and accelerate's
offload, with random weights. Each system runs in its own process, one after the other, several times over."""

EPILOG = f"""\
systems: {", ".join(SYSTEMS)}
  with options of TenCache: tencache:gpu_memory=8GiB+host_memory=0
models: {", ".join(SPECS)}"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(
        prog="tencache bench inference",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("systems", nargs="*", default=list(DEFAULT), metavar="SYSTEM", help=f"default: {' '.join(DEFAULT)}")
    add("--nvme-path", type=Path, required=True, metavar="FOLDER", help="folder on the storage to use")
    add("--out", type=Path, default=Path("benchmark_results"), metavar="FOLDER", help="gets inference.json and logs")
    add("--model", default="1.3B", choices=SPECS, metavar="MODEL")
    add("--batch", type=at_least_one, nargs="+", default=[8], metavar="N", help="sequences at a time")
    add("--prompt", type=at_least_one, default=128, metavar="N", help="tokens of each prompt")
    add("--tokens", type=at_least_one, default=16, metavar="N", help="tokens to generate, at least 2")
    add("--rounds", type=at_least_one, default=2, metavar="N", help="measured generations in each process")
    add("--runs", type=at_least_one, default=2, metavar="N", help="processes of each system, alternating")
    add("--timeout", type=float, default=600.0, metavar="S", help="stop a process after this time")
    return parser


def run(words: list[str]) -> int:
    """Runs the command and returns its exit status."""
    arguments = make_parser().parse_args(words)
    try:
        systems = {name: parse(name) for name in arguments.systems}
        if arguments.tokens < 2:
            raise ValueError("--tokens has to be at least 2: the first one is measured with the prompt")
        machine = Machine()
        machine.build_operators()
        hardware = machine.probe(arguments.nvme_path.resolve(), 10.0)
        arguments.out.mkdir(parents=True, exist_ok=True)
        console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
        failed = False
        record = {}
        for batch in arguments.batch:
            found, errors = _measure(arguments, systems, batch)
            console.print(_table(arguments, batch, systems, found, errors, hardware))
            for name, error in errors.items():
                console.print(f"{name}: {_in_a_line(error)}", markup=False, highlight=False)
            figures = {name: each.model_dump() for name, each in found.items()}
            record[batch] = figures | {name: str(error) for name, error in errors.items()}
            failed |= bool(errors)
        settings = {key: getattr(arguments, key) for key in ("model", "prompt", "tokens", "rounds", "runs")}
        result = {"settings": settings, "hardware": hardware.model_dump(), "versions": machine.versions()}
        (arguments.out / "inference.json").write_text(json.dumps(result | {"by_batch": record}, indent=1))
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_PROBLEM
    return EXIT_PROBLEM if failed else 0


def _measure(
    arguments: argparse.Namespace, systems: dict[str, System], batch: int
) -> tuple[dict[str, Generation], dict[str, Exception]]:
    """By system, its figures, or the reason for their absence."""
    counted = census(arguments.model, arguments.prompt + arguments.tokens)
    found: dict[str, Generation] = {}
    errors: dict[str, Exception] = {}
    for number in range(arguments.runs):
        for name, system in systems.items():
            if name in errors:
                continue
            print(f"batch {batch}, run {number + 1} of {arguments.runs}: {name}", flush=True)
            try:
                each = _run(arguments, name, system, counted, batch)
            except (OSError, ValueError, subprocess.TimeoutExpired) as error:
                errors[name] = error
                found.pop(name, None)
                continue
            if name in found:
                each.prompt_s, each.token_s = found[name].prompt_s + each.prompt_s, found[name].token_s + each.token_s
            found[name] = each
    return found, errors


def _run(arguments: argparse.Namespace, name: str, system: System, counted: Census, batch: int) -> Generation:
    """One process.

    Raises:
        ValueError: it failed; says why.
        subprocess.TimeoutExpired: it took too long.
    """
    folder = arguments.out.resolve()
    stem = f"{name.replace(':', '-').replace('=', '-').replace('+', '-')}-{batch}"
    config, result, log = (folder / f"{stem}.{kind}" for kind in ("config.json", "result.json", "log"))
    result.unlink(missing_ok=True)
    storage = Path(tempfile.mkdtemp(prefix="inference-", dir=arguments.nvme_path))
    try:
        config.write_text(json.dumps(system.config(storage, counted, batch), indent=1))
        command = [
            sys.executable, "-m", f"{PACKAGE}.inference.generation", "--system", system.program,
            "--model", arguments.model, "--batch", str(batch), "--prompt", str(arguments.prompt),
            "--tokens", str(arguments.tokens), "--rounds", str(arguments.rounds),
            "--config", str(config), "--result", str(result), "--offload", str(storage),
        ]  # fmt: skip
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        with log.open("w") as output:
            done = subprocess.run(
                command, env=environment() | address, stdout=output, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, timeout=arguments.timeout, check=False,
            )  # fmt: skip
        if done.returncode != 0 or not result.exists():
            raise ValueError(last_error(log.read_text(errors="replace")) or f"exit status {done.returncode}")
        return Generation.model_validate_json(result.read_text())
    except ValidationError as error:
        raise ValueError(f"its result cannot be read: {error}") from None
    finally:
        shutil.rmtree(storage, ignore_errors=True)


def _in_a_line(error: Exception) -> str:
    """Why a system has no figures. The text of a time-out is the whole command, which is for the file only."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"timed out after {error.timeout:g} s"
    return " ".join(str(error).split()) or type(error).__name__


def _table(
    arguments: argparse.Namespace,
    batch: int,
    systems: dict[str, System],
    found: dict[str, Generation],
    errors: dict[str, Exception],
    hardware: Hardware,
) -> Table:
    table = Table(title=f"{arguments.model}, batch {batch}, prompt {arguments.prompt}, {arguments.tokens} tokens")
    for heading in ("system", "ms/token", "tokens/s", f"x {BASELINE}", "of bound", "prompt s", "built s", "GPU peak",
                    "RAM peak", "weights: GPU, RAM, NVMe", "tokens"):  # fmt: skip
        if heading == "system":  # rich would shorten the names first, which differ at their ends
            table.add_column(heading, min_width=max(map(len, systems)), no_wrap=True, overflow="fold")
        else:
            table.add_column(heading, justify="right")
    baseline = found.get(BASELINE)
    expected = {systems[name].program == "deepspeed": each for name, each in reversed(found.items())}
    for name, system in systems.items():
        each = found.get(name)
        if each is None:
            table.add_row(name, "failed" if name in errors else "")
            continue
        seconds, bound_s = each.seconds_per_token, each.bound_s(hardware, system.on_nvme)
        places = (each.gpu_nbytes, each.host_nbytes, each.nvme_nbytes)
        moves = system.program != "device"
        table.add_row(
            name,
            f"{seconds * 1e3:.1f}",
            f"{batch / seconds:.1f}",
            "" if baseline is None else f"{baseline.seconds_per_token / seconds:.2f}",
            f"{bound_s / seconds:.2f}" if moves and bound_s is not None else "",
            f"{min(each.prompt_s):.2f}",
            f"{each.built_s:.1f}",
            "" if each.gpu_peak_nbytes is None else gib(each.gpu_peak_nbytes),
            gib(each.rss_peak_nbytes),
            "" if None in places else ", ".join(gib(nbytes) for nbytes in places if nbytes is not None),
            # DeepSpeed draws other random weights than a model that is built without it.
            each.compare(expected[system.program == "deepspeed"]),
        )
    return table
