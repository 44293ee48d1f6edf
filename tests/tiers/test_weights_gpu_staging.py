# SPDX-License-Identifier: Apache-2.0
"""Weights with a second pool, that of the GPU: which of the two each use takes. Both are ordinary memory here."""

from __future__ import annotations

import pytest
import torch

from tencache_ds.io import Operation
from tencache_ds.memory import BufferPool, DeviceArena, HostArena, Locking
from tencache_ds.observability.counters import Event
from tencache_ds.planning.size_classes import SizeClass
from tencache_ds.tiers.weight_homes import ResidentMemory
from tencache_ds.tiers.weights import WeightTier
from tests.tiers.conftest import TIMEOUT_S, ManualEvent, Storage, numbers

pytestmark = pytest.mark.timeout(60)

P = 4096
NUMEL = 2 * P // 4
N_WEIGHTS = 6


class Bench:
    """Six weights of two pages on a store; two buffers for the host, three for the GPU."""

    def __init__(self, folder) -> None:
        self.storage = Storage(folder, (SizeClass(2 * P, 2),))
        self.gpu_arena = DeviceArena(torch.device("cpu"))
        self.gpu_pool = BufferPool(self.gpu_arena, (SizeClass(2 * P, 3),), poison=True)
        self.transient, self.resident = HostArena(None, Locking.NONE), HostArena(None, Locking.NONE)
        self.tier = WeightTier(
            store=lambda: self.storage.store,
            resident=ResidentMemory(self.resident),
            transient_arena=self.transient,
            resident_budget_nbytes=lambda: 0,
            counters=self.storage.counters,
            timeout_s=TIMEOUT_S,
        )
        for key in range(N_WEIGHTS):
            self.tier.register(key, f"w{key}", NUMEL, torch.float32, always_resident=False).copy_(self.value(key))
            self.tier.store_initial(key)
        self.tier.use_pool(self.storage.pool, self.gpu_pool)

    @staticmethod
    def value(key: int) -> torch.Tensor:
        return numbers(NUMEL, torch.float32, key)

    def events(self) -> dict[str, int]:
        return self.storage.counters.total().events

    def in_use(self) -> tuple[int, int, int]:
        """Buffers leased of the host's pool and the GPU's, and bytes of ordinary memory."""
        host, gpu = self.storage.pool.stats(), self.gpu_pool.stats()
        return host.nbytes_leased // (2 * P), gpu.nbytes_leased // (2 * P), self.transient.nbytes_in_use

    def close(self) -> None:
        self.tier.close()
        self.gpu_pool.drain(timeout_s=TIMEOUT_S)
        self.gpu_pool.assert_idle()
        self.gpu_pool.close()
        self.storage.close()
        assert self.transient.nbytes_in_use == 0
        self.resident.close()


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_what_is_exposed_is_in_gpu_memory(bench):
    shards = bench.tier.expose([0, 1])
    for key, shard in enumerate(shards):
        assert bench.gpu_arena.owns(shard)
        assert bench.tier.staged_for_gpu(key)
        assert torch.equal(shard, bench.value(key))
    assert bench.in_use() == (0, 2, 0)
    for key in (0, 1):
        bench.tier.give_back(key)
        assert not bench.tier.staged_for_gpu(key)


def test_a_buffer_comes_back_after_its_last_copy(bench):
    bench.tier.expose([0, 1, 2])
    event = ManualEvent()
    for key in (0, 1, 2):
        bench.tier.give_back(key, event)
    assert bench.in_use()[1] == 3
    event.done = True
    bench.tier.read_ahead([3])
    assert bench.in_use()[1] == 1


def test_read_ahead_fills_the_gpu_pool_only(bench):
    bench.tier.read_ahead(range(N_WEIGHTS))
    assert bench.in_use() == (0, 3, 0)
    bench.tier.expose([0])
    assert bench.events()[Event.DISCARDED_READ.value] == 0
    bench.tier.give_back(0)


def test_what_finds_no_buffer_is_read_into_host_memory(bench):
    shards = bench.tier.expose(range(N_WEIGHTS))
    assert [bench.tier.staged_for_gpu(key) for key in range(N_WEIGHTS)] == [True] * 3 + [False] * 3
    assert all(torch.equal(shard, bench.value(key)) for key, shard in enumerate(shards))
    assert bench.events()[Event.OVERFLOW_BUFFER.value] == 3
    for key in range(N_WEIGHTS):
        bench.tier.give_back(key)


def test_the_host_gets_host_memory(bench):
    bench.tier.read_ahead([1])  # for the GPU
    shards = bench.tier.expose([0, 1], for_host=True)
    assert not any(bench.gpu_arena.owns(shard) for shard in shards)
    assert all(torch.equal(shard, bench.value(key)) for key, shard in enumerate(shards))
    assert bench.in_use()[0] == 2
    for key in (0, 1):
        bench.tier.give_back(key)
    bench.tier.read_ahead([4, 5], for_host=True)
    assert bench.in_use()[0] == 2
    (shard,) = bench.tier.expose([4])  # it is there already: no reason to read it again
    assert not bench.gpu_arena.owns(shard)
    bench.tier.give_back(4)


@pytest.mark.parametrize("state", ["stored", "reading", "staged", "exposed"])
def test_an_update_is_made_in_host_memory(bench, state):
    if state == "reading":
        bench.storage.backend.gates[Operation.READ].clear()
    if state in ("reading", "staged"):
        bench.tier.read_ahead([0])
        while state == "staged" and not bench.tier.ready(0):
            pass
    elif state == "exposed":
        bench.tier.expose([0])
    target = bench.tier.begin_update(0)
    assert not bench.gpu_arena.owns(target)
    bench.storage.backend.open_gates()
    target.copy_(bench.value(100))
    bench.tier.finish_update(0)
    (shard,) = bench.tier.expose([0])
    assert bench.gpu_arena.owns(shard)
    assert torch.equal(shard, bench.value(100))
    bench.tier.give_back(0)


def test_updates_do_not_take_from_what_is_staged_for_the_gpu(bench):
    bench.tier.read_ahead([3, 4, 5])
    for key in (0, 1, 2):  # one more than the host has buffers for
        bench.tier.begin_update(key).copy_(bench.value(100 + key))
        bench.tier.finish_update(key)
    assert bench.events()[Event.DISCARDED_READ.value] == 0
    assert all(torch.equal(s, bench.value(k)) for k, s in zip((3, 4, 5), bench.tier.expose([3, 4, 5]), strict=True))
    for key in (3, 4, 5):
        bench.tier.give_back(key)


def test_a_demand_takes_the_buffer_of_what_was_read_ahead_for_the_gpu(bench):
    bench.tier.read_ahead([3, 4, 5])
    while not all(bench.tier.ready(key) for key in (3, 4, 5)):
        pass
    (shard,) = bench.tier.expose([0])
    assert bench.gpu_arena.owns(shard)
    assert torch.equal(shard, bench.value(0))
    assert bench.events()[Event.DISCARDED_READ.value] == 1
    bench.tier.give_back(0)


def test_a_new_value_from_outside_is_put_into_host_memory(bench):
    bench.tier.read_ahead([0])
    target = bench.tier.begin_overwrite(0)
    assert not bench.gpu_arena.owns(target)
    target.copy_(bench.value(7))
    bench.tier.finish_overwrite(0)
    assert torch.equal(bench.tier.read(0), bench.value(7))
