# SPDX-License-Identifier: Apache-2.0
"""What a training run was like, in a few lines of text, and a step's figures as events of DeepSpeed's monitor
(TensorBoard, Weights & Biases, CSV): pure functions of :class:`~tencache_ds.observability.counters.Stats`.
"""

from __future__ import annotations

from dataclasses import asdict

from tencache_ds.layout import gib
from tencache_ds.observability.binding import shares
from tencache_ds.observability.counters import Stall, Stats, StepRecord

_WAITS = {
    Stall.WEIGHT_READ: "reads of weights",
    Stall.OPTIMIZER_READ: "reads of optimizer state",
    Stall.BUFFER: "staging buffers",
    Stall.WRITE_BACK: "writes",
    Stall.ACTIVATION_READ: "reads of activations",
    Stall.ACTIVATION_WRITE: "writes of activations",
}

WORTH_SAYING = 0.05
"""Share of the time spent waiting for NVMe from which more memory or another drive is recommended."""


def summary(stats: Stats) -> list[str]:
    """The lines for the end of a run; none if it took no optimizer step. NVMe is named where there is an NVMe path."""
    total = stats.total
    if not total.step:
        return []
    has_nvme = bool(stats.paths)
    waits = {name: total.stall_seconds.get(cause.value, 0.0) for cause, name in _WAITS.items()}
    waited = sum(waits.values())
    share = waited / total.seconds if total.seconds else 0.0
    last = "" if stats.last_step is None else f", the last one {stats.last_step.seconds:.2f} s"
    lines = [f"{total.step} optimizer steps in {_duration(total.seconds)} since the engine was built{last}"]
    causes = ", ".join(f"{seconds:.1f} s for {name}" for name, seconds in waits.items() if seconds >= 0.05)
    if has_nvme:
        lines.append(f"waited for NVMe for {waited:.1f} s ({share:.1%} of the time){f': {causes}' if causes else ''}")
    if total.seconds:
        parts = {name: spent / total.seconds for name, spent in shares(asdict(total)).items()}
        line = f"{parts['compute']:.0%} of the time was forward and backward, {parts['update']:.0%} the optimizer step"
        if has_nvme:
            line += f", {parts['NVMe']:.0%} waits for NVMe"
        elif parts["NVMe"] >= 0.005:  # without NVMe, nothing but copies to and from the GPU holds staging buffers
            line += f", {parts['NVMe']:.0%} waits for staging buffers"
        lines.append(line)
    if total.background_seconds:
        waited_for_update = total.stall_seconds.get(Stall.UPDATE.value, 0.0)
        hidden = max(total.background_seconds - waited_for_update, 0.0)
        lines.append(f"{hidden:.1f} s of the optimizer steps were hidden behind forward passes")
    if has_nvme:
        read, written = total.nbytes.get("nvme_read", 0), total.nbytes.get("nvme_write", 0)
        lines.append(
            f"NVMe: {gib(read)} read, {gib(written)} written, per step {gib(read // total.step)} and "
            f"{gib(written // total.step)}"
        )
    lines.append(
        f"at the end: in GPU memory {gib(stats.gpu_weight_nbytes + stats.gpu_gradient_nbytes + stats.gpu_state_nbytes)}"
        f", in RAM {gib(stats.resident_weight_nbytes + stats.resident_state_nbytes)} of weights and state"
        f"{f', on NVMe {gib(stats.stored_nbytes)}' if has_nvme else ''}"
    )
    moved_nbytes = stats.host_activation_nbytes + stats.nvme_activation_nbytes
    if moved_nbytes:
        lines.append(
            f"activations between forward and backward: {gib(stats.gpu_activation_nbytes)} in GPU memory, "
            f"{gib(stats.host_activation_nbytes)} in RAM"
            f"{f', {gib(stats.nvme_activation_nbytes)} on NVMe' if has_nvme else ''}"
        )
    if has_nvme and share >= WORTH_SAYING:
        lines.append(
            "more RAM or GPU memory, another drive (tencache.nvme_paths) or a larger batch would shorten these waits; "
            "`tencache plan --job` estimates by how much while it runs"
        )
    return lines


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


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
