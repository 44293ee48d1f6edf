# SPDX-License-Identifier: Apache-2.0
"""Measures the parts one by one:

    python -m benchmarks.micro all --nvme-path /local_nvme --json micro.json

The default takes about a minute; ``--seconds`` scales it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from rich.console import Console

from tencache_ds.cli.arguments import at_least_one, positive
from tencache_ds.config import parse_size
from tencache_ds.errors import ConfigError, TenCacheError

from .result import MicroReport, MicroResult

SHARES = {"pool": 0.1, "storage": 0.5, "latency": 0.15, "cpu_update": 0.25}
"""Of the budget, relative to the others that are run."""

DEFAULT_SECONDS = 42.0
_FILE_WIDTH = 260


class _Variant(Protocol):
    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=_Variant)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for.

    Returns:
        The exit status: 0, or 1 when a benchmark could not run (the others still do).
    """
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`: scratch files are removed
    benchmarks: dict[str, Callable[[float], MicroResult]] = {
        "pool": _pool,
        "storage": lambda seconds: _storage(arguments, seconds),
        "latency": lambda seconds: _latency(arguments, seconds),
        "cpu_update": _cpu_update,
    }
    named = arguments.benchmarks or ["all"]
    chosen = [name for name in benchmarks if name in named or "all" in named]
    # In a file nothing wraps a table: give it the room it needs.
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    results, status = [], 0
    for name in chosen:
        try:
            result = benchmarks[name](arguments.seconds * SHARES[name] / sum(SHARES[other] for other in chosen))
        except TenCacheError as error:
            print(f"{name}: {error}", file=sys.stderr)
            status = 1
            continue
        result.show(console)
        results.append(result)
        if arguments.json is not None:
            MicroReport(results=results).write(arguments.json)
    return status


def _pool(seconds: float) -> MicroResult:
    from . import pool

    return pool.run(seconds)


def _storage(arguments: argparse.Namespace, seconds: float) -> MicroResult:
    from . import storage

    return storage.run(
        arguments.nvme_path,
        seconds,
        lanes=arguments.lanes or storage.LANES,
        requests_nbytes=arguments.request or storage.REQUESTS_NBYTES,
        every_combination=bool(arguments.lanes and arguments.request),
        working_set_nbytes=arguments.working_set or storage.WORKING_SET_NBYTES,
        variants=_chosen(arguments, storage.VARIANTS, always=storage.RAW),
    )


def _latency(arguments: argparse.Namespace, seconds: float) -> MicroResult:
    from . import latency

    return latency.run(
        arguments.nvme_path,
        seconds,
        lanes=max(arguments.lanes or [latency.LANES]),
        working_set_nbytes=arguments.working_set or latency.WORKING_SET_NBYTES,
        variants=_chosen(arguments, latency.VARIANTS),
    )


def _chosen(arguments: argparse.Namespace, variants: Sequence[Named], always: Sequence[Named] = ()) -> list[Named]:
    """The variants that the command line asks for, and those that are always measured."""
    from . import latency, storage

    wanted, names = set(arguments.variants or ()), {variant.name for variant in variants}
    unknown = wanted - {variant.name for variant in (*storage.VARIANTS, *latency.VARIANTS)}
    if unknown or (wanted and not wanted & names):
        raise ConfigError(
            f"--variants {', '.join(sorted(unknown or wanted))}: there are only {', '.join(sorted(names))}"
        )
    return [v for v in variants if not wanted or v.name in wanted or v in always]


def _cpu_update(seconds: float) -> MicroResult:
    from . import cpu_update

    return cpu_update.run(seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro", description="Micro-benchmarks of the components."
    )
    parser.add_argument(
        "benchmarks", nargs="*", type=_benchmark, metavar="NAME", help=f"{', '.join(SHARES)} or all, the default"
    )
    parser.add_argument(
        "--nvme-path", type=Path, default=Path("."), metavar="FOLDER", help="storage to measure (default: this folder)"
    )
    parser.add_argument(
        "--seconds", type=positive, default=DEFAULT_SECONDS, help="budget of the run (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to write the figures to")
    parser.add_argument(
        "--lanes", type=at_least_one, nargs="+", metavar="N", help="storage, latency: concurrent requests"
    )
    parser.add_argument(
        "--request",
        type=_request,
        nargs="+",
        metavar="SIZE",
        help="storage: sizes such as 8MiB; with --lanes too, every combination is measured",
    )
    parser.add_argument(
        "--working-set", type=_request, metavar="SIZE", help="storage, latency: maximum size of the files (2GiB, 1GiB)"
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        metavar="NAME",
        help='storage, latency: only these variants, such as native "stock handle x4"; raw ones always',
    )
    return parser


def _benchmark(text: str) -> str:
    if text not in (*SHARES, "all"):
        raise argparse.ArgumentTypeError(f"{text} is none of {', '.join(SHARES)}, all")
    return text


def _request(text: str) -> int:
    nbytes = parse_size(text)
    if nbytes < 4096 or nbytes % 4096:
        raise argparse.ArgumentTypeError(f"{text} is not a positive multiple of 4096 bytes")
    return nbytes


if __name__ == "__main__":
    sys.exit(main())
