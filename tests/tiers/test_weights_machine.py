# SPDX-License-Identifier: Apache-2.0
"""Random histories of the weight tier against a dict: values are right after any sequence, and no buffer is lost."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tencache_ds.errors import TenCacheError
from tencache_ds.memory import HostArena, Locking
from tencache_ds.planning.size_classes import SizeClass
from tencache_ds.tiers import weight_homes, weight_staging
from tencache_ds.tiers.weight_homes import ResidentMemory
from tencache_ds.tiers.weights import WeightTier
from tests.tiers.conftest import TIMEOUT_S, ManualEvent, Storage, numbers

P = 4096
CLASSES = (SizeClass(P, 2), SizeClass(3 * P, 1))
SHAPES = (
    (300, torch.float32),  # resident
    (1000, torch.float32),
    (1, torch.bfloat16),
    (3 * 1024, torch.float32),
    (5000, torch.float16),
    (2049, torch.float32),
    (5000, torch.float32),  # larger than every slot
)
RESIDENT_BUDGET_NBYTES = 1200
KEY = st.integers(0, len(SHAPES) - 1)
KEYS = st.lists(KEY, max_size=5)


class WeightMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(weight_staging, "UPDATE_PATIENCE_S", 0.01)  # the user holds on to everything here
        self.patch.setattr(weight_homes, "SLAB_NBYTES", P)
        self.folder = tempfile.TemporaryDirectory()
        self.storage = Storage(Path(self.folder.name), CLASSES)
        self.resident, self.transient = HostArena(None, Locking.NONE), HostArena(None, Locking.NONE)
        self.tier = self.new_tier()
        self.seed = 0
        self.values: dict[int, torch.Tensor] = {}
        self.exposed: dict[int, torch.Tensor] = {}
        self.updating: dict[int, torch.Tensor] = {}
        self.overwriting: dict[int, torch.Tensor] = {}
        self.events: list[ManualEvent] = []
        for key in range(len(SHAPES)):
            self.create(key)
        self.tier.use_pool(self.storage.pool)
        self.tier.set_trainable(range(0, len(SHAPES), 2))

    def new_tier(self) -> WeightTier:
        return WeightTier(
            store=lambda: self.storage.store,
            resident=ResidentMemory(self.resident),
            transient_arena=self.transient,
            resident_budget_nbytes=lambda: RESIDENT_BUDGET_NBYTES,
            counters=self.storage.counters,
            timeout_s=TIMEOUT_S,
        )

    def new_value(self, key: int) -> torch.Tensor:
        self.seed += 1
        numel, dtype = SHAPES[key]
        return numbers(numel, dtype, self.seed)

    def create(self, key: int) -> None:
        numel, dtype = SHAPES[key]
        self.values[key] = self.new_value(key)
        self.tier.register(key, f"w{key}", numel, dtype, always_resident=False).copy_(self.values[key])
        self.tier.store_initial(key)

    @rule(keys=KEYS)
    def read_ahead(self, keys: list[int]) -> None:
        self.tier.read_ahead(keys)

    @rule(key=KEY)
    def ready(self, key: int) -> None:
        if self.tier.ready(key):
            assert key not in self.incomplete

    @property
    def incomplete(self) -> dict[int, torch.Tensor]:
        return self.updating | self.overwriting

    @precondition(lambda self: self.incomplete)
    @rule(keys=KEYS, pick=KEY)
    def expose_what_has_no_value(self, keys: list[int], pick: int) -> None:
        key = sorted(self.incomplete)[pick % len(self.incomplete)]
        with pytest.raises(TenCacheError, match=rf"w{key} is needed while it is (updating|overwriting)"):
            self.tier.expose([*(key for key in keys if key not in self.incomplete), key])

    @rule(keys=KEYS)
    def expose(self, keys: list[int]) -> None:
        keys = [key for key in keys if key not in self.incomplete]
        for key, shard in zip(keys, self.tier.expose(keys), strict=True):
            assert torch.equal(shard, self.values[key])
            self.exposed[key] = shard

    @precondition(lambda self: self.exposed)
    @rule(pick=KEY, with_event=st.booleans(), keep=st.booleans())
    def give_back(self, pick: int, with_event: bool, keep: bool) -> None:
        key = sorted(self.exposed)[pick % len(self.exposed)]
        event = ManualEvent() if with_event else None
        if event is not None:
            self.events.append(event)
        del self.exposed[key]
        self.tier.give_back(key, event, keep=keep)

    @rule(key=KEY)
    def forget(self, key: int) -> None:
        self.tier.forget(key)

    @precondition(lambda self: self.events)
    @rule(pick=KEY)
    def fire(self, pick: int) -> None:
        self.events.pop(pick % len(self.events)).done = True

    @precondition(lambda self: self.exposed)
    @rule(pick=KEY)
    def change_exposed(self, pick: int) -> None:
        key = sorted(self.exposed)[pick % len(self.exposed)]
        self.values[key] = self.new_value(key)
        assert self.tier.begin_overwrite(key).data_ptr() == self.exposed[key].data_ptr()
        self.exposed.pop(key).copy_(self.values[key])
        self.tier.finish_overwrite(key)

    @rule(key=KEY)
    def begin_overwrite(self, key: int) -> None:
        if not self.tier.homes.is_resident(key) and key not in self.incomplete:
            self.exposed.pop(key, None)
            self.overwriting[key] = self.tier.begin_overwrite(key)

    @precondition(lambda self: self.overwriting)
    @rule(pick=KEY, complete=st.booleans())
    def end_overwrite(self, pick: int, complete: bool) -> None:
        key = sorted(self.overwriting)[pick % len(self.overwriting)]
        target = self.overwriting.pop(key)
        if complete:
            self.values[key] = self.new_value(key)
            target.copy_(self.values[key])
            self.tier.finish_overwrite(key)
        else:
            target.zero_()
            self.tier.abandon_overwrite(key)

    @rule(key=KEY)
    def begin_update(self, key: int) -> None:
        if not self.tier.homes.is_resident(key) and key not in self.overwriting:
            self.exposed.pop(key, None)  # an exposure ends here
            self.updating[key] = self.tier.begin_update(key)

    @precondition(lambda self: self.updating)
    @rule(pick=KEY)
    def finish_update(self, pick: int) -> None:
        key = sorted(self.updating)[pick % len(self.updating)]
        self.values[key] = self.new_value(key)
        self.updating.pop(key).copy_(self.values[key])
        self.tier.finish_update(key)

    @rule(key=KEY)
    def overwrite(self, key: int) -> None:
        if key not in self.incomplete:
            self.values[key] = self.new_value(key)
            if not self.tier.homes.is_resident(key):
                self.exposed.pop(key, None)
            self.tier.overwrite(key, self.values[key])

    @rule()
    def drop_stale(self) -> None:
        self.tier.drop_stale()

    @rule()
    def end_service(self) -> None:
        """An engine is destroyed, whatever its weights were used for, and another one begins."""
        self.exposed.clear()
        self.updating.clear()
        self.overwriting.clear()
        self.tier.end_service(self.storage.counters)
        for event in self.events:
            event.done = True
        self.storage.assert_idle()
        assert self.storage.store.nbytes_allocated == self.tier.homes.allocated_nbytes
        for key, value in self.values.items():
            assert torch.equal(self.tier.expose([key])[0], value)
            self.tier.give_back(key)
        self.tier.begin_service(self.storage.counters)
        self.tier.use_pool(self.storage.pool)

    @rule(keys=KEYS)
    def become_a_model_of_their_own(self, keys: list[int]) -> None:
        """Weights without a buffer go to another tier over the same store, and come back."""
        keys = [key for key in set(keys) if self.tier._weights[key].buffer is None]
        other = self.new_tier()
        self.tier.hand_over(keys, other)
        for key in keys:
            assert torch.equal(other.expose([key])[0], self.values[key])
            other.give_back(key)
        assert other.homes.keys == set(keys)
        other.hand_over(keys, self.tier)

    @rule(key=KEY)
    def be_replaced(self, key: int) -> None:
        """A weight is dropped and another one is made, which has as much of the budget."""
        weight = self.tier._weights[key]
        if weight.buffer is not None and not weight.unused:
            with pytest.raises(TenCacheError, match=f"w{key} cannot be dropped"):
                self.tier.drop([key])
            return
        self.exposed.pop(key, None)  # of a resident one
        was_resident, allocated = self.tier.homes.is_resident(key), self.tier.homes.allocated_nbytes
        self.tier.drop([key])
        assert not self.tier.homes.holds(key)
        assert self.tier.homes.allocated_nbytes <= allocated
        self.create(key)
        assert self.tier.homes.is_resident(key) == was_resident
        assert self.tier.homes.allocated_nbytes == allocated
        self.tier.set_trainable(range(0, len(SHAPES), 2))

    @rule(key=KEY)
    def read(self, key: int) -> None:
        assert torch.equal(self.tier.read(key), self.values[key])  # of an update, the value before it

    @rule()
    def drain(self) -> None:
        self.tier.drain()
        self.tier.check()

    @invariant()
    def what_is_exposed_stays_as_it_is(self) -> None:
        for key, shard in self.exposed.items():
            assert torch.equal(shard, self.values[key]), key

    @invariant()
    def nobody_shares_a_buffer(self) -> None:
        ranges = sorted(
            (t.data_ptr(), t.data_ptr() + t.nbytes) for t in (*self.exposed.values(), *self.incomplete.values())
        )
        assert all(before[1] <= after[0] for before, after in zip(ranges, ranges[1:], strict=False))

    def teardown(self) -> None:
        try:
            for event in self.events:
                event.done = True
            for key in list(self.updating):
                self.finish_update(key)
            for key in self.overwriting:
                self.tier.abandon_overwrite(key)
            for key in self.values:
                self.tier.give_back(key)
            for key, value in self.values.items():
                (shard,) = self.tier.expose([key])
                assert torch.equal(shard, value), key
                self.tier.give_back(key)
            self.tier.drop_stale()
            self.tier.drain()
            self.tier.close()
            assert self.transient.nbytes_in_use == 0
            self.storage.close()  # raises when a buffer is leased
        finally:
            self.storage.backend.close()
            self.resident.close()
            self.transient.close()
            self.folder.cleanup()
            self.patch.undo()


WeightMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestWeightMachine = pytest.mark.timeout(60)(WeightMachine.TestCase)
