# SPDX-License-Identifier: Apache-2.0
"""The command line: ``tencache bench`` and ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tencache_ds.cli.console import at_least_one, size
from tencache_ds.errors import ConfigError

from .comparison.machine import Machine
from .comparison.peers import PEERS
from .comparison.process import describe_command, terminated_as_interrupted
from .comparison.runner import RESULT_FILE, OutOfTime, Session
from .comparison.suites import PAPER, PAPER_MODELS, SETS, Plan, paper, parse_entries, smoke, workload_of
from .record import Benchmark, Outcome, Workload
from .workloads import SPECS

EXIT_PROBLEM = 1
EXIT_USAGE = 2
EXIT_MORE_TO_DO = 3
EXIT_INTERRUPTED = 130

DESCRIPTION = """\
Compares TenCache with stock DeepSpeed and others on this machine, in one run, alternating. Each peer first gets its
best settings from a short search. Writes one JSON file, a Markdown report and plots. The same command continues an
interrupted benchmark."""

EPILOG = f"""\
configurations: {", ".join(PEERS)}
  with chosen settings: nvme-nvme:aio_threads=8+sub_group_size=200000000, tencache:host_memory_share=0.5
sets: {", ".join(SETS)}
models: {", ".join(SPECS)}
exit status: 0 all done, 1 a problem, 3 time limit reached (the same command continues), 130 interrupted"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the command to ``parser``."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("configurations", nargs="*", metavar="CONFIGURATION",
        help="configurations or sets to compare (default: the set pair)")  # fmt: skip
    what = parser.add_mutually_exclusive_group().add_argument
    what("--smoke", action="store_true", help="run a scaled-down version once; three minutes on two cores")
    what("--paper", action="store_true", help="the models of 10Cache's paper, for a large GPU host")
    what("--report", type=Path, metavar="FOLDER", help="only rewrite the report of a finished benchmark")
    add("--nvme-path", type=Path, metavar="FOLDER", help="folder on the storage to measure")
    add("--out", type=Path, default=Path("benchmark_results"), metavar="FOLDER")
    add("--name", default="report", help="file name of the report, without .md")
    add("--title", help="its heading")
    add("--baseline", help="configuration that ratios refer to (default: the best comparable stock one)")
    add("--repeat", type=Path, metavar="FOLDER", help="second benchmark, to show repeatability")
    load = parser.add_argument_group("workload").add_argument
    load("--model", default="1.3B", choices=SPECS, metavar="MODEL")
    load("--ranks", type=at_least_one, default=1, help="processes on this machine, one per GPU")
    load("--micro-batch", type=numbers, default=(None,), metavar="N[,N...]",
         help="sequences per micro-step and rank; several numbers here or in --accumulation run one benchmark each",
    )  # fmt: skip
    load("--sequence", type=at_least_one, help="tokens per sequence")
    load("--accumulation", type=numbers, default=(1,), metavar="N[,N...]", help="micro-steps per optimizer step")
    load("--precision", choices=("bf16", "fp16"))
    load("--checkpointing", action="store_true", dest="activation_checkpointing",
         help="recompute activations in backward")  # fmt: skip
    load("--busy-cores", type=not_negative, default=0, metavar="N",
         help="additional processes that keep one core busy each")  # fmt: skip
    load("--deterministic", action="store_true",
         help="use torch's deterministic algorithms: without them, kernels of a GPU may give other losses in each run, "
         "whatever is compared")  # fmt: skip
    effort = parser.add_argument_group("effort").add_argument
    effort("--rounds", type=at_least_one, help="runs of each configuration")
    effort("--steps", type=at_least_one, help="measured optimizer steps per run")
    effort("--turns", type=at_least_one, metavar="N",
           help="keep all configurations in memory and alternate every STEPS/N steps: steadier ratios where the "
           "machine's speed varies")  # fmt: skip
    effort("--warmup", type=not_negative,
           help="warm-up steps, not counted; more where TenCache has not decided by then what lives in GPU memory",
    )  # fmt: skip
    effort("--max-trials", type=not_negative,
           help="maximum number of search trials per peer; 0 keeps the starting values")  # fmt: skip
    effort("--timeout", type=float, default=900.0, metavar="S", help="stop a run after this time")
    effort("--time-limit", type=float, metavar="S", help="start no run that would end later than this")
    effort("--no-profile", action="store_false", dest="profile",
           help="skip the step under the profiler at the end of a run")  # fmt: skip
    effort("--retry-failed", action="store_true", help="repeat runs that failed before")
    caps = parser.add_argument_group("caps, the same for all configurations").add_argument
    caps("--host-memory", type=size, metavar="SIZE", help="host memory, such as 32GiB")
    caps("--gpu-memory", type=size, metavar="SIZE", help="memory of each GPU")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status; ``argv`` is for the record."""
    try:
        with terminated_as_interrupted():
            if arguments.report is None:
                return _measure(arguments, argv)
            print(_report(arguments.report, arguments))
            return 0
    except OutOfTime as reached:
        print(f"{reached}. Measurements so far are kept; the same command continues.", file=sys.stderr)
        return EXIT_MORE_TO_DO
    except KeyboardInterrupt:
        print("\ninterrupted. Measurements so far are kept; the same command continues.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_PROBLEM


def _measure(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    if arguments.nvme_path is None:
        print("error: --nvme-path FOLDER is required: a folder on the storage to measure", file=sys.stderr)
        return EXIT_USAGE
    machine, failed = Machine(), False
    for plan in plans(arguments, machine):
        plan.out.mkdir(parents=True, exist_ok=True)
        benchmark = Session(replace(plan, command=describe_command(argv)), machine).run()
        failed |= any(run.outcome is Outcome.failed for run in benchmark.runs)
        print(_report(plan.out, arguments))
    # A peer that fails is a row of the report; in the quick check nothing may fail.
    return EXIT_PROBLEM if arguments.smoke and failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m benchmarks``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    add_arguments(parser)
    words = list(sys.argv[1:] if argv is None else argv)
    return run(parser.parse_args(words), words)


def plans(arguments: argparse.Namespace, machine: Machine) -> list[Plan]:
    """The benchmarks that a command line asks for, each with its output folder.

    Raises:
        ValueError: something in it cannot be.
    """
    if arguments.smoke:
        found = [replace(smoke(machine.gpus()), out=arguments.out)]
    elif arguments.paper:
        entries = arguments.configurations or PAPER
        found = [replace(paper(model, entries), out=arguments.out / model) for model in PAPER_MODELS]
    else:
        found = _chosen(arguments, machine)
    # Most options have the name of what they say of the plan; each plan has its own folder already.
    names = {field.name for field in fields(Plan)} - {"out"}
    given: dict[str, Any] = {key: value for key, value in vars(arguments).items() if key in names and value is not None}
    found = [replace(plan, **given) for plan in found]
    for plan in found:
        if plan.steps % plan.turns:
            raise ValueError(f"--steps ({plan.steps}) must be a multiple of --turns ({plan.turns})")
        if plan.turns > 1 and plan.host_memory is not None:
            raise ValueError(
                "--turns keeps all configurations in memory at once, and --host-memory caps the host: use one of them"
            )
    return found


def _chosen(arguments: argparse.Namespace, machine: Machine) -> list[Plan]:
    """One benchmark for each number of tokens per step that the command line asks for."""
    entries = parse_entries(arguments.configurations or ["pair"])
    batches = list(itertools.product(arguments.micro_batch, arguments.accumulation))
    name = f"{arguments.model} model on {arguments.ranks} " + ("GPU(s)" if machine.gpus() else "CPU process(es)")
    load = {key: value for key, value in vars(arguments).items() if key in Workload.model_fields}
    chosen = []
    for micro_batch, accumulation in batches:
        workload = workload_of(**load | {"micro_batch": micro_batch, "accumulation": accumulation})
        title, out = name, arguments.out
        if len(batches) > 1:
            title += f", {workload.tokens_per_step:,} tokens per step"
            out /= f"batch_{workload.micro_batch}x{accumulation}"
        chosen.append(Plan(title=title, workload=workload, entries=entries, out=out))
    return chosen


def _report(folder: Path, arguments: argparse.Namespace) -> Path:
    from .reporting.report import write_report  # pandas and matplotlib take seconds, which --help need not wait for

    benchmark, repeat = _finished(folder), _finished(arguments.repeat) if arguments.repeat else None
    return write_report(benchmark, folder, name=arguments.name, baseline=arguments.baseline, repeat=repeat)


def _finished(folder: Path) -> Benchmark:
    file = folder / RESULT_FILE
    if not file.is_file():
        raise ValueError(f"{folder} holds no {RESULT_FILE}: give the folder that was --out of a benchmark")
    return Benchmark.read(file)


def numbers(text: str) -> tuple[int, ...]:
    """Distinct numbers above 0 from a comma-separated list."""
    return tuple(dict.fromkeys(at_least_one(word) for word in text.split(",")))


def not_negative(text: str) -> int:
    """A whole number that is 0 or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} cannot be negative")
    return value
