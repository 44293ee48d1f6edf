# SPDX-License-Identifier: Apache-2.0
"""Steps, passes and loads that fail in the middle, and everything that a user may try after that: run like
``training.py``.

Two steps are trained and saved. The third one, or a load, meets the fault of the case. Where that leaves a void step,
every use is tried, then every load that does not replace everything, then the right one; where it does not, the step is
tried again. Then the third step and two more are trained: stock has the same losses and weights without any of this.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import training

from tencache_ds.errors import StorageError
from tencache_ds.integration.model_weights import ModelWeights
from tencache_ds.integration.optimizer_states import OptimizerStates
from tencache_ds.integration.stage3 import TenCacheZeroOptimizer_Stage3
from tencache_ds.io.wrappers.faults import VARIABLE, parse_faults
from tencache_ds.tiers.momentum import Momentum

N_STEPS, STEPS_BEFORE = 5, 2
GOOD = "good"

ERRORS: dict[str, Callable[[], BaseException]] = {
    "error": lambda: RuntimeError("made up"),
    "memory": lambda: MemoryError("made up"),
    "storage": lambda: StorageError("read", "/made/up", 0, 1, "made up"),
    "interrupt": lambda: KeyboardInterrupt("made up"),
    "exit": lambda: SystemExit("made up"),
}


class Countdown:
    """Raises, or sends this process a signal, when it is called for the n-th time."""

    def __init__(self, n: int, what: str) -> None:
        self._left, self._what = n, what
        self.reached = threading.Event()

    def __call__(self) -> None:
        self._left -= 1
        if self._left:
            return
        self.reached.set()
        if self._what == "signal":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            raise ERRORS[self._what]()


@contextlib.contextmanager
def before(owner: Any, name: str, count: Callable[[], None]) -> Iterator[None]:
    """Within the block ``count()`` is called before a method."""
    there = name in owner.__dict__
    method = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        count()
        return method(*args, **kwargs)

    setattr(owner, name, counted)
    try:
        yield
    finally:
        if there:
            setattr(owner, name, method)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def fault(case: dict[str, Any], engine: Any) -> Iterator[Countdown | None]:
    """Within the block the case's fault is there to be met."""
    where, count = case["where"], Countdown(case.get("at", 1), case.get("what", "error"))
    if where == "signal":
        timer = threading.Timer(case["seconds"], os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            yield None
        finally:
            timer.cancel()
        return
    if where == "io":
        paths = [path for part in engine.optimizer.tencache.all() for path in part.nvme.paths]
        for path in paths:
            path.backend.inject(parse_faults(case["rule"]))
        try:
            yield None
        finally:
            for path in paths:
                path.backend.inject(())
        return
    layer = [module for module in engine.module.modules() if not list(module.children())][-1]
    places: dict[str, tuple[Any, str]] = {
        "chunk": (ModelWeights, "close"),  # an updated chunk's weights are there
        "begin": (TenCacheZeroOptimizer_Stage3, "_complete_norms"),  # before the ranks meet
        "norm": (TenCacheZeroOptimizer_Stage3, "_get_norm_groups"),  # before the update
        "matrix": (TenCacheZeroOptimizer_Stage3, "_orthogonalize"),
        "momentum": (Momentum, "take"),
        "scale": (TenCacheZeroOptimizer_Stage3, "unscale_and_clip_grads"),
        "post_step": (engine.optimizer, "reset_cpu_buffers"),  # after it
        "scheduler": (engine.lr_scheduler, "step"),
        "gradients": (TenCacheZeroOptimizer_Stage3, "partition_grads"),
        "load": (OptimizerStates, "replace"),
        "forward": (layer, "forward"),
    }
    with before(*places[where], count):
        yield count


def attempt(use: Callable[[], Any]) -> str:
    """What comes of a use: the name of its error, or ``"done"``."""
    try:
        use()
    except BaseException as error:
        return type(error).__name__
    return "done"


class Job:
    """One engine and its micro-batches."""

    def __init__(self, case: dict[str, Any], engine_name: str, folder: str, rank: int) -> None:
        self.case, self.rank = case, rank
        self.folder = os.path.join(folder, "void", case["name"])
        self.engine = training.build(case, engine_name, os.path.join(folder, "nvme"))
        self._oracle = engine_name == "stock"
        generator = torch.Generator().manual_seed(1000 + rank)
        self._n_micro = self.engine.gradient_accumulation_steps()
        self._batches = [self.engine.module.batch(generator) for _ in range(N_STEPS * self._n_micro)]

    def batch(self, number: int = 0) -> list[torch.Tensor]:
        return [t.to(self.engine.device) for t in self._batches[number]]

    def train(self, first: int, last: int) -> list[str]:
        """Losses of some steps."""
        losses = []
        for number in range(first * self._n_micro, last * self._n_micro):
            loss = self.engine(*self.batch(number))
            losses.append(float(loss.detach().float()).hex())
            self.engine.backward(loss)
            if self._oracle and self._n_micro > 1 and self.engine.is_gradient_accumulation_boundary():
                training.complete_gradients(self.engine)
            self.engine.step()
            if self._oracle and (number + 1) % self._n_micro == 0:
                training.zero_gradients(self.engine)
        return losses


def uses(job: Job, spare: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Everything that trains on, reads or saves weights and states."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param

    engine, batch = job.engine, job.batch()
    param = next(p for p in engine.module.parameters() if p.requires_grad)

    def gather(rank: int | None) -> None:
        with deepspeed.zero.GatheredParameters([param], modifier_rank=rank):
            float(param.sum())

    def evaluate() -> None:
        engine.eval()
        try:
            with torch.no_grad():
                engine(*batch)
        finally:
            engine.train()

    return {
        "step": engine.step,
        "optimizer.step": engine.optimizer.step,
        "backward": lambda: engine.backward(spare),
        "forward": lambda: engine(*batch),
        "forward of the module": lambda: engine.module(*batch),
        "evaluate": evaluate,
        "save_checkpoint": lambda: engine.save_checkpoint(job.folder, tag="void"),
        "save_16bit_model": lambda: engine.save_16bit_model(job.folder),
        "consolidated": engine._zero3_consolidated_16bit_state_dict,
        "module_state_dict": engine.module_state_dict,
        "state_dict": engine.module.state_dict,
        "optimizer.state_dict": engine.optimizer.state_dict,
        "gather": lambda: gather(None),
        "gather to change": lambda: gather(0),
        "safe_get": lambda: safe_get_full_fp32_param(param),
        "safe_get of a state": lambda: safe_get_full_optimizer_state(param, "exp_avg"),
        "safe_set": lambda: safe_set_full_fp32_param(param, torch.zeros(tuple(param.ds_shape))),
    }


def partial_loads(job: Job) -> dict[str, Callable[[], Any]]:
    """Loads that do not replace everything, or fail."""
    load, folder = job.engine.load_checkpoint, job.folder
    return {
        "nothing": lambda: load(os.path.join(folder, "nowhere")),
        "damaged": lambda: load(os.path.join(folder, "damaged"), tag=GOOD),
        "module only": lambda: load(folder, tag=GOOD, load_module_only=True),
        "without states": lambda: load(folder, tag=GOOD, load_optimizer_states=False),
    }


def make_a_damaged_copy(job: Job) -> None:
    """Copies the checkpoint and damages it: the optimizer state of every rank ends early."""
    import deepspeed

    deepspeed.comm.barrier()
    copy = Path(job.folder, "damaged", GOOD)
    if job.rank == 0:
        shutil.copytree(Path(job.folder, GOOD), copy)
        for path in copy.glob("*optim_states.pt"):
            os.truncate(path, path.stat().st_size // 2)
    deepspeed.comm.barrier()


def explore(job: Job, spare: torch.Tensor) -> dict[str, Any]:
    """What uses and loads give while a step is void; at the end the good checkpoint is loaded."""
    found: dict[str, Any] = {"uses": {name: attempt(use) for name, use in uses(job, spare).items()}}
    found["loads"], found["after loads"] = {}, {}
    for name, load in partial_loads(job).items():
        found["loads"][name] = attempt(load)
        found["after loads"][name] = [attempt(lambda: job.engine(*job.batch())), attempt(job.engine.step)]
    if job.case.get("rebuilt"):
        job.engine.destroy()
        job.engine = training.initialize(job.case, job.engine.module, job.case["nvme"])
        found["after loads"]["another engine"] = [
            attempt(lambda: job.engine(*job.batch())), attempt(lambda: job.engine.save_16bit_model(job.folder))
        ]  # fmt: skip
    found["latest"] = Path(job.folder, "latest").read_text()
    found["saved"] = Path(job.folder, "void").exists() or Path(job.folder, "pytorch_model.bin").exists()
    job.engine.load_checkpoint(job.folder, tag=GOOD)
    return found


def meet_the_fault(job: Job, result: dict[str, Any]) -> None:
    """The third step, or a load, with the fault; afterwards the engine is where it was before that step."""
    engine, case = job.engine, job.case
    here = job.rank == case.get("rank", job.rank)
    spare = engine(*job.batch())
    loads = case["where"] == "load"
    step = STEPS_BEFORE
    if not loads and case["where"] not in ("forward", "gradients"):
        for number in range(step * job._n_micro, (step + 1) * job._n_micro):
            loss = engine(*job.batch(number))
            if case.get("again") or case.get("whole"):
                result["losses"].append(float(loss.detach().float()).hex())
            engine.backward(loss)
            if number + 1 < (step + 1) * job._n_micro:
                engine.step()

    def use() -> None:
        if case.get("mixed"):  # the second micro-step of two
            engine.backward(engine(*job.batch(0)))
            engine.step()
            with fault(case, engine):
                engine.backward(engine(*job.batch(1)))
        elif loads:
            engine.load_checkpoint(job.folder, tag=GOOD)
        elif case["where"] in ("forward", "gradients"):
            engine.backward(engine(*job.batch(step)))
        else:
            engine.step()
            if case.get("behind"):
                engine(*job.batch())
                engine.optimizer.state_dict()

    with fault(case, engine) if here and not case.get("mixed") else contextlib.nullcontext():
        result["failure"] = attempt(use)
    if case.get("whole"):
        result["again"] = "done" if not loads else ""
        return
    if case.get("mixed"):
        engine.backward(engine(*job.batch()))
        result["mixed"] = attempt(engine.step)
        engine.load_checkpoint(job.folder, tag=GOOD)
        return
    if case.get("again"):
        result["again"] = attempt(engine.step) if case["where"] not in ("forward", "gradients") else "done"
        return
    result |= explore(job, spare)


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    os.environ[VARIABLE] = "none"
    case = case | {"nvme": os.path.join(folder, "nvme")}
    job = Job(case, engine_name, folder, rank)
    result: dict[str, Any] = {"losses": job.train(0, STEPS_BEFORE)}
    first = STEPS_BEFORE
    if engine_name == "tencache":
        job.engine.save_checkpoint(job.folder, tag=GOOD)
        make_a_damaged_copy(job)
        meet_the_fault(job, result)
        if result.get("again") == "done" and case["where"] not in ("forward", "gradients"):
            first += 1  # the step that was tried again was the third one
    result["losses"] += job.train(first, N_STEPS)
    result["weights"] = training.digests(job.engine.module)
    job.engine.destroy()
    return result


if __name__ == "__main__":
    training.main(run)
