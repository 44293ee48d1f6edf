# SPDX-License-Identifier: Apache-2.0
"""What TenCache and stock DeepSpeed's NVMe offload do when storage goes wrong, side by side, as a table:

    python tests/integration/fault_table.py --folder /local_nvme/drill --ranks 1

Both meet the same fault at the same place: a library between the process and libaio, or the file system itself. Each
run is a separate process with a time limit, forked from one that has everything imported; what it trained is compared
with a run without a fault. Needs a C compiler; some rows need root. Only ``--folder`` is written to; logs stay there.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 60.0
HANG_TIMEOUT_S = 1.0
ENGINES = {"tencache": ("tencache", {}), "aio": ("tencache", {"io_backend": "aio"}), "stock": ("stock_nvme", {})}
"""Columns: the harness's engine, and options of the ``tencache`` section."""
SIZES = {"model": "mlp_wide", "buffer_size": 1_200_000, "sub_group_size": 1_000_000}
"""Stock leaves weights below 1 MiB per rank in host memory: these are larger, on one rank and on two."""


def libaio(rule: str, **more: Any) -> dict[str, Any]:
    return {"act": "libaio", "rule": rule, **more}


HANG = {"tencache": {"io_timeout_s": HANG_TIMEOUT_S}}
WHOLE = {"tencache": {"verify": "full"}}
ROWS: dict[str, dict[str, Any]] = {
    "no fault": {"act": "none"},
    "EIO on read": libaio("kind=eio,op=read"),
    "EIO on write": libaio("kind=eio,op=write"),
    "ENOSPC on write": libaio("kind=enospc,op=write"),
    "short reads": libaio("kind=short,op=read"),
    "short writes": libaio("kind=short,op=write"),
    "torn write": libaio("kind=torn,op=write,times=1"),
    "bit flips on read": libaio("kind=flip,op=read,times=1", **WHOLE),
    "bit flips on write": libaio("kind=flip,op=write,times=1", **WHOLE),
    "read hangs": libaio("kind=hang,op=read", **HANG),
    "write hangs": libaio("kind=hang,op=write", **HANG),
    "files truncated": {"act": "truncate"},
    "folder removed": {"act": "remove"},
    "permission lost": {"act": "forbid"},
    "device too small": {"act": "small_device", "size": "48m"},
}
KINDS = ("weights", "optimizer")


@dataclass(frozen=True, slots=True)
class Ended:
    """How the ranks of one run ended.

    Attributes:
        codes: as of ``os.waitstatus_to_exitcode``: negative for a signal; None for one that had to be killed.
        results: what each rank wrote, empty if it did not live to.
        logs: what each rank printed.
        n_steps: optimizer steps that rank 0 said were done after the fault began.
    """

    codes: tuple[int | None, ...]
    results: tuple[dict[str, Any], ...]
    logs: tuple[str, ...]

    @property
    def n_steps(self) -> int:
        return min(log.count(" done\n") for log in self.logs)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def import_everything() -> None:
    """What takes seconds in each process, once."""
    import cpuinfo
    import deepspeed
    import fault_cases  # noqa: F401
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    from tencache_ds.ops.tencache_aio import load_tencache_aio

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
    deepspeed.get_accelerator()
    AsyncIOBuilder().load(verbose=False)
    CPUAdamBuilder().load(verbose=False)
    load_tencache_aio()
    import torch._inductor.lowering  # noqa: F401  (DeepSpeed's choice of optimizer brings it in)


def be_a_rank(case: dict[str, Any], engine: str, folder: Path, rank: int, ranks: int, port: int) -> None:
    """In the forked process: trains the case and writes its result; does not return."""
    code = 1
    try:
        os.setsid()
        log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "AIO_FAULT_FILE": str(folder / f"rule{rank}"),
        }  # fmt: skip
        import deepspeed
        import fault_cases
        import torch

        deepspeed.init_distributed()
        torch.use_deterministic_algorithms(True, warn_only=True)
        result = fault_cases.run(case, engine, str(folder), rank)
        (folder / f"result{rank}").write_text(json.dumps(result))
        code = 1 if result.get("failure") else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(case: dict[str, Any], engine: str, folder: Path, ranks: int, timeout_s: float) -> Ended:
    """One run; like DeepSpeed's launcher, it ends the other ranks soon after one has failed."""
    from benchmarks.comparison.shared_buffers import remove_shared_buffers  # main() makes it importable

    folder.mkdir(parents=True)
    port = free_port()
    pids: list[int] = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            be_a_rank(case, engine, folder, rank, ranks, port)
        pids.append(pid)
    codes: dict[int, int | None] = {}
    t_end = time.monotonic() + timeout_s
    t_failed: float | None = None
    while len(codes) < ranks and time.monotonic() < t_end and (t_failed is None or time.monotonic() < t_failed + 5):
        for pid in pids:
            if pid not in codes and (waited := os.waitpid(pid, os.WNOHANG))[0] == pid:
                codes[pid] = os.waitstatus_to_exitcode(waited[1])
                t_failed = time.monotonic() if codes[pid] and t_failed is None else t_failed
        time.sleep(0.05)
    for pid in pids:
        if pid not in codes:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            codes[pid] = None
    remove_shared_buffers(port)
    for mount in folder.glob("small*/nvme"):  # an aborted process leaves its file system
        subprocess.run(["umount", "-l", str(mount)], check=False, stderr=subprocess.DEVNULL)
    results = [json.loads(path.read_text()) if path.exists() else {} for path in
               (folder / f"result{rank}" for rank in range(ranks))]  # fmt: skip
    logs = [(folder / f"log{rank}").read_text(errors="replace") for rank in range(ranks)]
    return Ended(tuple(codes[pid] for pid in pids), tuple(results), tuple(logs))


