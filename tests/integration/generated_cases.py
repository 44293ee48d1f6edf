# SPDX-License-Identifier: Apache-2.0
"""Trains with generated configs, all in one process, beside stock CPU offload: each has its losses, or is refused."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import os
import tempfile
import time
import traceback
from typing import Any

import deepspeed
import torch
import training
from generated_configs import TRAINING, Generated, configs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from models import Mlp
from pydantic import ValidationError

from tencache_ds.errors import ConfigError

STEPS = 2
DEPENDS_ON_THE_MODEL = "staging_memory"
"""Which option a config without a mistake may still be refused for: how little is too little, the model decides."""


def losses_with(config: dict[str, Any], *, zero_init: bool, oracle: bool = False) -> list[str]:
    """Two steps of a small model."""
    torch.manual_seed(7)
    with deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(config)) if zero_init else contextlib.nullcontext():
        model = Mlp()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    try:
        return training.train(engine, STEPS, torch.Generator().manual_seed(1000), oracle=oracle)
    finally:
        engine.destroy()


def judge(generated: Generated, expected: list[str], zero_init: bool) -> tuple[str, str]:
    """``"trained"`` or ``"refused"``, and what is wrong with that."""
    written = copy.deepcopy(generated.config)
    try:
        losses = losses_with(generated.config, zero_init=zero_init)
    except (ConfigError, ValidationError) as error:
        names = generated.mistakes or [DEPENDS_ON_THE_MODEL]
        return "refused", "" if any(name in str(error) for name in names) else f"{names} not named in: {error}"
    except Exception:
        return "failed", traceback.format_exc()
    if generated.mistakes:
        return "trained", f"accepted with {generated.mistakes}"
    if generated.config != written:
        return "trained", "the user's own config was changed"
    return "trained", "" if losses == expected else f"losses {losses}, stock's are {expected}"


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    on_cpu = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    stock = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": on_cpu} | TRAINING
    # zero.Init makes weights in bfloat16, which gives other random numbers than float32.
    expected = {zero_init: losses_with(stock, zero_init=zero_init, oracle=True) for zero_init in (False, True)}
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    os.chdir(tempfile.mkdtemp(dir=folder))

    @settings(
        max_examples=case["examples"], phases=[Phase.generate], deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(configs(most_mistakes=1, for_training=True), st.booleans())
    def attempt(generated: Generated, zero_init: bool) -> None:
        t_start_s = time.perf_counter()
        outcome, problem = judge(generated, expected[zero_init], zero_init)
        counts[outcome] += 1
        print(f"{outcome} after {time.perf_counter() - t_start_s:.1f} s: {generated.mistakes} {generated.config}")
        if problem:
            wrong.append(f"{generated.config!r}, zero.Init: {zero_init}\n{problem}")
        gc.collect()  # what failed half-way is closed when nothing refers to it any more

    attempt()
    left = training.scratch_engines(folder)
    return {"counts": dict(counts), "wrong": wrong, "left": left}


if __name__ == "__main__":
    training.main(run)
