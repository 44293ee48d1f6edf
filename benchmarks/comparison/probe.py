# SPDX-License-Identifier: Apache-2.0
"""Measures this machine and writes its rates as JSON: the program that a benchmark starts first."""

from __future__ import annotations

import argparse
from pathlib import Path

from tencache_ds.profiling.probe import probe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvme-path", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.nvme_path.mkdir(parents=True, exist_ok=True)
    hardware = probe(arguments.nvme_path, seconds=arguments.seconds)
    arguments.result.write_text(hardware.model_dump_json(indent=1))


if __name__ == "__main__":
    main()
