# SPDX-License-Identifier: Apache-2.0
"""Ranks that were not started alike: other variables, options or weights on one of them. Run like ``training.py``.

``{"by_rank": {"1": …}}`` is laid over the case on that rank, ``"variables"`` are those of its environment, and
``"circumstance"`` names something else that is wrong there; ``"freezes_one"``: a weight is not trained there.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import training
from torch.optim.optimizer import register_optimizer_step_post_hook


@contextlib.contextmanager
def another_home() -> Iterator[None]:
    """The weight with id 2 stays in host memory, whatever the budget."""
    from tencache_ds.tiers.weights import WeightTier

    register = WeightTier.register

    def registered(self: Any, key: int, *args: Any, always_resident: bool) -> Any:
        return register(self, key, *args, always_resident=always_resident or key % 8 == 2)

    with mock.patch.object(WeightTier, "register", registered):
        yield


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Collectives may take two seconds."""
    from tencache_ds.integration import agreement

    initialize = agreement.Agreement.__init__

    def initialized(self: Any, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        initialize(self, store, rank, world_size, 2.0)

    with mock.patch.object(agreement.Agreement, "__init__", initialized):
        yield


@contextlib.contextmanager
def device_memory(*, usable: bool = True) -> Iterator[None]:
    """Ordinary memory stands in for a device's, where there is none; not usable, it is a GPU without Triton."""
    import gpu_memory_cases

    from tencache_ds.errors import ConfigError
    from tencache_ds.integration import stage3_building

    def opened(on_cuda: bool, fused: Any) -> Any:
        if not usable:
            raise ConfigError("there is no Triton")
        return gpu_memory_cases.OrdinaryMemory(), gpu_memory_cases.TeamAdam(fused)

    if torch.cuda.is_available() and usable:
        yield
        return
    with mock.patch.object(stage3_building, "open_device", opened):
        yield


@contextlib.contextmanager
def watched_step() -> Iterator[None]:
    """A hook that watches optimizer steps, so that state is not updated by chunks."""
    handle = register_optimizer_step_post_hook(lambda *_: None)
    yield
    handle.remove()


@contextlib.contextmanager
def no_space() -> Iterator[None]:
    """Nothing is free where optimizer state goes."""
    from tencache_ds.runtime import state_building

    with mock.patch.object(state_building, "_free_together", return_value=0):
        yield


CIRCUMSTANCES: dict[str, Callable[[], Any]] = {
    "": contextlib.nullcontext, "another_home": another_home, "impatient": impatient, "watched_step": watched_step,
    "device_memory": device_memory, "no_triton": functools.partial(device_memory, usable=False),
    "no_space": no_space,
}  # fmt: skip


def freeze_one(model: torch.nn.Module) -> None:
    model.layers[1].weight.requires_grad_(False)


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    case = case | case.get("by_rank", {}).get(str(rank), {})
    for option in case.get("tencache", {}).keys() & {"nvme_paths"}:
        case["tencache"][option] = [os.path.join(folder, path) for path in case["tencache"][option]]
    result: dict[str, Any] = {"failure": ""}
    t_start = time.monotonic()
    with mock.patch.dict(os.environ, case.get("variables", {})), CIRCUMSTANCES[case.get("circumstance", "")]():
        try:
            nvme, edit = os.path.join(folder, "nvme"), freeze_one if case.get("freezes_one") else None
            engine = training.build(case, case.get("engine", engine_name), nvme, edit)
        except Exception as error:
            result["failure"] = f"{type(error).__name__}: {error}"
            result["seconds"] = time.monotonic() - t_start
            gc.collect()
            return result
        generator = torch.Generator().manual_seed(1000 + rank)
        result["losses"] = training.train(engine, 4, generator, oracle=engine_name == "stock")
        if engine_name == "tencache":
            import tencache_ds

            result["resident_nbytes"] = tencache_ds.stats(engine).resident_weight_nbytes
            homes = engine.optimizer._gpu_homes
            result["gpu_nbytes"] = None if homes is None else homes._moves.nbytes
            result["local_ranks"] = engine.optimizer.tencache.surroundings.local_ranks
        engine.destroy()
    return result


if __name__ == "__main__":
    training.main(run)
