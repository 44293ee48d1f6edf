# SPDX-License-Identifier: Apache-2.0
"""Starts that must fail, each with a clear error: run like ``training.py``, all in one process that survives them.

``{"change": …}`` is laid over a config that works (null removes a key); ``"circumstance"`` names something that is
wrong with the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import training
from models import Mlp

CAP_IPC_LOCK = 14
NOBODY = 65534
_CAPABILITY_VERSION_3 = 0x20080522


def overlay(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """``config`` with ``change`` laid over it, section by section."""
    result = dict(config)
    for key, value in change.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = overlay(result[key], value)
        else:
            result[key] = value
    return result


@contextlib.contextmanager
def without_permission_to_lock(folder: str) -> Iterator[None]:
    """64 KiB of locked memory, and no capability that lifts the limit."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    before, without = ((ctypes.c_uint32 * 6)() for _ in range(2))
    if libc.capget(header, before):
        raise OSError(ctypes.get_errno(), "capget")
    without[:] = before[:]
    without[0] &= ~(1 << CAP_IPC_LOCK)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if libc.capset(header, without):
        raise OSError(ctypes.get_errno(), "capset")
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (2**16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
        libc.capset(header, before)


@contextlib.contextmanager
def small_files_only(folder: str) -> Iterator[None]:
    """Files cannot grow beyond 1 MiB, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def few_descriptors(folder: str) -> Iterator[None]:
    """Six files can be opened beyond those that are: enough to look at the machine, too few for eight lanes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(name) for name in os.listdir("/proc/self/fd")) + 8, hard))
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    for _ in range(6):
        os.close(taken.pop())
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


@contextlib.contextmanager
def few_threads(folder: str) -> Iterator[None]:
    """The system refuses the third thread of a backend, as it does under ``ulimit -u``."""
    start = threading.Thread.start
    started = []

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("tencache-"):
            started.append(thread)
            if len(started) > 2:
                raise RuntimeError("can't start new thread")
        start(thread)

    with mock.patch.object(threading.Thread, "start", limited):
        yield


@contextlib.contextmanager
def faults_left_over(folder: str) -> Iterator[None]:
    """The variable of a drill is still set."""
    with mock.patch.dict(os.environ, {"TENCACHE_FAULTS": "op=write,kind=eio"}):
        yield


@contextlib.contextmanager
def little_space(folder: str) -> Iterator[None]:
    """The disk says that 1 MiB is free."""
    with mock.patch("tencache_ds.runtime.state_building.free_nbytes", return_value=2**20):
        yield


@contextlib.contextmanager
def foreign_folder(folder: str) -> Iterator[None]:
    """The folder may only be read: root becomes another user for a while."""
    path = Path(folder, "foreign")
    path.mkdir(mode=0o555, exist_ok=True)
    is_root = os.getuid() == 0
    if is_root:
        os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        if is_root:
            os.setresuid(0, 0, 0)


CIRCUMSTANCES: dict[str, Callable[[str], Any]] = {
    "": lambda folder: contextlib.nullcontext(),
    "memlock": without_permission_to_lock,
    "small_files": small_files_only,
    "little_space": little_space,
    "few_descriptors": few_descriptors,
    "few_threads": few_threads,
    "faults_left_over": faults_left_over,
    "foreign": foreign_folder,
}


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    model_case = {"model": "mlp"}
    config = overlay(training.config_for(model_case, engine_name, os.path.join(folder, "nvme")), case.get("change", {}))
    torch.manual_seed(7)
    result: dict[str, Any] = {"failure": ""}
    engine = model = context = None
    with CIRCUMSTANCES[case.get("circumstance", "")](folder):
        try:
            context = deepspeed.zero.Init(config_dict_or_path=config) if case.get("zero_init", True) else None
            with context or contextlib.nullcontext():
                model = Mlp()
            engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
            generator = torch.Generator().manual_seed(1000)
            result["losses"] = training.train(engine, 3, generator, oracle=engine_name == "stock")
            if engine_name == "tencache":
                import tencache_ds

                result["io_backend"] = tencache_ds.stats(engine).io_backend
        except Exception as error:
            result["failure"] = f"{type(error).__name__}: {error}"
    if engine is not None:
        engine.destroy()
    del engine, model, context  # each of which holds the weights, and so their files
    training.wait_until_closed()  # what failed half-way is closed when nothing refers to it any more
    result["threads"] = [thread.name for thread in threading.enumerate() if "lane" in thread.name]
    result["scratch"] = training.scratch_engines(folder)
    return result


if __name__ == "__main__":
    training.main(run)
