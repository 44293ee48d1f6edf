# SPDX-License-Identifier: Apache-2.0
"""One process that generates with one system.

deepspeed --module benchmarks.inference.generation task.json    # a benchmarks.inference.result.GenerationTask
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention
from deepspeed.accelerator import get_accelerator

from ..training.instruments import process_nbytes
from ..workloads import build, default_dtype, prepare
from .result import Generation, GenerationTask

SEED = 1


def measure(task: GenerationTask) -> Generation:
    """Builds the model and generates: twice to warm up, then ``rounds`` times, and twice for the tokens."""
    prepare()
    accelerator = get_accelerator()
    device = torch.device(accelerator.current_device_name())
    t_start_s = time.perf_counter()
    torch.manual_seed(SEED)
    model, engine = BUILDERS[task.program](task, device)
    model.eval()
    built_s = time.perf_counter() - t_start_s
    generator = torch.Generator().manual_seed(SEED)
    prompt = torch.randint(0, model.config.vocab_size, (task.batch, task.prompt), generator=generator).to(device)

    def generate(tokens: int) -> tuple[float, Any]:
        accelerator.synchronize()
        t_start_s = time.perf_counter()
        with torch.no_grad():
            made = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=tokens, max_new_tokens=tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
        accelerator.synchronize()
        return time.perf_counter() - t_start_s, made

    generate(task.tokens)  # recorded, and then weights find their places
    generate(task.tokens)
    prompts, tokens = [], []
    for _ in range(task.rounds):
        seconds, _ = generate(1)
        whole, _ = generate(task.tokens)
        prompts.append(seconds)
        tokens.append((whole - seconds) / (task.tokens - 1))
    places = weight_places(engine, task.deepspeed_config) if engine is not None else {}
    gpu_peak_nbytes = None if accelerator.is_synchronized_device() else accelerator.max_memory_allocated()
    # The fast attention kernels of a GPU give other bits from run to run for some shapes, in every system.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        generated = [generate(task.tokens)[1][:, task.prompt :].tolist() for _ in range(2)]
    parameters = sum(getattr(param, "ds_numel", param.numel()) for param in model.parameters())
    return Generation(
        built_s=built_s,
        prompt_s=prompts,
        token_s=tokens,
        tokens=generated[-1],
        varies=any(each != generated[-1] for each in generated),
        model_nbytes=parameters * torch.bfloat16.itemsize,
        gpu_peak_nbytes=gpu_peak_nbytes,
        rss_peak_nbytes=process_nbytes("VmHWM"),
        **places,
    )


def on_device(task: GenerationTask, device: Any) -> tuple[Any, None]:
    """The whole model in the device's memory, without offload."""
    with torch.device(device), default_dtype(torch.bfloat16):
        return build(task.model, task.prompt + task.tokens), None


def accelerate_cpu(task: GenerationTask, device: Any) -> tuple[Any, None]:
    """accelerate's ``cpu_offload``."""
    import accelerate

    return accelerate.cpu_offload(on_device(task, "cpu")[0], execution_device=device), None


def accelerate_disk(task: GenerationTask, device: Any) -> tuple[Any, None]:
    """accelerate's ``disk_offload``."""
    import accelerate

    model = accelerate.disk_offload(on_device(task, "cpu")[0], task.offload, execution_device=device)
    gc.collect()
    return model, None


def deepspeed_engine(task: GenerationTask, device: Any) -> tuple[Any, Any]:
    """ZeRO stage 3 without an optimizer, with or without TenCache: by its config."""
    import deepspeed

    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=task.deepspeed_config):
        model = build(task.model, task.prompt + task.tokens)
    engine = deepspeed.initialize(model=model, config=task.deepspeed_config)[0]
    return engine.module, engine


def weight_places(engine: Any, config: dict[str, Any]) -> dict[str, int]:
    """Bytes of TenCache's weights by place, as fields of :class:`.result.Generation`; empty without TenCache."""
    if config["zero_optimization"].get("offload_engine") != "tencache":
        return {}
    import tencache_ds

    try:
        stats = tencache_ds.stats(engine)
    except ValueError:  # there is nothing to do for TenCache: DeepSpeed keeps all weights in RAM
        return {}
    host_nbytes = stats.resident_weight_nbytes
    if config["zero_optimization"]["offload_param"]["device"] == "cpu":
        # DeepSpeed keeps these weights, and TenCache's statistics of RAM do not cover them.
        in_ram = [param for param in engine.module.parameters() if not param.ds_persist]
        host_nbytes = sum(param.ds_numel * param.element_size() for param in in_ram)
    return {
        "gpu_nbytes": stats.gpu_weight_nbytes,
        "host_nbytes": host_nbytes,
        "nvme_nbytes": stats.stored_weight_nbytes,
    }


BUILDERS: dict[str, Callable[[GenerationTask, Any], tuple[Any, Any]]] = {
    "device": on_device,
    "accelerate-cpu": accelerate_cpu,
    "accelerate-disk": accelerate_disk,
    "deepspeed": deepspeed_engine,
}
"""Build the model, ready to generate on the device, and DeepSpeed's engine where there is one."""


if __name__ == "__main__":
    asked = GenerationTask.of_command_line()
    measure(asked).write(Path(asked.result))
