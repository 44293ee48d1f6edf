# SPDX-License-Identifier: Apache-2.0
"""Generation by an engine without optimizer, with weights in device memory, in RAM and on NVMe.

On a GPU this is the real thing; on the CPU accelerator ordinary memory stands in for the device's. A case is a list of
actions, which are the same with stock DeepSpeed.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from typing import Any

import deepspeed
import gpu_memory_cases
import torch
import training
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation
from models import MODELS

from tencache_ds.integration import stage3_building
from tencache_ds.memory.device_memory import DeviceMemory
from tencache_ds.placement import inference_policy

PASSES = 4
"""Tokens that are generated each time."""


class Inference:
    """One case with one engine."""

    def __init__(self, case: dict[str, Any], engine: str, folder: str) -> None:
        self._case = case
        self._kind = engine
        self._folder = folder
        self.seen: list[Any] = []
        self.gpu_weight_nbytes: list[int] = []
        self.available_nbytes: int | None = None
        self._taken: torch.Tensor | None = None
        self.model = self._new_model()
        self.initialize()

    def _config(self) -> dict[str, Any]:
        config = training.config_for(self._case, self._kind, os.path.join(self._folder, "nvme"))
        del config["optimizer"], config["zero_optimization"]["offload_optimizer"]
        if self._kind == "tencache":
            config["tencache"]["gpu_memory"] = self._case.get("device_memory")
            config["tencache"]["split_master"] = False
        return config

    def _new_model(self) -> Any:
        torch.manual_seed(7)
        with deepspeed.zero.Init(config_dict_or_path=self._config()):
            return MODELS["llama"]()

    def initialize(self) -> None:
        # The model that transformers knows how to generate with; it is the root of forward passes.
        self.engine = deepspeed.initialize(model=self.model.model, config=self._config())[0]
        self.engine.eval()

    def act(self, action: str) -> None:
        getattr(self, action)()
        if self._kind == "tencache" and action != "destroy":
            import tencache_ds

            stats = tencache_ds.stats(self.engine)
            tencache_ds.wait_for_checkpoint(self.engine)  # there is none
            self.gpu_weight_nbytes.append(stats.gpu_weight_nbytes)

    def _generate(self, tokens: int) -> None:
        with torch.no_grad():
            made = self.engine.module.generate(
                self._prompt(tokens), max_new_tokens=PASSES, do_sample=False, synced_gpus=True
            )
            loss = self.engine(input_ids=made, labels=made).loss
        self.seen.append([made.tolist(), float(loss).hex()])

    def _prompt(self, tokens: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(self.seen))
        return torch.randint(0, self.model.vocabulary, (2, tokens), generator=generator).to(self.engine.device)

    def compile_the_model(self) -> None:
        self.engine.compile(backend="eager")

    def generate(self) -> None:
        self._generate(4)

    def hand_back(self) -> None:
        if self._kind == "tencache":  # stock has nothing there, and refuses
            self.engine.offload_states()

    def take_again(self) -> None:
        if self._kind == "tencache":
            self.engine.reload_states()

    def generate_from_a_long_prompt(self) -> None:
        self._generate(48)

    def generate_with_gathered_weights(self) -> None:
        with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            self._generate(4)

    def generate_without_hooks(self) -> None:
        """As TRL does: DeepSpeed's hooks are removed for a generation, and new ones are registered."""
        with unwrap_model_for_generation(self.engine):
            self._generate(4)

    def interrupt(self) -> None:
        """An exception in the middle of a forward pass, which the script catches."""

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        layers = self.engine.module.model.layers
        hook = layers[len(layers) // 2].mlp.register_forward_pre_hook(fail)
        with contextlib.suppress(KeyboardInterrupt), torch.no_grad():
            self.engine(input_ids=self._prompt(4))
        hook.remove()

    def search_beams(self) -> None:
        with torch.no_grad():
            made = self.engine.module.generate(
                self._prompt(4), max_new_tokens=PASSES, num_beams=3, do_sample=False, synced_gpus=True
            )
        self.seen.append(made.tolist())

    def copy_the_model(self) -> None:
        with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            copied = copy.deepcopy(self.engine.module)
        self.seen.append(sum(param.numel() for param in copied.parameters()))

    def run_the_inner_model(self) -> None:
        """Past the hooks of the model that DeepSpeed knows."""
        with torch.no_grad():
            hidden = self.engine.module.model(self._prompt(6)).last_hidden_state
        self.seen.append(training.digest(hidden))

    def differentiate(self) -> None:
        """By the inputs, with the weights as they are: a backward pass without an optimizer."""
        embedded = torch.randn(2, 6, self.model.model.config.hidden_size, generator=torch.Generator().manual_seed(3))
        inputs = embedded.to(self.engine.device, torch.bfloat16).requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self.engine.module(inputs_embeds=inputs).logits.float().sum(), inputs)
        self.seen.append(training.digest(gradient))

    def empty_cache(self) -> None:
        self.engine.empty_partition_cache()

    def change_weights(self) -> None:
        for number, param in enumerate(self.model.parameters()):
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                if deepspeed.comm.get_rank() == 0:
                    param.data.mul_(1 + 0.25 * (number % 3))

    def save(self) -> None:
        weights = self.engine._zero3_consolidated_16bit_state_dict() or {}
        self.seen.append({name: training.digest(value) for name, value in weights.items()})

    def read(self) -> None:
        self.seen.append(training.digests(self.model))

    def need_memory(self) -> None:
        """Somebody else takes nearly all of the device's memory."""
        for memory in opened:
            if isinstance(memory, gpu_memory_cases.OrdinaryMemory):
                memory.wanted_by_training_nbytes = gpu_memory_cases.CAPACITY["nbytes"]
            else:
                memory.trim()
                nbytes = memory.usage().free_nbytes - LEFT_NBYTES
                self._taken = torch.empty(nbytes, dtype=torch.uint8, device=memory.device)
            self.available_nbytes = memory.usage().available_nbytes

    def need_no_memory(self) -> None:
        self._taken = None
        for memory in opened:
            if isinstance(memory, gpu_memory_cases.OrdinaryMemory):
                memory.wanted_by_training_nbytes = 0
            else:
                memory.trim()

    def train_beside(self) -> None:
        """Another engine of this process trains."""
        config = training.config_for({"model": "mlp"}, self._kind, os.path.join(self._folder, "nvme"))
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = MODELS["mlp"]()
        self._trained = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        loss = self._trained(*(each.to(self._trained.device) for each in model.batch(torch.Generator().manual_seed(1))))
        self._trained.backward(loss)
        self._trained.step()
        self.seen.append(float(loss).hex())

    def train_no_longer(self) -> None:
        self._trained.destroy()

    def destroy(self) -> None:
        self.engine.destroy()


