# SPDX-License-Identifier: Apache-2.0
"""One measured training run with torch's FSDP2 and CPU offload: a peer outside DeepSpeed.

    deepspeed --module benchmarks.training.train_fsdp task.json    # a benchmarks.record.Task

Model, first weights, data, loss and optimizer settings are those of :mod:`.train_step`; batch, optimizer and clipping
are read from the DeepSpeed config. The numerics are torch's own (where it rounds, in which order it reduces), so losses
agree with DeepSpeed's only to a few digits.

Weights, gradients and optimizer state live in host memory as fp32 shards; a layer at a time is copied to the GPU,
cast to 16 bits and gathered. AdamW is torch's fused one, on the CPU.
"""

from __future__ import annotations

import math
import os
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from packaging.version import Version
from torch.distributed.device_mesh import init_device_mesh

from ..record import Task
from .measured_run import MeasuredRun, Trainee, limit_gpu_memory, run_task
from .train_step import DTYPES, same_weights_as_zero_init

OLDEST_TORCH = Version("2.6")
"""With ``torch.distributed.fsdp.fully_shard`` and ``torch.nn.utils.get_total_norm``."""


def loss_scaler(config: dict[str, Any]) -> Any:
    """DeepSpeed's loss scaler for a DeepSpeed config; 1 throughout without fp16."""
    fp16 = DeepSpeedFP16Config(**config.get("fp16", {}))
    dtype = torch.float16 if fp16.enabled else torch.bfloat16
    return CreateLossScaler(dtype, fp16.loss_scale, fp16.loss_scale == 0, fp16.dynamic_loss_scale_args())


class FsdpTrainee(Trainee):
    """An FSDP2 model with its optimizer under measurement.

    Args:
        model: whole.
        task: optimizer, clipping, accumulation and ``fp16`` are read from its DeepSpeed config.
        device: where the computation runs.
    """

    def __init__(self, model: torch.nn.Module, task: Task, device: torch.device) -> None:
        config, dtype = task.deepspeed_config, DTYPES[task.workload.precision]
        self.device = device
        self.vocabulary: int = model.config.vocab_size  # type: ignore[union-attr,assignment]
        self.numel = sum(p.numel() for p in model.parameters())
        model.to("cpu")
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():  # as DeepSpeed's engine does
                owner, _, own_name = name.rpartition(".")
                model.get_submodule(owner).register_buffer(own_name, buffer.to(device, dtype), persistent=False)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        limit_gpu_memory(task.gpu_nbytes)  # only now: the first weights are drawn whole on the GPU
        shard(model, dtype, device)
        self._model = model
        self._parameters = list(model.parameters())
        settings = dict(config["optimizer"]["params"])
        settings["betas"] = tuple(settings.get("betas", (0.9, 0.999)))
        settings.setdefault("weight_decay", 0.0)  # DeepSpeed's default; torch's is 0.01
        self._optimizer = torch.optim.AdamW(self._parameters, fused=True, **settings)
        self._clipping = float(config.get("gradient_clipping", 0.0))
        self._accumulation = int(config.get("gradient_accumulation_steps", 1))
        self._scaler, self._fp16 = loss_scaler(config), bool(config.get("fp16", {}).get("enabled"))
        self._n_micro_steps = self._n_skipped = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def backward(self, loss: torch.Tensor) -> None:
        (loss * (self._scaler.loss_scale / self._accumulation)).backward()

    def step(self) -> None:
        self._n_micro_steps += 1
        if self._n_micro_steps % self._accumulation:
            return
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        norm = float((total.full_tensor() if hasattr(total, "full_tensor") else total).item())
        norm /= self._scaler.loss_scale
        overflow = self._fp16 and not math.isfinite(norm)
        if overflow:
            self._n_skipped += 1
        else:
            factor = 1 / self._scaler.loss_scale
            if self._clipping and norm > self._clipping:
                factor *= self._clipping / (norm + 1e-6)
            if factor != 1:
                torch._foreach_mul_(gradients, factor)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._scaler.update_scale(overflow)

    def loss_scale(self) -> float | None:
        return float(self._scaler.loss_scale) if self._fp16 else None

    def n_skipped(self) -> int:
        return self._n_skipped


def shard(model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Makes each decoder layer, and the rest, a unit of FSDP2 with its fp32 shards in host memory.

    Args:
        model: whole, with 16-bit weights, in host memory. Each unit passes through the device alone.
        dtype: of computation, gathers and gradient reduction, as with DeepSpeed's defaults.
        device: the accelerator.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu"),
    }
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    for layer in max(lists, key=len):
        _to_fp32(layer)
        fully_shard(layer, **options)
    _to_fp32(model)
    fully_shard(model, **options)


def _to_fp32(module: torch.nn.Module) -> None:
    """Master weights: the parameters only, buffers stay as DeepSpeed has them, in 16 bits."""
    for parameter in module.parameters():
        if parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()


def building(task: Task, device: torch.device, run: MeasuredRun) -> AbstractContextManager[object]:
    """The context in which the model is built."""
    return same_weights_as_zero_init(DTYPES[task.workload.precision], device)


def main() -> None:
    if Version(torch.__version__) < OLDEST_TORCH:
        sys.exit(f"cannot run: torch {torch.__version__} lacks parts of FSDP2: it needs torch {OLDEST_TORCH} or later")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # gloo for the gradients' norm, which is reduced in host memory. DeepSpeed's loss scaler asks for the rank.
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    run_task(building, FsdpTrainee)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
