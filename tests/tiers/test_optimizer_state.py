# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tencache_ds.errors import SpaceError, StorageError, TenCacheError
from tencache_ds.io import Operation, StorageTimeoutError
from tencache_ds.layout import round_up
from tencache_ds.observability.counters import Counters, Stall
from tencache_ds.placement.places import Place
from tencache_ds.planning.size_classes import SizeClass
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.sub_group import MASTER, SubGroupSpec
from tests.tiers.conftest import TIMEOUT_S, Storage, numbers

pytestmark = pytest.mark.timeout(60)

KINDS = ((MASTER, torch.float32), ("exp_avg", torch.float32), ("exp_avg_sq", torch.bfloat16))
CHUNK_NBYTES = 4096 * 10  # one granule of master, exp_avg and exp_avg_sq
NUMELS = (3 * 4096 + 100, 5, 2 * 4096)
SLOTS = 3
HOMES: dict[str, tuple[Place, ...]] = {
    "whole": (),
    "stored": (Place.NVME,),
    "resident": (Place.HOST,),
    "mixed": (Place.HOST, Place.NVME),
}
"""Places of a sub-group's chunks, over and over; none where the sub-group is whole in host memory."""
EVERY_HOME = pytest.mark.parametrize("home", HOMES)


def spec_of(numel: int, home: str) -> SubGroupSpec:
    """A sub-group of ``KINDS`` in chunks of ``CHUNK_NBYTES``."""
    places = HOMES[home]
    n_chunks = -(-numel // 4096)
    return SubGroupSpec(numel, KINDS, (places * n_chunks)[:n_chunks] if places else None)


class Bench:
    """An optimizer tier with a dense model of what it holds."""

    def __init__(self, folder: Path, *homes: str) -> None:
        # Slots with room for a granule of one more kind.
        self.storage = Storage(folder, (SizeClass(CHUNK_NBYTES + 4096 * 4, SLOTS),))
        specs = [spec_of(numel, home) for numel, home in zip(NUMELS, homes, strict=True)]
        self.tier = OptimizerStateTier(
            specs,
            store=self.storage.store if set(homes) != {"whole"} else None,
            pool=lambda: self.storage.pool,
            counters=self.storage.counters,
            chunk_nbytes=CHUNK_NBYTES,
            timeout_s=TIMEOUT_S,
        )
        self.dense: list[dict[str, torch.Tensor]] = []
        for index, numel in enumerate(NUMELS):
            self.dense.append({kind: numbers(numel, dtype, 10 * index + i) for i, (kind, dtype) in enumerate(KINDS)})
            self.tier.write(index, self.dense[index])

    def all_chunks(self):
        return [chunk for index in range(len(NUMELS)) for chunk in self.tier.chunks(index)]

    def compare(self, used, *, add: float | None = None) -> None:
        """Compares a chunk in use with the model; with ``add`` both are changed."""
        chunk = used.chunk
        assert list(used.views) == list(self.tier.kinds(chunk.sub_group))
        for kind, view in used.views.items():
            part = self.dense[chunk.sub_group][kind][chunk.start : chunk.start + chunk.numel]
            assert torch.equal(view, part), (chunk.sub_group, chunk.index, kind)
            if add is not None:
                view.add_(add)
                part.add_(add)

    def scan(self) -> None:
        """Compares every chunk with the model."""
        seen = []

        def visit(chunk, views):
            for kind, view in views.items():
                part = self.dense[chunk.sub_group][kind][chunk.start : chunk.start + chunk.numel]
                assert torch.equal(view, part), (chunk.sub_group, chunk.index, kind)
            seen.append(chunk)

        self.tier.scan(visit)
        assert seen == self.all_chunks()

    def check(self) -> None:
        for index, kinds in enumerate(self.dense):
            for kind, value in self.tier.borrow(index).items():
                assert torch.equal(value, kinds[kind]), (index, kind)

    def close(self) -> None:
        self.storage.backend.open_gates()
        self.tier.close()
        self.tier.close()
        self.storage.close()


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path, *["stored"] * len(NUMELS))
    yield bench
    bench.close()


