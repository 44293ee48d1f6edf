# SPDX-License-Identifier: Apache-2.0
"""What scripts do with a DeepSpeed engine besides training: one scenario per case, run like ``training.py``.

Each scenario returns everything a user would see; ``test_user_api.py`` compares it between the engines.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import deepspeed
import torch
import training
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from models import MODELS, Mlp
from threadpoolctl import ThreadpoolController
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from training import build, digests, train

from tencache_ds.errors import TenCacheError
from tencache_ds.integration.watched_tensors import values_of


def value_of(tensor: torch.Tensor | None) -> list[Any] | None:
    """A tensor as an exact and readable value: dtype, shape, sum and norm of its float64 elements."""
    if tensor is None:
        return None
    wide = tensor.detach().double().cpu()
    weighted = wide.flatten() * torch.arange(1, wide.numel() + 1)
    return [list(tensor.shape), wide.sum().item().hex(), weighted.sum().item().hex()]


class Scenario:
    """An engine of the kind under test, its batches and the losses so far."""

    more: ClassVar[dict[str, Any]] = {}
    """What this run adds to every case."""

    def __init__(self, engine_name: str, folder: str, rank: int, **case: Any) -> None:
        edit = case.pop("edit", None)
        self.name = engine_name
        self.folder = folder
        self.engine = build({"model": "mlp"} | self.more | case, engine_name, os.path.join(folder, "nvme"), edit)
        self.generator = torch.Generator().manual_seed(1000 + rank)
        self.seen: dict[str, Any] = {"losses": []}

    def initialize_again(self, **case: Any) -> None:
        """Another DeepSpeed engine for the same model."""
        model = self.engine.module
        config = training.config_for(case, self.name, os.path.join(self.folder, "nvme"))
        trained = [param for param in model.parameters() if param.requires_grad]
        self.engine = deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]

    def read_model(self, what: str) -> None:
        """Everything that can be read of a model without an engine."""
        model = self.engine.module
        self.seen[f"weights {what}"] = digests(model)
        with deepspeed.zero.GatheredParameters(list(model.parameters())), torch.no_grad():
            self.seen[f"forward {what}"] = float(model(*self.batch())).hex()
        kept = self.engine._zero3_consolidated_16bit_state_dict() or {}
        self.seen[f"state dict {what}"] = {name: value_of(value) for name, value in kept.items()}

    def train(self, steps: int = 3) -> None:
        self.seen["losses"] += train(self.engine, steps, self.generator, oracle=self.name == "stock")

    def backward(self, *, step: bool = True, batch: Any = None) -> None:
        loss = self.engine(*(self.batch() if batch is None else [tensor.to(self.engine.device) for tensor in batch]))
        self.seen["losses"].append(float(loss.detach()).hex())
        self.engine.backward(loss)
        if step:
            self.engine.step()
            if self.name == "stock":
                training.zero_gradients(self.engine)

    def batch(self) -> list[torch.Tensor]:
        return [tensor.to(self.engine.device) for tensor in self.engine.module.batch(self.generator)]

    def params(self) -> list[tuple[str, Any]]:
        return [(name, param) for name, param in self.engine.module.named_parameters() if param.requires_grad]

    def end(self) -> dict[str, Any]:
        self.seen["weights"] = digests(self.engine.module)
        self.engine.destroy()
        return self.seen


def read_state(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    s = Scenario(engine_name, folder, rank)
    s.seen["master_at_start"] = {n: value_of(safe_get_full_fp32_param(p)) for n, p in s.params()}
    s.train()
    s.backward(step=False)
    s.seen["gradients"] = {n: value_of(safe_get_full_grad(p)) for n, p in s.params()}
    s.seen["local_gradients"] = {n: value_of(safe_get_local_grad(p)) for n, p in s.params()}
    s.engine.step()
    if engine_name == "stock":
        training.zero_gradients(s.engine)
    for n, p in s.params():
        s.seen[f"master {n}"] = value_of(safe_get_full_fp32_param(p))
        s.seen[f"local master {n}"] = value_of(safe_get_local_fp32_param(p))
        for key in ("exp_avg", "exp_avg_sq"):
            s.seen[f"{key} {n}"] = value_of(safe_get_full_optimizer_state(p, key))
            s.seen[f"local {key} {n}"] = value_of(safe_get_local_optimizer_state(p, key))
    s.train()
    return s.end()


def write_full_state(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    s = Scenario(engine_name, folder, rank)
    s.train()
    for _, p in s.params():
        safe_set_full_fp32_param(p, safe_get_full_fp32_param(p) * 0.75)
        safe_set_full_optimizer_state(p, safe_get_full_optimizer_state(p, "exp_avg") + 0.01, "exp_avg")
        safe_set_full_optimizer_state(p, safe_get_full_optimizer_state(p, "exp_avg_sq") * 2, "exp_avg_sq")
    s.seen["read_back"] = {n: value_of(safe_get_full_fp32_param(p)) for n, p in s.params()}
    s.train()
    s.backward(step=False)
    for _, p in s.params():
        safe_set_full_grad(p, safe_get_full_grad(p) * 3)
    s.seen["gradients"] = {n: value_of(safe_get_full_grad(p)) for n, p in s.params()}
    s.engine.step()
    if engine_name == "stock":
        training.zero_gradients(s.engine)
    s.train()
    return s.end()


def momentum_of_muon(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    s = Scenario(engine_name, folder, rank, muon=True)
    s.train()
    for n, p in s.params():
        kind = "momentum_buffer" if p.use_muon else "exp_avg"
        s.seen[f"{kind} {n}"] = value_of(safe_get_full_optimizer_state(p, kind))
        safe_set_full_optimizer_state(p, safe_get_full_optimizer_state(p, kind) * 0.5, kind)
        safe_set_local_optimizer_state(p, safe_get_local_optimizer_state(p, kind) + 0.01, kind)
    s.train()
    return s.end()


def write_local_state(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    s = Scenario(engine_name, folder, rank, clipping=0.1)
    s.train()
    s.seen["shapes"] = {n: list(p.ds_tensor.shape) for n, p in s.params()}
    first = s.engine.module.layers[0].weight
    safe_set_local_fp32_param(first, torch.full(first.ds_tensor.shape, 0.125))  # as DeepSpeed's documentation does it
    s.train()
    for _, p in s.params():
        safe_set_local_fp32_param(p, safe_get_local_fp32_param(p) * 0.75)
        safe_set_local_optimizer_state(p, safe_get_local_optimizer_state(p, "exp_avg") + 0.01, "exp_avg")
    s.train()
    s.backward(step=False)
    for _, p in s.params():
        safe_set_local_grad(p, safe_get_local_grad(p) * 3)
    s.engine.step()
    if engine_name == "stock":
        training.zero_gradients(s.engine)
    s.train()
    return s.end()


def gather_before_and_between(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    def edit(model: Any) -> None:
        with deepspeed.zero.GatheredParameters([model.layers[1].weight, model.layers[1].bias], modifier_rank=0):
            if rank == 0:
                model.layers[1].weight.data.mul_(0.5)
                model.layers[1].bias.data.fill_(0.25)

    s = Scenario(engine_name, folder, rank, edit=edit)
    s.seen["initial"] = digests(s.engine.module)
    s.train()
    layers = s.engine.module.layers
    with deepspeed.zero.GatheredParameters([layers[2].weight, layers[0].weight], modifier_rank=0):
        s.seen["between"] = value_of(layers[2].weight.data)
        if rank == 0:
            layers[2].weight.data.add_(0.125)
            layers[0].weight.data.zero_()
    s.engine.optimizer.refresh_fp32_params()
    s.seen["changed"] = digests(s.engine.module)
    s.train()
    with deepspeed.zero.GatheredParameters([layers[3].weight]):  # only read
        s.seen["read"] = value_of(layers[3].weight.data)
    s.train()
    return s.end()


def gather_within_passes(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """Weights are gathered, and released again, while others are being used: in a forward pass, in a backward pass,
    between the two, and between two forward passes of one backward pass. Not so in stock, which cannot release what it
    has begun to fetch."""
    s = Scenario(engine_name, folder, rank)
    layers = s.engine.module.layers

    def read(*params: Any) -> None:
        if engine_name != "stock":
            with deepspeed.zero.GatheredParameters(list(params)):
                assert all(param.data.shape == param.ds_shape for param in params)

    def read_in_backward(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _: read(layers[1].weight, layers[2].weight, layers[3].weight))

    s.train(4)
    for _ in range(2):
        hooks = [
            layers[2].register_forward_pre_hook(lambda *_: read(layers[1].weight, layers[2].weight, layers[3].bias)),
            layers[2].register_forward_hook(read_in_backward),
        ]
        s.backward()
        for hook in hooks:
            hook.remove()
        loss = s.engine(*s.batch())
        read(layers[1].weight, layers[2].weight)
        s.engine.backward(loss)
        s.engine.step()
        if engine_name == "stock":
            training.zero_gradients(s.engine)
        first = s.engine(*s.batch())
        read(layers[3].weight)
        second = s.engine(*s.batch())
        s.engine.backward(first + second)
        s.engine.step()
        if engine_name == "stock":
            training.zero_gradients(s.engine)
        s.train()
    return s.end()


def forward_inside_gathered(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """A forward (or a whole step) inside the context releases what the context has gathered, and the edit with it."""

    def freeze(model: Any) -> None:
        model.layers[3].weight.requires_grad_(False)

    s = Scenario(engine_name, folder, rank, edit=freeze)
    s.train()
    layers = s.engine.module.layers
    groups = [[layers[1].weight], [layers[3].weight]]
    several = [layer.weight for layer in layers[1:]]
    if deepspeed.comm.get_world_size() > 1:
        groups.append(several)  # on one rank with a CPU accelerator stock shows the shards themselves, not copies
    for index, gathered in enumerate(groups):
        for edited in ("before", "after"):
            for inside in ("forward", "step"):
                with deepspeed.zero.GatheredParameters(gathered, modifier_rank=0):
                    if rank == 0 and edited == "before":
                        for param in gathered:
                            param.data.mul_(0.5)
                    s.backward() if inside == "step" else s.engine(*s.batch())
                    s.seen[f"{inside} {edited} {index}"] = [list(param.shape) for param in gathered]
                    if rank == 0 and edited == "after":
                        for param in gathered:
                            param.data.mul_(0.5)
                s.seen[f"after {inside} {edited} {index}"] = digests(s.engine.module)
    with deepspeed.zero.GatheredParameters(several, modifier_rank=0):
        for param in several if rank == 0 else []:
            param.data.mul_(0.75)
    s.engine.optimizer.refresh_fp32_params()
    s.seen["changed"] = digests(s.engine.module)
    s.train()
    return s.end()


def masters_of_changed_weights(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """The optimizer does not notice that somebody changes a weight, and overwrites it with the next step."""
    s = Scenario(engine_name, folder, rank)
    s.train()
    layers = s.engine.module.layers
    for name, param in (("weight", layers[1].weight), ("bias", layers[2].bias)):
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            if rank == 0:
                param.data.add_(0.125)
            s.seen[f"inside, {name}"] = value_of(safe_get_full_fp32_param(param))
    s.seen["after"] = {n: value_of(safe_get_full_fp32_param(p)) for n, p in s.params()}
    s.seen["changed"] = digests(s.engine.module)
    s.train(1)
    s.engine.module.load_state_dict({}, strict=False)
    with deepspeed.zero.GatheredParameters([layers[1].weight], modifier_rank=0):
        pass
    s.seen["then"] = {n: value_of(safe_get_full_fp32_param(p)) for n, p in s.params()}
    s.train()
    return s.end()


def weights_changed_behind_the_back(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    s = Scenario(engine_name, folder, rank, offload_param="cpu")
    s.train()
    s.engine.module.layers[1].weight.ds_tensor.data[3] += 1
    try:
        s.train(1)
        safe_get_full_fp32_param(s.engine.module.layers[0].weight)
    except TenCacheError as error:
        s.seen["refused"] = str(error)
    s.engine.destroy()
    return s.seen


def gathered_and_not_changed(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """What is written to NVMe when weights are gathered by somebody who may change them, and who does not or does."""
    s = Scenario(engine_name, folder, rank, tencache={"host_memory": 0, "chunk_size": 2**16},
                 zero={"stage3_gather_16bit_weights_on_model_save": True})  # fmt: skip
    s.train()
    shard_nbytes = max(param.ds_tensor.ds_numel * 2 for _, param in s.params())
    seen: dict[str, Any] = {"shard_nbytes": shard_nbytes, "written": []}

    def written() -> int:
        training.drain(s.engine)
        return s.engine.optimizer.tencache.stats().total.nbytes["nvme_write"]

    def all_of_them() -> None:
        with deepspeed.zero.GatheredParameters(list(s.engine.module.parameters()), modifier_rank=0):
            pass

    def one_of_them() -> None:
        with deepspeed.zero.GatheredParameters(list(s.engine.module.parameters()), modifier_rank=0):
            if rank == 0:
                s.engine.module.layers[1].weight.data[-1, -1] += 1  # in the last rank's shard

    def saved() -> None:
        s.engine.save_16bit_model(os.path.join(folder, "saved"))

    for use in (all_of_them, saved, one_of_them, all_of_them):
        before = written()
        use()
        seen["written"].append(written() - before)
    s.end()
    return seen


def gather_everything(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    s = Scenario(engine_name, folder, rank, model="llama", smallest_staging=True)
    s.train()
    everything = list(s.engine.module.parameters())
    with deepspeed.zero.GatheredParameters(everything):
        s.seen["everything"] = [value_of(param.data) for param in everything]
    with deepspeed.zero.GatheredParameters(everything, modifier_rank=0):
        if rank == 0:
            for param in everything:
                param.data.mul_(0.9)
    s.engine.optimizer.refresh_fp32_params()
    s.seen["changed"] = digests(s.engine.module)
    s.train()
    return s.end()


def gather_what_is_ahead(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """Weights that DeepSpeed gathers for modules to come. Stock fails with those ("Cannot partition a param in flight",
    "already in registry"), depending on the sizes, unless it releases them first."""
    s = Scenario(engine_name, folder, rank, prefetch=200_000, max_live=10**9, persistence=0)
    model, ahead = s.engine.module, 0

    def now() -> Any:
        nonlocal ahead
        ahead += len(model.ds_inflight_param_registry)
        if s.name == "stock":
            s.engine.optimizer._get_param_coordinator()._clean_inflight_param_registry()
        return digests(model)

    for number in range(3):
        s.train(1)
        s.engine.eval()
        with torch.no_grad():
            s.seen["losses"].append(float(s.engine(*s.batch())).hex())
        s.engine.train()
        s.seen[f"after an evaluation {number}"] = now()
        loss = s.engine(*s.batch())
        s.seen[f"within a pass {number}"] = now()
        s.engine.backward(loss)
        s.engine.step()
        if s.name == "stock":
            training.zero_gradients(s.engine)
    with torch.no_grad():
        s.engine(*s.batch())
    assert ahead or s.name != "stock"
    if s.name == "stock":
        now()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        if rank == 0:
            model.layers[1].weight.data.mul_(0.5)
    s.engine.optimizer.refresh_fp32_params()
    s.train()
    return s.end()


def gathers_that_fail(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """At every point of ``GatheredParameters.__enter__``; stock does the same without the failures."""
    from deepspeed.runtime.zero.partition_parameters import DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR, Init

    from tencache_ds.integration import model_weights

    s = Scenario(engine_name, folder, rank, offload_param="cpu", tencache={"host_memory": "20MiB"})
    s.train()
    params = list(s.engine.module.parameters())
    before = s.seen["before"] = digests(s.engine.module)

    def fail_after(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def fails(*args: Any, **kwargs: Any) -> None:
            plain(*args, **kwargs)
            raise MemoryError("made up")

        setattr(owner, name, fails)
        try:
            for modifier_rank in (None, 0):
                context = deepspeed.zero.GatheredParameters(params, modifier_rank=modifier_rank)
                assert raised(context.__enter__) == "MemoryError: made up", name
                assert {param.ds_status.name for param in params} == {"NOT_AVAILABLE"}, name
                assert not any(param.data.numel() for param in params), name
                assert not any(hasattr(param, DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR) for param in params), name
        finally:
            setattr(owner, name, plain)
        assert digests(s.engine.module) == before

    if s.name == "tencache":
        for owner, name in (
            (Init, "_ensure_availability_of_partitioned_params"),
            (Init, "_allgather_params_coalesced"),
            (Init, "_all_gather"),
            (model_weights.SharedWeights, "gathered"),
        ):
            fail_after(owner, name)
    with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
        inner = deepspeed.zero.GatheredParameters(params[:2], modifier_rank=0)
        s.seen["nested"] = raised(inner.__enter__).partition(":")[0]
        if rank == 0:
            params[0].data.mul_(0.5)
    s.engine.optimizer.refresh_fp32_params()
    s.train()
    return s.end()


def average_of_shards(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """Averages of weights from DeepSpeed's private shards, in several ways, and a change of one."""
    s = Scenario(engine_name, folder, rank)
    params = [param for _, param in s.params()]
    averages = [param.ds_tensor.detach().float().clone() for param in params]
    for number in range(4):
        s.train(1)
        if number == 0:
            for average, param in zip(averages, params, strict=True):
                average.mul_(0.5).add_(param.ds_tensor, alpha=0.5)
        elif number == 1:
            torch._foreach_lerp_(averages, [param.ds_tensor.data.float() for param in params], 0.25)
        elif number == 2:
            for average, param in zip(averages, params, strict=True):
                average.copy_(average * 0.5 + param.ds_tensor.to(torch.float32) * 0.5)
            s.seen["sums"] = [float(param.ds_tensor.float().sum()).hex() for param in params]
        else:
            params[0].ds_tensor.data.mul_(0.5)
            with torch.no_grad():
                params[1].ds_tensor.copy_(torch.ones_like(params[1].ds_tensor))
        s.seen[f"averages {number}"] = [value_of(average) for average in averages]
        with torch.no_grad():
            s.seen["losses"].append(float(s.engine(*s.batch())).hex())
    return s.seen | {"weights": digests(s.engine.module), "end": s.engine.destroy()}


