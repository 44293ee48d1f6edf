# SPDX-License-Identifier: Apache-2.0
"""Every transition of a weight, one by one, on a real store."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tencache_ds.errors import StorageError, TenCacheError
from tencache_ds.io import Operation
from tencache_ds.layout import round_up
from tencache_ds.memory import HostArena, Locking
from tencache_ds.observability.counters import Access, Counters, Event, Link, Stall
from tencache_ds.planning.size_classes import SizeClass
from tencache_ds.tiers import weight_homes, weight_staging
from tencache_ds.tiers import weights as weights_module
from tencache_ds.tiers.weight_homes import ResidentMemory
from tencache_ds.tiers.weights import WeightTier
from tests.tiers.conftest import TIMEOUT_S, ManualEvent, Storage, numbers

pytestmark = pytest.mark.timeout(60)

P = 4096
SMALL, LARGE = 1000, 3000  # elements of fp32: one page, three pages
CLASSES = (SizeClass(P, 2), SizeClass(3 * P, 1))


class Bench:
    """A weight tier on a store, with ``pool`` in use; ``values`` are what the weights should hold."""

    def __init__(self, folder, budget_nbytes: int = 0) -> None:
        self.storage = Storage(folder, CLASSES)
        self.resident, self.transient = HostArena(None, Locking.NONE), HostArena(None, Locking.NONE)
        self.budget_asked = self.store_opened = 0
        self.budget_nbytes = budget_nbytes
        self.tier = WeightTier(
            store=self._open,
            resident=ResidentMemory(self.resident),
            transient_arena=self.transient,
            resident_budget_nbytes=self._budget,
            counters=self.storage.counters,
            timeout_s=TIMEOUT_S,
        )
        self.values: dict[int, torch.Tensor] = {}

    def _open(self):
        self.store_opened += 1
        return self.storage.store

    def _budget(self) -> int:
        self.budget_asked += 1
        return self.budget_nbytes

    def add(self, *numels: int, dtype: torch.dtype = torch.float32, always_resident: bool = False) -> None:
        for numel in numels:
            key = len(self.values)
            shard = self.tier.register(key, f"w{key}", numel, dtype, always_resident=always_resident)
            assert shard.shape == (numel,)
            assert shard.dtype is dtype
            assert not shard.any()
            self.values[key] = numbers(numel, dtype, key)
            shard.copy_(self.values[key])
            self.tier.store_initial(key)

    def use_pool(self) -> None:
        self.tier.use_pool(self.storage.pool)
        self.tier.set_trainable(self.values)

    def check(self, *keys: int) -> list[torch.Tensor]:
        """Exposes weights and compares them; they stay exposed."""
        shards = self.tier.expose(keys)
        for key, shard in zip(keys, shards, strict=True):
            assert torch.equal(shard, self.values[key]), key
        return shards

    def check_and_give_back(self, *keys: int) -> None:
        for key in keys or self.values:
            self.check(key)
            self.tier.give_back(key)

    def wait_ready(self, *keys: int) -> None:
        for key in keys:
            self.tier._weights[key].ticket.wait_ended(TIMEOUT_S)
            assert self.tier.ready(key)

    def count(self, name: Access | Event) -> int:
        total = self.storage.counters.total()
        return (total.accesses | total.events)[name.value]

    def close(self) -> None:
        self.storage.backend.open_gates()
        self.tier.close()
        try:
            assert self.transient.nbytes_in_use == 0
            self.storage.close()
        finally:
            self.resident.close()
            self.transient.close()


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.close()


@pytest.fixture
def staged(bench):
    """Two weights of each size on NVMe, the pool in use: two small slots and a large one."""
    bench.add(SMALL, SMALL, LARGE, LARGE, SMALL)
    bench.use_pool()
    bench.tier.drain()
    return bench


# Residency


def test_host_memory_is_filled_in_the_order_of_registration(tmp_path):
    bench = Bench(tmp_path, budget_nbytes=4 * (LARGE + SMALL) + 8)
    bench.add(LARGE)
    bench.add(50_000, always_resident=True)
    bench.add(SMALL, SMALL, 2, 1)
    bench.use_pool()
    assert [bench.tier.homes.is_resident(key) for key in bench.values] == [True, True, True, False, True, False]
    assert bench.tier.homes.resident_nbytes == 4 * (LARGE + 50_000 + SMALL + 2)
    assert bench.tier.homes.stored_nbytes() == [4 * SMALL, 4]
    assert bench.tier.homes.nbytes_of(1) == 200_000
    assert (bench.budget_asked, bench.store_opened) == (1, 1)
    bench.check_and_give_back()
    bench.close()


def test_without_stored_weights_there_is_no_store(tmp_path):
    bench = Bench(tmp_path, budget_nbytes=10**6)
    bench.add(SMALL, LARGE)
    bench.use_pool()
    bench.tier.read_ahead(bench.values)
    bench.tier.drain()
    bench.tier.check()
    assert bench.store_opened == 0
    bench.close()


def test_a_resident_weight_is_the_same_memory_for_good(tmp_path):
    bench = Bench(tmp_path, budget_nbytes=10**6)
    bench.add(SMALL)
    bench.use_pool()
    (shard,) = bench.check(0)
    assert bench.tier.ready(0)
    bench.tier.give_back(0)
    same = [bench.tier.begin_update(0), bench.tier.begin_overwrite(0)]
    assert {tensor.data_ptr() for tensor in same} == {shard.data_ptr()}
    bench.tier.overwrite(0, torch.ones(SMALL))
    bench.tier.finish_update(0)
    bench.tier.finish_overwrite(0)
    assert bool((shard == 1).all())
    total = bench.storage.counters.total()
    assert total.nbytes["nvme_read"] == total.nbytes["nvme_write"] == 0
    bench.close()


def test_resident_weights_share_slabs_but_no_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_homes, "SLAB_NBYTES", 4 * P)
    bench = Bench(tmp_path, budget_nbytes=10**9)
    bench.add(1, 3, SMALL, LARGE, 5 * P, 7, 0)
    shards = [bench.tier.expose([key])[0] for key in bench.values]
    assert all(shard.data_ptr() % weight_homes.ALIGNMENT_NBYTES == 0 for shard in shards[:-1])
    for key, shard in enumerate(shards):
        assert torch.equal(shard, bench.values[key])
    bench.close()


def test_a_weight_is_registered_once(bench):
    bench.add(SMALL)
    with pytest.raises(TenCacheError, match="w0 .*twice"):
        bench.tier.register(0, "w0", SMALL, torch.float32, always_resident=False)


# INITIAL → STORED


def test_a_weight_is_not_there_before_its_first_value(bench):
    bench.tier.register(0, "first", SMALL, torch.float32, always_resident=False)
    for use in (bench.tier.begin_update, lambda key: bench.tier.expose([key]), bench.tier.finish_overwrite):
        with pytest.raises(TenCacheError, match="first"):
            use(0)
    assert not bench.tier.ready(0)


def test_first_values_wait_in_bounded_memory(bench, monkeypatch):
    monkeypatch.setattr(weights_module, "WRITES_BEHIND_NBYTES", 6 * P)
    bench.add(*[LARGE] * 12)
    assert bench.transient.nbytes_peak <= 6 * P
    bench.tier.drain()
    assert bench.transient.nbytes_in_use == 0
    bench.use_pool()
    bench.check_and_give_back()


def test_storing_a_first_value_twice_writes_it_once(bench):
    bench.add(SMALL)
    bench.tier.store_initial(0)
    assert bench.storage.counters.total().nbytes["nvme_write"] == P


def test_before_there_is_a_pool_ordinary_memory_serves(bench):
    bench.add(SMALL, LARGE)
    bench.tier.read_ahead([0, 1])
    assert not bench.tier.ready(0)
    bench.check_and_give_back()
    assert bench.count(Event.OVERFLOW_BUFFER) == 0
    bench.tier.begin_update(0).copy_(bench.values[0] + 1)
    bench.tier.finish_update(0)
    bench.values[0] = bench.values[0] + 1
    bench.check_and_give_back()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 1023, 1024, 2049, 3 * 1024])
def test_sizes_and_types(bench, dtype, numel):
    bench.add(numel, dtype=dtype)
    bench.use_pool()
    bench.check_and_give_back()


# STORED → READING → STAGED → EXPOSED → STORED


def test_a_weight_nobody_asked_for_is_read_on_demand(staged):
    staged.check_and_give_back(0)
    assert staged.count(Access.DEMAND) == 1
    assert staged.storage.counters.total().nbytes["nvme_read"] == P
    staged.storage.assert_idle()


def test_a_weight_read_ahead_is_there_in_time(staged):
    staged.tier.read_ahead([0, 2])
    staged.wait_ready(0, 2)
    staged.check_and_give_back(0, 2)
    assert staged.count(Access.PREFETCHED) == 2
    assert staged.count(Access.DEMAND) == staged.count(Event.DISCARDED_READ) == 0
    staged.storage.assert_idle()


def test_a_read_that_is_still_going_on_is_waited_for(staged):
    gate = staged.storage.backend.gates[Operation.READ]
    gate.clear()
    staged.tier.read_ahead([0])
    assert not staged.tier.ready(0)
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    staged.check_and_give_back(0)
    opener.join()
    assert staged.count(Access.LATE) == 1
    assert staged.storage.counters.total().stall_seconds[Stall.WEIGHT_READ.value] > 0.01


def test_reading_ahead_is_idempotent(staged):
    staged.tier.read_ahead([0, 0])
    staged.tier.read_ahead([0])
    staged.check(0)
    staged.tier.read_ahead([0])
    assert staged.storage.pool.stats().n_leases == 1
    staged.tier.give_back(0)


def test_reading_ahead_ends_with_the_buffers_and_goes_nearest_first(staged):
    staged.tier.read_ahead([99, 2, 0, 3, 1, 4])  # 99 is nobody's; 2 has the large slot, 0 a small one, 3 finds none
    states = {key: weight.buffer is not None for key, weight in staged.tier._weights.items()}
    assert states == {0: True, 1: False, 2: True, 3: False, 4: False}


def test_a_small_weight_may_have_a_large_buffer(staged):
    staged.tier.read_ahead([0, 1, 4, 2])
    states = [staged.tier._weights[key].buffer is not None for key in range(5)]
    assert states == [True, True, False, False, True]
    staged.check_and_give_back()


def test_several_weights_at_once_and_the_same_one_twice(staged):
    first, _, again = staged.check(0, 2, 0)
    assert first.data_ptr() == again.data_ptr()
    staged.check(0)
    assert staged.count(Access.DEMAND) == 2
    for key in (0, 2):
        staged.tier.give_back(key)
    staged.tier.give_back(0)  # no longer exposed: nothing to end
    staged.storage.assert_idle()


def test_a_buffer_comes_back_after_its_last_reader(staged):
    staged.check(0)
    event = ManualEvent()
    staged.tier.give_back(0, event)
    assert staged.storage.pool.stats().nbytes_leased == P
    event.done = True
    assert staged.storage.pool.stats().nbytes_leased == 0


def test_an_ordinary_buffer_waits_for_its_last_reader(bench):
    bench.add(SMALL)
    bench.tier.drain()
    bench.check(0)
    event = ManualEvent()
    bench.tier.give_back(0, event)
    assert event.done
    assert bench.transient.nbytes_in_use == 0


# More weights than buffers


def test_a_weight_needed_now_takes_the_buffer_of_a_staged_one(staged):
    staged.tier.read_ahead([0, 1, 2])
    staged.wait_ready(0, 1, 2)
    staged.check(4)
    assert staged.count(Event.OVERFLOW_BUFFER) == 0
    assert staged.count(Event.DISCARDED_READ) >= 1
    staged.tier.give_back(4)
    staged.check_and_give_back()


def test_a_weight_needed_now_takes_the_buffer_of_one_that_was_read_unnoticed(staged):
    """Nobody called ready(): the tier itself has to see that the read is over."""
    staged.tier.read_ahead([0, 1, 2])
    for key in (0, 1, 2):
        staged.tier._weights[key].ticket.wait_ended(TIMEOUT_S)
    staged.check(3)
    assert staged.count(Event.OVERFLOW_BUFFER) == 0
    staged.tier.give_back(3)
    staged.check_and_give_back()


class Backward:
    """An order of uses: the last weight registered is needed first, and dropped weights are reported."""

    def __init__(self) -> None:
        self.dropped: list[int] = []

    def next_use(self, key: int) -> int | None:
        return 100 - key

    def gone(self, key: int) -> None:
        self.dropped.append(key)


def test_the_weight_with_the_farthest_next_use_loses_its_buffer(staged):
    order = Backward()
    staged.tier.follow(order)
    staged.tier.read_ahead([4, 2, 1])
    staged.wait_ready(4, 2, 1)
    staged.check_and_give_back(0)  # a small one, for which the buffer of either 4 or 1 would do
    assert order.dropped == [1]
    staged.check_and_give_back(3)  # a large one: that of 2 alone would do
    assert order.dropped == [1, 2]
    assert staged.tier.ready(4)


def test_a_kept_weight_is_not_read_again(staged):
    read = staged.storage.counters.total().nbytes["nvme_read"]
    staged.check(0)
    event = ManualEvent()
    staged.tier.give_back(0, event, keep=True)
    assert staged.tier.ready(0)
    assert staged.storage.pool.stats().nbytes_leased == P
    staged.check(0)
    assert event.done  # the new holder may change it
    staged.tier.give_back(0)
    assert staged.storage.counters.total().nbytes["nvme_read"] == read + P
    assert (staged.count(Access.DEMAND), staged.count(Access.PREFETCHED)) == (1, 1)
    staged.storage.assert_idle()


def test_the_buffer_of_a_kept_weight_waits_for_its_reader(staged):
    staged.check(0)
    event = ManualEvent()
    staged.tier.give_back(0, event, keep=True)
    staged.tier.forget(0)
    assert staged.storage.pool.stats().nbytes_leased == P
    event.done = True
    assert staged.storage.pool.stats().nbytes_leased == 0
    assert staged.count(Event.DISCARDED_READ) == 0  # it was of use once
    staged.check_and_give_back(0)


def test_an_update_drops_what_was_kept(staged):
    staged.check(0)
    staged.tier.give_back(0, keep=True)
    staged.values[0] = numbers(SMALL, torch.float32, 7)
    staged.tier.drop_stale()
    staged.tier.begin_update(0).copy_(staged.values[0])
    staged.tier.finish_update(0)
    staged.check_and_give_back(0)


def test_one_weight_at_a_time_is_read_ahead_while_there_are_buffers(staged):
    assert [staged.tier.read_one_ahead(key) for key in (2, 3, 0, 2, 99)] == [True, False, True, True, True]


def test_weights_asked_for_together_do_not_evict_one_another(staged):
    staged.tier.read_ahead([0, 1, 2])
    staged.wait_ready(0, 1, 2)
    staged.check(0, 1, 2, 3, 4)
    assert staged.count(Access.PREFETCHED) == 3
    assert staged.count(Event.DISCARDED_READ) == 0
    assert staged.count(Event.OVERFLOW_BUFFER) == 2
    for key in range(5):
        staged.tier.give_back(key)
    assert staged.transient.nbytes_in_use == 0


def test_a_read_under_way_is_left_alone_for_a_demand(staged):
    staged.storage.backend.gates[Operation.READ].clear()
    staged.tier.read_ahead([0, 1, 2])
    opener = threading.Timer(0.05, staged.storage.backend.open_gates)
    opener.start()
    staged.check(4)
    opener.join()
    assert staged.count(Event.OVERFLOW_BUFFER) == 1
    assert staged.transient.nbytes_in_use == P
    staged.tier.give_back(4)
    assert staged.transient.nbytes_in_use == 0
    staged.check_and_give_back(0, 1, 2)
    assert staged.count(Access.PREFETCHED) + staged.count(Access.LATE) == 3


def test_a_weight_larger_than_every_slot_has_ordinary_memory(bench):
    bench.add(SMALL, 2 * LARGE, SMALL)
    bench.use_pool()
    bench.tier.read_ahead([0, 1, 2])
    held = [bench.tier._weights[key].buffer is not None for key in range(3)]
    assert held == [True, False, True]  # it will never have a slot: nothing waits for one
    bench.check(1)
    assert bench.count(Event.OVERFLOW_BUFFER) == 1
    bench.tier.give_back(1)
    bench.tier.begin_update(1).copy_(bench.values[1].neg_())
    bench.tier.finish_update(1)
    bench.check_and_give_back()


# STORED → UPDATING → STORED


def test_an_update_reaches_the_disk(staged):
    for round_ in range(3):
        for key in staged.values:
            staged.values[key] = numbers(staged.values[key].numel(), torch.float32, 100 * round_ + key)
            target = staged.tier.begin_update(key)
            assert staged.tier.begin_update(key).data_ptr() == target.data_ptr()
            target.copy_(staged.values[key])
            staged.tier.finish_update(key)
            staged.tier.finish_update(key)  # nothing more to write
        staged.check_and_give_back()
    writes = staged.storage.counters.total().nbytes[Link.NVME_WRITE.value]
    assert writes == (1 + 3) * (3 * P + 2 * 3 * P)
    staged.storage.assert_idle()


@pytest.mark.parametrize("before", ["reading", "staged", "exposed"])
def test_an_update_ends_what_was_there(staged, before):
    if before == "reading":
        staged.storage.backend.gates[Operation.READ].clear()
    staged.tier.read_ahead([0])
    if before == "staged":
        staged.wait_ready(0)
    elif before == "exposed":
        staged.check(0)
    staged.values[0] = torch.full((SMALL,), 3.0)
    staged.tier.begin_update(0).copy_(staged.values[0])
    staged.storage.backend.open_gates()
    staged.tier.finish_update(0)
    staged.check_and_give_back(0)
    assert staged.count(Event.DISCARDED_READ) == (before != "exposed")
    staged.storage.assert_idle()


def test_updates_wait_for_writes_to_return_their_buffers(staged):
    gate = staged.storage.backend.gates[Operation.WRITE]
    gate.clear()
    opener = threading.Timer(0.1, gate.set)
    opener.start()
    for key in (2, 3):  # one large slot for two
        staged.tier.begin_update(key).copy_(staged.values[key].neg_())
        staged.tier.finish_update(key)
    opener.join()
    assert staged.storage.counters.total().stall_seconds[Stall.BUFFER.value] > 0.03
    assert staged.count(Event.OVERFLOW_BUFFER) == 0
    staged.check_and_give_back()


def test_an_update_does_not_wait_for_ever_for_what_the_user_holds(staged, monkeypatch):
    monkeypatch.setattr(weight_staging, "UPDATE_PATIENCE_S", 0.05)
    staged.check(0, 1, 2)
    staged.tier.begin_update(3).copy_(staged.values[3].neg_())
    assert staged.count(Event.OVERFLOW_BUFFER) == 1
    staged.tier.finish_update(3)
    for key in (0, 1, 2):
        staged.tier.give_back(key)
    staged.check_and_give_back()
    staged.tier.drain()
    assert staged.transient.nbytes_in_use == 0


def test_an_update_names_the_write_that_keeps_every_buffer(staged, monkeypatch):
    monkeypatch.setattr(staged.tier._mover, "timeout_s", 0.1)
    staged.storage.backend.gates[Operation.WRITE].clear()
    t_start = time.monotonic()
    keys = iter(staged.values)

    def update_all() -> None:
        for key in keys:
            target = staged.tier.begin_update(key)
            target.copy_(staged.values[key].neg_())
            staged.tier.finish_update(key)

    with pytest.raises(StorageError, match=r"write of w0 .* not finished after 0\.1 s"):
        update_all()
    assert time.monotonic() - t_start < 2
    staged.storage.backend.open_gates()
    staged.check_and_give_back()


def test_an_update_takes_the_buffer_of_a_read_under_way(staged):
    """Frozen weights are read ahead across the step; they must not hold up an update for UPDATE_PATIENCE_S."""
    staged.tier.set_trainable([4])
    staged.storage.backend.gates[Operation.READ].clear()
    staged.tier.read_ahead([0, 1, 2])
    opener = threading.Timer(0.05, staged.storage.backend.open_gates)
    opener.start()
    staged.tier.begin_update(4).copy_(staged.values[4].neg_())
    opener.join()
    staged.tier.finish_update(4)
    assert staged.count(Event.OVERFLOW_BUFFER) == 0
    assert staged.count(Event.DISCARDED_READ) >= 1
    assert staged.storage.counters.total().stall_seconds[Stall.BUFFER.value] < 2.0
    staged.check_and_give_back()


def test_only_trainable_weights_go_stale(staged):
    staged.tier.set_trainable([0, 2, 3])
    staged.tier.read_ahead([0, 1, 2])
    staged.wait_ready(0)
    staged.tier.drop_stale()
    held = {key for key, weight in staged.tier._weights.items() if weight.buffer is not None}
    assert held == {1}
    assert staged.count(Event.DISCARDED_READ) == 2
    staged.check_and_give_back()


# Changing weights outside the optimizer


def test_a_changed_exposed_weight_is_written(staged):
    """GatheredParameters: the user changes what was exposed, then the partition is written from the same buffer."""
    (shard,) = staged.check(0)
    staged.values[0] = numbers(SMALL, torch.float32, 77)
    assert staged.tier.begin_overwrite(0).data_ptr() == shard.data_ptr()
    shard.copy_(staged.values[0])
    staged.tier.finish_overwrite(0)
    staged.check_and_give_back(0)
    staged.storage.assert_idle()


@pytest.mark.parametrize("before", ["stored", "reading", "staged"])
def test_an_overwrite_reads_nothing(staged, before):
    if before != "stored":
        staged.tier.read_ahead([0])
    if before == "staged":
        staged.wait_ready(0)
    read = staged.storage.counters.total().nbytes["nvme_read"]
    target = staged.tier.begin_overwrite(0)
    assert not target.any()
    staged.values[0] = torch.full((SMALL,), 5.0)
    target.copy_(staged.values[0])
    staged.tier.finish_overwrite(0)
    assert staged.storage.counters.total().nbytes["nvme_read"] == read
    staged.check_and_give_back(0)


def test_overwrite_takes_a_value(staged):
    for key in staged.values:
        staged.values[key] = numbers(staged.values[key].numel(), torch.float32, 55 + key)
        staged.tier.overwrite(key, staged.values[key])
    staged.check_and_give_back()
    staged.tier.drain()
    staged.storage.assert_idle()


def test_there_has_to_be_a_value_to_write(staged):
    with pytest.raises(TenCacheError, match="w0 has no new value to write: it is not in use"):
        staged.tier.finish_overwrite(0)


@pytest.mark.parametrize("begin", ["begin_overwrite", "begin_update"])
@pytest.mark.parametrize("before", ["stored", "staged", "exposed"])
def test_a_weight_that_is_being_changed_has_no_value_to_show(staged, begin, before):
    if before == "staged":
        staged.tier.read_ahead([0])
        staged.wait_ready(0)
    if before == "exposed":
        staged.check(0)
    getattr(staged.tier, begin)(0)
    with pytest.raises(TenCacheError, match="w0 is needed while it is .*: its new value is not complete"):
        staged.tier.expose([1, 0])
    assert not staged.tier.ready(0)
    getattr(staged.tier, begin.replace("begin", "finish"))(0)


@pytest.mark.parametrize("before", ["stored", "exposed"])
def test_an_overwrite_that_does_not_come_to_its_end_changes_nothing(staged, before):
    if before == "exposed":
        staged.check(0)
    staged.tier.begin_overwrite(0).fill_(5)
    staged.tier.abandon_overwrite(0)
    staged.check_and_give_back(0)
    with pytest.raises(RuntimeError):
        staged.tier.overwrite(0, torch.ones(3))
    staged.check_and_give_back(0)
    staged.storage.assert_idle()


# From one engine to the next


@pytest.mark.parametrize("state", ["reading", "staged", "exposed", "updating", "overwriting"])
def test_when_an_engine_ends_its_buffers_come_back_and_the_values_stay(staged, state):
    if state == "reading":
        staged.storage.backend.gates[Operation.READ].clear()
    if state in ("reading", "staged"):
        staged.tier.read_ahead([0, 1])
    if state == "staged":
        staged.wait_ready(0, 1)
    if state == "exposed":
        staged.check(0)
    if state == "updating":
        staged.tier.begin_update(0).fill_(7)
    if state == "overwriting":
        staged.tier.begin_overwrite(0).fill_(7)
    staged.tier.end_service(Counters())
    staged.storage.backend.open_gates()
    staged.storage.assert_idle()
    leases = staged.storage.pool.stats().n_leases
    staged.check_and_give_back()
    assert staged.storage.pool.stats().n_leases == leases, "without an engine ordinary memory serves"
    assert staged.transient.nbytes_in_use == 0


def test_weights_that_go_to_another_tier_keep_their_place(staged):
    other = WeightTier(
        store=staged._open,
        resident=ResidentMemory(staged.resident),
        transient_arena=staged.transient,
        resident_budget_nbytes=lambda: 0,
        counters=staged.storage.counters,
        timeout_s=TIMEOUT_S,
    )
    (shard,) = staged.check(0)
    with pytest.raises(TenCacheError, match="w0 cannot be handed over: it is exposed"):
        staged.tier.hand_over([1, 0], other)
    staged.tier.give_back(0)
    allocated = staged.tier.homes.allocated_nbytes
    staged.tier.hand_over([0, 1], other)
    assert other.homes.keys == {0, 1}
    assert not staged.tier.homes.holds(0)
    assert other.homes.allocated_nbytes + staged.tier.homes.allocated_nbytes == allocated
    for key, seen in zip([0, 1], other.expose([0, 1]), strict=True):
        assert torch.equal(seen, staged.values[key])
    other.give_back(0)
    other.give_back(1)
    other.close()
    assert staged.storage.store.nbytes_allocated == staged.tier.homes.allocated_nbytes
    staged.check_and_give_back(2)


def test_dropped_weights_give_their_places_back(tmp_path):
    bench = Bench(tmp_path, budget_nbytes=4 * LARGE)
    bench.add(LARGE, LARGE, SMALL, SMALL)  # the first one is resident
    bench.add(50_000, always_resident=True)
    bench.use_pool()
    resident, stored = bench.tier.homes.resident_nbytes, bench.tier.homes.allocated_nbytes
    bench.check(3)
    with pytest.raises(TenCacheError, match="w3 cannot be dropped: it is exposed"):
        bench.tier.drop([3])
    bench.tier.give_back(3)
    backend = bench.storage.backend
    backend.at_gate[Operation.READ].clear()
    backend.gates[Operation.READ].clear()
    bench.tier.read_ahead([1])
    assert backend.at_gate[Operation.READ].wait(TIMEOUT_S)
    bench.tier.drop([0, 1, 4])
    assert bench.storage.store.nbytes_allocated == stored, "w1 is being read"
    backend.open_gates()
    bench.storage.assert_idle()
    assert bench.tier.homes.keys == {2, 3}
    assert bench.tier.homes.resident_nbytes == resident - 4 * (LARGE + 50_000) == 0
    assert bench.tier.homes.allocated_nbytes == stored - round_up(4 * LARGE)
    assert bench.storage.store.nbytes_allocated == bench.tier.homes.allocated_nbytes
    for key in (0, 1, 4):
        del bench.values[key]
    bench.check_and_give_back()
    in_use = bench.transient.nbytes_in_use
    bench.tier.register(8, "w8", 2 * LARGE, torch.float32, always_resident=False)
    assert bench.transient.nbytes_in_use > in_use
    bench.tier.drop([8])  # without its first value
    assert bench.transient.nbytes_in_use == in_use
    assert bench.tier.register(9, "w9", LARGE, torch.float32, always_resident=False).numel() == LARGE
    assert bench.tier.homes.is_resident(9), "there is room for one again"
    bench.close()


def test_a_copy_takes_no_staging_buffer_and_changes_nothing(staged):
    staged.tier.begin_update(2).copy_(staged.values[2].neg_())
    staged.tier.finish_update(2)
    leases = staged.storage.pool.stats().n_leases
    for key in staged.values:
        copy = staged.tier.read(key)
        assert torch.equal(copy, staged.values[key])
        copy.zero_()
    assert staged.storage.pool.stats().n_leases == leases
    staged.check_and_give_back()


def test_a_changed_copy_is_kept_by_overwrite(staged):
    staged.tier.overwrite(2, staged.tier.read(2).mul_(2))
    staged.values[2] = staged.values[2] * 2
    staged.check_and_give_back()
    assert torch.equal(staged.tier.read(2), staged.values[2])


def test_a_scan_shows_every_shard_once_and_leaves_nothing_behind(staged):
    seen = []

    def visit(key, shard):
        assert torch.equal(shard, staged.values[key])
        seen.append(key)

    staged.tier.scan(list(staged.values), visit)
    assert seen == list(staged.values)
    staged.check_and_give_back()


def test_a_scan_that_is_left_early_gives_its_buffers_back(staged):
    def visit(key, shard):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        staged.tier.scan(list(staged.values), visit)
    staged.check_and_give_back()


# Failures


@pytest.mark.parametrize("ahead", [False, True], ids=["on demand", "read ahead"])
def test_a_failed_read_is_raised_and_leaves_nothing_behind(staged, ahead):
    staged.storage.backend.fails = lambda operation, tag: operation is Operation.READ and tag == "w0"
    if ahead:
        staged.tier.read_ahead([0])
    with pytest.raises(StorageError, match="w0") as caught:
        staged.tier.expose([0])
    assert caught.value.errno == 5
    staged.storage.assert_idle()
    staged.storage.backend.fails = lambda operation, tag: False
    staged.check_and_give_back()


def test_a_failed_read_next_to_good_ones(staged):
    staged.storage.backend.fails = lambda operation, tag: operation is Operation.READ and tag == "w1"
    with pytest.raises(StorageError, match="w1"):
        staged.tier.expose([0, 1, 2])
    staged.storage.backend.fails = lambda operation, tag: False
    staged.check_and_give_back()
    staged.storage.assert_idle()


def test_a_failed_read_ahead_is_raised_by_who_asks(staged):
    staged.storage.backend.fails = lambda operation, tag: operation is Operation.READ
    staged.tier.read_ahead([0])
    staged.tier._weights[0].ticket.wait_ended(TIMEOUT_S)
    with pytest.raises(StorageError, match="w0"):
        staged.tier.ready(0)
    staged.storage.assert_idle()


def test_a_failed_write_is_raised_by_the_next_check(staged):
    staged.storage.backend.fails = lambda operation, tag: operation is Operation.WRITE
    staged.tier.begin_update(0).fill_(1)
    staged.tier.finish_update(0)
    with pytest.raises(StorageError, match="w0"):
        staged.tier.drain()
    staged.tier.check()
    staged.storage.assert_idle()
    with pytest.raises(StorageError, match="w0"):  # the old value must not pass for the new one
        staged.tier.expose([0])
    staged.storage.assert_idle()


def test_a_failed_first_write_is_raised(bench):
    bench.storage.backend.fails = lambda operation, tag: operation is Operation.WRITE
    bench.add(SMALL)
    with pytest.raises(StorageError, match="w0"):
        bench.tier.drain()


def test_a_closed_store_leaves_no_lease(staged):
    staged.tier.begin_update(2)
    staged.storage.store.close()
    with pytest.raises(StorageError, match="closed"):
        staged.tier.finish_update(2)
    for read in (staged.tier.expose, staged.tier.read_ahead):
        with pytest.raises((StorageError, ValueError)):
            read([0])
    staged.tier.close()
    staged.storage.assert_idle()


# The end


def test_close_gives_everything_back_whatever_is_going_on(tmp_path):
    bench = Bench(tmp_path)
    bench.add(SMALL, SMALL, LARGE, LARGE, SMALL)
    bench.use_pool()
    bench.tier.drain()
    bench.check(3)
    bench.tier.begin_update(0)
    bench.storage.backend.gates[Operation.READ].clear()
    bench.tier.read_ahead([1])
    bench.tier.register(9, "not stored yet", SMALL, torch.float32, always_resident=False)
    threading.Timer(0.05, bench.storage.backend.open_gates).start()
    bench.tier.close()
    bench.tier.close()
    assert bench.transient.nbytes_in_use == 0
    bench.close()
