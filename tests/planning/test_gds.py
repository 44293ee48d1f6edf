# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tencache_ds.errors import ConfigError
from tencache_ds.planning.budget import (
    AUTO_WEIGHT_STAGING_NBYTES,
    UPDATE_STAGING_NBYTES,
    plan_gpu_staging,
    plan_staging,
)
from tencache_ds.planning.gds import COMPATIBILITY_GAIN, GdsTrial, choose_gds, combined
from tencache_ds.planning.size_classes import plan_size_classes, smallest_budget_nbytes

MIB = 2**20
DRIVER = "the nvidia-fs driver is not loaded"


def trial(gds: float, staged: float = 1e9, compatibility: str = "") -> GdsTrial:
    return GdsTrial("", compatibility, gds, staged)


@pytest.mark.parametrize(
    ("trial", "use", "said"),
    [
        (trial(1.1e9), True, "faster, 1.10 GB/s, staged 1.00 GB/s"),
        (trial(0.9e9), False, "it is not faster, 0.90 GB/s, staged 1.00 GB/s"),
        (trial(1e9), False, "not faster"),
        (trial(1.01e9 * COMPATIBILITY_GAIN, compatibility=DRIVER), True, f"compatibility mode ({DRIVER})"),
        (trial(0.99e9 * COMPATIBILITY_GAIN, compatibility=DRIVER), False, f"({DRIVER}) is not clearly faster"),
        (GdsTrial("KvikIO is not installed"), False, "KvikIO is not installed"),
        (GdsTrial("KvikIO is not installed", DRIVER, 9e9, 1e9), False, "KvikIO is not installed"),
    ],
)
def test_automatic(trial, use, said):
    choice = choose_gds("auto", trial)
    assert choice.use is use
    assert said in choice.reason
    assert choice.warning == ""


def test_asked_for():
    assert choose_gds("on", trial(0.5e9)).use
    assert choose_gds("on", trial(0.5e9)).warning == ""


def test_asked_for_in_compatibility_mode_is_said_loudly():
    choice = choose_gds("on", trial(0.5e9, compatibility=DRIVER))
    assert choice.use
    assert "compatibility mode" in choice.reason
    for part in ('"tencache.gds"', DRIVER, "COMPATIBILITY MODE", "0.50 GB/s", "1.00 GB/s"):
        assert part in choice.warning


def test_asked_for_and_impossible():
    with pytest.raises(ConfigError) as caught:
        choose_gds("on", GdsTrial("KvikIO is not installed: pip install 'tencache-ds[gds-cu13]'"))
    assert '"tencache.gds" is "on"' in str(caught.value)
    assert "pip install 'tencache-ds[gds-cu13]'" in str(caught.value)


def test_several_paths():
    assert combined([trial(1e9), trial(2e9, 3e9, DRIVER)]) == GdsTrial("", DRIVER, 3e9, 4e9)
    assert combined([trial(1e9), GdsTrial("no space"), GdsTrial("gone")]).problem == "no space"


SHARDS = [40 * MIB] * 40


def test_gpu_memory_is_bounded():
    assert plan_gpu_staging(None, SHARDS) == AUTO_WEIGHT_STAGING_NBYTES
    assert plan_gpu_staging(None, [40 * MIB] * 3) == 120 * MIB
    assert plan_gpu_staging(None, [2000 * MIB] * 4) == 4000 * MIB
    assert plan_gpu_staging(100 * MIB, SHARDS) == 100 * MIB
    assert plan_gpu_staging(2**40, SHARDS) == 1600 * MIB


def test_too_little_gpu_memory_names_what_is_needed():
    least = smallest_budget_nbytes(SHARDS)
    assert plan_size_classes(SHARDS, plan_gpu_staging(least, SHARDS))
    with pytest.raises(ConfigError, match=f'"tencache.gds_memory" is {least - 1} bytes.*at least {least} per rank'):
        plan_gpu_staging(least - 1, SHARDS)


def test_host_memory_for_weights_that_are_only_written():
    plan = plan_staging(None, SHARDS, 32 * MIB, 20, weights_read_by_gpu=True)
    assert plan.weight_nbytes == UPDATE_STAGING_NBYTES
    assert plan.chunk_slots == plan_staging(None, SHARDS, 32 * MIB, 20).chunk_slots
    # What the weights do not need goes to the chunks.
    limit = 1000 * MIB
    with_gds, without = (plan_staging(limit, SHARDS, 32 * MIB, 90, weights_read_by_gpu=yes) for yes in (True, False))
    assert with_gds.weight_nbytes < without.weight_nbytes
    assert with_gds.chunk_slots > without.chunk_slots
    assert with_gds.nbytes <= limit
    # The least that works is the same either way.
    large = [600 * MIB] * 4
    assert plan_staging(None, large, 0, 0, weights_read_by_gpu=True).weight_nbytes == smallest_budget_nbytes(large)