def told(ended: Ended, clean: Ended, timeout_s: float) -> str:
    """The outcome as text, of the last rank, which met the fault, or of the others if that one says nothing."""
    for code, result, log in reversed(list(zip(ended.codes, ended.results, ended.logs, strict=True))):
        if "skipped" in result:
            return f"not tried: {result['skipped'].strip()}"
        if code is not None and code < 0:
            why = [line for line in log.splitlines() if "Assertion `" in line or "terminate called" in line]
            return f"aborts: signal {-code}{': ' + why[0].split(': ', 1)[-1] if why else ''}"
        if result.get("failure"):
            after = f" after {result['seconds']:.1f} s" if "seconds" in result else ""
            return f"stops{after}: {result['failure']}"
        if code == 1:
            return f"stops: {log.strip().splitlines()[-1]}"
    if None in ended.codes:
        return f"hangs in step {3 + ended.n_steps}: killed after {timeout_s:.0f} s"
    for result, reference in zip(ended.results, clean.results, strict=True):
        pairs = zip(result["losses"], reference["losses"], strict=True)
        wrong = [step for step, (loss, right) in enumerate(pairs, 1) if loss != right]
        if wrong:
            return f"CONTINUES WITH WRONG NUMBERS: losses differ from step {wrong[0]}"
        if result["weights"] != reference["weights"]:
            n_wrong = sum(result["weights"][name] != right for name, right in reference["weights"].items())
            return f"CONTINUES WITH WRONG NUMBERS: same losses, {n_wrong} weights differ at the end"
    return "continues, same losses and weights"


def cases(rows: Sequence[str], kinds: Sequence[str], ranks: int, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The chosen rows, with a fault on the last rank alone."""
    chosen: dict[str, dict[str, Any]] = {}
    for row in rows:
        for kind in kinds:
            case = SIZES | ROWS[row] | {"what": kind, "rank": ranks - 1}
            name = row if case["act"] == "small_device" else f"{row}, {kind}"
            chosen[name] = case | {"tencache": case.get("tencache", {}) | options}
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, help="on the device to use (default: the temporary folder)")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds that a run may take")
    parser.add_argument("--json", type=Path, help="also write the outcomes here")
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="tencache-faults-", dir=arguments.folder))
    if "AIO_FAULT_FILE" not in os.environ:  # the library has to be there from the process's first moment
        from tests.io.conftest import build_libaio_faults

        library = build_libaio_faults(base)
        more = {"LD_PRELOAD": str(library), "AIO_FAULT_FILE": str(base / "rule"), "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv, "--folder", str(base)], dict(os.environ) | more)
    outcomes: dict[str, dict[str, str]] = {}
    import_everything()
    for column in arguments.engines:
        engine, options = ENGINES[column]
        clean = run(SIZES | {"act": "none", "tencache": options}, engine, base / f"{column}-clean",
                    arguments.ranks, 4 * arguments.timeout)  # fmt: skip
        if any(clean.codes):
            sys.exit(f"{column} without a fault: {clean.codes}\n{clean.logs[0][-3000:]}")
        for number, (name, case) in enumerate(cases(arguments.rows, arguments.kinds, arguments.ranks, options).items()):
            t_start = time.monotonic()
            folder = base / f"{column}-{number}"
            ended = run(case, engine, folder, arguments.ranks, arguments.timeout)
            outcomes.setdefault(name, {})[column] = told(ended, clean, arguments.timeout)
            seconds = time.monotonic() - t_start
            print(f"{column} | {name} | {outcomes[name][column]} | {seconds:.0f} s", flush=True)
            with contextlib.suppress(OSError):
                shutil.rmtree(folder / "nvme")
    print("\n| fault | " + " | ".join(arguments.engines) + " |\n|---|" + "---|" * len(arguments.engines))
    for name, of in outcomes.items():
        print(f"| {name} | " + " | ".join(of.get(column, "") for column in arguments.engines) + " |")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(outcomes, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
