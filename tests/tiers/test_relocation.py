# SPDX-License-Identifier: Apache-2.0
"""Both tiers on a store over two devices: weights and chunks move with their writes, and keep their values."""

from __future__ import annotations

import pytest
import torch

from tencache_ds.io import ExtentStore
from tencache_ds.io.stripes import Striping
from tencache_ds.memory import HostArena, Locking
from tencache_ds.observability.counters import Link
from tencache_ds.placement.places import Place
from tencache_ds.planning.size_classes import SizeClass
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.sub_group import MASTER, SubGroupSpec
from tencache_ds.tiers.weight_homes import ResidentMemory
from tencache_ds.tiers.weights import WeightTier
from tests.tiers.conftest import TIMEOUT_S, ControlledBackend, Storage, numbers

pytestmark = pytest.mark.timeout(60)

PAGE = 4096
FAST_SECOND = [1e9, 1e11]
FAST_FIRST = [1e11, 1e9]
KINDS = ((MASTER, torch.float32), ("exp_avg", torch.float32))
CHUNK_NBYTES = 8 * PAGE
NUMEL = 20 * PAGE + 5
N_CHUNKS = 21


@pytest.fixture
def storage(tmp_path):
    """As the other tests have it, with a store over a second device too."""
    storage = Storage(tmp_path, (SizeClass(CHUNK_NBYTES, 3),))
    storage.store.close()
    storage.second = ControlledBackend()
    storage.store = ExtentStore(
        str(tmp_path / "first.bin"),
        storage.backend,
        others=[(str(tmp_path / "second.bin"), storage.second)],
        placement=Striping(2),
        growth_nbytes=1 << 20,
        timeout_s=TIMEOUT_S,
    )
    yield storage
    storage.close()
    storage.second.close()


def shares(storage):
    held = storage.store.held()
    return [n / sum(n for n, _ in held) for n, _ in held]


def test_chunks_move_and_keep_their_state(storage):
    tier = OptimizerStateTier(
        [SubGroupSpec(NUMEL, KINDS, (Place.NVME,) * N_CHUNKS)],
        store=storage.store,
        pool=lambda: storage.pool,
        counters=storage.counters,
        chunk_nbytes=CHUNK_NBYTES,
        timeout_s=TIMEOUT_S,
    )
    dense = {kind: numbers(NUMEL, dtype, index) for index, (kind, dtype) in enumerate(KINDS)}
    tier.write(0, dense)
    n_written = storage.counters.total().nbytes[Link.NVME_WRITE]
    for rates, fast in ((FAST_SECOND, 1), (FAST_FIRST, 0)):
        for _ in range(6):
            storage.store.reweigh(rates)
            tier.begin_update()
            for chunk in tier.chunks(0):
                used = tier.take(chunk)
                for kind, view in used.views.items():
                    assert torch.equal(view, dense[kind][chunk.start : chunk.start + chunk.numel])
                    view.add_(1.0)
                tier.put(used)
            for value in dense.values():
                value.add_(1.0)
        assert shares(storage)[fast] > 0.7
        # A checkpoint reads the chunks where they are now.
        for kind, value in dense.items():
            assert torch.equal(tier.read(0, kind), value)
    assert storage.store.n_relocated > 10
    # No byte was moved for it but those of the updates.
    assert storage.counters.total().nbytes[Link.NVME_WRITE] == 13 * n_written
    tier.close()


def test_weights_move_and_keep_their_values(storage):
    resident, transient = HostArena(None, Locking.NONE), HostArena(None, Locking.NONE)
    tier = WeightTier(
        store=lambda: storage.store,
        resident=ResidentMemory(resident),
        transient_arena=transient,
        resident_budget_nbytes=lambda: 0,
        counters=storage.counters,
        timeout_s=TIMEOUT_S,
    )
    values = {key: numbers(1000 + key, torch.float32, key) for key in range(20)}
    for key, value in values.items():
        tier.register(key, f"w{key}", value.numel(), value.dtype, always_resident=False).copy_(value)
        tier.store_initial(key)
    tier.use_pool(storage.pool)
    tier.set_trainable(values)
    assert shares(storage) == [0.5, 0.5]
    for step in range(6):
        storage.store.reweigh(FAST_SECOND)
        tier.read_ahead(values)
        tier.drop_stale()
        for key in values:
            values[key] = values[key] + step
            tier.begin_update(key).copy_(values[key])
            tier.finish_update(key)
        for key, value in values.items():
            (shard,) = tier.expose([key])
            assert torch.equal(shard, value)
            tier.give_back(key)
    assert shares(storage)[1] > 0.8
    for key, value in values.items():
        assert torch.equal(tier.read(key), value)
    tier.close()
    resident.close()
    transient.close()
