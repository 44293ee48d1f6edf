# SPDX-License-Identifier: Apache-2.0
"""The command line of ``tencache bench inference``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import pandas as pd
from pydantic_core import to_json

from tencache_ds.cli.console import at_least_one
from tencache_ds.errors import ConfigError
from tencache_ds.profiling.hardware import Hardware

from ..comparison.machine import Machine
from ..comparison.process import Program, terminated_as_interrupted
from ..reporting.text import MISSING, fixed, gib
from ..workloads import SPECS, Census, census
from .result import Generation, GenerationTask
from .systems import BASELINE, DEFAULT, SYSTEMS, System, parse

EXIT_PROBLEM = 1
EXIT_INTERRUPTED = 130

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
        record: dict[int, dict[str, Generation | str]] = {}
        for batch in arguments.batch:
            with terminated_as_interrupted():
                found, errors = _measure(arguments, systems, batch)
            record[batch] = found | errors
            print(f"{arguments.model}, batch {batch}, prompt {arguments.prompt}, {arguments.tokens} tokens")
            print(table(batch, systems, found, hardware).to_string())
            print(*(f"{name}: {error}" for name, error in errors.items()), sep="\n", flush=True)
        settings = {key: getattr(arguments, key) for key in ("model", "prompt", "tokens", "rounds", "runs")}
        result = {"settings": settings, "hardware": hardware, "versions": machine.versions(), "by_batch": record}
        (arguments.out / "inference.json").write_bytes(to_json(result, indent=1))
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_PROBLEM
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    failed = any(isinstance(each, str) for of_batch in record.values() for each in of_batch.values())
    return EXIT_PROBLEM if failed else 0


def _measure(
    arguments: argparse.Namespace, systems: dict[str, System], batch: int
) -> tuple[dict[str, Generation], dict[str, str]]:
    """By system, its figures, or the reason for their absence."""
    counted = census(arguments.model, arguments.prompt + arguments.tokens)
    found: dict[str, Generation] = {}
    errors: dict[str, str] = {}
    for number in range(arguments.runs):
        for name, system in systems.items():
            if name in errors:
                continue
            print(f"batch {batch}, run {number + 1} of {arguments.runs}: {name}", flush=True)
            try:
                each = _run(arguments, name, system, counted, batch)
            except (OSError, ValueError) as error:
                errors[name] = " ".join(str(error).split()) or type(error).__name__
                found.pop(name, None)
                continue
            if name in found:
                times = {key: getattr(found[name], key) + getattr(each, key) for key in ("prompt_s", "token_s")}
                each = each.model_copy(update=times)
            found[name] = each
    return found, errors


def _run(arguments: argparse.Namespace, name: str, system: System, counted: Census, batch: int) -> Generation:
    """One process.

    Raises:
        ValueError: it failed, or took too long; says why.
    """
    with tempfile.TemporaryDirectory(prefix="inference-", dir=arguments.nvme_path, ignore_cleanup_errors=True) as nvme:
        task = GenerationTask(
            deepspeed_config=system.config(nvme, counted, batch), program=system.program, model=arguments.model,
            batch=batch, prompt=arguments.prompt, tokens=arguments.tokens, rounds=arguments.rounds, offload=nvme,
        )  # fmt: skip
        program = Program(
            "inference.generation", task, arguments.out, f"{name}-{batch}", timeout_s=arguments.timeout
        )  # fmt: skip
        try:
            program.watch()
        finally:
            program.end()
        measured, error = program.result()
        if error:
            raise ValueError(error)
        return Generation(**measured)


def table(batch: int, systems: dict[str, System], found: dict[str, Generation], hardware: Hardware) -> pd.DataFrame:
    """The figures as text, a line for each system."""
    baseline = found.get(BASELINE)
    expected = {systems[name].program == "deepspeed": each for name, each in reversed(found.items())}
    rows = {}
    for name, system in systems.items():
        if name not in found:
            rows[name] = {"ms/token": "failed"}
            continue
        each = found[name]
        seconds = each.seconds_per_token
        bound_s = each.bound_s(hardware, system.on_nvme) if system.program != "device" else None
        places = (each.gpu_nbytes, each.host_nbytes, each.nvme_nbytes)
        rows[name] = {
            "ms/token": fixed(seconds * 1e3),
            "tokens/s": fixed(batch / seconds),
            f"x {BASELINE}": fixed(baseline and baseline.seconds_per_token / seconds, 2),
            "of bound": fixed(bound_s and bound_s / seconds, 2),
            "prompt s": fixed(min(each.prompt_s), 2),
            "built s": fixed(each.built_s),
            "GPU peak": gib(each.gpu_peak_nbytes),
            "RAM peak": gib(each.rss_peak_nbytes),
            "weights: GPU, RAM, NVMe": MISSING if None in places else ", ".join(map(gib, places)),
            # DeepSpeed draws other random weights than a model that is built without it.
            "tokens": each.compare(expected[system.program == "deepspeed"]),
        }
    return pd.DataFrame.from_dict(rows, orient="index").fillna("")
