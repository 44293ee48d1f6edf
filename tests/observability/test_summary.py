# SPDX-License-Identifier: Apache-2.0
"""The summary at the end of a run, and the events of a step for DeepSpeed's monitor."""

from __future__ import annotations

import dataclasses

import pytest

from tencache_ds.observability.counters import Access, Counters, Link, Stall, Stats, StepRecord
from tencache_ds.observability.paths import PathStats
from tencache_ds.observability.summary import monitor_events, summary

GIB = 2**30

EMPTY = Counters().total()
NVME = (PathStats("/nvme", "native", 0, 0, 0.0, 0.0, None, ()),)


def record(step: int, seconds: float, **figures: object) -> StepRecord:
    return dataclasses.replace(EMPTY, step=step, seconds=seconds, **figures)


def test_a_run_without_a_step_has_none():
    assert summary(Stats(total=EMPTY, last_step=None)) == []


def test_a_run_that_waits_for_nvme_is_told_what_helps():
    total = record(
        200,
        400.0,
        nbytes={"nvme_read": 300 * GIB, "nvme_write": 100 * GIB, "h2d": 0, "d2h": 0},
        stall_seconds={Stall.OPTIMIZER_READ: 40.0, Stall.BUFFER: 4.0, Stall.WRITE_BACK: 0.01, Stall.UPDATE: 5.0},
        background_seconds=65.0,
    )
    stats = Stats(
        total, record(200, 1.98), gpu_state_nbytes=GIB, gpu_weight_nbytes=GIB, resident_state_nbytes=3 * GIB,
        stored_nbytes=7 * GIB, paths=NVME,
    )  # fmt: skip
    assert summary(stats) == [
        "200 optimizer steps in 6.7 min since the engine was built, the last one 1.98 s",
        "waited for NVMe for 44.0 s (11.0% of the time): 40.0 s for reads of optimizer state, 4.0 s for staging "
        "buffers",
        "88% of the time was forward and backward, 1% the optimizer step, 11% waits for NVMe",
        "60.0 s of the optimizer steps were hidden behind forward passes",
        "NVMe: 300.00 GiB read, 100.00 GiB written, per step 1.50 GiB and 0.50 GiB",
        "at the end: in GPU memory 2.00 GiB, in RAM 3.00 GiB of weights and state, on NVMe 7.00 GiB",
        "more RAM or GPU memory, another drive (tencache.nvme_paths) or a larger batch would shorten these waits; "
        "`tencache plan --job` estimates by how much while it runs",
    ]


def test_a_run_that_waits_for_nothing_needs_no_advice():
    lines = summary(Stats(record(3, 9000.0), record(3, 1.0), paths=NVME))
    assert len(lines) == 5
    assert "in 2.5 h since" in lines[0]
    assert lines[1] == "waited for NVMe for 0.0 s (0.0% of the time)"
    assert lines[2] == "100% of the time was forward and backward, 0% the optimizer step, 0% waits for NVMe"
    assert not any("hidden" in line or "drive" in line for line in lines)


def test_without_nvme_there_is_no_word_of_it():
    stats = Stats(
        record(3, 10.0, update_seconds=2.0), record(3, 1.0), resident_state_nbytes=GIB, host_activation_nbytes=GIB
    )
    assert summary(stats) == [
        "3 optimizer steps in 10.0 s since the engine was built, the last one 1.00 s",
        "80% of the time was forward and backward, 20% the optimizer step",
        "at the end: in GPU memory 0.00 GiB, in RAM 1.00 GiB of weights and state",
        "activations between forward and backward: 0.00 GiB in GPU memory, 1.00 GiB in RAM",
    ]


def test_without_nvme_waits_for_staging_buffers_are_named():
    lines = summary(Stats(record(3, 10.0, stall_seconds={Stall.BUFFER: 2.0}), record(3, 1.0)))
    assert lines[1] == (
        "80% of the time was forward and backward, 0% the optimizer step, 20% waits for staging buffers"
    )
    assert len(lines) == 3


def test_they_carry_every_figure():
    counters = Counters()
    counters.moved(Link.NVME_WRITE, 11)
    counters.accessed(Access.LATE)
    record = dataclasses.replace(counters.step_done(2_000_000_000), seconds=4.0)
    stats = Stats(record, record, gpu_state_nbytes=1, gpu_weight_nbytes=2, host_gradient_nbytes=4, stored_nbytes=8)
    events = monitor_events(record, stats, 640)
    values = {tag.removeprefix("TenCache/"): value for tag, value, _ in events}
    assert all(tag.startswith("TenCache/") for tag, _, _ in events)
    assert len(values) == len(events) == 3 + 3 + 2 * len(Link) + len(Stall) + len(Access) + 3
    assert all(samples == 640 and isinstance(value, float) for _, value, samples in events)
    assert (values["bytes/nvme_write"], values["rate/nvme_write_bytes_per_s"]) == (11.0, 2.75)
    assert values["weights/late"] == 1.0
    assert (values["step/update_seconds"], values["step/seconds"]) == (2.0, 4.0)
    assert [values[f"place/{place}_nbytes"] for place in ("gpu", "ram", "nvme")] == [3.0, 4.0, 8.0]
    assert [values[f"share/{name}"] for name in ("compute", "nvme", "update")] == pytest.approx([0.5, 0.0, 0.5])


def test_a_prediction_is_there_once_it_is_known():
    record = Counters().step_done(0)
    tags = [tag for tag, _, _ in monitor_events(record, Stats(record, record, predicted_seconds=0.5), 1)]
    assert "TenCache/step/predicted_seconds" in tags
