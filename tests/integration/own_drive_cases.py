# SPDX-License-Identifier: Apache-2.0
"""Ranks that keep checkpoints in a folder of their own, as on drives of different nodes. Run like ``training.py``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import training


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """Trains two steps, saves, and loads in a new engine; ``case["lost_by"]`` names a rank whose ``latest`` is gone by
    then, ``case["damaged_on"]`` one whose ``latest`` cannot be read, and ``case["blocked_on"]`` one whose ``latest``
    cannot be written."""
    drive = Path(folder, f"{case['name']}_drive{rank}")
    drive.mkdir()
    if case.get("blocked_on") == rank:
        (drive / "latest.partial").mkdir()
    config = {"config": {"checkpoint": {"use_node_local_storage": True}}}
    generator = torch.Generator().manual_seed(1000 + rank)
    result: dict[str, Any] = {"failure": ""}
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}):  # each is the first one of its node
        engine = training.build(case | config, engine_name, os.path.join(folder, "nvme"))
        training.train(engine, 2, generator, oracle=False)
        try:
            engine.save_checkpoint(str(drive), tag="second")
        except Exception as error:
            result["failure"] = f"{type(error).__name__}: {error}"
        result["files"] = sorted(str(path.relative_to(drive)) for path in drive.rglob("*.pt*") if path.is_file())
        result["latest"] = (drive / "latest").read_text() if (drive / "latest").exists() else ""
        state = generator.get_state()
        result["losses"] = training.train(engine, 2, generator, oracle=False)
        engine.destroy()
        if rank in (case.get("lost_by"), case.get("damaged_on")):
            (drive / "latest").unlink()
        if case.get("damaged_on") == rank:
            (drive / "latest").mkdir()
        torch.distributed.barrier()
        engine = training.build(case | config | {"seed": 99}, engine_name, os.path.join(folder, "nvme"))
        for tag in case.get("loads", ()):
            try:
                engine.load_checkpoint(str(drive), tag=tag)
            except Exception as error:
                result["failure"] = f"{type(error).__name__}: {error}"
        generator.set_state(state)
        result["losses_after_loading"] = training.train(engine, 2, generator, oracle=False)
        engine.destroy()
    return result


if __name__ == "__main__":
    training.main(run)
