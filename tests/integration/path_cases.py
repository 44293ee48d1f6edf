# SPDX-License-Identifier: Apache-2.0
"""Training on several NVMe paths, of which some become slow or fail: run like ``training.py``.

Paths are the folders ``nvme`` (DeepSpeed's ``nvme_path``) and those that a case names. ``"rules"`` gives, by number of
completed steps, the faults from then on, with ``{folder}`` for the folder that all paths are in.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import training

from tencache_ds.errors import StorageError
from tencache_ds.io.wrappers.faults import VARIABLE, parse_faults


class Watch:
    """Changes the faults between steps, and notes what each path holds."""

    def __init__(self, rules: dict[str, str], folder: str, engine: Any) -> None:
        self._rules = {int(step): rule.format(folder=folder) for step, rule in rules.items()}
        self.held: list[dict[str, dict[str, int]]] = []
        self(engine, -1)

    def __call__(self, engine: Any, step: int) -> None:
        import tencache_ds

        stats = tencache_ds.stats(engine)
        self.held.append(
            {Path(path.path).name: {part.kind: part.nbytes for part in path.contents} for path in stats.paths}
        )
        rule = self._rules.get(step + 1)
        if rule is not None:
            for path in engine.optimizer.tencache.all()[0].nvme.paths:
                path.backend.inject(parse_faults(rule))


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    import torch

    import tencache_ds

    case = {"model": "mlp", **case}
    if engine_name == "tencache":
        os.environ[VARIABLE] = "none"
        more = [os.path.join(folder, name) for name in case.pop("paths")]
        case["tencache"] = {"nvme_paths": more} | case.get("tencache", {})
        if "optimizer_path" in case:
            section = {"device": "nvme", "nvme_path": os.path.join(folder, case["optimizer_path"])}
            case["zero"] = {"offload_optimizer": section}
    engine = training.build(case, engine_name, os.path.join(folder, "nvme"))
    generator = torch.Generator().manual_seed(1000 + rank)
    watch = Watch(case.get("rules", {}), folder, engine) if engine_name == "tencache" else None
    result: dict[str, Any] = {"failure": ""}
    t_start = time.monotonic()
    try:
        result["losses"] = training.train(
            engine, case.get("steps", 12), generator, oracle=engine_name == "stock", hook=watch
        )
        if watch is not None:  # quick again, for the many small reads that follow
            for path in engine.optimizer.tencache.all()[0].nvme.paths:
                path.backend.inject([])
        result["weights"] = training.digests(engine.module)
    except StorageError as error:
        result |= {"failure": str(error), "path": error.path, "notes": error.__notes__}
    result["seconds"] = time.monotonic() - t_start
    if watch is not None:
        stats = tencache_ds.stats(engine)
        result |= {"held": watch.held, "relocated": stats.relocated_extents}
        result["scratch"] = sorted(Path(engine).parent.name for engine in training.scratch_engines(folder))
        result["paths"] = {
            Path(path.path).name: [path.nbytes_read, path.nbytes_written, path.bytes_per_s] for path in stats.paths
        }
        result["total"] = stats.total.nbytes
        result["line"] = engine.optimizer.tencache.describe()
    t_start = time.monotonic()
    try:
        engine.destroy()
    except StorageError as error:  # what had failed may be told again
        result["at_the_end"] = str(error)
    result["seconds_to_destroy"] = time.monotonic() - t_start
    del engine
    training.wait_until_closed()  # the weights' files and threads end with the model
    result["threads"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("tencache")]
    result["left"] = training.scratch_engines(folder)
    return result


if __name__ == "__main__":
    training.main(run)