@pytest.fixture
def either(tmp_path, home):
    bench = Bench(tmp_path, *[home] * len(NUMELS))
    yield bench
    bench.close()


@EVERY_HOME
def test_a_pass_in_order_streams_and_keeps_every_change(either):
    for step in range(3):
        either.tier.begin_update()
        for chunk in either.all_chunks():
            used = either.tier.take(chunk)
            either.compare(used, add=step + 1.0)
            either.tier.put(used)
            assert used.views == {}
    either.tier.drain()
    either.tier.check()
    either.storage.assert_idle()
    either.check()


def test_a_pass_moves_each_chunk_once(bench):
    nbytes = sum(chunk.nbytes for chunk in bench.all_chunks())
    before = bench.storage.counters.total().nbytes
    assert before["nvme_write"] == nbytes  # the first values, written without reading
    assert before["nvme_read"] == 0
    bench.tier.begin_update()
    for chunk in bench.all_chunks():
        bench.tier.put(bench.tier.take(chunk))
    after = bench.storage.counters.total().nbytes
    assert after["nvme_read"] == nbytes
    assert after["nvme_write"] == 2 * nbytes


@EVERY_HOME
def test_a_scan_shows_every_chunk_and_changes_nothing(either):
    either.scan()
    either.storage.assert_idle()
    either.check()


def test_a_scan_reads_each_chunk_once(bench):
    nbytes = sum(chunk.nbytes for chunk in bench.all_chunks())
    before = bench.storage.counters.total().nbytes
    bench.scan()
    after = bench.storage.counters.total().nbytes
    assert after["nvme_read"] - before["nvme_read"] == nbytes
    assert after["nvme_write"] == before["nvme_write"]


def test_a_scan_that_is_left_early_gives_its_buffers_back(bench):
    def visit(chunk, views):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bench.tier.scan(visit)
    bench.storage.pool.drain()
    bench.storage.assert_idle()
    bench.check()


def test_the_next_chunks_are_read_while_one_is_worked_on(bench):
    bench.tier.drain()
    bench.storage.pool.drain()
    bench.tier.begin_update()
    assert bench.storage.pool.stats().nbytes_leased == bench.storage.pool.stats().nbytes_total
    bench.tier.put(bench.tier.take(bench.all_chunks()[0]), changed=False)
    assert len(bench.tier._stored._ahead) == SLOTS


@pytest.mark.parametrize("home", ["whole", "resident"])
def test_state_in_host_memory_touches_neither_pool_nor_disk(tmp_path, home):
    bench = Bench(tmp_path, *[home] * len(NUMELS))
    bench.tier.begin_update()
    for chunk in bench.all_chunks():
        used = bench.tier.take(chunk)
        bench.compare(used, add=1.0)
        bench.tier.put(used)
    bench.tier.drain()
    bench.check()
    assert bench.storage.pool.stats().n_leases == 0
    assert not any(bench.storage.counters.total().nbytes.values())
    bench.close()


@pytest.mark.parametrize("homes", [("stored", "whole", "stored"), ("mixed", "resident", "mixed")])
def test_homes_side_by_side(tmp_path, homes):
    bench = Bench(tmp_path, *homes)
    assert [bench.tier.streamed(index) for index in range(3)] == [True, False, True]
    assert [bench.tier.whole(index) for index in range(3)] == [home == "whole" for home in homes]
    for _ in range(2):
        bench.tier.begin_update()
        for chunk in bench.all_chunks():
            used = bench.tier.take(chunk)
            bench.compare(used, add=0.5)
            bench.tier.put(used)
    bench.check()
    bench.close()


@pytest.mark.parametrize("order", [[6, 5, 4, 3, 2, 1, 0], [1, 0, 3, 2, 5, 4, 6], [0, 4, 1, 1, 6, 0], [2, 3, 4]])
def test_another_order_than_that_of_the_pass(bench, order):
    chunks = bench.all_chunks()
    assert len(chunks) == 7
    bench.tier.begin_update()
    for position in order:
        used = bench.tier.take(chunks[position])
        bench.compare(used, add=1.0)
        bench.tier.put(used)
    bench.check()


