# SPDX-License-Identifier: Apache-2.0
"""Models whose parameters differ in dtype, and get to DeepSpeed in different ways: a base with adapters beside it.

A case says which dtypes there are, which part is trained, and when the adapters are added to the base. Steps are few;
what is compared are losses, gathered weights with their dtypes, a 16-bit model as it is saved, and, where the case says
so, a run that goes on from a checkpoint, which may be stock's or be loaded by stock.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import deepspeed
import gpu_memory_cases
import torch
import training
from deepspeed.accelerator import get_accelerator
from torch import nn

from tencache_ds.placement import step_observer

NOT_FOR_STOCK = {"number", "tencache", "offload_param", "checkpoint", "device_memory"}
DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "uint8": torch.uint8,
}  # fmt: skip
WIDTH = 256
STEPS = 4
stock_results: dict[str, dict[str, Any]] = {}


class Part(nn.Module):
    """A matrix that computes in its own dtype, whichever that is while it is gathered; 8-bit ones are unpacked."""

    def __init__(self, n_out: int, n_in: int, dtype: torch.dtype, *, trained: bool) -> None:
        super().__init__()
        value = torch.randn(n_out, n_in) / n_in**0.5
        packed = (value * 256 + 128).clamp(0, 255) if dtype is torch.uint8 else value
        self.weight = nn.Parameter(packed.to(dtype), requires_grad=trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if weight.dtype is torch.uint8:
            weight = (weight.float() - 128) / 256
        return nn.functional.linear(x.to(weight.dtype), weight)


class Adapter(nn.Module):
    """Adapter of low rank, with a weight of its own that is small enough to stay gathered."""

    def __init__(self, rank: int, dtype: torch.dtype, *, trained: bool) -> None:
        super().__init__()
        self.down = Part(rank, WIDTH, dtype, trained=trained)
        self.up = Part(WIDTH, rank, dtype, trained=trained)
        self.scale = Part(1, WIDTH, dtype, trained=trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (
            x if self.down.weight.dtype is torch.uint8 else x.to(self.down.weight.dtype)
        )  # as PEFT does, before the weight is gathered
        return self.up(self.down(x)) * torch.sigmoid(self.scale(x).float())


class Adapted(nn.Module):
    def __init__(self, base: nn.ModuleList, adapters: nn.ModuleList) -> None:
        super().__init__()
        self.base = base
        self.adapters = adapters

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        x = torch.randn(4, WIDTH, generator=generator)
        return x, x.roll(1, dims=1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer, adapter in zip(self.base, self.adapters, strict=True):
            x = x + torch.tanh(layer(x).float() + adapter(x).float())
        return nn.functional.mse_loss(x, y.to(x.device))


def base_of(case: dict[str, Any]) -> nn.ModuleList:
    dtype, trained = DTYPES[case["base"]], case["trains"] in ("base", "both")
    return nn.ModuleList(Part(WIDTH, WIDTH, dtype, trained=trained) for _ in range(3))


def adapters_of(case: dict[str, Any]) -> nn.ModuleList:
    dtype, trained = DTYPES[case["adapter"]], case["trains"] in ("adapters", "both")
    return nn.ModuleList(Adapter(case["adapter_rank"], dtype, trained=trained) for _ in range(3))


def model_of(case: dict[str, Any], config: dict[str, Any]) -> Adapted:
    """The model, whose parameters DeepSpeed partitions now or later."""
    when = case["added"]
    if when in ("whole", "converted", "before"):
        adapters = adapters_of(case)
    if when in ("whole", "converted"):
        model = Adapted(base_of(case), adapters)
        if when == "converted":
            deepspeed.zero.Init(module=model, config_dict_or_path=copy.deepcopy(config))
        return model
    with deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(config)):
        base = base_of(case)
        if when in ("inside", "recast"):
            adapters = adapters_of(case)
    if when == "after":
        adapters = adapters_of(case)
    if when == "recast":  # as PEFT and Module.float() do, of which partitioned weights notice nothing
        for param in adapters.parameters():
            param.data = param.data.to(DTYPES[case["adapter"]])
    return Adapted(base, adapters)


def build(case: dict[str, Any], engine: str, nvme: str) -> Any:
    config = training.config_for(case, engine, nvme)
    torch.manual_seed(case.get("seed", 7))
    model = model_of(case, config)
    if case["trains"] == "nothing":
        del config["optimizer"], config["zero_optimization"]["offload_optimizer"]
        return deepspeed.initialize(model=model, config=config)[0]
    optimizer = training.optimizer_for(case, model)
    if optimizer is not None:
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    parts = [model.base, model.adapters] if case["first"] == "base" else [model.adapters, model.base]
    trained = [[param for param in part.parameters() if param.requires_grad] for part in parts]
    groups = [{"params": params, "weight_decay": 0.1 * n} for n, params in enumerate(trained) if params]
    if not case["groups"]:
        groups = [{"params": [param for params in trained for param in params]}]
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def look_at(engine: Any) -> dict[str, Any]:
    """The weights as a user sees them."""
    dtypes = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            dtypes[name] = str(param.dtype)
    saved = engine._zero3_consolidated_16bit_state_dict() or {}
    return {
        "weights": training.digests(engine.module), "dtypes": dtypes,
        "saved": {name: [str(value.dtype), training.digest(value)] for name, value in saved.items()},
    }  # fmt: skip


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    number = case["number"]
    if engine_name == "stock":
        # The oracle never stops, but where stock resumes: of what TenCache has saved as of what it has saved itself.
        resumes = {key: value for key, value in case.items() if (key, value) == ("checkpoint", "to stock")}
        case = {key: value for key, value in case.items() if key not in NOT_FOR_STOCK} | resumes
    key = str(sorted(case.items())) if engine_name == "stock" else ""
    if key in stock_results:
        return stock_results[key]
    nvme, path = os.path.join(folder, "nvme"), os.path.join(folder, f"checkpoint-{engine_name}-{number}")
    generator = torch.Generator().manual_seed(1000 + rank)
    checkpoint = case.get("checkpoint")
    name = "stock" if checkpoint == "from stock" else engine_name
    engine = build(case, name, nvme)
    at_first: dict[str, Any] = {"shown": {name: str(param.dtype) for name, param in engine.module.named_parameters()}}
    if case["accumulation"] == 2:  # after which parameters show other dtypes
        at_first |= look_at(engine)
    if case["trains"] == "nothing":
        losses = predict(engine, generator)
        result = {"losses": losses, "at first": at_first, "at last": look_at(engine), "facts": {}}
        engine.destroy()
        return result
    losses = training.train(engine, STEPS // 2, generator, oracle=name == "stock")
    if checkpoint is not None:
        engine.save_checkpoint(path)
        engine.destroy()
        name = "stock" if checkpoint == "to stock" else engine_name
        engine = build(case | {"seed": 99}, name, nvme)
        if engine.load_checkpoint(path)[0] is None:
            raise RuntimeError(f"nothing was loaded from {path}")
    losses += training.train(engine, STEPS - STEPS // 2, generator, oracle=name == "stock")
    result = {"losses": losses, "at first": at_first, "at last": look_at(engine)}
    result["facts"] = facts_of(engine) if name == "tencache" else {}
    engine.destroy()
    if key:
        stock_results[key] = result
    return result


@torch.no_grad()
def predict(engine: Any, generator: torch.Generator) -> list[str]:
    """Losses of an engine without optimizer."""
    engine.eval()
    batches = [[part.to(engine.device) for part in engine.module.batch(generator)] for _ in range(STEPS)]
    return [float(engine(*batch)).hex() for batch in batches]


def facts_of(engine: Any) -> dict[str, Any]:
    """Where TenCache has the weights."""
    homes = [home for part in engine.optimizer.tencache.all() for home in part.weights.homes.all()]
    return {
        "in the tier": len(homes), "on NVMe": sum(home.on_nvme for home in homes),
        "in GPU memory": engine.optimizer.tencache.stats().gpu_weight_nbytes,
    }  # fmt: skip


if __name__ == "__main__":
    training.config_for = gpu_memory_cases.config_for
    step_observer.MOST_STEPS = 1
    if get_accelerator().is_synchronized_device():
        gpu_memory_cases.use_ordinary_memory()
    training.main(run)
