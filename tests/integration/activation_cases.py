# SPDX-License-Identifier: Apache-2.0
"""Training with and without ``"activations": "on"``: run like ``training.py``, with the engines "off" and "on", both of
them TenCache's. A case may do something in the middle that hooks for saved tensors have to cope with.

Cases with ``rows`` train in memory that is counted, with batches of that many rows, and twice: "auto" has the share
``memory`` of what "off" took at its peak. "short" is "off" with as little.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import os
from collections.abc import Callable
from typing import Any

import models
import torch
import training
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import tencache_ds
from tencache_ds.errors import InplaceChangeError, StorageError
from tencache_ds.integration import stage3_building
from tencache_ds.io.wrappers.faults import VARIABLE
from tests.activations.counted_memory import CountedMemory

ACT_AT = 3
"""The step in which a case does what it is about."""


class Transforms(models.Residual):
    """Function transforms in the forward pass, which torch refuses under hooks for saved tensors."""

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def energy(h: torch.Tensor) -> torch.Tensor:
            return (torch.tanh(h) * h).sum()

        x = super().block(layer, x)
        _, pull = torch.func.vjp(torch.sin, x)
        x = x + 0.1 * torch.func.grad(energy)(x) + 0.1 * pull(x)[0]
        rows = torch.func.vmap(torch.func.grad(energy))(x)
        return x + 0.1 * rows + torch.func.jacrev(energy)(x[0]) + torch.func.hessian(energy)(x[0, :4]).sum()


models.MODELS |= {
    "transforms": Transforms,
    "transforms_reentrant": lambda: Transforms("reentrant"),
}


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose operations no mode sees."""

    @functools.wraps(function)
    def hidden(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return hidden


def one_step(engine: Any, generator: torch.Generator, act: str) -> dict[str, Any]:
    """A step in which something happens; what is to be reported."""
    found: dict[str, Any] = {}
    batch = [tensor.to(engine.device) for tensor in engine.module.batch(generator)]
    if act == "exception":
        engine.module.breaks = act
        try:
            engine(*batch)
        except ZeroDivisionError as error:
            found["error"] = type(error).__name__
        engine.module.breaks = ""
    elif act == "inplace":
        engine.module.breaks = act
        loss = engine(*batch)
        try:
            engine.backward(loss)
        except RuntimeError as error:
            found |= {"inplace": str(error), "ours": isinstance(error, InplaceChangeError)}
        return found
    elif act == "no_backward":
        for _ in range(3):
            engine(*batch)
    elif act == "eval":
        engine.eval()
        found["eval_loss"] = engine(*batch).item()
        engine.train()
    if act == "memory":
        hooks = engine.optimizer.activation_hooks
        if hooks is not None:  # the hooks' own buffers are not the model's tensors
            hooks._saved.save = unseen(hooks._saved.save)
            hooks._saved.begin_forward = unseen(hooks._saved.begin_forward)
        with CountedMemory() as memory:
            loss = engine(*batch)
        # Without gathered weights: whether this forward pass or the one before gathers them depends on reads.
        weights = {param.data.untyped_storage()._cdata for param in engine.module.parameters()}
        found["alive_nbytes"] = memory.alive_nbytes(without=weights)
    elif act == "own_hooks":
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            loss = engine(*batch)
    else:
        loss = engine(*batch)
    found["loss"] = loss.item().hex()
    # Twice does not work under ZeRO-3, with or without TenCache: weights were released.
    engine.backward(loss, retain_graph=act == "retain_graph")
    engine.step()
    if engine.optimizer.activation_hooks is not None:
        found["figures"] = dataclasses.asdict(engine.optimizer.tencache.activations.figures)
    return found


peaks: dict[str, int] = {}
"""Peaks of counted memory, by the rows of the run that had no limit."""


class Counting:
    """Counts the tensors that hooks take."""

    def __init__(self, saved: Any) -> None:
        self.calls = 0
        save = saved.save

        def counted(tensor: torch.Tensor) -> Any:
            self.calls += 1
            return save(tensor)

        saved.save = counted


def run_in_counted_memory(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """A run with a step in which the forward pass fails, an evaluation, and a second engine for the same model."""
    rows, key = case["rows"], str(case["rows"])
    limited = engine_name != "off"
    memory = CountedMemory(int(case["memory"] * peaks[key])) if limited else CountedMemory()
    stage3_building.open_usage = lambda: memory.usage if engine_name == "auto" else None
    if engine_name == "auto":
        case["tencache"] = {"activations": "auto", "activation_min_size": 1024} | case["places"]
    engine = training.build(case, "tencache", os.path.join(folder, "nvme"))
    torch.manual_seed(77 + rank)
    generator = torch.Generator().manual_seed(1000 + rank)
    result: dict[str, Any] = {"losses": [], "calls": [], "figures": []}
    counting = None

    def random_rows(rows: int) -> torch.Tensor:
        return torch.randn(rows, engine.module.width, generator=generator).to(engine.device)

    def micro_step(rows: int) -> None:
        x = random_rows(rows)
        with memory:
            loss = engine(x, x.roll(1, dims=1))
            result["losses"].append(loss.item().hex())
            engine.backward(loss)
        engine.step()

    try:
        for step, each in enumerate(rows):
            if step in (0, len(rows) // 2):
                if step:  # weights stay the model's
                    engine.destroy()
                    engine = training.initialize(case, engine.module, os.path.join(folder, "nvme"))
                if engine_name == "auto":
                    counting = Counting(engine.optimizer.tencache.activations.saved)
            if step == 2:
                engine.module.breaks = "exception"
                with memory, contextlib.suppress(ZeroDivisionError):
                    engine(*(random_rows(each),) * 2)
                engine.module.breaks = ""
                engine.eval()
                with memory, torch.no_grad():
                    loss = engine(*(random_rows(each),) * 2)
                result["losses"].append(loss.item().hex())
                engine.train()
            for _ in range(engine.gradient_accumulation_steps()):
                micro_step(each)
            if counting is not None:
                result["calls"].append(counting.calls)
                counting.calls = 0
                result["figures"].append(dataclasses.asdict(engine.optimizer.tencache.activations.figures))
    except torch.OutOfMemoryError as error:
        result["out_of_memory"] = str(error)
    peaks.setdefault(key, memory.peak_nbytes)
    result["stats"] = dataclasses.asdict(tencache_ds.stats(engine))
    result["weights"] = training.digests(engine.module) if not limited or engine_name == "auto" else {}
    gc.collect()
    if engine_name == "auto":
        result["live_nbytes"] = engine.optimizer.tencache.activations.saved.live_nbytes
    engine.destroy()
    return result


def run_case(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    case = copy.deepcopy(case)
    if "rows" in case:
        return run_in_counted_memory(case, engine_name, folder, rank)
    places = case.setdefault("tencache", {})
    if engine_name == "on":
        places |= {"activations": "on", "activation_min_size": 1024} | case.get("places", {})
    if case.get("model") == "residual_deepspeed":
        import deepspeed

        # Without, its inputs stay in the graph: on a CPU, stock's own offload of them frees the very tensor it keeps.
        deepspeed.checkpointing.configure(None, checkpoint_in_cpu=engine_name == "on")
    if "fault" in case:
        os.environ[VARIABLE] = case["fault"]
    try:
        engine = training.build(case, "tencache", os.path.join(folder, "nvme"))
    finally:
        os.environ.pop(VARIABLE, None)
    torch.manual_seed(77 + rank)  # dropout
    generator = torch.Generator().manual_seed(1000 + rank)
    result: dict[str, Any] = {}
    act, steps = case.get("act"), case.get("steps", 20)
    try:
        if act is None:
            result["losses"] = training.train(engine, steps, generator, oracle=False)
        else:
            result["losses"] = training.train(engine, ACT_AT, generator, oracle=False)
            result["act"] = one_step(engine, generator, act)
            if act != "inplace":
                result["losses"] += training.train(engine, ACT_AT, generator, oracle=False)
    except StorageError as error:
        result["storage_error"] = str(error)
    result["stats"] = dataclasses.asdict(tencache_ds.stats(engine))
    if engine.optimizer.activation_hooks is not None:
        gc.collect()
        saved = engine.optimizer.tencache.activations.saved
        result["live_nbytes"] = saved.live_nbytes
    if case.get("weights"):
        result["weights"] = training.digests(engine.module)
    if "fault" in case:
        try:
            engine.destroy()
        except StorageError as error:
            result["at_end"] = str(error)
    else:
        engine.destroy()
    return result


if __name__ == "__main__":
    training.main(run_case)
