# SPDX-License-Identifier: Apache-2.0
"""What ranks on several nodes do: run like ``training.py``, with ``tests/integration`` on the path.

Without an action a case trains; ``"save"`` and ``"load"`` are those of ``checkpoint_cases.py``; ``"full"`` saves while
the drive of one node is full; ``"interrupted"`` trains until something ends it, after it has saved.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import checkpoint_cases
import torch
import training


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    action = case.get("action", "train")
    acts = {"train": train, "save": checkpoint_cases.run, "load": checkpoint_cases.run, "full": save_on_a_full_drive,
            "interrupted": train_until_interrupted}  # fmt: skip
    t_start = time.monotonic()
    result = acts[action](case, engine_name, folder, rank)
    return result | {"host": socket.gethostname(), "seconds": time.monotonic() - t_start}


def train(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def look(engine: Any, step: int) -> None:
        if rank in case.get("late_ranks", ()):
            time.sleep(case["late_s"])
        seen["optimizer"] = type(engine.optimizer).__name__
        if engine_name == "tencache" and step == 0:
            surroundings = engine.optimizer.tencache.surroundings
            seen["local_ranks"], seen["cores"] = surroundings.local_ranks, surroundings.cores
            seen["host_nbytes"], seen["host_reason"] = surroundings.host_nbytes, surroundings.host_reason
            seen["scratch"] = training.scratch_engines(case["nvme_path"])

    return training.run_case(case, engine_name, folder, rank, look) | seen


def save_on_a_full_drive(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """Saves, lets the drive of the ranks in ``case["full_on"]`` run full, tries to save, and trains on."""
    engine = training.build(case, engine_name, os.path.join(folder, "nvme"))
    generator = torch.Generator().manual_seed(1000 + rank)
    path = case["checkpoint"]
    losses = training.train(engine, 2, generator, oracle=False)
    engine.save_checkpoint(path, tag="first")
    losses += training.train(engine, 1, generator, oracle=False)
    filler = Path(path, "filler")
    if rank in case["full_on"]:
        fill(filler)
    torch.distributed.barrier()
    try:
        engine.save_checkpoint(path, tag="second")
        failure = ""
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    torch.distributed.barrier()
    latest, left = read_latest(path), [str(file) for file in Path(path, "second").glob("*")]
    filler.unlink(missing_ok=True)
    torch.distributed.barrier()
    losses += training.train(engine, 1, generator, oracle=False)
    engine.save_checkpoint(path, tag="third")
    result = {"losses": losses, "failure": failure, "latest": latest, "left": left, "latest_after": read_latest(path)}
    engine.destroy()
    return result


def fill(path: Path) -> None:
    """Takes the space that is left on the drive, but for a few names."""
    with open(path, "wb", buffering=0) as file:
        for nbytes in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(nbytes))
            except OSError:
                continue
        file.truncate(file.tell() - 2**15)


def read_latest(path: str) -> str:
    """What ``latest`` names on this node; empty where there is none."""
    latest = Path(path, "latest")
    return latest.read_text() if latest.exists() else ""


def train_until_interrupted(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """Trains three steps, saves, and trains on; ranks in ``case["stuck_ranks"]`` do not come to the end of what
    ``case["stuck_in"]`` names: ``"forward"`` (the others wait in a collective) or ``"update"`` (they wait for votes).
    """
    engine = training.build(case, engine_name, os.path.join(folder, "nvme"))
    generator = torch.Generator().manual_seed(1000 + rank)
    training.train(engine, 3, generator, oracle=False)
    engine.save_checkpoint(case["checkpoint"], tag="save0")
    if rank in case["stuck_ranks"]:

        def stuck(*_: Any) -> None:
            Path(folder, f"stuck_{rank}").touch()
            time.sleep(600)

        if case["stuck_in"] == "forward":
            engine.module.register_forward_pre_hook(stuck)
        else:
            engine.optimizer.step_guard.begin_change = stuck
    training.train(engine, 1, generator, oracle=False)
    return {}


if __name__ == "__main__":
    training.main(run)
