# SPDX-License-Identifier: Apache-2.0
"""A process that has imported torch, DeepSpeed and transformers and loaded the ops, and forks each program of a test.

``conftest.py`` starts one per pytest worker and talks to it over its standard input and output, one JSON object a line:

- ``{"words": [...], "environment": {...}, "folder": path, "log": path, "ranks": n}`` starts a program, its words those
  that would follow ``python``; the answer is ``{"pid": number}`` of a process that leads a session of its own;
- when that one ends, ``{"pid": number, "code": status}`` follows.

A fork is as good as a start only while nothing but the forking thread exists that could hold a lock: that is checked
before every one. Nothing of TenCache or of the tests is imported here, but what ``import torch`` brings along.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULES = (
    "torch",
    "torch._inductor.lowering",  # DeepSpeed's choice of optimizer brings it in
    "deepspeed",
    "deepspeed.runtime.zero.stage3",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.vit.modeling_vit",
    "peft",
)
OPS = ("ShareMemCommBuilder", "CPUAdamBuilder", "AsyncIOBuilder")
SECONDS_TO_END = 30.0
"""Longest time that a rank takes to end when it is told to, as under DeepSpeed's launcher."""


@dataclass(frozen=True, slots=True)
class Request:
    words: list[str]
    environment: dict[str, str]
    folder: str
    log: str
    ranks: int


def n_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def get_warm() -> dict[str, str]:
    """Returns the variables that imports have set."""
    before = dict(os.environ)
    for name in MODULES:
        importlib.import_module(name)
    from deepspeed.accelerator import get_accelerator

    from tencache_ds.ops.async_io import load_pin_memory
    from tencache_ds.ops.tencache_aio import load_tencache_aio
    from tencache_ds.ops.tencache_update import load_tencache_update

    for name in OPS:
        get_accelerator().create_op_builder(name).load(verbose=False)
    for load in (load_tencache_aio, load_tencache_update, load_pin_memory):
        load()
    sys.stdout.flush()
    gc.collect()
    gc.freeze()  # collections in the children look at what is theirs
    return {key: value for key, value in os.environ.items() if before.get(key) != value}


class WarmParent:
    """Reads requests until its input ends."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._unread = b""
        self._children: dict[int, int] = {}
        """Process numbers, by descriptor."""

    def serve(self) -> Request | None:
        """Returns a request in a child that is to fulfil it, and nothing in the parent, at the end."""
        while True:
            ready, _, _ = select.select([self._requests, *self._children], [], [])
            for descriptor in ready:
                if descriptor in self._children:
                    self._tell_the_end(descriptor)
            if self._requests not in ready:
                continue
            found = os.read(self._requests, 2**16)
            if not found:
                return None
            *lines, self._unread = (self._unread + found).split(b"\n")
            for line in lines:
                request = Request(**json.loads(line))
                if self._fork() == 0:
                    return request

    def _fork(self) -> int:
        if n_threads() != 1:
            raise RuntimeError(f"{n_threads()} threads: one of them may hold a lock, which no child could ever get")
        pid = os.fork()
        if pid == 0:
            for descriptor in (self._requests, self._answers, *self._children):
                os.close(descriptor)
            os.setsid()
            return pid
        self._children[os.pidfd_open(pid)] = pid
        self._answer({"pid": pid})
        return pid

    def _tell_the_end(self, descriptor: int) -> None:
        pid = self._children.pop(descriptor)
        _, status = os.waitpid(pid, 0)
        os.close(descriptor)
        self._answer({"pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _answer(self, what: dict[str, Any]) -> None:
        os.write(self._answers, json.dumps(what).encode() + b"\n")


# In the children


def become(request: Request, set_by_imports: dict[str, str]) -> None:
    """Takes the request's environment, folder and log."""
    log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(set_by_imports | request.environment)
    anew()


def anew() -> None:
    """What each process has for itself when it is started."""
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].seed()
    faulthandler.enable()


def be_a_rank(request: Request) -> bool:
    """Forks the ranks, with the variables that DeepSpeed's launcher sets; true in a rank, false after all have ended.

    Like the launcher, ends all ranks when one of them ends badly, and then ends so itself.
    """
    ranks: set[int] = set()
    os.environ |= {"WORLD_SIZE": str(request.ranks), "LOCAL_SIZE": str(request.ranks)}
    os.environ |= {"CROSS_RANK": "0", "CROSS_SIZE": "1"}
    for rank in range(request.ranks):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            request.words.insert(1, f"--local_rank={rank}")
            anew()
            sys.stdout.reconfigure(line_buffering=True)  # the ranks share a log
            return True
        ranks.add(pid)
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and ranks:
            end(ranks)
        if code:
            sys.exit(code if code > 0 else 128 - code)
    return False


def end(ranks: set[int]) -> None:
    for pid in ranks:
        os.kill(pid, signal.SIGTERM)
    t_end = time.monotonic() + SECONDS_TO_END
    while ranks:
        if time.monotonic() > t_end:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
        for pid in list(ranks):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == pid:
                    ranks.discard(pid)
        time.sleep(0.01)


def execute(words: Sequence[str]) -> None:
    """Does what ``python`` does with such words: a script, or ``-m`` and a module."""
    if words[0] == "-m":
        sys.argv = list(words[1:])
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    set_by_imports = get_warm()
    request = WarmParent(requests, answers).serve()
    if request is None:
        return
    become(request, set_by_imports)
    if request.ranks == 1 or be_a_rank(request):
        execute(request.words)


if __name__ == "__main__":
    main()
