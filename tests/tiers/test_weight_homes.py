# SPDX-License-Identifier: Apache-2.0
"""Which weights stay in host memory, and the report about each."""

from __future__ import annotations

import pytest
import torch

from tencache_ds.errors import MemoryLimitError, TenCacheError
from tencache_ds.memory import HostArena, Locking
from tencache_ds.placement.places import Place
from tencache_ds.tiers.weight_homes import SLAB_NBYTES, CopyState, ResidentMemory, WeightHome, WeightHomes

NUMEL = 1000


@pytest.fixture
def arena():
    arena = HostArena(2 * SLAB_NBYTES, Locking.NONE)
    yield arena
    arena.close()


def added(homes: WeightHomes, key: int, *, numel: int = NUMEL, always_resident: bool = False):
    weight = homes.make(key, f"w{key}", numel, torch.bfloat16, always_resident=always_resident)
    homes.weights[key] = weight
    return weight


def test_memory_goes_to_the_first_ones_and_to_those_that_need_it(arena):
    asked = []
    homes = WeightHomes(ResidentMemory(arena), lambda: asked.append(True) or 5 * NUMEL)
    weights = [added(homes, key, always_resident=key == 4) for key in range(5)]
    assert asked == [True]
    assert [homes.is_resident(key) for key in range(5)] == [True, True, False, False, True]
    for weight in weights:
        if not weight.home.stored:
            assert weight.copy is CopyState.NONE
            assert weight.home.memory.shape == (NUMEL,)
            assert not weight.home.memory.any()
        else:
            assert weight.copy is CopyState.INITIAL
            assert weight.home.memory is None
    assert homes.resident_nbytes == 3 * 2 * NUMEL
    assert homes.stored_nbytes() == [2 * NUMEL] * 2
    assert homes.nbytes_of(0) == 2 * NUMEL
    assert homes.allocated_nbytes == 0
    assert homes.keys == set(range(5))
    assert homes.all()[2] == WeightHome(2, "w2", NUMEL, on_nvme=True)


def test_a_smaller_one_may_still_fit(arena):
    homes = WeightHomes(ResidentMemory(arena), lambda: 3 * NUMEL)
    for key, numel in enumerate((NUMEL, NUMEL, NUMEL // 2)):
        added(homes, key, numel=numel)
    assert [homes.is_resident(key) for key in range(3)] == [True, False, True]


def test_in_device_memory_only_what_belongs_to_host_counts_there(arena):
    homes = WeightHomes(ResidentMemory(arena), lambda: 2 * NUMEL)
    there, stored = added(homes, 0), added(homes, 1)
    for weight in (there, stored):
        memory = torch.empty(NUMEL, dtype=torch.bfloat16)
        weight.home.to_device(memory, lambda: torch.zeros(NUMEL, dtype=torch.bfloat16))
    assert [homes.on_device(key) for key in (0, 1)] == [True, True]
    assert [homes.of(key).returns_to for key in (0, 1)] == [Place.HOST, Place.NVME]
    assert homes.resident_nbytes == 2 * NUMEL
    assert homes.stored_nbytes() == []


def test_host_memory_of_a_weight_in_device_memory_is_freed_and_made_again(arena):
    memory = ResidentMemory(arena)
    homes = WeightHomes(memory, lambda: 2 * SLAB_NBYTES)
    large, small = added(homes, 0, numel=SLAB_NBYTES // 2), added(homes, 1)
    nbytes = large.nbytes + small.nbytes
    held = large.home.memory
    for weight in (large, small):
        weight.home.to_device(torch.ones(weight.numel, dtype=torch.bfloat16))
    assert homes.resident_nbytes == nbytes
    assert homes.free_unused() == nbytes
    assert homes.resident_nbytes == arena.nbytes_in_use == homes.free_unused() == 0
    held.fill_(1)  # remaining readers still may
    assert [weight.home.missing_nbytes for weight in (large, small)] == [large.nbytes, small.nbytes]
    small.home.memory.fill_(3)
    small.home.leave_device()
    assert small.home.memory.dtype is torch.bfloat16
    assert (small.home.memory == 3).all()
    other = added(homes, 2)
    assert other.home.memory.data_ptr() > small.home.memory.data_ptr(), "in the same slab"
    assert arena.nbytes_in_use == SLAB_NBYTES
    small.home.to_device(torch.empty(NUMEL, dtype=torch.bfloat16))
    assert homes.free_unused() == small.nbytes
    assert arena.nbytes_in_use == SLAB_NBYTES, "a weight is still in it"


def test_a_weight_is_registered_once_or_not_at_all(arena):
    homes = WeightHomes(ResidentMemory(arena), lambda: 10 * SLAB_NBYTES)
    added(homes, 0)
    with pytest.raises(TenCacheError, match="registered twice"):
        added(homes, 0)
    with pytest.raises(MemoryLimitError):
        added(homes, 1, numel=SLAB_NBYTES)
    assert homes.holds(0)
    assert not homes.holds(1)
