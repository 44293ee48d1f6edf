# SPDX-License-Identifier: Apache-2.0
"""Saves and loads checkpoints in the processes of ``test_checkpoint.py``; run like ``training.py``.

``{"action": "save"}`` trains, saves and continues; ``"load"`` starts from other weights, loads and continues with the
batches that follow; ``"pass_on"`` loads one and saves another; ``"reload"`` goes back and forth between checkpoints;
``"fp32"`` reads one with DeepSpeed's ``zero_to_fp32``.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
import training
from checkpoint_contents import hashes


def skip_batches(engine: Any, generator: torch.Generator, steps: int) -> None:
    """Draws the batches of ``steps`` steps without using them."""
    for _ in range(steps * engine.gradient_accumulation_steps()):
        engine.module.batch(generator)


def vary(engine: Any, step: int) -> None:
    """Hyper-parameters of the next step: each group's follow the steps, its betas until the tenth."""
    done = engine.global_steps
    for number, group in enumerate(engine.optimizer.param_groups):
        group["lr"], group["eps"] = 1e-3 / (1 + done % 3), 1e-8 * (1 + done % 4 + number)
        group["weight_decay"] = 0.01 * (done % 5)
        if done < 10:
            group["betas"] = (0.85 + 0.01 * (done % 7), group["betas"][1])


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    path = os.path.join(folder, "checkpoints", case["checkpoint"])
    if case["action"] == "fp32":
        return read_as_fp32(path) if rank == 0 else {}
    if case["action"] == "reload":
        return reload(case, engine_name, folder, rank)
    if case["action"] == "pass_on":
        return pass_on(case, engine_name, folder, path)
    generator = torch.Generator().manual_seed(1000 + rank)
    if case["action"] == "load":
        case = case | {"seed": 99}
    engine = training.build(case, engine_name, os.path.join(folder, "nvme"))
    if case.get("watched"):
        engine.optimizer.optimizer.register_step_post_hook(lambda *_: None)
    before, after = case.get("before", 3), case.get("after", 5)
    train = functools.partial(training.train, oracle=engine_name == "stock", hook=vary if case.get("varied") else None)
    result: dict[str, Any] = {}
    if case["action"] == "save":
        train(engine, before, generator)
        for round_ in range(case.get("saves", 1)):
            if round_:
                train(engine, 2, generator)
            if not case.get("only_train"):
                engine.save_checkpoint(path, tag=f"save{round_}")
        if case.get("save_16bit_model"):
            engine.save_16bit_model(path, "weights.bin")
            if rank == 0:
                result["bit16"] = hashes(torch.load(os.path.join(path, "weights.bin")))
    else:
        skip_batches(engine, generator, before)
        if case.get("trained_before_loading"):
            train(engine, 2, torch.Generator().manual_seed(5))
        loaded, _ = engine.load_checkpoint(path, **case.get("load_options", {}))
        if loaded is None:
            raise RuntimeError(f"nothing was loaded from {path}")
        result["weights"] = training.digests(engine.module)
    result["losses"] = train(engine, after, generator)
    result["final_weights"] = training.digests(engine.module)
    engine.destroy()
    return result


def reload(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """Losses of a run that goes back to a checkpoint saved before the first step, and to a later one, more than once.

    The checkpoints are its own or, with ``case["loads"]``, another run's. The oracle, stock without that, trains again
    from the beginning instead of loading optimizer state.
    """
    saves = os.path.join(folder, "checkpoints", case["checkpoint"])
    loads = os.path.join(folder, "checkpoints", case.get("loads", case["checkpoint"]))
    generator = torch.Generator().manual_seed(1000 + rank)
    before = case.get("before", 2)
    engine = training.build(case, engine_name, os.path.join(folder, "nvme"))
    losses: list[str] = []

    def train(steps: int) -> None:
        losses.extend(training.train(engine, steps, generator, oracle=engine_name == "stock"))

    def load(tag: str, **options: Any) -> None:
        nonlocal engine
        if engine_name == "stock" and "loads" not in case and not options:
            engine.destroy()
            engine = training.build(case, engine_name, os.path.join(folder, "nvme"))
            steps = {"begin": 0, "later": before}[tag]
            training.train(engine, steps, torch.Generator().manual_seed(1000 + rank), oracle=True)
        elif engine.load_checkpoint(loads, tag=tag, **options)[0] is None:
            raise RuntimeError(f"nothing was loaded from {loads}")

    engine.save_checkpoint(saves, tag="begin")
    train(before)
    engine.save_checkpoint(saves, tag="later")
    train(1)
    load("begin")
    train(2)
    load("later")
    load("begin")
    train(1)
    load("later")
    train(1)
    load("later")
    train(1)
    load("begin", load_optimizer_states=False)
    train(2)
    result = {"losses": losses, "weights": training.digests(engine.module)}
    engine.destroy()
    return result


def pass_on(case: dict[str, Any], engine_name: str, folder: str, path: str) -> dict[str, Any]:
    """Saves under another name what it has loaded, ``case["loads"]``; a refusal is its result."""
    engine = training.build(case | {"seed": 99}, engine_name, os.path.join(folder, "nvme"))
    try:
        loaded, _ = engine.load_checkpoint(os.path.join(folder, "checkpoints", case["loads"]))
    except Exception as error:
        engine.destroy()
        return {"refused": f"{type(error).__name__}: {error}"}
    if loaded is None:
        raise RuntimeError(f"nothing was loaded from {case['loads']}")
    engine.save_checkpoint(path, tag="save0")
    result = {"weights": training.digests(engine.module), "steps": engine.global_steps}
    engine.destroy()
    return result


def read_as_fp32(path: str) -> dict[str, Any]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    files = sorted(file.name for file in Path(path, "save0").iterdir())
    return {"fp32": hashes(get_fp32_state_dict_from_zero_checkpoint(path)), "files": files}


if __name__ == "__main__":
    training.main(run)
