# SPDX-License-Identifier: Apache-2.0
"""Chunks on NVMe: the read-ahead of a pass, and the lifetime of buffers."""

from __future__ import annotations

import pytest
import torch

from tencache_ds.errors import StorageError, TenCacheError
from tencache_ds.io import Operation
from tencache_ds.observability.counters import Link
from tencache_ds.planning.chunks import cut_sub_group
from tencache_ds.planning.size_classes import SizeClass
from tencache_ds.tiers.mover import Mover
from tencache_ds.tiers.state_chunks import StoredChunks
from tencache_ds.tiers.sub_group import SubGroup, SubGroupSpec
from tests.tiers.conftest import TIMEOUT_S, Storage

pytestmark = pytest.mark.timeout(60)

KINDS = (("master", torch.float32),)
NBYTES = 4096 * 4
N_CHUNKS, SLOTS = 6, 3


class Bench:
    """A sub-group of which chunk 2 lives elsewhere; every other holds its index in each byte."""

    def __init__(self, folder) -> None:
        self.storage = Storage(folder, (SizeClass(NBYTES, SLOTS),))
        self.chunks = cut_sub_group(0, 4096 * N_CHUNKS, [("master", 4)], NBYTES)
        self.group = SubGroup(SubGroupSpec(4096 * N_CHUNKS, KINDS, None), self.chunks)
        mover = Mover(self.storage.store, self.storage.counters, TIMEOUT_S)
        self.stored = StoredChunks([self.group], mover, lambda: self.storage.pool)
        self.here = [chunk for chunk in self.chunks if chunk.index != 2]
        for chunk in self.here:
            self.stored.store(self.group, chunk, torch.full((NBYTES,), chunk.index, dtype=torch.uint8))
        self.storage.assert_idle()
        self._read_before = self.n_read

    @property
    def n_read(self) -> int:
        return self.storage.counters.total().nbytes[Link.NVME_READ] // NBYTES

    @property
    def n_read_since(self) -> int:
        return self.n_read - self._read_before

    @property
    def n_leased(self) -> int:
        return self.storage.pool.stats().nbytes_leased // NBYTES

    def take(self, index: int):
        lease, is_split = self.stored.take(self.chunks[index])
        assert not is_split
        assert bool((lease.buffer[:NBYTES] == index).all())
        return lease


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    assert len(bench.chunks) == N_CHUNKS
    yield bench
    bench.storage.backend.open_gates()
    bench.stored.abandon()
    bench.storage.close()


def test_a_pass_in_order_reads_each_once_and_into_every_buffer(bench):
    bench.stored.begin(bench.chunks)
    for chunk in bench.here:
        lease = bench.take(chunk.index)
        left = len(bench.here) - 1 - bench.here.index(chunk)
        assert bench.n_leased == min(1 + left, SLOTS)
        bench.stored.put(chunk, lease, changed=False)
    assert bench.n_read_since == len(bench.here)
    bench.storage.assert_idle()


def test_a_caller_who_skips_ahead_stays_in_the_pass(bench):
    bench.stored.begin(bench.chunks)
    assert bench.n_read_since == SLOTS  # 0, 1 and 3
    bench.stored.put(bench.chunks[4], bench.take(4), changed=False)
    assert bench.n_read_since == SLOTS + 2  # 4 and, ahead, 5
    bench.stored.put(bench.chunks[5], bench.take(5), changed=False)
    assert bench.n_read_since == SLOTS + 2


def test_a_caller_who_goes_back_ends_the_pass(bench):
    bench.stored.begin(bench.chunks)
    for index in (0, 0):
        bench.stored.put(bench.chunks[index], bench.take(index), changed=False)
    bench.storage.assert_idle()


def test_a_pass_within_one_goes_on_with_it(bench):
    bench.stored.begin(bench.chunks)
    bench.stored.begin_within(bench.chunks[:2])
    assert bench.n_read_since == SLOTS
    for entry in bench.stored._ahead:
        entry.ticket.wait_ended(TIMEOUT_S)
    bench.stored.begin_within(bench.chunks[4:])
    assert bench.n_read_since == SLOTS + 2
    bench.stored.begin_within(bench.chunks[2:4])  # one of them: nothing to read ahead
    assert bench.n_read_since == SLOTS + 2


