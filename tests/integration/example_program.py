# SPDX-License-Identifier: Apache-2.0
"""Runs several scripts one after the other in one process per rank, each as ``python script …`` would.

Usage: ``example_program.py FILE``, a JSON list of ``{"script", "argv", "env"}``. Before each, ``=== index`` is printed.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import cpuinfo
import hugging_face_cases


def main() -> None:
    answer = cpuinfo.get_cpu_info()  # takes a second each time
    cpuinfo.get_cpu_info = lambda: answer
    for index, run in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        with (
            mock.patch.dict(os.environ, run.get("env", {})),
            mock.patch.object(sys, "argv", [run["script"], *run["argv"]]),
        ):
            hugging_face_cases.forget()
            if "ACCELERATE_USE_DEEPSPEED" in os.environ:
                hugging_face_cases.join_ranks()
            if os.environ.get("RANK", "0") == "0":
                print(f"=== {index}", flush=True)
            runpy.run_path(run["script"], run_name="__main__")
            gc.collect()


if __name__ == "__main__":
    main()
