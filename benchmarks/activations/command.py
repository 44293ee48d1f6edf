# SPDX-License-Identifier: Apache-2.0
"""The command line of ``tencache bench activations``."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from tencache_ds.cli.console import at_least_one, size

from ..comparison.process import Program, terminated_as_interrupted
from ..comparison.suites import parse_settings
from ..reporting.text import fixed, gib
from ..workloads import SPECS
from .result import ActivationRun, ActivationTask

EXIT_PROBLEM = 1
EXIT_INTERRUPTED = 130

EXPANDABLE = "expandable_segments:True"
"""Setting of torch's allocator: tensors of long sequences are large and differ in size, and without it much memory is
lost between them."""

SYSTEMS = {
    "keep": "TenCache, activations stay on the GPU",
    "tencache": "TenCache, activations move",
    "stock": "DeepSpeed's CPU offload, activations stay on the GPU",
    "stock-offload": "the same, with DeepSpeed's offload of checkpointed inputs",
    "transformers-offload": 'the same, with gradient_checkpointing_kwargs={"offload": True} of transformers',
}
OF_TENCACHE = ("keep", "tencache")

DESCRIPTION = """\
Compares training with long sequences whose activations stay on the GPU, or move: by TenCache, DeepSpeed or
transformers. Each system trains in its own process, one after the other, with activation checkpointing and random
weights."""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    listed = "\n".join(f"  {name}: {text}" for name, text in SYSTEMS.items())
    parser = argparse.ArgumentParser(
        prog="tencache bench activations",
        description=DESCRIPTION,
        epilog=f"systems:\n{listed}\n  with options of TenCache: tencache:activation_memory=0+gpu_memory=8GiB",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("systems", nargs="+", metavar="SYSTEM")
    add("--model", default="1.3B", choices=SPECS, metavar="MODEL")
    add("--sequence", type=at_least_one, nargs="+", default=[8192], metavar="N", help="tokens of each sequence")
    add("--batch", type=at_least_one, default=1, metavar="N", help="sequences of each micro-step")
    add("--accumulation", type=at_least_one, default=1, metavar="N", help="micro-steps of each step")
    add("--steps", type=at_least_one, default=4, metavar="N", help="measured")
    add("--warmup", type=int, default=11, metavar="N", help="steps before, and more until TenCache has planned")
    add("--gpu-cap", type=size, metavar="SIZE", help="GPU memory that torch may take")
    add("--nvme-path", type=Path, metavar="FOLDER", help="without it, everything that moves goes to RAM")
    add("--out", type=Path, default=Path("benchmark_results"), metavar="FOLDER", help="gets activations.json and logs")
    add("--timeout", type=float, default=600.0, metavar="S", help="stop a process after this time")
    return parser


def run(words: list[str]) -> int:
    """Runs the command and returns its exit status."""
    arguments = make_parser().parse_args(words)
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)
    rows, records, failed = {}, [], False
    try:
        for text in arguments.systems:
            check(text)
        arguments.out.mkdir(parents=True, exist_ok=True)
        for sequence in arguments.sequence:
            for text in arguments.systems:
                with terminated_as_interrupted():
                    measured, error = train(text, sequence, arguments)
                failed |= bool(error)
                records.append({"system": text, "sequence": sequence} | ({"error": error} if error else measured))
                rows[f"{text} {sequence}"] = {"s/step": error} if error else row(ActivationRun(**measured))
                print(f"{text} {sequence}:", *rows[f"{text} {sequence}"].values(), flush=True)
                record = {"command": words, "runs": records}  # after each: a later one may be killed
                (arguments.out / "activations.json").write_text(json.dumps(record, indent=1))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_PROBLEM
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(pd.DataFrame.from_dict(rows, orient="index", dtype=object).fillna("").to_string())
    return EXIT_PROBLEM if failed else 0


def check(text: str) -> tuple[str, dict[str, Any]]:
    """A system and options of TenCache.

    Raises:
        ValueError: there is no such system, or it takes no options.
    """
    name, options = parse_settings(text)
    if name not in SYSTEMS:
        raise ValueError(f"unknown system {name!r}; known: {', '.join(SYSTEMS)}")
    if options and name not in OF_TENCACHE:
        raise ValueError(f"{name} takes no options of TenCache: {', '.join(options)}")
    return name, options


def train(text: str, sequence: int, arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """One process: the fields of an :class:`ActivationRun`, and the error, if there was one."""
    name, options = check(text)
    parent = arguments.nvme_path
    with tempfile.TemporaryDirectory(prefix="activations-", dir=parent, ignore_cleanup_errors=True) as storage:
        task = ActivationTask(
            deepspeed_config=deepspeed_config(name, options, arguments, None if parent is None else storage),
            system=name, model=arguments.model, sequence=sequence, batch=arguments.batch,
            accumulation=arguments.accumulation, steps=arguments.steps, warmup=arguments.warmup,
            gpu_nbytes=arguments.gpu_cap,
        )  # fmt: skip
        program = Program(
            "activations.training", task, arguments.out, f"{text}-{sequence}", timeout_s=arguments.timeout
        )  # fmt: skip
        try:
            program.watch()
        finally:
            program.end()
        return program.result()


def row(found: ActivationRun) -> dict[str, Any]:
    """The figures as text."""
    seconds = statistics.median(found.seconds)
    return {
        "s/step": fixed(seconds, 3),
        "tokens/s": fixed(found.tokens / seconds, 0),
        "activations GPU GiB": gib(found.activation_peak_nbytes, 2),
        "GPU peak GiB": gib(found.gpu_peak_nbytes, 2),
        "RAM peak GiB": gib(found.rss_peak_nbytes, 2),
        "moved to RAM GiB": gib(found.host_activation_nbytes, 2),
        "to NVMe GiB": gib(found.nvme_activation_nbytes, 2),
        "waits for NVMe s": fixed(found.late_seconds, 2),
        "loss": fixed(found.losses[-1], 6),
    }


def deepspeed_config(
    name: str, options: dict[str, Any], arguments: argparse.Namespace, storage: str | None
) -> dict[str, Any]:
    """Weights and optimizer state in RAM; TenCache may use NVMe, if there is some."""
    ram: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {"stage": 3, "offload_param": ram, "offload_optimizer": ram}
    config = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_accumulation_steps": arguments.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }
    if name not in OF_TENCACHE:
        return config
    if storage is not None:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": storage}
    section = {"activations": "on" if name == "tencache" else "off"} | options
    return config | {"offload_engine": "tencache", "tencache": section}
