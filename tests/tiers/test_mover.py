# SPDX-License-Identifier: Apache-2.0
"""The mover: what is counted, who waits, and that a buffer comes back exactly once, after errors too."""

from __future__ import annotations

import threading

import pytest

from tencache_ds.errors import StorageError, TenCacheError
from tencache_ds.io import Operation, Priority, StorageTimeoutError
from tencache_ds.memory import Lease, PoolTimeout
from tencache_ds.observability.counters import Counters, Link, Stall
from tencache_ds.planning.size_classes import SizeClass
from tencache_ds.tiers.mover import Mover
from tests.tiers.conftest import TIMEOUT_S, Storage

pytestmark = pytest.mark.timeout(60)

PAGE = 4096
NBYTES = 2 * PAGE - 100
PATTERN = 7


@pytest.fixture
def storage(tmp_path):
    """A store with one extent's worth of a pattern, and a pool of two buffers."""
    storage = Storage(tmp_path, (SizeClass(2 * PAGE, 2),))
    storage.mover = Mover(storage.store, storage.counters, TIMEOUT_S)
    storage.extent = storage.store.allocate(NBYTES, "an extent")
    lease = lease_of(storage)
    lease.buffer.fill_(PATTERN)
    storage.mover.write_back(storage.extent, lease).wait(TIMEOUT_S)
    storage.assert_idle()
    yield storage
    storage.close()


def lease_of(storage: Storage) -> Lease:
    return storage.pool.lease(NBYTES, "test", "test")


def moved(storage) -> tuple[int, int]:
    total = storage.counters.total().nbytes
    return total[Link.NVME_READ], total[Link.NVME_WRITE]


def stalled(storage, cause: Stall) -> float:
    return storage.counters.total().stall_seconds[cause.value]


class ClosedStore:
    """Refuses every request."""

    def read(self, *arguments, **options):
        raise StorageError("read", "path", 0, 1, "closed")

    def write(self, *arguments, **options):
        raise StorageError("write", "path", 0, 1, "closed")


def test_a_free_buffer_is_no_wait(storage):
    storage.mover.lease(storage.pool, NBYTES, "w", "test").release()
    assert stalled(storage, Stall.BUFFER) == 0


def test_a_wait_for_a_buffer_is_counted(storage):
    first, second = lease_of(storage), lease_of(storage)
    timer = threading.Timer(0.1, first.release)
    timer.start()
    storage.mover.lease(storage.pool, NBYTES, "w", "test").release()
    timer.join()
    second.release()
    assert stalled(storage, Stall.BUFFER) > 0.03


def test_who_waits_in_vain_is_told_of_the_transfer_that_hangs(storage):
    storage.mover.timeout_s = 0.1
    gate = storage.backend.gates[Operation.WRITE]
    gate.clear()
    storage.mover.write_back(storage.extent, lease_of(storage))
    held = lease_of(storage)
    with pytest.raises(StorageTimeoutError, match="write of an extent"):
        storage.mover.lease(storage.pool, NBYTES, "w", "test")
    gate.set()
    held.release()


def test_who_waits_in_vain_for_a_user_is_told_who_has_the_buffers(storage):
    held = [lease_of(storage), lease_of(storage)]
    with pytest.raises(PoolTimeout, match="test"):
        storage.mover.lease(storage.pool, NBYTES, "w", "test", patience_s=0.05)
    for lease in held:
        lease.release()


def test_a_read_is_counted_and_waited_for(storage):
    gate, lease = storage.backend.gates[Operation.READ], lease_of(storage)
    before = moved(storage)
    gate.clear()
    timer = threading.Timer(0.1, gate.set)
    timer.start()
    ticket = storage.mover.read(storage.extent, lease, Priority.URGENT)
    storage.mover.wait(ticket, Stall.OPTIMIZER_READ, lease)
    timer.join()
    assert stalled(storage, Stall.OPTIMIZER_READ) > 0.03
    assert bool((lease.buffer[:NBYTES] == PATTERN).all())
    assert moved(storage) == (before[0] + 2 * PAGE, before[1])
    storage.mover.wait(ticket, Stall.WEIGHT_READ)  # it is there
    assert stalled(storage, Stall.WEIGHT_READ) == 0
    lease.release()


