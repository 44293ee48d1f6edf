# SPDX-License-Identifier: Apache-2.0
"""A step's figures as events of DeepSpeed's monitor (TensorBoard, Weights & Biases, CSV)."""

from __future__ import annotations

from dataclasses import asdict

from tencache_ds.observability.binding import shares
from tencache_ds.observability.counters import Stats, StepRecord


def monitor_events(record: StepRecord, stats: Stats, samples: int) -> list[tuple[str, float, int]]:
    """``(tag, value, samples)`` triples of a step.

    Args:
        record: of the step.
        stats: of its engine, after it.
        samples: the place on the x axis, as DeepSpeed counts it.
    """
    seconds = record.seconds
    values: dict[str, float] = {
        "step/seconds": seconds,
        "step/update_seconds": record.update_seconds,
        "step/background_seconds": record.background_seconds,
        "place/gpu_nbytes": stats.gpu_weight_nbytes + stats.gpu_gradient_nbytes + stats.gpu_state_nbytes,
        "place/ram_nbytes": stats.resident_weight_nbytes + stats.host_gradient_nbytes + stats.resident_state_nbytes,
        "place/nvme_nbytes": stats.stored_nbytes,
    }
    if stats.predicted_seconds is not None:
        values["step/predicted_seconds"] = stats.predicted_seconds
    values |= {f"bytes/{link}": nbytes for link, nbytes in record.nbytes.items()}
    values |= {f"stall/{cause}": stalled for cause, stalled in record.stall_seconds.items()}
    values |= {f"weights/{access}": count for access, count in record.accesses.items()}
    if seconds:
        values |= {f"rate/{link}_bytes_per_s": nbytes / seconds for link, nbytes in record.nbytes.items()}
        # The largest is what limits the step.
        values |= {f"share/{name.lower()}": spent / seconds for name, spent in shares(asdict(record)).items()}
    return [(f"TenCache/{tag}", float(value), samples) for tag, value in values.items()]