def test_a_pass_over_some_sub_groups(bench):
    bench.tier.begin_update([2, 0])
    for index in (2, 0):
        for chunk in bench.tier.chunks(index):
            used = bench.tier.take(chunk)
            bench.compare(used, add=1.0)
            bench.tier.put(used)
    assert not bench.tier._stored._ahead
    bench.check()


def test_two_chunks_in_use_at_a_time(bench):
    bench.tier.begin_update()
    first, second = (bench.tier.take(chunk) for chunk in bench.all_chunks()[:2])
    bench.compare(first, add=1.0)
    bench.compare(second, add=2.0)
    bench.tier.put(second)
    bench.tier.put(first)
    bench.tier.put(first)  # already ended
    bench.check()


@pytest.mark.parametrize("use", ["read", "write"])
def test_elements_of_many_chunks_are_read_ahead(bench, use):
    sub_group = max(range(len(NUMELS)), key=lambda index: len(bench.tier.chunks(index)))
    n_chunks = len(bench.tier.chunks(sub_group))
    assert n_chunks > 2
    bench.tier.drain()
    bench.storage.pool.drain()
    bench.storage.backend.gates[Operation.READ].clear()
    seen = []

    def open_gates() -> None:
        seen.append(bench.storage.pool.stats().nbytes_leased)
        bench.storage.backend.open_gates()

    opener = threading.Timer(0.2, open_gates)
    opener.start()
    before = bench.storage.counters.total().nbytes["nvme_read"]
    if use == "read":
        assert torch.equal(bench.tier.read(sub_group, MASTER), bench.dense[sub_group][MASTER])
    else:
        bench.dense[sub_group][MASTER].add_(1)
        bench.tier.write(sub_group, {MASTER: bench.dense[sub_group][MASTER]})
    opener.join()
    assert seen == [bench.storage.pool.stats().nbytes_total], "as many chunks at a time as there are buffers"
    moved = bench.storage.counters.total().nbytes["nvme_read"] - before
    assert moved == sum(extent.allocated_nbytes for extent in bench.tier._groups[sub_group].extents.values())
    bench.check()


def test_what_was_not_said_to_be_changed_is_not_written(bench):
    written = bench.storage.counters.total().nbytes["nvme_write"]
    used = bench.tier.take(bench.all_chunks()[0])
    used.views[MASTER].zero_()
    bench.tier.put(used, changed=False)
    assert bench.storage.counters.total().nbytes["nvme_write"] == written
    bench.check()


def test_a_chunk_in_use_comes_back_with_an_error_and_stays_what_it_was(bench):
    def fail(chunk) -> None:
        with bench.tier.using(chunk) as used:
            used.views[MASTER].zero_()
            raise KeyError

    for chunk in bench.all_chunks():  # more than there are buffers
        with pytest.raises(KeyError):
            fail(chunk)
    bench.check()
    with bench.tier.using(bench.all_chunks()[0]) as used:
        bench.compare(used, add=1.0)
    bench.check()


@pytest.mark.parametrize("groups", [None, [1]], ids=["with the pool full of read-ahead", "with buffers left"])
def test_a_write_in_the_middle_of_a_pass_is_seen_by_it(bench, groups):
    """The pass has read the chunk ahead before it was written."""
    bench.tier.drain()
    bench.storage.pool.drain()
    bench.tier.begin_update(groups)
    for value in bench.dense[1].values():
        value.mul_(2)
    bench.tier.write(1, bench.dense[1])
    for chunk in bench.all_chunks() if groups is None else bench.tier.chunks(1):
        used = bench.tier.take(chunk)
        bench.compare(used)
        bench.tier.put(used, changed=False)
    bench.check()


