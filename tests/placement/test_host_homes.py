# SPDX-License-Identifier: Apache-2.0
"""State that leaves host memory when it gets short, on a tier with real files."""

from __future__ import annotations

import pytest

from tencache_ds.errors import MemoryLimitError
from tencache_ds.placement.host_homes import HostHomes
from tencache_ds.placement.memory_watch import FIRST_HOST_PATIENCE, HostWatch
from tencache_ds.placement.moves import StateMoves
from tencache_ds.placement.places import Place
from tests.tiers.test_device_places import CHUNK_NBYTES, Bench

pytestmark = pytest.mark.timeout(60)

GIB = 2**30
PLENTY = 100 * GIB


class Accounts:
    host_left_nbytes = 10 * CHUNK_NBYTES

    def __init__(self) -> None:
        self.host_nbytes = 0

    def count_host(self, nbytes: int) -> None:
        self.host_nbytes += nbytes


class Life:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.accounts = Accounts()
        self.available = PLENTY
        self.may_store = True
        self.shown: list[int] = []
        moves = StateMoves(bench.tier, 2, self.accounts, open_store=lambda: self.may_store, moved=self.shown.append)
        self.homes = HostHomes(HostWatch(PLENTY, 1), moves, lambda: self.available)

    def step(self) -> int:
        """Returns how many chunks are in host memory after it."""
        self.bench.change(1.0)
        self.homes._t_looked_at_step_s = float("-inf")
        self.homes.step_done()
        return self.there()

    def there(self) -> int:
        return sum(self.bench.tier.places(index).count(Place.HOST) for index in (0, 1))


@pytest.fixture
def life(tmp_path):
    bench = Bench(tmp_path)
    bench.tier.relocate({0: (Place.HOST,) * 4, 1: (Place.HOST, Place.GPU)})
    yield Life(bench)
    bench.check()
    bench.close()


def test_it_leaves_when_there_is_little_and_returns_when_there_is_plenty(life, caplog):
    assert life.step() == 5
    assert life.shown == []
    life.available = GIB
    assert life.step() == 0, "five chunks are less than what is missing"
    assert life.accounts.host_nbytes == -sum(life.bench.tier.chunks(0)[i].nbytes for i in range(4)) - CHUNK_NBYTES
    assert set(life.shown) == {0, 1}
    assert "to NVMe" in caplog.text
    assert life.bench.tier.places(1)[1] is Place.GPU
    life.available = PLENTY
    for _ in range(FIRST_HOST_PATIENCE):
        assert life.step() == 0
    assert life.step() == 5
    assert life.accounts.host_nbytes == 0


def test_it_leaves_between_micro_steps_and_returns_between_steps(life):
    assert life.step() == 5
    life.available = GIB
    life.homes.backward_done()
    assert life.there() == 5, "it was looked a moment ago"
    life.homes._t_looked_s = float("-inf")
    life.homes.backward_done()
    assert life.there() == 0
    life.available = PLENTY
    for _ in range(1 + FIRST_HOST_PATIENCE):
        assert life.step() == 0
    life.homes._t_looked_s = float("-inf")
    life.homes.backward_done()
    assert life.there() == 0
    assert life.step() == 5


def test_as_much_leaves_as_has_to_evenly(life):
    assert life.homes._moves.leave_host_memory(2 * CHUNK_NBYTES) >= 2 * CHUNK_NBYTES
    assert 2 <= life.there() <= 3
    assert life.homes._moves.leave_host_memory(0) == 0
    assert life.homes._moves.take_host_memory(CHUNK_NBYTES) == CHUNK_NBYTES
    life.bench.check()


def test_without_nvme_nothing_can_leave(life, caplog):
    life.may_store, life.available = False, GIB
    assert life.step() == 5
    assert caplog.text == ""


def test_where_it_cannot_go_training_goes_on(life, monkeypatch, caplog):
    def refuse(nbytes: int) -> int:
        raise MemoryLimitError("no staging memory either")

    monkeypatch.setattr(life.homes._moves, "leave_host_memory", refuse)
    life.available = GIB
    for _ in range(3):
        assert life.step() == 5
    assert caplog.text.count("no staging memory either") == 1
