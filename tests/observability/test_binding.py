# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from tencache_ds.observability.binding import binding, shares


def record(seconds: float = 10.0, update: float = 0.0, background: float = 0.0, **stalls: float) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "update_seconds": update,
        "stall_seconds": stalls,
        "background_seconds": background,
        "background_stall_seconds": {},
    }


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        (record(), {"compute": 10, "NVMe": 0, "update": 0}),
        (record(weight_read=4, buffer=2), {"compute": 4, "NVMe": 6, "update": 0}),
        (record(update=7, optimizer_read=5), {"compute": 3, "NVMe": 5, "update": 2}),
        (record(update=1, background=4, update_wait=0) | {"stall_seconds": {"update": 3}},
         {"compute": 6, "NVMe": 0, "update": 4}),
        (record(background=4) | {"stall_seconds": {"update": 2}, "background_stall_seconds": {"optimizer_read": 3}},
         {"compute": 8, "NVMe": 1.5, "update": 0.5}),
        (record(seconds=1, update=3, weight_read=5), {"compute": 0, "NVMe": 1, "update": 0}),
    ],
)  # fmt: skip
def test_a_step_is_divided(figures: dict[str, Any], expected: dict[str, float]):
    actual = shares(figures)
    assert actual == pytest.approx(expected)
    assert sum(actual.values()) == pytest.approx(figures["seconds"])
    resource, share = binding(figures)
    assert expected[resource] == max(expected.values())
    assert share == pytest.approx(expected[resource] / figures["seconds"])


def test_a_step_without_time():
    assert binding(record(seconds=0.0))[1] == 0.0
