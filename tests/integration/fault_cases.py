# SPDX-License-Identifier: Apache-2.0
"""Training on storage that goes wrong in the middle: run like ``training.py``, many cases in one process.

Two steps are trained, then the fault begins, then three more steps follow. Reported are the error of each rank,
how long it took, and, where training went on, its losses and a hash of every weight. Stock's NVMe offload takes the
same cases, but those that need TenCache's own fault injection; it may abort or hang, so give it one case a process.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import torch
import training

from tencache_ds.errors import StorageError
from tencache_ds.io import ExtentStore, NvmePath
from tencache_ds.io.wrappers.faults import VARIABLE, parse_faults

NOBODY = 65534
LIBAIO_RULE = "AIO_FAULT_FILE"
"""Names the file from which a preloaded ``libaio_faults.c`` takes its rule."""
STOCK_FOLDERS = {"weights": "*params", "optimizer": "optimizer"}
STEPS_BEFORE, STEPS_AFTER = 2, 3
N_STEPS = STEPS_BEFORE + STEPS_AFTER


class Circumstance:
    """What a case does to the storage of an engine that has trained some steps."""

    def __init__(self, case: dict[str, Any], engine_name: str, engine: Any, folder: str, rank: int) -> None:
        self._case = case
        self._engine_name = engine_name
        self._here = rank == case.get("rank", rank)
        self._stock_folder = Path(folder, "nvme", "zero_stage_3")
        self._rank = rank
        self._paths = []
        if engine_name == "tencache":
            self._paths = [path for part in engine.optimizer.tencache.all() for path in part.nvme.paths]
        self._was_root = os.getuid() == 0

    @property
    def _folders(self) -> list[Path]:
        if self._engine_name == "stock_nvme":
            return list(self._stock_folder.glob(f"{STOCK_FOLDERS[self._case['what']]}/rank{self._rank}"))
        return [Path(path.root) for path in self._paths]

    @property
    def _files(self) -> list[Path]:
        if self._engine_name == "stock_nvme":
            return [path for folder in self._folders for path in folder.glob("*")]
        return [Path(store.location(name)) for _, store, name in self._stored]

    @property
    def _stored(self) -> list[tuple[NvmePath, ExtentStore, str]]:
        """TenCache's files of the case's kind, which have no names to find them by."""
        kind = self._case["what"]
        stored = [(path, store) for path in self._paths for each, store, _ in path.stores if each == kind]
        return [
            (p, store, name)
            for p, store in stored
            for name in store.paths
            if Path(name).parent == Path(p.scratch.folder)
        ]

    def begin(self) -> None:
        act = self._case["act"]
        if not self._here or act == "none":
            return
        if act == "inject":
            for path in self._paths:
                path.backend.inject(parse_faults(self._case["rule"]))
            return
        if act == "libaio":
            match = f"rank{self._rank}-{self._case['what']}" if self._paths else "/".join(self._folders[0].parts[-2:])
            rule = Path(os.environ[LIBAIO_RULE])
            rule.with_suffix(".new").write_text(f"{self._case['rule']},match={match}")
            rule.with_suffix(".new").rename(rule)
            return
        files = self._files
        if not files:
            raise RuntimeError(f"no file for {self._case['what']} in {self._folders}")
        if act == "truncate":
            for path in files:
                os.truncate(path, min(path.stat().st_size, 8192))
        elif act == "remove":
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)  # which another rank may have done
        elif act == "forbid":
            for path in files:
                path.chmod(0)
            if self._was_root:  # for whom permissions mean nothing
                os.setresuid(NOBODY, NOBODY, 0)
        if self._case.get("reopen"):  # as if these files had not been open
            for nvme, store, name in self._stored:
                nvme.backend.forget(name)
                nvme.backend.add(name, int(os.path.basename(store.location(name))))

    def end(self) -> None:
        if self._case["act"] == "libaio" and self._here:
            Path(os.environ[LIBAIO_RULE]).unlink(missing_ok=True)
        if self._was_root and os.getuid() != 0:
            os.setresuid(0, 0, 0)


def describe(error: BaseException) -> dict[str, Any]:
    """What a user sees, and the storage error at the root of it."""
    root: BaseException | None = error
    while root is not None and not isinstance(root, StorageError):
        root = root.__cause__ or root.__context__
    result = {"failure": f"{type(error).__name__}: {error}", "notes": getattr(root, "__notes__", [])}
    if isinstance(root, StorageError):
        result |= {"type": type(root).__name__, "path": root.path, "offset": root.offset, "tag": root.tag}
        result |= {"errno": root.errno, "operation": root.operation}
    return result


def run_on_a_small_device(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """A real file system of a few MiB under ``nvme_path``."""
    mount = Path(folder, f"small{rank}", "nvme")
    mount.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={case['size']}", "tmpfs", str(mount)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"skipped": done.stderr}
    result: dict[str, Any] = {"failure": ""}
    try:
        engine = training.build({"model": "mlp", **case}, engine_name, str(mount))
        if engine_name == "stock_nvme":  # which takes it
            generator = torch.Generator().manual_seed(1000 + rank)
            result["losses"] = training.train(engine, N_STEPS, generator, oracle=False, hook=say_the_step)
            result["weights"] = training.digests(engine.module)
        engine.destroy()
    except StorageError as error:
        return describe(error)
    finally:
        training.wait_until_closed()
        subprocess.run(["umount", "-l", str(mount)], check=True)
    return result


@functools.cache
def least_memory(nvme: str) -> dict[str, int]:
    """So little staging memory that every pass reads weights and chunks again: nothing is missed by luck."""
    smallest = training.smallest_staging_nbytes({"model": "mlp"}, nvme)
    training.wait_until_closed()
    return {"staging_memory": smallest}


def forget_what_was_read_ahead(engine: Any) -> None:
    """How much is read ahead at the end of a step depends on how soon writes return their buffers."""
    from tencache_ds.integration.model_weights import in_tier

    for param in filter(in_tier, engine.module.parameters()):
        param.nvme_swapper.engine.weights.forget(param.ds_id)


def say_the_step(engine: Any, step: int) -> None:
    """For the log of a process that may not live to tell more."""
    print(f"step {engine.global_steps} done", flush=True)


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    os.environ[VARIABLE] = case.get("variable", "none")
    if case["act"] == "small_device":
        return run_on_a_small_device(case, engine_name, folder, rank)
    import deepspeed

    nvme = os.path.join(folder, "nvme")
    if engine_name == "tencache":
        case = {**case, "tencache": least_memory(nvme) | case.get("tencache", {})}
    engine = training.build({"model": "mlp", **case}, engine_name, nvme)
    generator = torch.Generator().manual_seed(1000 + rank)
    result: dict[str, Any] = {"losses": training.train(engine, STEPS_BEFORE, generator, oracle=False)}
    if engine_name == "tencache":  # so that every rank meets the fault at the same point
        training.drain(engine)
        forget_what_was_read_ahead(engine)
    deepspeed.comm.barrier()
    circumstance = Circumstance(case, engine_name, engine, folder, rank)
    Path(folder, f"{case['act']}-began").write_text(str(time.time()))  # before this process may lose its permissions
    circumstance.begin()
    t_began = t_start = time.monotonic()
    try:
        result["losses"] += training.train(engine, STEPS_AFTER, generator, oracle=False, hook=say_the_step)
        result["weights"] = training.digests(engine.module)
        if engine_name == "tencache":
            training.drain(engine)
        result["failure"] = ""
    except Exception as error:
        result |= describe(error)
        print(f"[rank {rank}] {result['failure']}", flush=True)
        if case.get("dies"):  # as it would end a user's script
            raise
    finally:
        circumstance.end()
    result["seconds"] = time.monotonic() - t_start
    if engine_name == "tencache":
        result["healed"] = engine.optimizer.tencache.stats().healed_reads
        paths = [path for part in engine.optimizer.tencache.all() for path in part.nvme.paths]
        result["injected"] = sum(getattr(path.backend, "n_injected", 0) for path in paths)
    t_start = time.monotonic()
    try:
        engine.destroy()
    except Exception as error:  # what had failed may be told again
        result["at_the_end"] = f"{type(error).__name__}: {error}"
    result["seconds_to_destroy"] = time.monotonic() - t_start
    if "answers_after_s" in case:
        time.sleep(max(0.0, t_began + case["answers_after_s"] - time.monotonic()))
        print("the device has answered, and this process lives", flush=True)
    del engine, circumstance
    training.wait_until_closed()  # the weights' files and threads end with the model
    result["threads"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("tencache")]
    return result


if __name__ == "__main__":
    training.main(run)
