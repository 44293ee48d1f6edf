# SPDX-License-Identifier: Apache-2.0
"""Momentum of matrices, in host memory or on NVMe, and in device memory beside that."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tencache_ds.placement.places import Place
from tencache_ds.planning.size_classes import SizeClass
from tencache_ds.tiers.momentum import Momentum
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.sub_group import MOMENTUM, SubGroupSpec

from .conftest import TIMEOUT_S, Storage

GROUPS = {1: {10: 3000, 11: 40}, 4: {12: 5000}}
"""Elements of each matrix, by its key, of two sub-groups."""
PLACES = {1: (Place.NVME, Place.HOST), 4: (Place.NVME,)}


class Bench:
    """Momentum with a model of what it holds."""

    def __init__(self, folder: Path) -> None:
        self.storage = Storage(folder, (SizeClass(16384, 4),))
        specs = [
            SubGroupSpec(
                sum(group.values()),
                ((MOMENTUM, torch.bfloat16),),
                PLACES[index],
                cuts=tuple(itertools.accumulate(list(group.values())[:-1])),
            )
            for index, group in GROUPS.items()
        ]
        self.tier = OptimizerStateTier(
            specs,
            store=self.storage.store,
            pool=lambda: self.storage.pool,
            counters=self.storage.counters,
            chunk_nbytes=2**20,
            timeout_s=TIMEOUT_S,
        )
        self.momentum = Momentum(self.tier, {index: list(group) for index, group in GROUPS.items()})
        self.model = {
            key: torch.zeros(numel, dtype=torch.bfloat16) for g in GROUPS.values() for key, numel in g.items()
        }

    def move(self, key: int, there: bool) -> None:
        memory = torch.full((self.momentum.nbytes_of(key),), 255, dtype=torch.uint8) if there else None
        self.momentum.move(key, memory)

    def update(self, by: float) -> None:
        keys = list(self.model)
        with self.momentum.updating(keys, lambda: None):
            for key in keys:
                self.momentum.take(key).add_(by)
                self.model[key].add_(by)
            for key in keys:
                assert torch.equal(self.momentum.taken(key), self.model[key])
            self.momentum.put(keys)

    def check(self) -> None:
        for index, group in GROUPS.items():
            whole = torch.cat([self.model[key] for key in group])
            assert torch.equal(self.momentum.whole(index), whole)
            for key in group:
                assert torch.equal(self.momentum.part(key), self.model[key])
        seen: dict[int, list[torch.Tensor]] = {index: [] for index in GROUPS}
        self.momentum.scan(lambda index, views: seen[index].append(views[MOMENTUM].clone()))
        for index, group in GROUPS.items():
            assert torch.equal(torch.cat(seen[index]), torch.cat([self.model[key] for key in group]))

    def close(self) -> None:
        self.storage.backend.open_gates()
        self.tier.drain()
        self.tier.close()
        self.storage.close()


KEYS = [key for group in GROUPS.values() for key in group]
STEPS = st.one_of(
    st.tuples(st.just("move"), st.sampled_from(KEYS), st.booleans()),
    st.tuples(st.sampled_from(["update", "check", "set", "replace"]), st.sampled_from(KEYS), st.booleans()),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=12))
def test_values_are_the_same_wherever_they_live(steps: list[tuple[str, int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        try:
            for number, (what, key, flag) in enumerate(steps):
                if what == "move":
                    bench.move(key, flag)
                    assert bench.momentum.on_device(key) == flag
                elif what == "update":
                    bench.update(number + 0.5)
                elif what == "check":
                    bench.check()
                elif what == "set":
                    bench.model[key].fill_(number)
                    bench.momentum.set_part(key, bench.model[key])
                else:
                    index = next(index for index, group in GROUPS.items() if key in group)
                    for each in GROUPS[index]:
                        bench.model[each].fill_(number if flag else 0)
                    values = torch.cat([bench.model[each] for each in GROUPS[index]])
                    bench.momentum.replace(index, {MOMENTUM: values} if flag else {})
                    assert bench.momentum.begun(index) == flag
            bench.check()
        finally:
            bench.close()


def test_bytes_in_device_memory_are_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    momentum = bench.momentum
    assert momentum.nbytes_of(10) == 6000
    assert momentum.nbytes_of(99) == momentum.device_nbytes == 0
    bench.move(10, there=True)
    bench.move(11, there=True)
    assert momentum.device_nbytes == 6080
    places = {(key, place) for key, place, _ in momentum.residency()}
    assert places == {(10, Place.NVME), (10, Place.GPU), (11, Place.HOST), (11, Place.GPU), (12, Place.NVME)}
    bench.update(1.0)
    bench.move(10, there=False)
    assert momentum.device_nbytes == 80
    bench.close()


def test_after_an_error_what_was_not_put_is_as_before(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.update(1.0)
    bench.move(12, there=True)
    waited: list[bool] = []

    def fail() -> None:
        with bench.momentum.updating(KEYS, lambda: waited.append(True)):
            bench.momentum.take(10).add_(1)
            raise RuntimeError("made up")

    with pytest.raises(RuntimeError, match="made up"):
        fail()
    assert waited
    bench.check()
    bench.update(1.0)
    bench.check()
    bench.close()