def test_a_changed_chunk_is_written_and_a_blank_one_is_not_read(bench):
    lease = bench.stored.blank(bench.chunks[1])
    assert bench.n_read_since == 0
    assert not lease.buffer[:NBYTES].any()
    lease.buffer.fill_(77)
    bench.stored.put(bench.chunks[1], lease, changed=True)
    with bench.stored.reading(bench.chunks[1]) as result:
        assert bool((result == 77).all())
    bench.storage.assert_idle()


def test_of_a_fresh_chunk_the_end_is_not_stored_but_read_as_zero(tmp_path):
    """In whatever order: read ahead, on demand, given up, copied, and written whole at last."""
    kinds = (("master", torch.float32), ("exp_avg", torch.float32))
    storage = Storage(tmp_path, (SizeClass(2 * NBYTES, SLOTS),))
    chunks = cut_sub_group(0, 4096 * 4, [(kind, 4) for kind, _ in kinds], 2 * NBYTES)
    group = SubGroup(SubGroupSpec(4096 * 4, kinds, None), chunks)
    stored = StoredChunks([group], Mover(storage.store, storage.counters, TIMEOUT_S), lambda: storage.pool)
    for chunk in chunks:
        stored.allocate(group, chunk)
        lease = stored.blank(chunk, fresh=True)
        lease.buffer.fill_(99)
        lease.buffer[:NBYTES] = 1 + chunk.index
        stored.put(chunk, lease, changed=True, fresh=True)
    storage.assert_idle()
    assert storage.counters.total().nbytes[Link.NVME_WRITE] == len(chunks) * NBYTES

    def check(chunk, buffer):
        assert bool((buffer[:NBYTES] == 1 + chunk.index).all())
        assert not buffer[NBYTES : chunk.nbytes].any()

    for _ in range(2):
        dirty = [storage.pool.lease(2 * NBYTES, "test", "test", timeout_s=TIMEOUT_S) for _ in range(SLOTS)]
        for lease in dirty:
            lease.buffer.fill_(99)
            lease.release()
        stored.begin(chunks)
        for chunk in chunks:
            lease, _ = stored.take(chunk)
            check(chunk, lease.buffer)
            stored.put(chunk, lease, changed=False)
            if chunk.index == 1:
                stored.abandon()
        for chunk in chunks:
            with stored.reading(chunk) as buffer:
                check(chunk, buffer)
        storage.assert_idle()
    lease = stored.blank(chunks[0])
    lease.buffer.fill_(7)
    stored.put(chunks[0], lease, changed=True)
    with stored.reading(chunks[0]) as buffer:
        assert bool((buffer == 7).all())
    stored.forget(group, chunks[2])
    stored.store(group, chunks[2], torch.full((2 * NBYTES,), 5, dtype=torch.uint8))
    with stored.reading(chunks[2]) as buffer:
        assert bool((buffer == 5).all())
    storage.close()


def test_what_cannot_be_written_has_no_place(bench):
    bench.storage.backend.fails = lambda operation, tag: operation is Operation.WRITE
    with pytest.raises(StorageError, match="injected"):
        bench.stored.store(bench.group, bench.chunks[2], torch.zeros(NBYTES, dtype=torch.uint8))
    assert 2 not in bench.group.extents
    bench.storage.assert_idle()


def test_without_a_store_nothing_is_leased(bench):
    nowhere = StoredChunks([bench.group], Mover(None, bench.storage.counters, TIMEOUT_S), lambda: pytest.fail("leased"))
    with pytest.raises(TenCacheError, match="there is no store"):
        nowhere.store(bench.group, bench.chunks[2], torch.zeros(NBYTES, dtype=torch.uint8))


def test_a_place_that_is_given_up_is_free(bench):
    before = bench.storage.store.held()
    bench.stored.forget(bench.group, bench.chunks[0])
    bench.stored.forget(bench.group, bench.chunks[0])
    assert 0 not in bench.group.extents
    bench.stored.allocate(bench.group, bench.chunks[0])
    assert bench.storage.store.held() == before
