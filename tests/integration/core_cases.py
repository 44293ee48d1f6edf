# SPDX-License-Identifier: Apache-2.0
"""Cases of the exactness core, all of one rank count in one process: run like ``training.py``.

``case["action"]`` names what is done beside training: a checkpoint that is saved, loaded, or made universal, weights
held gathered, or a step that fails. Nothing of TenCache is imported for stock, which trains on any DeepSpeed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import checkpoint_cases
import torch
import training
from deepspeed.accelerator import get_accelerator
from packaging.version import Version


def hold_gathered(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """Weights that somebody reads across whole steps, and changes between two."""
    with whole_gathers() if engine_name == "stock" else contextlib.nullcontext():
        return train_with_weights_held(case, engine_name, folder, rank)


def train_with_weights_held(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    import deepspeed

    engine = training.build(case, engine_name, os.path.join(folder, "nvme"))
    generator = torch.Generator().manual_seed(1000 + rank)
    layers = engine.module.layers
    result: dict[str, Any] = {"losses": []}

    def train(steps: int) -> None:
        result["losses"] += training.train(engine, steps, generator, oracle=engine_name == "stock")

    def changed(params: list[Any], factor: float) -> None:
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
            if rank == 0:
                for param in params:
                    param.data.mul_(factor)
        engine.optimizer.refresh_fp32_params()

    train(2)
    read = [layers[1].weight, layers[2].bias]
    with deepspeed.zero.GatheredParameters(read):
        result["gathered"] = [training.digest(param.data) for param in read]
        train(2)
        result["shapes after steps"] = [list(param.shape) for param in read]
    result["released"] = training.digests(engine.module)
    changed([layers[0].weight, layers[3].bias], 0.5)
    result["changed"] = training.digests(engine.module)
    train(2)
    changed([layers[0].weight, layers[1].weight], 0.75)
    train(2)
    result["weights"] = training.digests(engine.module)
    engine.destroy()
    return result


@contextlib.contextmanager
def whole_gathers() -> Iterator[None]:
    """Before 0.19.8 stock gathers several weights on the ranks of a CPU and waits for the last collective only: what it
    trains here differs from run to run, to NaN too. Corrected, one weight after the other."""
    from deepspeed.runtime.zero.partition_parameters import Init

    gather = Init._allgather_params_coalesced

    def one_by_one(self: Any, param_list: Any, hierarchy: Any = 0, quantize: bool = False) -> None:
        for param in param_list:
            gather(self, [param], hierarchy, quantize)

    corrected = one_by_one if deepspeed_is_older("0.19.8") and get_accelerator().is_synchronized_device() else gather
    with mock.patch.object(Init, "_allgather_params_coalesced", corrected):
        yield


def deepspeed_is_older(version: str) -> bool:
    import deepspeed

    return Version(deepspeed.__version__) < Version(version)


def make_universal(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """DeepSpeed's own conversion of a checkpoint of ``checkpoint_cases.py``."""
    import deepspeed
    from deepspeed.checkpoint import ds_to_universal

    path = os.path.join(folder, "checkpoints", case["checkpoint"])
    words = ["--input_folder", os.path.join(path, "save0"), "--output_folder", os.path.join(path, "universal")]
    words += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    failure: list[str | None] = [None]
    deepspeed.comm.barrier()
    if rank == 0:
        try:
            with mock.patch.object(sys, "argv", ["ds_to_universal", *words]):
                ds_to_universal.main(ds_to_universal.parse_arguments())
        except Exception as error:
            failure[0] = f"{type(error).__name__}: {error}"
    torch.distributed.broadcast_object_list(failure)
    if failure[0] is not None:
        raise RuntimeError(f"the conversion failed: {failure[0]}")
    return {}


def checkpoint_with_deepspeed(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """DeepSpeed's own activation checkpointing. Before 0.19.8 it makes a stream without a use, and a CPU has none."""
    accelerator = get_accelerator()
    if not accelerator.is_synchronized_device():
        return training.run_case(case, engine_name, folder, rank)
    with mock.patch.object(type(accelerator), "Stream", staticmethod(lambda device: None)):
        return training.run_case(case, engine_name, folder, rank)


def fail_a_step(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """A step that fails half-way, everything that is tried then, and training from the checkpoint before it."""
    if engine_name == "stock":
        return training.run_case(case, engine_name, folder, rank)
    import void_cases

    return void_cases.run(case, engine_name, folder, rank)


ACTIONS: dict[str, Callable[[dict[str, Any], str, str, int], dict[str, Any]]] = {
    "train": training.run_case,
    "save": checkpoint_cases.run,
    "load": checkpoint_cases.run,
    "hold_gathered": hold_gathered,
    "make_universal": make_universal,
    "checkpoint_with_deepspeed": checkpoint_with_deepspeed,
    "fail_a_step": fail_a_step,
}


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    return ACTIONS[case["action"]](case, engine_name, folder, rank)


def writes_no_files(case: dict[str, Any]) -> bool:
    return case["action"] not in ("save", "load", "make_universal")


if __name__ == "__main__":
    training.main(run, writes_no_files)
