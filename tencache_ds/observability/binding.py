# SPDX-License-Identifier: Apache-2.0
"""What a step's time was spent on, from its figures alone: which resource the training waits for. Imports neither torch
nor DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NVME_STALLS = ("weight_read", "optimizer_read", "buffer", "write_back", "activation_read", "activation_write")


def shares(record: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step by what the training thread was doing; they add up to the step.

    Args:
        record: a :class:`~tencache_ds.observability.counters.StepRecord` as a dict.

    Returns:
        ``"compute"`` (forward, backward, and everything that TenCache does not count), ``"NVMe"`` (waits for reads,
        writes and staging buffers) and ``"update"`` (the optimizer step but for these waits, and waits for the part of
        it that continues in the background).
    """
    stalls = record["stall_seconds"]
    nvme = sum(stalls.get(cause, 0.0) for cause in NVME_STALLS)
    # Reads of weights and most waits for buffers belong to the passes, the others to the update.
    in_update = stalls.get("optimizer_read", 0.0) + stalls.get("write_back", 0.0)
    update = max(record["update_seconds"] - in_update, 0.0)
    waited = stalls.get("update", 0.0)
    background = record.get("background_seconds", 0.0)
    if background:  # where the update in the background waited for NVMe itself, so did the training
        stalled = sum(record.get("background_stall_seconds", {}).get(cause, 0.0) for cause in NVME_STALLS)
        share = min(stalled / background, 1.0)
        nvme, waited = nvme + share * waited, (1 - share) * waited
    seconds = record["seconds"]
    nvme = min(nvme, seconds)
    update = min(update + waited, seconds - nvme)
    return {"compute": seconds - nvme - update, "NVMe": nvme, "update": update}


def binding(record: Mapping[str, Any]) -> tuple[str, float]:
    """The resource that most of a step's time was spent on, and its share of the step."""
    by_resource = shares(record)
    resource = max(by_resource, key=by_resource.__getitem__)
    return resource, by_resource[resource] / record["seconds"] if record["seconds"] else 0.0
