# SPDX-License-Identifier: Apache-2.0
"""The cases of three other programs with slow optimizer steps in the background: a reader that does not wait for a
weight, a gradient or the state gets a wrong one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import checkpoint_cases
import models
import torch
import training
import user_api_cases

import tencache_ds
from tencache_ds.errors import TenCacheError
from tencache_ds.integration.coordinator import TenCacheCoordinator
from tencache_ds.integration.model_weights import ModelWeights
from tencache_ds.observability.counters import Stall
from tencache_ds.planning.chunks import Chunk
from tencache_ds.tiers.update import ChunkedUpdate

DELAY_S, DELAYED = 0.003, 4
"""Additional seconds per chunk in the background, and the number of chunks that get them."""

models.MODELS["deep"] = lambda: models.Mlp(depth=10)

plain_config = training.config_for
plain_finish = ChunkedUpdate._finish
in_background: list[int] = []
each_delayed_s = 0.0
dies_at = 0


def config_for(case: dict[str, Any], engine: str, nvme: str) -> dict[str, Any]:
    """A hundred chunks, no persistent weights, and host memory for everything: whatever may wait does."""
    case = {"persistence": 0} | case
    config = plain_config(case, engine, nvme)
    if engine == "tencache":
        config["tencache"] = {"gpu_memory": 0} | config["tencache"] | {"chunk_size": 2**18, "host_memory": "1GiB"}
        config["tencache"] |= case.get("tencache", {})
    return config


def slow_finish(self: ChunkedUpdate, *args: Any) -> None:
    if threading.current_thread().name.startswith("tencache-update"):
        in_background.append(1)
        time.sleep(each_delayed_s)
        if len(in_background) % DELAYED == 0:
            time.sleep(DELAY_S)
        if len(in_background) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
    plain_finish(self, *args)


def be_killed(case: dict[str, Any], folder: str) -> None:
    """A job that gets SIGKILL in the middle of an update, in the second step after its checkpoint."""
    global dies_at
    engine = training.build(case, "tencache", os.path.join(folder, "nvme"))
    generator = torch.Generator().manual_seed(1000)
    training.train(engine, case["before"], generator, oracle=False)
    engine.save_checkpoint(os.path.join(folder, "checkpoints", case["checkpoint"]), tag="save0")
    dies_at = len(in_background) * (2 * case["before"] + 3) // (2 * case["before"])
    training.train(engine, case["after"], generator, oracle=False)
    raise RuntimeError("the process lives")


def evaluate_and_save(folder: str) -> Callable[[Any, int], None]:
    """For between the steps of a long run: every step is still going on when it is called."""

    def hook(engine: Any, step: int) -> None:
        if step % 10 == 4:
            engine.eval()
            with torch.no_grad():
                engine(*(t.to(engine.device) for t in engine.module.batch(torch.Generator().manual_seed(step))))
            engine.train()
        if step % 20 == 17:
            engine.save_checkpoint(os.path.join(folder, "checkpoints", "long"), tag=f"step{step}")

    return hook


def recover(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """A step that fails in the background; then the last checkpoint is loaded into the same engine."""
    engine = training.build(case, "tencache", os.path.join(folder, "nvme"))
    close = ModelWeights.close

    def train(steps: int) -> list[str]:
        return training.train(engine, steps, torch.Generator().manual_seed(1), oracle=False)

    def fail(self: ModelWeights, chunk: Chunk) -> None:
        close(self, chunk)
        if len(in_background) > 20:
            raise RuntimeError("made up")

    train(2)
    engine.save_checkpoint(folder, tag="recover")
    result: dict[str, Any] = {"losses": train(3), "errors": []}
    engine.load_checkpoint(folder, tag="recover")
    in_background.clear()
    ModelWeights.close = fail
    uses: list[Callable[[], Any]] = [lambda: train(3), engine.step, lambda: engine.save_checkpoint(folder, tag="wrong")]
    for use in uses:
        try:
            use()
        except TenCacheError as error:
            result["errors"].append(str(error))
    ModelWeights.close = close
    engine.load_checkpoint(folder, tag="recover")
    result["again"] = train(3)
    engine.destroy()
    return result


def run_behind_update(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """The model's last weight is held back in each step until the next forward pass is in the middle of the model."""
    engine = training.build(case, "tencache", os.path.join(folder, "nvme"))
    in_the_middle, found = threading.Event(), []
    last_weight = max(param.ds_id for param in engine.module.parameters())
    finish = ChunkedUpdate._finish
    gathers, passes = 0, []
    gather_name = "_PartitionedParameterCoordinator__all_gather_params_"
    gather = getattr(TenCacheCoordinator, gather_name)

    def counted(self: TenCacheCoordinator, params: Any, forward: bool, **options: Any) -> None:
        nonlocal gathers
        gathers += 1
        gather(self, params, forward, **options)

    def held(self: ChunkedUpdate, begun: Any, finished: Any) -> None:
        chunk = begun[0].used.chunk
        behind = threading.current_thread().name.startswith("tencache-update")
        if behind and last_weight in engine.optimizer._chunked_step._weights.keys_of(chunk):
            found.append(in_the_middle.wait(5))
        finish(self, begun, finished)

    layers = engine.module.layers
    layers[len(layers) // 2].register_forward_pre_hook(lambda *_: in_the_middle.set())
    ChunkedUpdate._finish = held  # type: ignore[method-assign]
    setattr(TenCacheCoordinator, gather_name, counted)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        gathers = 0
        loss = engine(*(tensor.to(engine.device) for tensor in engine.module.batch(generator)))
        passes.append(gathers)
        engine.backward(loss)
        in_the_middle.clear()
        engine.step()
        tencache_ds.stats(engine, wait=False)
    in_the_middle.set()
    engine.destroy()
    ChunkedUpdate._finish = finish  # type: ignore[method-assign]
    setattr(TenCacheCoordinator, gather_name, gather)
    return {"in_the_middle": found, "gathers": passes}


def run(case: dict[str, Any], engine: str, folder: str, rank: int) -> dict[str, Any]:
    global each_delayed_s
    in_background.clear()
    each_delayed_s = case.get("delay_s", 0.0)
    if case.get("model") == "deep":
        return run_behind_update(case, folder)
    if "recovers" in case:
        return recover(case, folder)
    if case.get("action") == "be_killed":
        be_killed(case, folder)
    if "scenario" in case:
        result = user_api_cases.run(case, engine, folder, rank)
    elif "action" in case:
        result = checkpoint_cases.run(case, engine, folder, rank)
    else:
        result = training.run_case(case, engine, folder, rank, evaluate_and_save(folder) if case.get("long") else None)
        if engine == "tencache":
            result["in_background"] = len(in_background)
            result["waited_s"] = result["stats"]["total"]["stall_seconds"][Stall.UPDATE]
        return result
    return {"result": result, "in_background": len(in_background)}


if __name__ == "__main__":
    training.config_for = config_for
    ChunkedUpdate._finish = slow_finish
    training.main(run)
