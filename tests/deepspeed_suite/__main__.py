# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own tests of ZeRO-3 and offload, with and without TenCache, side by side:

    python -m tests.deepspeed_suite /path/to/DeepSpeed --work /var/tmp/suite

See README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

import cpuinfo

from tests.deepspeed_suite.forcing import Mode
from tests.deepspeed_suite.outcomes import differences, forget, read_exclusions, report, stale, to_run
from tests.deepspeed_suite.runner import Runner
from tests.deepspeed_suite.selection import selected_files

EXCLUSIONS = Path(__file__).parent / "exclusions.toml"


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0: every test that stock passes passes with TenCache or is excluded, and the table is exact."""
    parser = argparse.ArgumentParser(prog="tests.deepspeed_suite", description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="folder of a DeepSpeed checkout; only read")
    parser.add_argument("--work", type=Path, required=True, help="results; a stopped run continues from them")
    parser.add_argument("-k", dest="expression", default="", help="pytest's expression for the names of tests")
    parser.add_argument("--files", nargs="+", default=[""], help="parts of file names: only these of the selection")
    parser.add_argument("--jobs", type=int, default=1, help="pytest processes at a time")
    parser.add_argument("--limit", type=float, default=180, help="seconds for one test")
    parser.add_argument(
        "--again", nargs="*", metavar="PART",
        help="forget results of TenCache's modes that did not pass; with PART, all of tests whose id contains one",
    )  # fmt: skip
    options = parser.parse_args(arguments)

    tests = (options.checkout / "tests").resolve()
    files = [file for file in selected_files(tests) if any(part in file for part in options.files)]
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    runner = Runner(tests, work, options.jobs, options.limit, options.expression)
    if options.again is not None:
        for mode in (Mode.line, Mode.nvme):
            forget(runner.results_of(mode), options.again)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the children as Ctrl-C does
    os.environ["CPUINFO_ANSWER"] = json.dumps(cpuinfo.get_cpu_info())  # see tests/asked_once

    stock = runner.run(Mode.stock, files)
    with_mode = {mode: runner.run(mode, files, to_run(mode, stock)) for mode in (Mode.line, Mode.nvme)}
    exclusions = read_exclusions(EXCLUSIONS)
    failing = [difference.result.test for difference in differences(stock, with_mode, exclusions)]
    with_mode[Mode.offload] = runner.run(
        Mode.offload, files, [test for test in failing if test in with_mode[Mode.nvme]]
    )

    unexpected = differences(stock, with_mode, exclusions)
    complete = options.files == [""] and not options.expression
    complaints = stale(exclusions, stock, unexpected, complete)
    print(report(stock, with_mode, unexpected, complaints))
    return int(bool(complaints) or not all(difference.accounted_for for difference in unexpected))


if __name__ == "__main__":
    sys.exit(main())