@EVERY_HOME
@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["read", "write", "write all kinds", "update", "look", "begin", "scan"]),
            st.integers(0, len(NUMELS) - 1),
            st.sets(st.sampled_from([kind for kind, _ in KINDS]), min_size=1),
            st.integers(0, 10**6),
            st.integers(1, 10**6),
        ),
        max_size=12,
    )
)
def test_any_ranges_against_a_dense_model(home, operations):
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), *[home] * len(NUMELS))
        for seed, (name, index, kinds, start, numel) in enumerate(operations):
            dense = bench.dense[index]
            start %= NUMELS[index]
            numel = 1 + numel % (NUMELS[index] - start)
            if name == "begin":
                bench.tier.begin_update()
            elif name in ("update", "look"):
                chunks = bench.tier.chunks(index)
                used = bench.tier.take(chunks[start % len(chunks)])
                bench.compare(used, add=1.0 if name == "update" else None)
                bench.tier.put(used, changed=name == "update")
            elif name == "read":
                for kind in kinds:
                    assert torch.equal(bench.tier.read(index, kind, start, numel), dense[kind][start : start + numel])
            elif name == "scan":
                bench.scan()
            else:
                written = set(dense) if name == "write all kinds" else kinds
                values = {kind: numbers(numel, dense[kind].dtype, 1000 + seed) for kind in written}
                bench.tier.write(index, values, start)
                for kind, value in values.items():
                    dense[kind][start : start + numel] = value
        bench.check()
        bench.close()


def test_a_whole_replacement_reads_nothing(bench):
    read = bench.storage.counters.total().nbytes["nvme_read"]
    for kind in bench.dense[0]:
        bench.dense[0][kind].fill_(7)
    bench.tier.write(0, bench.dense[0])
    assert bench.storage.counters.total().nbytes["nvme_read"] == read
    bench.check()


@EVERY_HOME
def test_reads_are_copies(either):
    either.tier.read(0, MASTER).zero_()
    either.check()


@EVERY_HOME
def test_values_of_different_lengths_are_refused(either):
    with pytest.raises(TenCacheError, match="sub-group 0 have lengths"):
        either.tier.write(0, {MASTER: torch.zeros(3), "exp_avg": torch.zeros(4)})


@EVERY_HOME
def test_a_kind_that_is_not_kept(either):
    for use in (either.tier.read, either.tier.dtype):
        with pytest.raises(KeyError, match="momentum"):
            use(0, "momentum")


@EVERY_HOME
def test_what_was_borrowed_and_changed_is_kept(either):
    for index in (0, 1):
        values = either.tier.borrow(index)
        for kind, value in values.items():
            value.add_(1)
            if value is not either.dense[index][kind]:
                either.dense[index][kind] = value.clone()
        either.tier.keep(index, values)
    either.check()


