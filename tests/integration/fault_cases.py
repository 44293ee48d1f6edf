# SPDX-License-Identifier: Apache-2.0
"""Training on storage that goes wrong in the middle: run like ``training.py``, many cases in one process.

Two steps are trained, then the fault begins, then three more steps follow. What is reported: the error of each rank,
how long it took, and, where training went on, its losses and a hash of every weight.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import training

from tencache_ds.errors import StorageError
from tencache_ds.io.faults import VARIABLE, parse_faults

NOBODY = 65534
STEPS_BEFORE, STEPS_AFTER = 2, 3


class Circumstance:
    """What a case does to the storage of an engine that has trained some steps."""

    def __init__(self, case: dict[str, Any], engine: Any) -> None:
        self._case = case
        self._parts = engine.optimizer.tencache.all()
        self._was_root = os.getuid() == 0

    @property
    def _folders(self) -> list[Path]:
        return [Path(scratch.folder) for part in self._parts for scratch in part._scratch.values()]

    @property
    def _files(self) -> list[Path]:
        return [path for folder in self._folders for path in folder.glob(f"*{self._case['what']}*")]

    def begin(self) -> None:
        act = self._case["act"]
        if act == "inject":
            for part in self._parts:
                part._io[0].inject(parse_faults(self._case["rule"]))
            return
        files = self._files
        if not files:
            raise RuntimeError(f"no file for {self._case['what']} in {self._folders}")
        if act == "truncate":
            for path in files:
                os.truncate(path, min(path.stat().st_size, 8192))
        elif act == "remove":
            for folder in self._folders:
                shutil.rmtree(folder)
        elif act == "forbid":
            for path in files:
                path.chmod(0)
            if self._was_root:  # for whom permissions mean nothing
                os.setresuid(NOBODY, NOBODY, 0)
        if self._case.get("reopen"):  # as if these files had not been open
            for part in self._parts:
                for path in files:
                    part._io[0].forget(str(path))

    def end(self) -> None:
        if self._was_root and os.getuid() != 0:
            os.setresuid(0, 0, 0)


def describe(error: BaseException) -> dict[str, Any]:
    """What a user sees, and the storage error at the root of it."""
    root: BaseException | None = error
    while root is not None and not isinstance(root, StorageError):
        root = root.__cause__ or root.__context__
    found = {"failure": f"{type(error).__name__}: {error}"}
    if isinstance(root, StorageError):
        found |= {"type": type(root).__name__, "path": root.path, "offset": root.offset, "tag": root.tag}
        found |= {"errno": root.errno, "operation": root.operation}
    return found


def start_on_a_small_device(case: dict[str, Any], folder: str, rank: int) -> dict[str, Any]:
    """A real file system of a few MiB under ``nvme_path``."""
    mount = Path(folder, f"small{rank}", "nvme")
    mount.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={case['size']}", "tmpfs", str(mount)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"skipped": done.stderr}
    try:
        training.build({"model": "mlp", **case}, "tencache", str(mount)).destroy()
    except StorageError as error:
        return describe(error)
    finally:
        gc.collect()
        wait_for_threads("tencache-close")
        subprocess.run(["umount", "-l", str(mount)], check=True)
    return {"failure": ""}


def wait_for_threads(name: str) -> None:
    t_end = time.monotonic() + 10
    while any(thread.name == name for thread in threading.enumerate()) and time.monotonic() < t_end:
        time.sleep(0.02)


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    os.environ[VARIABLE] = case.get("variable", "none")
    if case["act"] == "small_device":
        return start_on_a_small_device(case, folder, rank)
    import deepspeed
    import torch

    engine = training.build({"model": "mlp", **case}, engine_name, os.path.join(folder, "nvme"))
    generator = torch.Generator().manual_seed(1000 + rank)
    result: dict[str, Any] = {"losses": training.train(engine, STEPS_BEFORE, generator, oracle=False)}
    deepspeed.comm.barrier()
    circumstance = Circumstance(case, engine)
    Path(folder, f"{case['act']}-began").write_text(str(time.time()))  # before this process may lose its permissions
    circumstance.begin()
    t_start = time.monotonic()
    try:
        result["losses"] += training.train(engine, STEPS_AFTER, generator, oracle=False)
        result["weights"] = training.digests(engine.module)
        for part in engine.optimizer.tencache.all():
            part.weights.drain()
        engine.optimizer.tencache.optimizer_state.drain()
        result["failure"] = ""
    except Exception as error:
        result |= describe(error)
        print(f"[rank {rank}] {result['failure']}", flush=True)
        if case.get("dies"):  # as it would end a user's script
            raise
    finally:
        circumstance.end()
    result["seconds"] = time.monotonic() - t_start
    result["healed"] = engine.optimizer.tencache.stats().healed_reads
    result["injected"] = sum(getattr(part._io[0], "n_injected", 0) for part in engine.optimizer.tencache.all())
    t_start = time.monotonic()
    try:
        engine.destroy()
    except Exception as error:  # what had failed may be told again
        result["at_the_end"] = f"{type(error).__name__}: {error}"
    result["seconds_to_destroy"] = time.monotonic() - t_start
    del engine, circumstance
    gc.collect()
    result["threads"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("tencache")]
    return result


if __name__ == "__main__":
    training.main(run)
