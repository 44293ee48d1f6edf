# SPDX-License-Identifier: Apache-2.0
"""The events of a step for DeepSpeed's monitor."""

from __future__ import annotations

import dataclasses

import pytest

from tencache_ds.observability.counters import Access, Counters, Link, Stall, Stats
from tencache_ds.observability.summary import monitor_events


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