@pytest.mark.parametrize("use", ["keep", "replace"])
@EVERY_HOME
def test_new_kinds_and_dtypes_get_room_and_missing_kinds_become_zero(either, use):
    """As after a first step that made a state, or after loading a checkpoint of other states."""
    for index in (0, 2):
        values = {
            MASTER: numbers(NUMELS[index], torch.float32, 100 + index),
            "exp_avg": numbers(NUMELS[index], torch.bfloat16, 200 + index),  # kept in fp32 until now
            "max_exp_avg_sq": numbers(NUMELS[index], torch.float32, 300 + index),
        }
        getattr(either.tier, use)(index, values)
        assert either.tier.kinds(index) == (MASTER, "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        zeros = torch.zeros(NUMELS[index], dtype=torch.bfloat16)
        dense = {MASTER: values[MASTER], "exp_avg": values["exp_avg"], "exp_avg_sq": zeros}
        either.dense[index] = {k: v.clone() for k, v in (dense | {"max_exp_avg_sq": values["max_exp_avg_sq"]}).items()}
    either.check()
    for step in range(2):
        either.tier.begin_update()
        for chunk in either.all_chunks():
            used = either.tier.take(chunk)
            either.compare(used, add=step + 1.0)
            either.tier.put(used)
    either.check()


def test_a_whole_sub_group_keeps_the_optimizers_tensors_and_copies_loaded_ones(tmp_path):
    bench = Bench(tmp_path, *["whole"] * len(NUMELS))
    loaded = {kind: value.clone() for kind, value in bench.dense[0].items()}
    bench.tier.replace(0, loaded)
    assert not {v.data_ptr() for v in bench.tier.borrow(0).values()} & {v.data_ptr() for v in loaded.values()}
    bench.tier.keep(0, loaded)
    assert all(bench.tier.borrow(0)[kind] is value for kind, value in loaded.items())
    bench.close()


def test_chunks_of_more_kinds_fit_the_pool_that_there_is(tmp_path):
    """The pool was made for chunks of two kinds; a third one turns up."""
    two, numel = ((MASTER, torch.float32), ("exp_avg", torch.float32)), 20 * 4096 + 17
    slot_nbytes = round_up(numel * 8)
    storage = Storage(tmp_path, (SizeClass(slot_nbytes, SLOTS),))
    tier = OptimizerStateTier(
        [SubGroupSpec(numel, two, (Place.NVME,))],
        store=storage.store,
        pool=lambda: storage.pool,
        counters=storage.counters,
        chunk_nbytes=64 * slot_nbytes,
        timeout_s=TIMEOUT_S,
    )
    assert len(tier.chunks(0)) == 1
    values = {kind: numbers(numel, torch.float32, i) for i, kind in enumerate((MASTER, "exp_avg", "exp_avg_sq"))}
    tier.keep(0, values)
    assert len(tier.chunks(0)) > 1
    assert all(chunk.nbytes <= slot_nbytes and chunk.start % 4096 == 0 for chunk in tier.chunks(0))
    for kind, value in tier.borrow(0).items():
        assert torch.equal(value, values[kind])
    many = {f"kind{i}": values[MASTER] for i in range(100)}
    with pytest.raises(TenCacheError, match=r"103 kinds of optimizer state of sub-group 0 .*tencache\.chunk_size"):
        tier.keep(0, values | many)
    assert torch.equal(tier.read(0, "exp_avg_sq"), values["exp_avg_sq"])
    tier.close()
    storage.close()


def test_new_kinds_take_the_place_of_the_old_extents(bench):
    before = bench.storage.store.nbytes_allocated
    bench.tier.keep(0, bench.tier.borrow(0) | {"max_exp_avg_sq": torch.zeros(NUMELS[0])})
    bench.tier.drain()
    grown = bench.storage.store.nbytes_allocated - before
    assert grown == sum(round_up(chunk.piece("max_exp_avg_sq").nbytes) for chunk in bench.tier.chunks(0))


def test_no_room_for_new_kinds_leaves_the_state_as_it_was(bench, monkeypatch):
    allocated, allocate = bench.storage.store.nbytes_allocated, bench.storage.store.allocate
    left = iter(range(2))

    def allocate_two(nbytes, tag):
        if next(left, None) is None:
            raise SpaceError("allocate", "/scratch", 0, nbytes, "the disk is full")
        return allocate(nbytes, tag)

    monkeypatch.setattr(bench.storage.store, "allocate", allocate_two)
    with pytest.raises(SpaceError, match="the disk is full"):
        bench.tier.keep(0, bench.tier.borrow(0) | {"max_exp_avg_sq": torch.zeros(NUMELS[0])})
    assert bench.storage.store.nbytes_allocated == allocated
    bench.check()


@EVERY_HOME
def test_the_whole_state_has_master_weights(either):
    with pytest.raises(TenCacheError, match="'master' is missing"):
        either.tier.keep(0, {"exp_avg": torch.zeros(NUMELS[0])})


def test_stored_state_needs_a_store():
    with pytest.raises(TenCacheError, match="no store"):
        OptimizerStateTier(
            [SubGroupSpec(5, KINDS, (Place.NVME,))],
            store=None,
            pool=lambda: pytest.fail("no pool is needed"),
            counters=Counters(),
            chunk_nbytes=CHUNK_NBYTES,
            timeout_s=1.0,
        )


def test_waits_are_counted_as_stalls(bench):
    bench.tier.drain()
    gate = bench.storage.backend.gates[Operation.READ]
    gate.clear()
    bench.tier.begin_update()
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    bench.tier.put(bench.tier.take(bench.all_chunks()[0]), changed=False)
    opener.join()
    assert bench.storage.counters.total().stall_seconds[Stall.OPTIMIZER_READ.value] > 0.01


def test_a_write_that_hangs_is_named_by_who_waits_for_its_buffer(bench):
    bench.tier.drain()
    bench.tier._mover.timeout_s = 0.3
    gate = bench.storage.backend.gates[Operation.WRITE]
    gate.clear()
    bench.tier.begin_update()

    def update() -> None:
        for chunk in bench.all_chunks():
            bench.tier.put(bench.tier.take(chunk))

    with pytest.raises(StorageTimeoutError, match=r"write of optimizer chunk 0\.0 failed .* not finished after 0\.3 s"):
        update()
    gate.set()


@pytest.mark.parametrize("ahead", [True, False], ids=["read ahead", "on demand"])
def test_a_failed_read_is_raised_and_leaves_the_pool_idle(bench, ahead):
    bench.tier.drain()
    bench.storage.backend.fails = lambda operation, tag: operation is Operation.READ and tag == "optimizer chunk 0.0"
    if ahead:
        bench.tier.begin_update()
    with pytest.raises(StorageError, match=r"optimizer chunk 0\.0") as caught:
        bench.tier.take(bench.all_chunks()[0])
    assert caught.value.errno == 5
    bench.tier.drain()
    bench.storage.assert_idle()
    bench.storage.backend.fails = lambda operation, tag: False
    bench.check()


def test_a_failed_write_is_raised_by_the_next_check(bench):
    bench.tier.drain()
    bench.storage.backend.fails = lambda operation, tag: operation is Operation.WRITE
    used = bench.tier.take(bench.all_chunks()[0])
    bench.tier.put(used)
    with pytest.raises(StorageError, match=r"optimizer chunk 0\.0"):
        bench.tier.drain()
    bench.tier.check()
    bench.storage.assert_idle()


def test_a_closed_store_leaves_no_lease(bench):
    used = bench.tier.take(bench.all_chunks()[0])
    bench.storage.store.close()
    with pytest.raises(StorageError, match="closed"):
        bench.tier.put(used)
    with pytest.raises(StorageError, match="closed"):
        bench.tier.take(bench.all_chunks()[1])
    bench.storage.assert_idle()


def test_drain_gives_up_what_was_read_ahead(bench):
    bench.tier.begin_update()
    bench.tier.drain()
    bench.storage.assert_idle()
    bench.check()


def test_an_empty_sub_group(tmp_path):
    storage = Storage(tmp_path, (SizeClass(CHUNK_NBYTES, 1),))
    tier = OptimizerStateTier(
        [SubGroupSpec(0, KINDS, ())],
        store=storage.store,
        pool=lambda: storage.pool,
        counters=storage.counters,
        chunk_nbytes=CHUNK_NBYTES,
        timeout_s=TIMEOUT_S,
    )
    assert tier.chunks(0) == ()
    tier.begin_update()
    assert tier.read(0, MASTER).numel() == 0
    assert tier.read(0, "exp_avg_sq").dtype is torch.bfloat16
    tier.close()
    storage.close()


@pytest.mark.parametrize("home", ["whole", "resident", "stored"])
def test_a_fresh_chunk_is_zero(tmp_path, home):
    specs = [spec_of(numel, home) for numel in NUMELS]
    storage = Storage(tmp_path, (SizeClass(CHUNK_NBYTES, 4),))
    tier = OptimizerStateTier(
        specs,
        store=storage.store,
        pool=lambda: storage.pool,
        counters=storage.counters,
        chunk_nbytes=CHUNK_NBYTES,
        timeout_s=TIMEOUT_S,
    )
    for index in range(len(specs)):
        for chunk in tier.chunks(index):
            used = tier.overwrite(chunk, fresh=True)
            assert not any(view.any() for view in used.views.values())
            used.views[MASTER].fill_(3.0)
            tier.put(used)
            used = tier.overwrite(chunk)
            assert not any(view.any() for view in used.views.values())
            tier.put(used)
    tier.close()
    storage.close()
