# SPDX-License-Identifier: Apache-2.0
"""One process that generates with one system, and writes its times to a file."""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..training.instruments import process_nbytes
from ..workloads import build, prepare
from .result import Generation

SEED = 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    for name in ("model", "config", "result", "offload"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("batch", "prompt", "tokens", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--system", required=True, choices=SYSTEMS)
    arguments = parser.parse_args()
    Path(arguments.result).write_text(measure(arguments).model_dump_json(indent=1))


def measure(arguments: argparse.Namespace) -> Generation:
    """Builds the model and generates: twice to warm up, then ``rounds`` times, and twice for the tokens."""
    import torch
    import torch.nn.attention
    from deepspeed.accelerator import get_accelerator

    prepare()
    accelerator = get_accelerator()
    device = torch.device(accelerator.current_device_name())
    t_start_s = time.perf_counter()
    torch.manual_seed(SEED)
    model, finish = SYSTEMS[arguments.system](arguments, device)
    model.eval()
    built_s = time.perf_counter() - t_start_s
    vocabulary = model.config.vocab_size
    generator = torch.Generator().manual_seed(SEED)
    prompt = torch.randint(0, vocabulary, (arguments.batch, arguments.prompt), generator=generator).to(device)

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

    generate(arguments.tokens)  # recorded, and then weights find their places
    generate(arguments.tokens)
    prompts, tokens = [], []
    for _ in range(arguments.rounds):
        seconds, _ = generate(1)
        whole, _ = generate(arguments.tokens)
        prompts.append(seconds)
        tokens.append((whole - seconds) / (arguments.tokens - 1))
    places = finish()
    gpu_peak_nbytes = None if accelerator.is_synchronized_device() else accelerator.max_memory_allocated()
    # The fast attention kernels of a GPU give other bits from run to run for some shapes, in every system.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        generated = [generate(arguments.tokens)[1][:, arguments.prompt :].tolist() for _ in range(2)]
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


def _nothing_to_add() -> dict[str, Any]:
    return {}


def on_device(arguments: argparse.Namespace, device: Any) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """The whole model in the device's memory, without offload."""
    return _plain(arguments, device), _nothing_to_add


def accelerate_cpu(arguments: argparse.Namespace, device: Any) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """accelerate's ``cpu_offload``."""
    import accelerate

    return accelerate.cpu_offload(_plain(arguments, "cpu"), execution_device=device), _nothing_to_add


def accelerate_disk(arguments: argparse.Namespace, device: Any) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """accelerate's ``disk_offload``."""
    import accelerate

    model = accelerate.disk_offload(_plain(arguments, "cpu"), arguments.offload, execution_device=device)
    gc.collect()
    return model, _nothing_to_add


def _plain(arguments: argparse.Namespace, device: Any) -> Any:
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return build(arguments.model, arguments.prompt + arguments.tokens)
    finally:
        torch.set_default_dtype(before)


def deepspeed_engine(arguments: argparse.Namespace, device: Any) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """ZeRO stage 3 without an optimizer, with or without TenCache: by its config."""
    import deepspeed

    deepspeed.init_distributed()
    config = json.loads(Path(arguments.config).read_text())
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build(arguments.model, arguments.prompt + arguments.tokens)
    engine = deepspeed.initialize(model=model, config=config)[0]

    def finish() -> dict[str, Any]:
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

    return engine.module, finish


SYSTEMS: dict[str, Callable[[argparse.Namespace, Any], tuple[Any, Callable[[], dict[str, Any]]]]] = {
    "device": on_device,
    "accelerate-cpu": accelerate_cpu,
    "accelerate-disk": accelerate_disk,
    "deepspeed": deepspeed_engine,
}


if __name__ == "__main__":
    for key, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}.items():
        os.environ.setdefault(key, value)
    main()