@pytest.mark.parametrize("gives_back", [True, False])
def test_after_a_failed_wait_the_buffer_goes_back_if_asked_for(storage, gives_back):
    storage.backend.fails = lambda operation, tag: operation is Operation.READ
    lease = lease_of(storage)
    ticket = storage.mover.read(storage.extent, lease, Priority.URGENT)
    with pytest.raises(StorageError, match="injected"):
        storage.mover.wait(ticket, Stall.WEIGHT_READ, lease if gives_back else None)
    if not gives_back:
        lease.release()
    storage.assert_idle()


def test_after_a_time_out_the_buffer_goes_back_with_the_request(storage):
    storage.mover.timeout_s = 0.05
    gate, lease = storage.backend.gates[Operation.READ], lease_of(storage)
    gate.clear()
    ticket = storage.mover.read(storage.extent, lease, Priority.URGENT)
    with pytest.raises(StorageTimeoutError):
        storage.mover.wait(ticket, Stall.WEIGHT_READ, lease)
    assert storage.pool.stats().nbytes_leased == 2 * PAGE
    gate.set()
    storage.assert_idle()


def test_what_cannot_be_started_gives_the_buffer_back(storage):
    for store, kind in ((ClosedStore(), StorageError), (None, TenCacheError)):
        mover = Mover(store, storage.counters, TIMEOUT_S)
        with pytest.raises(kind):
            mover.read(storage.extent, lease_of(storage), Priority.URGENT)
        with pytest.raises(kind):
            mover.write_back(storage.extent, lease_of(storage))
        with pytest.raises(kind), mover.reading(storage.extent, lease_of(storage)):
            pass
        lease = lease_of(storage)
        with pytest.raises(kind):
            mover.write(storage.extent, lease.buffer)
        lease.release()  # a write alone leaves it to whoever has it
        storage.assert_idle()


def test_a_block_reads_and_gives_back(storage):
    with storage.mover.reading(storage.extent, lease_of(storage)) as memory:
        assert bool((memory[:NBYTES] == PATTERN).all())
    storage.assert_idle()

    def fail_inside() -> None:
        with storage.mover.reading(storage.extent, lease_of(storage)):
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail_inside()
    storage.assert_idle()
    storage.backend.fails = lambda operation, tag: True
    with pytest.raises(StorageError, match="injected"), storage.mover.reading(storage.extent, lease_of(storage)):
        pass
    storage.assert_idle()


def test_a_buffer_comes_back_after_its_write(storage):
    gate, before = storage.backend.gates[Operation.WRITE], moved(storage)
    gate.clear()
    lease = lease_of(storage)
    ticket = storage.mover.write_back(storage.extent, lease)
    assert storage.pool.stats().nbytes_leased == 2 * PAGE
    gate.set()
    ticket.wait(TIMEOUT_S)
    storage.assert_idle()
    assert moved(storage) == (before[0], before[1] + 2 * PAGE)


def test_writes_are_waited_for_and_their_errors_raised(storage):
    storage.mover.write_back(storage.extent, lease_of(storage))
    storage.mover.drain()
    storage.assert_idle()
    storage.mover.check()
    storage.backend.fails = lambda operation, tag: True
    ticket = storage.mover.write_back(storage.extent, lease_of(storage))
    ticket.wait_ended(TIMEOUT_S)
    with pytest.raises(StorageError, match="injected"):
        storage.mover.check()


def test_without_a_store_there_is_nothing_to_wait_for():
    mover = Mover(None, Counters(), TIMEOUT_S)
    mover.check()
    mover.drain()
    mover.raise_overdue()


def test_on_one_device_an_extent_stays_where_it_is(storage):
    assert storage.mover.relocate(storage.extent) == storage.extent
