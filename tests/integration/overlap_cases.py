# SPDX-License-Identifier: Apache-2.0
"""The cases of three other programs with optimizer steps that go on in the background, slowly: whoever does not wait
for a weight, a gradient or the state gets a wrong one.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import checkpoint_cases
import training
import user_api_cases

from tencache_ds.observability.counters import Stall
from tencache_ds.tiers.update import ChunkedUpdate

DELAY_S, DELAYED = 0.003, 7
"""So long takes each of so many chunks that are updated in the background."""

plain_config = training.config_for
plain_finish = ChunkedUpdate._finish
in_background: list[int] = []


def config_for(case: dict[str, Any], engine: str, nvme: str) -> dict[str, Any]:
    """Small chunks, no persistent weights, and host memory for everything: whatever may wait does."""
    case = {"persistence": 0} | case
    config = plain_config(case, engine, nvme)
    if engine == "tencache":
        config["tencache"] = {"gpu_memory": 0} | config["tencache"] | {"chunk_size": 2**16, "host_memory": "1GiB"}
        config["tencache"] |= case.get("tencache", {})
    return config


def slow_finish(self: ChunkedUpdate, *args: Any) -> None:
    if threading.current_thread().name.startswith("tencache-update"):
        in_background.append(1)
        if len(in_background) % DELAYED == 0:
            time.sleep(DELAY_S)
    plain_finish(self, *args)


def run(case: dict[str, Any], engine: str, folder: str, rank: int) -> dict[str, Any]:
    in_background.clear()
    if "scenario" in case:
        result = user_api_cases.run(case, engine, folder, rank)
    elif "action" in case:
        result = checkpoint_cases.run(case, engine, folder, rank)
    else:
        result = training.run_case(case, engine, folder, rank)
        if engine == "tencache":
            result["in_background"] = len(in_background)
            result["waited_s"] = result["stats"]["total"]["stall_seconds"][Stall.UPDATE]
        return result
    return {"result": result, "in_background": len(in_background)}


if __name__ == "__main__":
    training.config_for = config_for
    ChunkedUpdate._finish = slow_finish
    training.main(run)
