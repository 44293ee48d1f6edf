# SPDX-License-Identifier: Apache-2.0
"""Figures of a running job, from the snapshots of its processes. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tencache_ds.observability.channel_client import Process


def latest_engine(process: Process) -> dict[str, Any]:
    """The engine of a process that took the last step, where there are several."""
    return min(process.snapshot["engines"], key=lambda engine: (engine["steps"] == 0, engine["seconds_in_step"]))


def stored_nbytes(stats: Mapping[str, Any], kind: str) -> int:
    """Bytes on the NVMe paths of a rank, as stored.

    Args:
        stats: the rank's figures (:class:`~tencache_ds.observability.counters.Stats` as a dict).
        kind: as in :class:`~tencache_ds.observability.paths.Contents`.
    """
    held = (content for path in stats["paths"] for content in path["contents"])
    return sum(int(content["nbytes"]) for content in held if content["kind"] == kind)
