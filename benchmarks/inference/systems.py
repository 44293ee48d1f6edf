# SPDX-License-Identifier: Apache-2.0
"""The systems whose generation can be compared, and their configurations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..comparison.suites import parse_settings
from ..workloads import Census


@dataclass(frozen=True, slots=True)
class System:
    """One system."""

    program: str  # key of :data:`.generation.BUILDERS`
    device: str | None = None  # of DeepSpeed's ``offload_param``
    options: dict[str, Any] | None = None  # of TenCache; None where it is not used
    on_nvme: bool = False  # whether its weights are on NVMe, unless it says otherwise

    def config(self, nvme_path: str, census: Census, batch: int) -> dict[str, Any]:
        """Its DeepSpeed config."""
        if self.device is None:
            return {}
        offload: dict[str, Any] = {"device": self.device, "pin_memory": True}
        zero: dict[str, Any] = {"stage": 3, "offload_param": offload}
        if self.device == "nvme":
            offload["nvme_path"] = nvme_path
        if self.options is not None:
            zero["offload_engine"] = "tencache"
        elif self.device == "nvme":  # five buffers, as in DeepSpeed's examples; each holds the largest weight
            offload |= {"buffer_count": 5, "buffer_size": census.largest + 4096, "max_in_cpu": 0}
        return {
            "train_micro_batch_size_per_gpu": batch,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "steps_per_print": 10**9,
        } | ({"tencache": self.options} if self.options else {})


SYSTEMS = {
    "device": System("device"),
    "stock-ram": System("deepspeed", "cpu"),
    "stock-nvme": System("deepspeed", "nvme", on_nvme=True),
    "accelerate-cpu": System("accelerate-cpu"),
    "accelerate-disk": System("accelerate-disk", on_nvme=True),
    "tencache": System("deepspeed", "nvme", {}),
    "tencache-ram": System("deepspeed", "cpu", {}),
    "tencache-nvme": System("deepspeed", "nvme", {"host_memory": 0, "gpu_memory": 0}),
}
DEFAULT = ("device", "stock-ram", "stock-nvme", "accelerate-cpu", "accelerate-disk", "tencache", "tencache-nvme")
BASELINE = "stock-ram"


def parse(text: str) -> System:
    """A system by its name, with TenCache's options after a colon: ``tencache:gpu_memory=8GiB+host_memory=0``.

    Raises:
        ValueError: there is no such system, or it takes no options.
    """
    name, options = parse_settings(text)
    if name not in SYSTEMS:
        raise ValueError(f"unknown system {name!r}; known: {', '.join(SYSTEMS)}")
    system = SYSTEMS[name]
    if options and system.options is None:
        raise ValueError(f"{name} takes no options of TenCache: {', '.join(options)}")
    return replace(system, options=system.options | options) if options else system
