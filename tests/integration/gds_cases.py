# SPDX-License-Identifier: Apache-2.0
"""``training.py`` and ``user_api_cases.py`` with weights read into a staging pool of the device (``"gds": "on"``).

On a GPU this is KvikIO. On the CPU accelerator ordinary memory stands in for the device's, and ordinary files for
KvikIO's; all else is what runs on a GPU: two pools, the copy before a gather, fingerprints, the order of requests.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
import training
import user_api_cases
from deepspeed.accelerator import get_accelerator

from tencache_ds.planning.gds import GdsTrial
from tencache_ds.runtime import gpu_staging
from tests.io.device_files import PlainDeviceFile

plain_config = training.config_for


def config_for(case: dict[str, Any], engine: str, nvme: str) -> dict[str, Any]:
    config = plain_config(case, engine, nvme)
    if engine == "tencache":
        config["tencache"] = {"gds": "on"} | config["tencache"]
    return config


def use_ordinary_memory() -> None:
    gpu_staging.obstacle = lambda on_cuda, verify: ""
    gpu_staging.try_gds = lambda *args, **options: GdsTrial("", "", 2e9, 1e9)
    gpu_staging.GdsBackend = functools.partial(gpu_staging.GdsBackend, open_file=PlainDeviceFile)


def least_gds_memory(case: dict[str, Any], folder: str) -> int:
    """What the error for far too little ``gds_memory`` names as the least that works. Slots are lent often with it."""
    options = case.get("tencache", {}) | {"gds_memory": 1}
    try:
        training.build(case | {"tencache": options}, "tencache", f"{folder}/nvme")
    except ValueError as error:
        match = re.search(r"needs at least (\d+)", str(error))
        if match is None:
            raise
        return int(match.group(1))
    raise RuntimeError("one byte of GPU memory was accepted")


def run(case: dict[str, Any], engine: str, folder: str, rank: int) -> dict[str, Any]:
    if "scenario" in case:
        return user_api_cases.run(case, engine, folder, rank)
    if case.get("least_gds_memory") and engine == "tencache":
        least = least_gds_memory(case, folder)
        case = case | {"tencache": case.get("tencache", {}) | {"gds_memory": least}}
    return training.run_case(case, engine, folder, rank)


if __name__ == "__main__":
    training.config_for = config_for
    torch.manual_seed(0)
    if get_accelerator().is_synchronized_device():
        use_ordinary_memory()
    training.main(run)
