# SPDX-License-Identifier: Apache-2.0
"""Measures the parts one by one:

    python -m benchmarks.micro all --nvme-path /local_nvme --json micro.json

The default takes about a minute; ``--seconds`` scales it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tencache_ds.cli.console import at_least_one, positive, size
from tencache_ds.errors import ConfigError, TenCacheError

from . import cpu_update, latency, pool, storage
from .result import MicroReport
from .variants import RAW, Variant

BENCHMARKS = {"pool": pool.run, "storage": storage.run, "latency": latency.run, "cpu_update": cpu_update.run}
SHARES = {"pool": 0.1, "storage": 0.5, "latency": 0.15, "cpu_update": 0.25}
"""Shares of the budget, relative to the others that are run."""

VARIANTS = {"storage": storage.VARIANTS, "latency": latency.VARIANTS}
"""What ``--variants`` can choose from."""

DEFAULT_SECONDS = 42.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for.

    Returns:
        The exit status: 0, or 1 when a benchmark could not run (the others still do).
    """
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`: scratch files are removed
    named = SHARES if "all" in arguments.benchmarks else arguments.benchmarks
    shares = {name: share for name, share in SHARES.items() if name in named}
    results, status = [], 0
    for name, share in shares.items():
        try:
            seconds = arguments.seconds * share / sum(shares.values())
            result = BENCHMARKS[name](seconds=seconds, **_options(name, arguments))
        except TenCacheError as error:
            print(f"{name}: {error}", file=sys.stderr)
            status = 1
            continue
        print(result.table(), end="\n\n", flush=True)
        results.append(result)
        if arguments.json is not None:
            MicroReport(results=results).write(arguments.json)
    return status


def _options(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the command line says about a benchmark, for its function ``run``."""
    if name not in VARIANTS:
        return {}
    lanes, requests = arguments.lanes, arguments.request
    options = {
        "nvme_path": arguments.nvme_path,
        "variants": _chosen(name, arguments.variants),
        "working_set_nbytes": arguments.working_set,
    }
    if name == "latency":
        options["lanes"] = max(lanes) if lanes else None
    else:
        options |= {"lanes": lanes, "requests_nbytes": requests, "every_combination": bool(lanes and requests)}
    return {key: value for key, value in options.items() if value is not None}


def _chosen(name: str, wanted: Sequence[str] | None) -> list[Variant] | None:
    """The variants of these names and the raw ones; None for all."""
    if wanted is None:
        return None
    names = {variant.name for variant in VARIANTS[name]}
    if not names & {*wanted}:
        raise ConfigError(f"--variants {', '.join(wanted)}: there are only {', '.join(sorted(names))}")
    return [variant for variant in VARIANTS[name] if variant.name in wanted or variant in RAW]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro", description="Micro-benchmarks of the components."
    )
    names = list(dict.fromkeys(variant.name for variants in VARIANTS.values() for variant in variants))
    add = parser.add_argument
    # A list as default would have to be one of the choices.
    add("benchmarks", nargs="*", choices=[*BENCHMARKS, "all"], default="all", metavar="NAME",
        help=f"{', '.join(BENCHMARKS)} or all, the default")  # fmt: skip
    add("--nvme-path", type=Path, default=Path("."), metavar="FOLDER", help="storage to measure (default: this folder)")
    add("--seconds", type=positive, default=DEFAULT_SECONDS, help="budget of the run (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="file to write the figures to")
    add("--lanes", type=at_least_one, nargs="+", metavar="N", help="storage, latency: concurrent requests")
    add("--request", type=_request, nargs="+", metavar="SIZE",
        help="storage: sizes such as 8MiB; with --lanes too, every combination is measured")  # fmt: skip
    add("--working-set", type=_request, metavar="SIZE", help="storage, latency: maximum size of the files (2GiB, 1GiB)")
    add("--variants", nargs="+", choices=names, metavar="NAME",
        help='storage, latency: only these variants, such as native "stock handle x4"; raw ones always')  # fmt: skip
    return parser


def _request(text: str) -> int:
    nbytes = size(text)
    if nbytes < 4096 or nbytes % 4096:
        raise argparse.ArgumentTypeError(f"{text} is not a positive multiple of 4096 bytes")
    return nbytes


if __name__ == "__main__":
    sys.exit(main())