LEFT_NBYTES = gpu_memory_cases.LEFT_BY_TRAINING_NBYTES
opened: list[DeviceMemory] = []
open_device_memory = stage3_building.open_memory


def open_memory(options: Any) -> DeviceMemory | None:
    """The device's memory, or what stands in for it, kept where actions find it."""
    memory: DeviceMemory | None
    if get_accelerator().is_synchronized_device() and options.gpu_memory != 0:
        memory = gpu_memory_cases.OrdinaryMemory()
    else:
        memory = open_device_memory(options)
    opened[:] = [] if memory is None else [memory]
    return memory


def run(case: dict[str, Any], engine: str, folder: str, rank: int) -> dict[str, Any]:
    opened.clear()  # stock DeepSpeed opens none
    inference = Inference(case, engine, folder)
    for action in case["actions"]:
        inference.act(action)
    inference.engine.destroy()
    seen, nbytes, available_nbytes = inference.seen, inference.gpu_weight_nbytes, inference.available_nbytes
    del inference
    gc.collect()  # an engine of stock DeepSpeed counts as long as it is referred to
    return {"seen": seen, "gpu_weight_nbytes": nbytes, "available_nbytes": available_nbytes}


if __name__ == "__main__":
    inference_policy.FIRST_PATIENCE = 2
    stage3_building.open_memory = open_memory
    training.main(run)
