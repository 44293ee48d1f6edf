# SPDX-License-Identifier: Apache-2.0
"""Frameworks with stock DeepSpeed and with TenCache, side by side, by their own commands:

    python -m tests.frameworks llamafactory trl --work /var/tmp/frameworks

See README.md in this folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.frameworks.comparison import Comparison, table
from tests.frameworks.environment import Environment, InstallationFailed
from tests.frameworks.training import ENGINES, train

HERE = Path(__file__).parent


def names() -> list[str]:
    """The frameworks: folders with a command that trains."""
    return sorted(script.parent.name for script in HERE.glob("*/train.sh"))


def compare(name: str, folder: Path, replacements: list[str]) -> Comparison:
    """Makes the framework's environment, if there is none in this folder, and trains in it with each engine."""
    try:
        environment = Environment(folder / "environment", HERE / name / "requirements.txt", replacements)
        environment.make()
    except InstallationFailed as error:
        return Comparison(name, "", {}, str(error))
    runs = {engine: train(engine, HERE / name, folder, environment) for engine in ENGINES}
    return Comparison(name, environment.versions(), runs)


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0: each of the frameworks has the losses and the saved model of stock, and shows TenCache's lines."""
    parser = argparse.ArgumentParser(prog="tests.frameworks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(names())}; all if none is given")
    parser.add_argument("--work", type=Path, required=True, help="environments, logs and models; several GB")
    parser.add_argument(
        "--replace", nargs="+", default=[], metavar="REQUIREMENT",
        help="requirements in place of those of the same package, such as deepspeed==0.18.9",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(names())
    if unknown:
        parser.error(f"no such framework: {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    comparisons = []
    for name in options.names or names():
        folder = options.work.resolve() / "-".join([name, *options.replace])
        comparisons.append(compare(name, folder, options.replace))
        print(table(comparisons[-1:]), flush=True)
    if len(comparisons) > 1:
        print("\n" + table(comparisons))
    return int(any(comparison.complaints() for comparison in comparisons))


if __name__ == "__main__":
    sys.exit(main())
