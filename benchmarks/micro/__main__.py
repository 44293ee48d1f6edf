# SPDX-License-Identifier: Apache-2.0
"""Measures the parts one by one:

    python -m benchmarks.micro all --nvme-path /local_nvme --json micro.json

The default takes about a minute; ``--seconds`` scales it.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tencache_ds.cli.arguments import at_least_one, positive
from tencache_ds.config import parse_size
from tencache_ds.errors import ConfigError, TenCacheError

from .result import MicroReport

SHARES = {"pool": 0.1, "storage": 0.5, "latency": 0.15, "cpu_update": 0.25}
"""The benchmarks, which are modules of this package with a function ``run``, and their shares of the budget, relative
to the others that are run."""

DEFAULT_SECONDS = 42.0
_FILE_WIDTH = 260


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for.

    Returns:
        The exit status: 0, or 1 when a benchmark could not run (the others still do).
    """
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`: scratch files are removed
    named = arguments.benchmarks or ["all"]
    shares = {name: share for name, share in SHARES.items() if name in named or "all" in named}
    # In a file nothing wraps a table: give it the room it needs.
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    results, status = [], 0
    for name, share in shares.items():
        try:
            seconds = arguments.seconds * share / sum(shares.values())
            result = importlib.import_module(f".{name}", __package__).run(seconds=seconds, **_options(name, arguments))
        except TenCacheError as error:
            print(f"{name}: {error}", file=sys.stderr)
            status = 1
            continue
        result.show(console)
        results.append(result)
        if arguments.json is not None:
            MicroReport(results=results).write(arguments.json)
    return status


def _options(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the command line says about a benchmark, for its function ``run``."""
    if name not in ("storage", "latency"):
        return {}
    from . import latency, storage_variants

    known: dict[str, Sequence[storage_variants.Variant | latency.Variant]] = {
        "storage": storage_variants.VARIANTS, "latency": latency.VARIANTS
    }  # fmt: skip
    wanted, names = set(arguments.variants or ()), {variant.name for variant in known[name]}
    unknown = wanted - {variant.name for variants in known.values() for variant in variants}
    if unknown or (wanted and not wanted & names):
        raise ConfigError(
            f"--variants {', '.join(sorted(unknown or wanted))}: there are only {', '.join(sorted(names))}"
        )
    chosen = [v for v in known[name] if not wanted or v.name in wanted or v in storage_variants.RAW]
    options: dict[str, Any] = {"nvme_path": arguments.nvme_path, "variants": chosen}
    options["working_set_nbytes"] = arguments.working_set
    if name == "latency":
        options["lanes"] = max(arguments.lanes) if arguments.lanes else None
    else:
        every_combination = bool(arguments.lanes and arguments.request)
        options |= {
            "lanes": arguments.lanes,
            "requests_nbytes": arguments.request,
            "every_combination": every_combination,
        }
    return {key: value for key, value in options.items() if value is not None}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro", description="Micro-benchmarks of the components."
    )
    add = parser.add_argument
    add("benchmarks", nargs="*", type=_benchmark, metavar="NAME", help=f"{', '.join(SHARES)} or all, the default")
    add("--nvme-path", type=Path, default=Path("."), metavar="FOLDER", help="storage to measure (default: this folder)")
    add("--seconds", type=positive, default=DEFAULT_SECONDS, help="budget of the run (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="file to write the figures to")
    add("--lanes", type=at_least_one, nargs="+", metavar="N", help="storage, latency: concurrent requests")
    add("--request", type=_request, nargs="+", metavar="SIZE",
        help="storage: sizes such as 8MiB; with --lanes too, every combination is measured")  # fmt: skip
    add("--working-set", type=_request, metavar="SIZE", help="storage, latency: maximum size of the files (2GiB, 1GiB)")
    add("--variants", nargs="+", metavar="NAME",
        help='storage, latency: only these variants, such as native "stock handle x4"; raw ones always')  # fmt: skip
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
