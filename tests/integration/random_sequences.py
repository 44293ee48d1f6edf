# SPDX-License-Identifier: Apache-2.0
"""Random sequences of what scripts do between steps and instead of them, with stock and with TenCache: what each action
gives is compared.

Weights, gradients and state lie in any tier; without a GPU ordinary memory stands in for its memory (see
``gpu_memory_cases.py``), and chunks take a random time longer where they are updated behind a pass. What stock CPU
offload itself fails at, as a weight that is gathered while a pass has left it in use, ends a sequence.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import deepspeed
import gpu_memory_cases
import torch
import training
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
)
from torch import nn

import tencache_ds
from tencache_ds.errors import TenCacheError

N_ACTIONS = 25
N_FIRST_STEPS = 5
"""Places are decided in them."""

NOT_COMPARED = "not compared"


class Script:
    """One engine and what a script does with it.

    Args:
        engine: of DeepSpeed.
        seed: of the choices, the same on every rank and for both engines.
        rank: of this process: batches differ.
        stock: whether it is the oracle.
        folder: for checkpoints.
    """

    def __init__(self, engine: Any, seed: int, rank: int, folder: str, *, stock: bool) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(1000 * seed + rank)
        self._rank = rank
        self._folder = folder
        self._stock = stock

    def step(self) -> Any:
        return training.train(self._engine, 1, self._generator, oracle=self._stock)

    def evaluate(self) -> Any:
        self._engine.eval()
        with torch.no_grad():
            losses = [self._engine(*self._batch()).item().hex() for _ in range(self._random.choice((1, 2)))]
        self._engine.train()
        return losses

    def evaluate_the_module(self) -> Any:
        with torch.no_grad():
            return self._engine.module(*self._batch()).item().hex()

    def evaluate_in_inference_mode(self) -> Any:
        with torch.inference_mode():
            return self._engine(*self._batch()).item().hex()

    def call_a_layer(self) -> Any:
        layer = self._layer()
        with torch.no_grad():
            return training.digest(layer(self._input(layer)))

    def use_a_weight(self) -> Any:
        layer = self._layer()
        with torch.no_grad(), deepspeed.zero.GatheredParameters([layer.weight]):
            return training.digest(nn.functional.linear(self._input(layer), layer.weight))

    def gather(self) -> Any:
        param = self._param()
        with deepspeed.zero.GatheredParameters([param]):
            return training.digest(param.data)

    def gather_everything(self) -> Any:
        return list(training.digests(self._engine.module).values())

    def change(self) -> Any:
        param, factor = self._param(), self._random.choice((0.5, 0.99, 1.01))
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            if self._rank == 0:
                param.data.mul_(factor)

    def read_master(self) -> Any:
        return training.digest(safe_get_full_fp32_param(self._param()))

    def read_part_of_master(self) -> Any:
        return training.digest(safe_get_local_fp32_param(self._param()))

    def read_moment(self) -> Any:
        moment = safe_get_full_optimizer_state(self._param(), "exp_avg")
        return None if moment is None else training.digest(moment)

    def write_master(self) -> Any:
        param = self._param()
        safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) * 0.9)

    def consolidate(self) -> Any:
        weights = self._engine._zero3_consolidated_16bit_state_dict()
        return None if not weights else [training.digest(value) for value in weights.values()]

    def read_shard(self) -> Any:
        try:
            return training.digest(self._param().ds_tensor.detach().clone())
        except TenCacheError as error:
            if "NVMe" in str(error):
                return NOT_COMPARED
            raise

    def change_learning_rate(self) -> Any:
        factor = self._random.choice((0.5, 2.0))
        for group in self._engine.optimizer.param_groups:
            group["lr"] *= factor

    def offload(self) -> Any:
        if not self._stock:
            self._engine.offload_states()

    def reload(self) -> Any:
        if not self._stock:
            self._engine.reload_states()

    def release(self) -> Any:
        if not self._stock:
            with tencache_ds.release_gpu_memory(self._engine):
                pass

    def save(self) -> Any:
        self._engine.save_checkpoint(self._folder, tag="same")

    def _batch(self) -> list[torch.Tensor]:
        return [tensor.to(self._engine.device) for tensor in self._engine.module.batch(self._generator)]

    def _param(self) -> Any:
        return self._random.choice(list(self._engine.module.parameters()))

    def _layer(self) -> Any:
        return self._random.choice([each for each in self._engine.module.modules() if isinstance(each, nn.Linear)])

    def _input(self, layer: Any) -> torch.Tensor:
        values = torch.randn(3, layer.in_features, generator=self._generator)
        return values.to(self._engine.device, torch.bfloat16)


ACTIONS: dict[str, Callable[[Script], Any]] = {
    name: function for name, function in vars(Script).items() if not name.startswith("_")
}
MODELS = ("mlp", "tied", "external", "llama", "gpt2", "llama_nonreentrant", "post_norm", "moe_leaf", "llama_reentrant")


def case_of(seed: int) -> dict[str, Any]:
    """Model, places and options."""
    choices = random.Random(seed)
    case: dict[str, Any] = {
        "model": choices.choice(MODELS),
        "accumulation": choices.choice((1, 1, 2)),
        "clipping": choices.choice((0.0, 0.1)),
        "persistence": choices.choice((0, 1000, 10**5)),
        "sub_group_size": choices.choice((300_000, 10**9, 50_000)),
        "device_memory": choices.choice(("1MiB", "2MiB", "3MiB", "4MiB", "5MiB", "8MiB")),
        "copy_rate": choices.choice((1e6, 1e7, 1e10)),
        "zero": {"stage3_gather_16bit_weights_on_model_save": True},
        "tencache": {
            "chunk_size": choices.choice((2**16, 2**18)),
            "split_master": choices.choice((True, False)),
            "host_memory": choices.choice((0, None, "16MiB")),
            "host_path": choices.choice((True, True, False)),
        },
    }
    places = {
        "offload_param": choices.choice(("cpu", "nvme", "none")),
        "offload_optimizer": choices.choice(("cpu", "nvme")),
    }
    return case | {key: place for key, place in places.items() if place != "nvme"}


def plan_of(seed: int) -> list[str]:
    """Names of the actions, two of five of them steps."""
    choices = random.Random(seed)
    others = [name for name in ACTIONS if name != "step"]
    return ["step"] * N_FIRST_STEPS + [
        "step" if choices.random() < 0.4 else choices.choice(others) for _ in range(N_ACTIONS - N_FIRST_STEPS)
    ]


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    seed, stock = case["seed"], engine_name == "stock"
    case = case_of(seed) | {"seed": seed}
    gpu_memory_cases.CAPACITY["copy_rate"] = case["copy_rate"]
    if stock:
        case = {key: value for key, value in case.items() if key not in gpu_memory_cases.NOT_FOR_STOCK}
    engine = training.build(case, engine_name, f"{folder}/nvme")
    script = Script(engine, seed, rank, f"{folder}/checkpoints", stock=stock)
    result: dict[str, Any] = {"case": case, "log": [], "failed": ""}
    try:
        for name in [*plan_of(seed), "gather_everything"]:
            result["log"].append([name, ACTIONS[name](script)])
    except Exception as error:  # of stock's: the comparison ends here
        result["failed"] = f"{name}: {error!r}"[:500]
    with contextlib.suppress(Exception) if result["failed"] else contextlib.nullcontext():
        engine.destroy()
    return result


if __name__ == "__main__":
    gpu_memory_cases.prepare()
    gpu_memory_cases.delays_s = (0.0, 0.001, 0.004, 0.01)
    training.main(run, keeps=lambda case: False)
