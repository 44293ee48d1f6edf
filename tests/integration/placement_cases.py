# SPDX-License-Identifier: Apache-2.0
"""Training in which everything changes its place at random after steps, in two engines with a checkpoint between them.

Weights move on all ranks at once, gradients and chunks of optimizer state on each rank as it likes: into device memory,
host memory and onto NVMe, where the config allows it. The oracle is stock's run, which never stops.
"""

from __future__ import annotations

import functools
import os
import random
from collections import Counter
from typing import Any

import gpu_memory_cases
import torch
import training
from deepspeed.accelerator import get_accelerator

from tencache_ds.integration.agreement import agreed
from tencache_ds.placement import step_observer
from tencache_ds.placement.places import Place

NOT_FOR_STOCK = {"placement", "places", "tencache", "device_memory"}


class RandomPlacement:
    """Gives everything another place after steps.

    Args:
        seed: of the run.
        rank: whose gradients and state differ from those of others.
        places: of optimizer state.
    """

    def __init__(self, seed: int, rank: int, places: list[str]) -> None:
        self._of_all = random.Random(f"{seed}")
        self._of_rank = random.Random(f"{seed}:{rank}")
        self._places = [Place[name] for name in places]
        self.moved: Counter[str] = Counter()

    def attach(self, engine: Any) -> None:
        """From now on things move where those of the plan do: at the end of a step, in it."""
        homes = engine.optimizer._gpu_homes
        step_done = homes.step_done

        @functools.wraps(step_done)
        def then_move(*arguments: Any) -> None:
            step_done(*arguments)
            if homes.settled and self._of_all.random() < 0.6:
                self._move(engine.optimizer, homes)

        homes.step_done = then_move

    def _move(self, optimizer: Any, homes: Any) -> None:
        moves = homes._moves
        weights = moves._weight_moves
        moves._state.before()
        shards = {shard.key: shard for shard in homes._shards()}
        for key in list(weights.there):
            if self._of_all.random() < 0.4:
                weights.release(key)
                self.moved["weights"] += 1
        coming = [shard for key, shard in shards.items() if key not in weights.there and self._of_all.random() < 0.4]
        if not weights.bring(coming, agreed):
            raise RuntimeError("there is not enough device memory for the case")
        self.moved["weights"] += len(coming)
        gradients = optimizer._gradients
        for group in moves._sub_groups:
            for key, numel in group:
                there, wanted = gradients.on_device(key), self._of_rank.random() < 0.5
                if there != wanted:
                    memory = None
                    if wanted:
                        memory = homes._memory.allocate(numel * gradients.dtype.itemsize).view(gradients.dtype)
                    moves._moved_gradient(key, gradients.move(key, memory))
                    self.moved["gradients"] += 1
        if Place.NVME in self._places and not moves._state.open_store():
            raise RuntimeError("state may not go to NVMe, where the case wants it")
        if self._of_rank.random() < 0.3:
            moves.free_unused_host_memory()
        for index in range(len(moves._sub_groups)):
            places = optimizer._state.places(index)
            wanted = [self._of_rank.choice([*self._places, place]) for place in places]
            self.moved["state"] += sum(new is not old for new, old in zip(wanted, places, strict=True))
            moves.relocate({index: wanted})
        homes._memory.synchronize()


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    if engine_name == "stock":
        return training.run_case({k: v for k, v in case.items() if k not in NOT_FOR_STOCK}, "stock", folder, rank)
    nvme, path = os.path.join(folder, "nvme"), os.path.join(folder, "checkpoints", str(case["placement"]))
    generator = torch.Generator().manual_seed(1000 + rank)
    placement = RandomPlacement(case["placement"], rank, case["places"])
    losses: list[str] = []
    half = case["steps"] // 2

    def train(engine: Any, steps: int) -> None:
        placement.attach(engine)
        losses.extend(training.train(engine, steps, generator, oracle=False))

    engine = training.build(case, engine_name, nvme)
    train(engine, half)
    engine.save_checkpoint(path, tag="half")
    calls = getattr(engine.module, "calls", None)
    engine.destroy()
    engine = training.build(case | {"seed": 99}, engine_name, nvme)
    if engine.load_checkpoint(path, tag="half")[0] is None:
        raise RuntimeError(f"nothing was loaded from {path}")
    if calls is not None:
        engine.module.calls = calls
    train(engine, case["steps"] - half)
    result = {"losses": losses, "weights": training.digests(engine.module), "moved": dict(placement.moved)}
    engine.destroy()
    return result


if __name__ == "__main__":
    training.config_for = gpu_memory_cases.config_for
    torch.manual_seed(0)
    step_observer.MOST_STEPS = 1
    if get_accelerator().is_synchronized_device():
        gpu_memory_cases.use_ordinary_memory()
    training.main(run)
