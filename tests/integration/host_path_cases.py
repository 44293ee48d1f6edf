# SPDX-License-Identifier: Apache-2.0
"""Two engines beside each other, one with TenCache's host path and one without: run like ``training.py``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import training

STEPS = 5


class Functions:
    """The functions of ``tencache_ds.host_path`` that were called within the block, as ``module.function``."""

    def __init__(self) -> None:
        self.called: set[str] = set()

    def __enter__(self) -> Functions:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename)
            if path.parent.name == "host_path" and path.parent.parent.name == "tencache_ds":
                self.called.add(f"{path.stem}.{frame.f_code.co_name}")


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    """Stock trains one engine, TenCache both in turns."""
    switched = {"on": True, "off": False} if engine_name == "tencache" else {"stock": True}
    functions = {name: Functions() for name in switched}
    engines = {
        name: training.build(case | {"tencache": {"host_path": on}}, engine_name, os.path.join(folder, "nvme"))
        for name, on in switched.items()
    }
    generators = {name: torch.Generator().manual_seed(1000 + rank) for name in switched}
    losses: dict[str, list[str]] = {name: [] for name in switched}
    for _ in range(STEPS):
        for name, engine in engines.items():
            with functions[name]:
                losses[name] += training.train(engine, 1, generators[name], oracle=engine_name == "stock")
    result: dict[str, Any] = {
        name: {
            "losses": losses[name],
            "weights": training.digests(engine.module),
            "called": sorted(functions[name].called),
        }
        for name, engine in engines.items()
    }
    for engine in engines.values():
        engine.destroy()
    return result


def writes_no_files(case: dict[str, Any]) -> bool:
    return True


if __name__ == "__main__":
    training.main(run, writes_no_files)
