# SPDX-License-Identifier: Apache-2.0
"""A store over two devices: extents change the device with a write, and everything else stays as it is."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import consumes, rule

from tencache_ds.errors import CorruptionError, StorageError
from tencache_ds.io import ExtentStore, Operation, Priority
from tencache_ds.io.stripes import Striping
from tests.io.conftest import MemoryBackend, aligned
from tests.io.test_store_machine import POISONED, StoreMachine

pytestmark = pytest.mark.timeout(300)

PAGE = 4096
FAST_SECOND = [1e9, 1e11]


class Pair:
    """A store over two devices, each with its own backend."""

    def __init__(self, folder) -> None:
        self.backends = [MemoryBackend(), MemoryBackend()]
        self.files = [str(folder / "a.bin"), str(folder / "b.bin")]
        self.store = ExtentStore(
            self.files[0],
            self.backends[0],
            others=[(self.files[1], self.backends[1])],
            placement=Striping(2),
            growth_nbytes=16 * PAGE,
            timeout_s=20,
        )
        self.n_written = 0

    def extents(self, count: int):
        return [self.store.allocate(PAGE, f"t{index}") for index in range(count)]

    def rewrite(self, extent, value: int):
        """What a tier does."""
        moved = self.store.relocate(extent)
        self.store.write(moved, aligned(moved.allocated_nbytes, value))
        return moved

    def check(self, extent, value: int) -> None:
        back = aligned(extent.allocated_nbytes)
        self.store.read(extent, back, priority=Priority.URGENT).wait()
        assert torch.equal(back, torch.full_like(back, value))

    def n_on(self, device: int) -> int:
        return self.store.held()[device][0]


@pytest.fixture
def pair(tmp_path):
    pair = Pair(tmp_path)
    yield pair
    for backend in pair.backends:
        backend.gate.set()
    pair.store.close()
    for backend in pair.backends:
        backend.close()
    assert os.listdir(tmp_path) == []


def test_extents_take_turns_and_each_backend_gets_its_own(pair):
    extents = pair.extents(8)
    assert [extent.file for extent in extents] == pair.files * 4
    for value, extent in enumerate(extents):
        pair.store.write(extent, aligned(PAGE, value))
    pair.store.drain()
    for index, backend in enumerate(pair.backends):
        assert {path for path, _ in backend.pages} == {pair.files[index]}
        assert sorted(tag for _, tag in backend.order) == [f"t{n}" for n in range(index, 8, 2)]


def test_extents_move_with_their_writes_to_the_faster_device(pair):
    extents = pair.extents(40)
    for value, extent in enumerate(extents):
        pair.store.write(extent, aligned(PAGE, value))
    assert [pair.store.relocate(extent) for extent in extents] == extents  # no rates, no moves
    for step in range(8):
        pair.store.reweigh(FAST_SECOND)
        extents = [pair.rewrite(extent, (value + step) % 250) for value, extent in enumerate(extents)]
        pair.store.drain()  # an old place counts until its requests have ended
    assert pair.n_on(0) <= 3
    assert pair.n_on(1) >= 37
    assert pair.store.n_relocated == pair.n_on(1) - 20
    for value, extent in enumerate(extents):
        pair.check(extent, (value + 7) % 250)
    assert pair.store.nbytes_allocated == 40 * PAGE


def moving(pair, extents):
    """The first extent that a write would move now, with its place in the list and its new place."""
    for index, extent in enumerate(extents):
        moved = pair.store.relocate(extent)
        if moved is not extent:
            return index, extent, moved
    raise RuntimeError("no extent moves")


def test_reads_of_the_old_place_end_before_it_is_used_again(pair):
    extents = pair.extents(10)
    for extent in extents:
        pair.store.write(extent, aligned(PAGE, 1))
    pair.store.drain()
    pair.store.reweigh(FAST_SECOND)
    pair.backends[0].gate.clear()
    backs = [aligned(PAGE) for _ in extents]
    reads = [pair.store.read(extent, back) for extent, back in zip(extents, backs, strict=True)]
    index, old, moved = moving(pair, extents)
    assert (old.file, moved.file) == tuple(pair.files)
    pair.store.write(moved, aligned(PAGE, 2)).wait()  # the other device continues
    pair.check(moved, 2)
    pair.store.reweigh([1e9, 1e9])
    others = [pair.store.allocate(PAGE, "new") for _ in range(40)]
    assert (old.file, old.offset) not in {(extent.file, extent.offset) for extent in others}
    assert not reads[index].done
    pair.backends[0].gate.set()
    reads[index].wait()
    assert int(backs[index][0]) == 1
    for read in reads:
        read.wait()
    others += [pair.store.allocate(PAGE, "new") for _ in range(40)]
    assert (old.file, old.offset) in {(extent.file, extent.offset) for extent in others}


def test_the_old_extent_is_gone_and_the_new_one_has_to_be_written(pair):
    extents = pair.extents(10)
    for extent in extents:
        pair.store.write(extent, aligned(PAGE, 1))
    pair.store.reweigh(FAST_SECOND)
    _, old, moved = moving(pair, extents)
    assert (moved.nbytes, moved.allocated_nbytes, moved.tag) == (old.nbytes, old.allocated_nbytes, old.tag)
    for use in (pair.store.relocate, pair.store.free, lambda e: pair.store.read(e, aligned(PAGE))):
        with pytest.raises(ValueError, match="freed"):
            use(old)
    with pytest.raises(ValueError, match="never written"):
        pair.store.read(moved, aligned(PAGE))
    pair.store.write(moved, aligned(PAGE, 3))
    pair.check(moved, 3)


def test_writes_are_numbered_on_in_the_new_place(pair):
    """What one word per page misses in one write is in another place at the next."""
    extents = pair.extents(10)
    for extent in extents:
        pair.store.write(extent, aligned(PAGE, 1))
    pair.store.reweigh(FAST_SECOND)
    _, _, moved = moving(pair, extents)
    pair.store.write(moved, aligned(PAGE, 2)).wait()
    pair.backends[1].lose_writes = True
    pair.store.write(moved, aligned(PAGE, 3)).wait()
    with pytest.raises(CorruptionError, match="not those of write 3"):
        pair.store.read(moved, aligned(PAGE)).wait()


def test_a_failed_write_to_the_new_place_poisons_it(pair):
    extents = pair.extents(10)
    for extent in extents:
        pair.store.write(extent, aligned(PAGE, 1))
    pair.store.drain()
    pair.store.reweigh(FAST_SECOND)
    pair.backends[1].fail = lambda operation, offset, tag: operation is Operation.WRITE
    _, _, moved = moving(pair, extents)
    with pytest.raises(StorageError, match="injected"):
        pair.store.write(moved, aligned(PAGE, 2)).wait()
    with pytest.raises(StorageError, match="injected"):
        pair.store.read(moved, aligned(PAGE)).wait()


def test_a_device_that_stands_still_holds_up_nothing_on_the_other(pair):
    extents = pair.extents(20)
    pair.backends[0].gate.clear()
    tickets = {extent: pair.store.write(extent, aligned(PAGE, 1)) for extent in extents}
    for extent in extents[1::2]:
        tickets[extent].wait(10)
    assert not any(tickets[extent].done for extent in extents[::2])


def test_a_closed_store_moves_nothing(tmp_path):
    pair = Pair(tmp_path)
    extents = pair.extents(10)
    pair.store.reweigh(FAST_SECOND)
    pair.store.close()
    with pytest.raises(StorageError, match="closed"):
        pair.store.relocate(extents[0])
    for backend in pair.backends:
        backend.close()


def test_one_device_never_moves_anything(tmp_path, memory_backend):
    store = ExtentStore(str(tmp_path / "a.bin"), memory_backend)
    extent = store.allocate(PAGE, "t")
    store.reweigh([1e9])
    assert store.relocate(extent) is extent
    assert store.held() == [(1, PAGE)]
    assert store.n_relocated == 0
    store.close()


class Restless(Striping):
    """Moves what it is told to move."""

    move = False

    def destination(self, source: int, nbytes: int) -> int | None:
        return 1 - source if self.move else None


class StripedStoreMachine(StoreMachine):
    """The same machine over two devices: some writes move their extents."""

    def __init__(self) -> None:
        super().__init__()
        self.store.close()
        second = os.path.join(self._folder.name, "second.bin")
        self.placement = Restless(2)
        self.store = ExtentStore(
            self.path,
            self.backend,
            others=[(second, self.backend)],
            placement=self.placement,
            growth_nbytes=8 * PAGE,
            n_files=2,
            timeout_s=20,
        )

    @rule(target=StoreMachine.extents, extent=consumes(StoreMachine.extents), move=st.booleans())
    def rewrite(self, extent, move):
        self.placement.move = move
        moved = self.store.relocate(extent)
        assert (moved is not extent) == move
        if move:
            assert (moved.file in self.store.paths[:2]) != (extent.file in self.store.paths[:2])
            assert moved not in self.model
            del self.model[extent]
        self.value = self.value % 250 + 1
        failing = extent.tag in self.failing
        self.written[moved] = moved.allocated_nbytes
        buffer = aligned(moved.allocated_nbytes, 255 if failing else self.value)
        self.pending.append((self.store.write(moved, buffer), buffer, POISONED if failing else None))
        self.model[moved] = POISONED if failing else self.value
        return moved


StripedStoreMachine.TestCase.settings = settings(StoreMachine.TestCase.settings, max_examples=40)
TestStripedStore = StripedStoreMachine.TestCase