def shards_on_nvme(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    s = Scenario(engine_name, folder, rank, tencache={"gpu_memory": 0})
    s.train(1)
    param = s.engine.module.layers[0].weight
    shard = param.ds_tensor
    uses: list[Callable[[], Any]] = [
        lambda: torch.zeros(1).add_(shard),
        lambda: shard.data,
        lambda: shard.mul_(0.5),
        lambda: shard.float(),
        lambda: shard[0],
        lambda: torch._foreach_lerp_([torch.zeros(shard.shape)], [shard], 0.5),
        lambda: copy.deepcopy(shard),
    ]
    s.seen["errors"] = [raised(use) for use in uses]
    s.seen["shape"], s.seen["dtype"] = list(shard.shape), str(shard.dtype)
    repr(param), repr(shard)
    with deepspeed.zero.GatheredParameters([param]):
        s.seen["gathered"] = value_of(param.data)
    s.train(1)
    return s.end()


def evaluate_between(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    s = Scenario(engine_name, folder, rank, model="llama", accumulation=2)
    (tokens,) = s.engine.module.batch(torch.Generator().manual_seed(4))
    tokens = tokens.to(s.engine.device)
    seen: list[Any] = []
    for _ in range(3):
        s.train(1)
        s.engine.eval()
        with torch.no_grad():
            seen.append(float(s.engine(tokens)).hex())
            for length in range(1, 9):  # as in generation: the same weights again and again, on growing input
                seen.append(value_of(s.engine.module.model(input_ids=tokens[:, :length], use_cache=False).logits))
        seen.append(float(s.engine(tokens).detach()).hex())  # a graph that is never used
        s.engine.train()
        with torch.no_grad():
            seen.append(float(s.engine(tokens)).hex())
    s.seen["evaluations"] = seen
    if engine_name == "tencache":
        check_evaluation_reads_ahead(s.engine, tokens)
    return s.end()


def evaluate_behind_steps(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """At once after a step, with a weight of another module, which nothing has used so before."""
    s = Scenario(engine_name, folder, rank, model="external_in_evaluation")
    s.seen["evaluations"] = []
    s.train(6)
    for _ in range(3):
        s.train(1)
        s.engine.eval()
        with torch.no_grad():
            s.seen["evaluations"].append(float(s.engine(*s.batch())).hex())
        s.engine.train()
    return s.end()


def evaluate_in_inference_mode(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """As Lightning does between steps: what was gathered ahead then is used by a pass with gradients."""
    s = Scenario(engine_name, folder, rank, model="mlp")
    s.seen["evaluations"] = []
    for _ in range(3):
        s.train(2)
        with torch.inference_mode():
            s.seen["evaluations"].append(float(s.engine(*s.batch())).hex())
    s.train(1)
    return s.end()


def check_evaluation_reads_ahead(engine: Any, tokens: torch.Tensor) -> None:
    """Consecutive evaluations have their own order: none begins with a read on demand."""
    import tencache_ds

    engine.eval()
    with torch.no_grad():
        engine(tokens)
        engine(tokens)
        before = tencache_ds.stats(engine).total
        for _ in range(3):
            engine(tokens)
    stats = tencache_ds.stats(engine)
    after = stats.total
    if not stats.stored_nbytes or stats.gpu_weight_nbytes:
        return  # nothing to read
    for kind in ("demand", "late", "prefetched"):
        engine_reads = after.accesses[kind] - before.accesses[kind]
        if (kind == "demand" and engine_reads) or (kind == "prefetched" and not engine_reads):
            raise RuntimeError(f"{engine_reads} weights of evaluations were read as {kind}")
    if after.events["discarded_read"] != before.events["discarded_read"]:
        raise RuntimeError("evaluations read ahead what only a backward pass would need")


class Rows(torch.utils.data.Dataset):
    """Batches made in a data loader's workers, which also look at the model where its weights are in host memory."""

    def __init__(self, model: Any, look: bool) -> None:
        self.model = model
        self.look = look

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Any, list[Any]]:
        seen = [(value_of(p.data), value_of(p.ds_tensor)) for p in self.model.parameters()] if self.look else []
        return self.model.batch(torch.Generator().manual_seed(index)), seen


def data_loader_workers(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """Workers are forked from the training process, anew in every epoch."""
    s = Scenario(engine_name, folder, rank, tencache={"host_memory": "8GiB"})
    rows = Rows(s.engine.module, s.engine.device.type == "cpu")
    loader = torch.utils.data.DataLoader(rows, batch_size=None, num_workers=2, multiprocessing_context="fork")
    s.seen["in_workers"] = []
    for _ in range(2):
        for batch, seen in loader:
            s.seen["in_workers"].append(seen)
            s.backward(batch=batch)
    return s.end()


def two_engines(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for partner, other_name in (("stock", "stock"), ("same", engine_name)):
        first = Scenario(engine_name, folder, rank)
        other = Scenario(other_name, folder, rank, model="tied")
        if partner == "stock":
            seen["class_of_stock"] = type(other.engine.optimizer).__name__
        for _ in range(3):
            first.train(1)
            other.train(2)
        seen[f"beside_{partner}"] = [other.end(), first.end()]
    return seen


def destroy_one_of_two(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    first, second = (Scenario(engine_name, folder, rank, model=model) for model in ("mlp", "tied"))
    first.train()
    second.train()
    result = {"first": first.end()}
    second.train()
    return result | {"second": second.end()}


def second_zero_init(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    s = Scenario(engine_name, folder, rank)
    s.train()
    config = training.config_for({"model": "mlp"}, engine_name, os.path.join(folder, "nvme"))
    with deepspeed.zero.Init(config_dict_or_path=config):
        other = Mlp()
    s.train()
    with deepspeed.zero.GatheredParameters(list(other.parameters())):
        s.seen["other"] = [float(param.detach().double().sum()) != 0 for param in other.parameters()]
    del other
    s.train()
    return s.end()


class TwoParts(torch.nn.Module):
    """Two parts made in separate ``zero.Init`` contexts."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        with deepspeed.zero.Init(config_dict_or_path=config):
            self.first = Mlp(depth=2)
        with deepspeed.zero.Init(config_dict_or_path=config):
            self.second = Mlp(depth=2)

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return self.first.batch(generator)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.first(x, y) + self.second(x, y)


def parts_of_two_zero_inits(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    config = training.config_for({}, engine_name, os.path.join(folder, "nvme"))
    MODELS["two_parts"] = lambda: TwoParts(config)
    s = Scenario(engine_name, folder, rank, model="two_parts", zero_init=False)
    s.train(6)
    everything = list(s.engine.module.parameters())
    with deepspeed.zero.GatheredParameters(everything, modifier_rank=0):
        s.seen["everything"] = [value_of(param.data) for param in everything]
        if rank == 0:
            for param in everything:
                param.data.mul_(0.9)
    s.engine.optimizer.refresh_fp32_params()
    s.train()
    if engine_name == "tencache":
        engines = len(s.engine.optimizer.tencache.all())
        if engines != 2:
            raise RuntimeError(f"expected the engines of two zero.Init contexts, found {engines}")
    return s.end()


def accumulation_by_hand(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    s = Scenario(engine_name, folder, rank, clipping=0.1)
    for _ in range(3):
        for last in (False, False, True):
            s.engine.set_gradient_accumulation_boundary(last)
            s.backward(step=False)
        s.engine.step()
        if engine_name == "stock":
            training.zero_gradients(s.engine)
    return s.end()


def accumulation_unmanaged(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    config = {"managed_gradient_accumulation": False}
    s = Scenario(engine_name, folder, rank, model="random_skip", clipping=0.1, config=config)
    for count in (1, 3, 2, 2):
        for _ in range(count):
            s.backward(step=False)
        s.engine.step()
        if engine_name == "stock":
            training.zero_gradients(s.engine)
    return s.end()


def backward_of_the_user(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    s = Scenario(engine_name, folder, rank)
    for _ in range(4):
        loss = s.engine(*s.batch())
        s.seen["losses"].append(float(loss.detach()).hex())
        s.engine.scale(loss).backward()
        s.engine.step()
        if engine_name == "stock":
            training.zero_gradients(s.engine)
    return s.end()


def evaluation_without_optimizer(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    config = training.config_for({"model": "llama"}, engine_name, os.path.join(folder, "nvme"))
    del config["optimizer"], config["zero_optimization"]["offload_optimizer"]
    torch.manual_seed(7)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = MODELS["llama"]()
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.eval()
    (tokens,) = engine.module.batch(torch.Generator().manual_seed(4))
    tokens = tokens.to(engine.device)
    with torch.no_grad():
        losses = [float(engine(tokens)).hex() for _ in range(4)]
    if engine_name == "tencache":
        import tencache_ds

        accesses = tencache_ds.stats(engine).total.accesses
        if accesses["prefetched"] + accesses["late"] <= accesses["demand"]:
            raise RuntimeError(f"weights should be read ahead: {accesses}")
    kept = {name: value.clone() for name, value in (engine._zero3_consolidated_16bit_state_dict() or {}).items()}
    engine.destroy()
    return {"losses": losses, "weights": {name: value_of(value) for name, value in kept.items()}}


def step_hooks(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """Hooks around ``optimizer.step()`` look at weights, gradients and states, and change them."""
    s = Scenario(engine_name, folder, rank)
    optimizer = s.engine.optimizer.optimizer
    seen: list[Any] = []
    s.seen["hooks"] = seen

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            seen.append(["before", len(args), group["lr"], *[(value_of(p), value_of(p.grad)) for p in group["params"]]])
            group["lr"] *= 0.99
            for p in group["params"]:
                p.grad.mul_(0.5)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            state = optimizer.state[p]
            seen.append(["after", value_of(p), state["step"], value_of(state["exp_avg"]), sorted(state)])
            p.data.mul_(0.999)
            state["exp_avg_sq"].mul_(1.01)

    s.train(2)
    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    s.train(2)
    for handle in handles:
        handle.remove()
    s.train(2)
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda *args: seen.append("global"))
        s.train(1)
        handle.remove()
    stock_step = optimizer.step

    def step_with_pruning(*args: Any, **kwargs: Any) -> None:
        stock_step(*args, **kwargs)
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            p.data[::2] = 0

    optimizer.step = step_with_pruning
    s.train(1)
    del optimizer.step
    s.train(1)
    return s.end()


def scheduler_of_torch(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    s = Scenario(engine_name, folder, rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler = torch.optim.lr_scheduler.LambdaLR(s.engine.optimizer.optimizer, lambda step: 0.5**step)
        for _ in range(3):
            s.train(1)
            scheduler.step()
            s.seen[f"lr {scheduler.last_epoch}"] = s.engine.get_lr()
    s.seen["warnings"] = [str(warning.message) for warning in caught if "lr_scheduler" in str(warning.message)]
    return s.end()


def io_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())


def train_destroy_train(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """``destroy()`` ends an engine, not its model: it can be read, changed, and given to DeepSpeed again."""
    seen = {}
    in_ram = {"tencache": {"host_memory": 2**30}}
    for place, options in (("NVMe", {}), ("RAM", in_ram), ("RAM without NVMe", {"offload_param": "cpu"})):
        s = Scenario(engine_name, folder, rank, **options)
        s.train()
        s.engine.destroy()
        s.engine.destroy()
        s.read_model("after the first")
        with deepspeed.zero.GatheredParameters([s.engine.module.layers[1].weight], modifier_rank=0):
            if rank == 0:
                s.engine.module.layers[1].weight.data.mul_(0.5)
        s.initialize_again(**options, sub_group_size=100_000)
        s.train()
        s.engine(*s.batch())  # ends between forward and backward, weights in use
        s.engine.destroy()
        s.read_model("after the second")
        s.initialize_again(**options, offload_optimizer="cpu")
        s.train()
        seen[place] = s.end()
        s.read_model("after the third")
    return seen


def actor_and_critic(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """Models made in one ``zero.Init`` context, two with an engine each, one that is only looked at."""
    seen: dict[str, Any] = {}
    for place, case in (
        ("NVMe", {}),
        ("RAM", {"tencache": {"host_memory": 2**30}}),
        ("optimizer in RAM", {"offload_optimizer": "cpu"}),
    ):
        config = training.config_for(case, engine_name, os.path.join(folder, "nvme"))
        torch.manual_seed(7)
        with deepspeed.zero.Init(config_dict_or_path=config):
            models = [Mlp(), Mlp(depth=3), Mlp(depth=2)]
        engines = [
            deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
            for model in models[:2]
        ]
        generator = torch.Generator().manual_seed(1000 + rank)

        def turn(engine: Any, generator: torch.Generator = generator) -> list[str]:
            return train(engine, 2, generator, oracle=engine_name == "stock")

        losses = [turn(engine) for _ in range(3) for engine in engines]
        engines[0].destroy()
        losses.append(turn(engines[1]))
        seen[place] = losses, [digests(model) for model in models]
        del models[0], engines[0]
        gc.collect()
        losses.append(turn(engines[0]))
        engines[0].destroy()
        seen[f"{place}, later"] = losses, [digests(model) for model in models]
    return seen


class Head(torch.nn.Module):
    """Its own layer on a shared backbone."""

    def __init__(self, backbone: Mlp) -> None:
        super().__init__()
        self.backbone = backbone
        self.own = torch.nn.Linear(512, 512)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.backbone(self.own(x.to(self.own.weight.dtype)), y)


def two_heads_of_a_frozen_backbone(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    case = {"prefetch": 0}  # an engine's prefetch does not know of the other engine
    config = training.config_for(case, engine_name, os.path.join(folder, "nvme"))
    torch.manual_seed(7)
    with deepspeed.zero.Init(config_dict_or_path=config):
        backbone = Mlp(depth=3)
        heads = [Head(backbone), Head(backbone)]
    backbone.requires_grad_(False)
    engines = [
        deepspeed.initialize(model=head, model_parameters=list(head.own.parameters()), config=config)[0]
        for head in heads
    ]
    generator = torch.Generator().manual_seed(1000 + rank)
    batch = [value.to(engines[0].device) for value in backbone.batch(generator)]
    losses = []
    for engine in (*engines, *engines):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()).hex())
    engines[0].destroy()
    with torch.no_grad():
        losses.append(float(engines[1](*batch)).hex())
    seen = {"losses": losses, "weights": [digests(head) for head in heads]}
    engines[1].destroy()
    return seen


def destroy(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """What is there before, while and after a model has an engine, and after the model is gone, on NVMe and in RAM."""
    return {
        "NVMe": life_of_an_engine(engine_name, folder, rank),
        "RAM": life_of_an_engine(engine_name, folder, rank, tencache={"host_memory": "3MiB"}),  # for the weights alone
        "interrupted": life_of_an_engine(engine_name, folder, rank, interrupt=True),
    }


class Interrupted(Exception):
    pass


def interrupt_forward(s: Scenario, layer: int = 2) -> None:
    """An exception in the middle of a forward, weights in use and others on their way."""

    def interrupt(*args: Any) -> None:
        raise Interrupted

    hook = s.engine.module.layers[layer].register_forward_pre_hook(interrupt)
    with contextlib.suppress(Interrupted):
        s.engine(*s.batch())
    hook.remove()


def interrupt_backward(s: Scenario) -> None:
    """An exception in the middle of a backward."""

    def interrupt(*args: Any) -> None:
        raise Interrupted

    hook = s.engine.module.layers[2].register_forward_hook(
        lambda module, inputs, output: output.register_hook(interrupt) and None
    )
    loss = s.engine(*s.batch())
    hook.remove()
    with contextlib.suppress(Interrupted):
        s.engine.backward(loss)


def interrupted_passes(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """Scripts that catch an exception of a pass, and continue or end."""
    s = Scenario(engine_name, folder, rank)
    for _ in range(2):
        s.train()
        interrupt_forward(s)
    s.train()
    if engine_name == "stock":  # has weights in use and in flight afterwards, which it refuses to read
        s.batch()
    else:
        interrupt_backward(s)
    s.engine.destroy()
    s.engine.module.zero_grad()  # of the weights that were done
    s.read_model("after an interrupted backward")
    s.initialize_again()
    s.train()
    return s.end()


def engines_dropped_in_the_loop(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """Loops that end with an exception behind a step, in a script that builds its next engine without ``destroy()``:
    the step may continue in the background. The dropped engine stays, as with stock, because hooks refer to it."""
    seen, dropped = {}, []

    def fail(**options: Any) -> None:
        s = Scenario(engine_name, folder, rank, model="tied", **options)
        dropped.append(weakref.ref(s.engine))
        s.train(2)
        raise Interrupted

    in_ram = {"tencache": {"host_memory": 2**30}}
    for place, options in (("NVMe", {}), ("RAM", in_ram), ("RAM without NVMe", {"offload_param": "cpu"})):
        if engine_name != "stock":
            with contextlib.suppress(Interrupted):
                fail(**options)
        s = Scenario(engine_name, folder, rank, **options)
        s.train(4)
        seen[place] = s.end()
    for reference in dropped:
        engine = reference()
        if engine is not None:
            engine.destroy()
    return seen


def hooks_taken_off_and_put_back(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """As ``unwrap_model_for_generation`` of TRL and accelerate does, between steps: with weights gathered, or not."""
    s = Scenario(engine_name, folder, rank)
    s.seen["evaluated"] = []
    offload = s.engine.optimizer.parameter_offload
    for gather in (True, False, True, False, False):
        s.train(2)
        params = list(s.engine.module.parameters()) if gather else []
        with deepspeed.zero.GatheredParameters(params), torch.no_grad():
            if gather:
                for hook in (*offload.forward_hooks, *offload.backward_hooks):
                    hook.remove()
            s.engine.module.eval()
            s.seen["evaluated"].append(float(s.engine.module(*s.batch())).hex())
            s.engine.module.train()
            if gather:
                offload._register_deepspeed_module(offload.module)
    s.train()
    return s.end()


def copy_of_the_model(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """An average of weights, or a reference model, made by ``copy.deepcopy`` in mid-training."""
    s = Scenario(engine_name, folder, rank)
    s.train()
    with deepspeed.zero.GatheredParameters(list(s.engine.module.parameters())):
        copied = copy.deepcopy(s.engine.module)
    s.seen["numel"] = sum(param.numel() for param in copied.parameters())
    s.train()
    copied = copy.deepcopy(s.engine.module)
    s.train()
    return s.end()


def memory_runs_out_in_a_pass(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """A script that halves the batch when memory runs out."""
    s = Scenario(engine_name, folder, rank)
    for layer in (0, 3, 1):
        s.train(2)
        interrupt_forward(s, layer)
        gc.collect()
        get_accelerator().empty_cache()
        s.train(2)
        with torch.no_grad():
            interrupt_forward(s, layer)
            s.seen["losses"].append(float(s.engine(*s.batch())).hex())
    return s.end()


def modules_called_alone(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """A submodule is called without its model, between passes."""
    s = Scenario(engine_name, folder, rank)
    s.seen["outputs"] = []
    for _ in range(3):
        s.train(2)
        x = torch.ones(2, 512, dtype=torch.bfloat16, device=s.engine.device)
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                s.seen["outputs"].append(value_of(s.engine.module.layers[1](x)))
    s.train()
    return s.end()


def hooks_of_the_user(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """Hooks on modules with weights and without keep outputs for another loss, change outputs and inputs, and see
    gradients; two forward passes come before each backward pass."""
    s = Scenario(engine_name, folder, rank, model="post_norm")
    named = dict(s.engine.module.named_modules())
    layer, projection = named["model.model.layers.1"], named["model.model.layers.0.self_attn.q_proj"]
    kept: list[torch.Tensor] = []
    s.seen["gradients"] = []

    def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)

    def see(module: torch.nn.Module, of_inputs: Any, of_outputs: Any) -> None:
        s.seen["gradients"].append(value_of(of_outputs[0]))

    layer.register_forward_hook(keep)
    layer.mlp.register_forward_hook(lambda module, inputs, output: output.mul_(0.5))
    projection.register_forward_pre_hook(lambda module, inputs: (1.5 * inputs[0],))
    for module in (layer.mlp, projection):
        module.register_full_backward_hook(see)
    for _ in range(6):
        kept.clear()
        loss = sum(s.engine(*s.batch()) for _ in range(2)) + 0.01 * sum(each.float().pow(2).mean() for each in kept)
        s.seen["losses"].append(float(loss.detach()).hex())
        s.engine.backward(loss)
        s.engine.step()
    return s.end()


def weights_frozen_for_a_while(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """Some layers do not train for some steps."""
    s = Scenario(engine_name, folder, rank)
    s.train(4)
    for trains in (False, True):
        s.engine.module.layers[1].requires_grad_(trains)
        s.train(4)
    return s.end()


def life_of_an_engine(
    engine_name: str, folder: str, rank: int, *, interrupt: bool = False, **case: Any
) -> dict[str, Any]:
    def there() -> tuple[list[str], list[str]]:
        return scratch_files(folder), io_threads()

    training.wait_until_closed()  # models of earlier scenarios
    settings = process_settings()
    seen: dict[str, Any] = {"before": there(), "errors": []}
    s = Scenario(engine_name, folder, rank, **case)
    s.train()
    if interrupt:
        interrupt_forward(s)
    seen["during"] = there()
    seen["updates_on"] = process_settings()["update threads"]
    s.engine.optimizer.tencache.stats()  # waits for the last step
    views = [values_of(param) for param in s.engine.module.parameters()]
    views.append(s.engine.optimizer._gradients.segment(s.params()[0][1].ds_id))
    values = [view.clone() for view in views]
    session = s.engine.optimizer.tencache
    seen["memory"] = [
        sum(arena.nbytes_in_use for arena in session._staging.arenas),
        session._gradient_arena.nbytes_in_use,
    ]
    s.engine.destroy()
    s.engine.destroy()
    seen["after"] = there()
    seen["settings"] = [settings, process_settings()]
    seen["memory_after"] = [
        sum(arena.nbytes_in_use for arena in session._staging.arenas),
        session._gradient_arena.nbytes_in_use,
    ]
    uses: list[Callable[[Scenario], Any]] = [
        lambda s: s.engine.step(),
        lambda s: safe_get_full_fp32_param(s.params()[0][1]),
        lambda s: s.engine.save_checkpoint(folder),
    ]
    for use in uses:
        try:
            use(s)
        except Exception as error:
            seen["errors"].append(f"{type(error).__name__}: {error}")
    model = weakref.ref(s.engine.module)
    del s, session
    seen["gone"] = wait_until(lambda: there() == seen["before"]) and model() is None
    seen["views"] = all(
        torch.equal(view, value) if view.stride(0) else bool(view.isnan().all())
        for view, value in zip(views, values, strict=True)
    )
    return seen


def process_settings() -> dict[str, Any]:
    """What TenCache might change of a process beside its own files and memory."""
    openmp = ThreadpoolController().select(user_api="openmp").info()
    tasks = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):  # it has ended since
            tasks.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return {
        "openmp threads": [pool["num_threads"] for pool in openmp],
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "cores": sorted(os.sched_getaffinity(0)),
        "update threads": sum(task == "tencache-update" for task in tasks),
        "signal handlers": [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "blocked signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "limits": [resource.getrlimit(limit) for limit in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)],
        "switch interval": sys.getswitchinterval(),
    }


def wait_until(condition: Callable[[], bool]) -> bool:
    gc.collect()
    t_end = time.monotonic() + 10
    while not condition() and time.monotonic() < t_end:
        time.sleep(0.05)
    return condition()


def scratch_files(folder: str) -> list[str]:
    """The kind and path of each scratch file that this process has open; they have no names."""
    files = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            link = os.readlink(f"/proc/self/fd/{descriptor}")
            if link.startswith(f"{os.path.abspath(folder)}/") and "/tencache-engine-" in link:
                files.add(f"{'optimizer' if 'optimizer' in link else 'weights'}-{link}")
    return sorted(files)


def failed_initialize(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """Configs that cannot be, then the right one for the same model; a second engine beside it is refused."""
    config = training.config_for({}, engine_name, os.path.join(folder, "nvme"))
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Mlp()
    seen: dict[str, Any] = {"weights": digests(model), "errors": []}

    def initialize(**changes: Any) -> Any:
        trained = list(model.parameters())
        try:
            return deepspeed.initialize(model=model, model_parameters=trained, config=config | changes)[0]
        except Exception as error:
            seen["errors"].append(f"{type(error).__name__}: {error}")
            return None

    initialize(tencache=config["tencache"] | {"staging_memory": 1})
    stock = training.config_for({}, "stock", "")
    for key in ("offload_engine", "tencache"):
        config.pop(key)
    initialize(zero_optimization=stock["zero_optimization"])
    config |= training.config_for({}, engine_name, os.path.join(folder, "nvme"))
    initialize(zero_optimization=stock["zero_optimization"])
    engine = initialize()
    seen["hooks"] = len(model._forward_pre_hooks)
    initialize()
    seen["later"] = digests(model)
    seen["losses"] = train(engine, 2, torch.Generator().manual_seed(3), oracle=False)
    engine.destroy()
    return seen


def dropped_model(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    training.wait_until_closed()  # models of earlier scenarios
    before = training.scratch_engines(folder), io_threads()
    config = training.config_for({}, engine_name, os.path.join(folder, "nvme"))
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Mlp()
    during = training.scratch_engines(folder), io_threads()
    del model
    gc.collect()
    t_end = time.monotonic() + 10
    while (training.scratch_engines(folder), io_threads()) != before and time.monotonic() < t_end:
        time.sleep(0.05)
    return {"before": before, "during": during, "after": (training.scratch_engines(folder), io_threads())}


def read_ahead_across_steps(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """Where weights were when they were asked for, in each step; there is time between the steps, and memory."""
    import tencache_ds

    seen: dict[str, Any] = {}
    for model, accumulation in (("mlp", 1), ("llama", 2)):
        s = Scenario(engine_name, folder, rank, model=model, accumulation=accumulation)
        seen[model] = []
        for _ in range(5):
            s.train(1)
            time.sleep(0.2)
            record = tencache_ds.stats(s.engine).last_step
            seen[model].append({"accesses": record.accesses, "events": record.events})
        s.end()
    return seen


def stats_and_monitor(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    import dataclasses

    import tencache_ds

    monitor = {"csv_monitor": {"enabled": True, "output_path": os.path.join(folder, "csv"), "job_name": "job"}}
    s = Scenario(engine_name, folder, rank, config=monitor)
    s.seen["before"] = dataclasses.asdict(tencache_ds.stats(s.engine))
    s.train(4)
    s.seen["after"] = dataclasses.asdict(tencache_ds.stats(s.engine))
    s.seen["numel"] = sum(param.ds_numel for _, param in s.params())
    s.seen["description"] = s.engine.optimizer.tencache.describe()
    s.end()
    s.seen["csv"] = {
        path.name: [line.partition(",")[0] for line in path.read_text().splitlines()[1:]]
        for path in Path(folder, "csv").rglob("*.csv")
    }
    try:
        tencache_ds.stats(Scenario("stock", folder, rank).engine)
    except ValueError as error:
        s.seen["error_for_stock"] = str(error)
    return s.seen


def background_checkpoint(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """A checkpoint engine that writes during training needs values that training does not change."""
    s = Scenario(engine_name, folder, rank)
    s.train(2)
    s.engine.checkpoint_engine.is_decoupled = lambda: True
    masters = s.engine.optimizer.state_dict()["fp32_flat_groups"]
    before = [value_of(master) for master in masters]
    s.train(2)
    s.engine.checkpoint_engine.is_decoupled = lambda: False
    later = [value_of(master) for master in s.engine.optimizer.state_dict()["fp32_flat_groups"]]
    seen = {"before": before, "after": [value_of(master) for master in masters], "later": later}
    s.end()
    return seen


TRACED_STEPS, MOST_STEPS = 2, 40


def observed(engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """The job is traced and watched from outside while it trains, and traced again from Python."""
    s = Scenario(engine_name, folder, rank)
    if engine_name == "stock":
        s.train(MOST_STEPS)
        return s.end()
    import tencache_ds

    s.train(2)
    world_size = deepspeed.comm.get_world_size()
    command = [sys.executable, "-m", "tencache_ds.cli"]
    trace_file = os.path.join(folder, f"observed_{world_size}.json")
    tracing = watching = planning = None
    if rank == 0:
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        pid, steps = str(os.getpid()), str(TRACED_STEPS)
        watching = subprocess.Popen([*command, "watch", "--once", pid], env=environment, **pipes)
        s.seen["plan drawn"] = os.path.join(folder, f"plan_{world_size}.svg")
        plan = ["plan", "--job", pid, "--seconds", "0.5", "--plot", s.seen["plan drawn"]]
        planning = subprocess.Popen([*command, *plan], env=environment, **pipes)
        tracing = subprocess.Popen(
            [*command, "trace", pid, "--steps", steps, "--output", trace_file], env=environment, **pipes
        )
        s.seen["trace printed"] = tracing.stdout.readline()  # the rest is quick: the command has found the job
    over = torch.zeros(1)
    while not over.item() and len(s.seen["losses"]) < MOST_STEPS:
        s.train(1)
        time.sleep(0.1)  # so that the command does not have to plan many steps ahead
        over.fill_(tracing is not None and tracing.poll() is not None)
        deepspeed.comm.broadcast(over, 0)
    s.seen["own trace"] = os.path.join(folder, f"own_{world_size}_{{rank}}.json")
    tencache_ds.trace(s.engine, s.seen["own trace"], steps=1)
    s.seen["error for two traces"] = raised(lambda: tencache_ds.trace(s.engine, "b.json"))
    s.seen["error for no folder"] = raised(lambda: tencache_ds.trace(s.engine, "/no/such/folder/b.json"))
    s.train(2)
    s.seen["own trace"] = s.seen["own trace"].replace("{rank}", str(rank))
    wait_until(lambda: os.path.exists(s.seen["own trace"]))
    if tracing is not None and watching is not None and planning is not None:
        s.seen["trace printed"] += tracing.communicate(timeout=60)[0]
        s.seen["watch printed"] = watching.communicate(timeout=60)[0]
        s.seen["plan printed"] = planning.communicate(timeout=60)[0]
        s.seen["status"] = [tracing.returncode, watching.returncode, planning.returncode]
        s.seen["trace"] = trace_file
    threads = [channel_threads()]
    s.end()
    s.seen["channel threads"] = [*threads, channel_threads()]
    return s.seen


def channel_threads() -> list[str]:
    return [name for name in io_threads() if name.startswith("tencache-channel")]


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


SCENARIOS: dict[str, Callable[[str, str, int], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        read_state,
        write_full_state,
        write_local_state,
        momentum_of_muon,
        step_hooks,
        scheduler_of_torch,
        gather_before_and_between,
        masters_of_changed_weights,
        weights_changed_behind_the_back,
        gather_within_passes,
        forward_inside_gathered,
        gather_everything,
        gather_what_is_ahead,
        gathers_that_fail,
        average_of_shards,
        shards_on_nvme,
        gathered_and_not_changed,
        evaluate_between,
        evaluate_behind_steps,
        evaluate_in_inference_mode,
        data_loader_workers,
        two_engines,
        destroy_one_of_two,
        second_zero_init,
        parts_of_two_zero_inits,
        accumulation_by_hand,
        accumulation_unmanaged,
        backward_of_the_user,
        evaluation_without_optimizer,
        background_checkpoint,
        train_destroy_train,
        interrupted_passes,
        engines_dropped_in_the_loop,
        hooks_taken_off_and_put_back,
        copy_of_the_model,
        memory_runs_out_in_a_pass,
        modules_called_alone,
        hooks_of_the_user,
        weights_frozen_for_a_while,
        actor_and_critic,
        two_heads_of_a_frozen_backbone,
        destroy,
        failed_initialize,
        dropped_model,
        stats_and_monitor,
        read_ahead_across_steps,
        observed,
    )
}


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    Scenario.more = {key: value for key, value in case.items() if key != "scenario"}
    return SCENARIOS[case["scenario"]](engine_name, folder, rank)


if __name__ == "__main__":
    training.main(run)
