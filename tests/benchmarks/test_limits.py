# SPDX-License-Identifier: Apache-2.0
"""Where a finished run kept things, from what TenCache says of it."""

from __future__ import annotations

import pytest

from benchmarks.comparison.limits import placement_of
from benchmarks.comparison.peers import PEERS
from benchmarks.record import Placement, Run
from tests.benchmarks.examples import run

NUMEL = 10**9
EVERYTHING = {"resident_weight_nbytes": 2 * NUMEL, "resident_state_nbytes": 12 * NUMEL}


def finished(**stats: int) -> Run:
    return run("tencache", [1.0], numel=2 * NUMEL, tencache_stats=stats)


@pytest.mark.parametrize(
    ("stats", "placement"),
    [
        ({"resident_weight_nbytes": 0}, Placement(weights_nvme=1, optimizer_nvme=1)),
        (EVERYTHING, Placement(weights_nvme=0, optimizer_nvme=0)),
        (
            EVERYTHING
            | {"resident_state_nbytes": 6 * NUMEL, "gpu_weight_nbytes": 2 * NUMEL, "gpu_state_nbytes": 3 * NUMEL},
            Placement(weights_nvme=0, optimizer_nvme=0.25, weights_gpu=1, optimizer_gpu=0.25),
        ),
        (
            {"resident_weight_nbytes": 0, "gpu_weight_nbytes": NUMEL},
            Placement(weights_nvme=0.5, optimizer_nvme=1, weights_gpu=0.5),
        ),
        (
            {"resident_weight_nbytes": NUMEL, "stored_nbytes": 12 * NUMEL},  # half of the master weights are split
            Placement(weights_nvme=0.5, optimizer_nvme=1, optimizer_nvme_nbytes=11),
        ),
        (
            EVERYTHING | {"gpu_weight_nbytes": 2 * NUMEL, "gpu_state_nbytes": 12 * NUMEL + 4096},
            Placement(weights_nvme=0, optimizer_nvme=0, weights_gpu=1, optimizer_gpu=1),
        ),
    ],
)
def test_of_two_ranks_on_nvme(stats: dict[str, int], placement: Placement) -> None:
    assert placement_of(PEERS["tencache"], finished(**stats), 2) == placement


def test_a_config_for_ram_says_what_is_not_on_nvme_and_statistics_what_is_on_the_gpu() -> None:
    stats = {"resident_weight_nbytes": 0, "gpu_weight_nbytes": 2 * NUMEL, "gpu_state_nbytes": 3 * NUMEL}
    expected = Placement(weights_nvme=0, optimizer_nvme=0, weights_gpu=1, optimizer_gpu=0.25)
    assert placement_of(PEERS["tencache-ram"], finished(**stats), 2) == expected


def test_of_others_the_settings_say_it() -> None:
    other = finished().model_copy(update={"tencache_stats": None})
    assert placement_of(PEERS["gpu-ram"], other, 2) == Placement(weights_nvme=0, optimizer_nvme=0, weights_gpu=1)
    assert placement_of(PEERS["tencache"], other, 2) is None
