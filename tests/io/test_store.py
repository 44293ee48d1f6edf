# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time

import pytest
import torch

from tencache_ds.errors import CorruptionError, SpaceError, StorageError
from tencache_ds.io import Extent, ExtentStore, Operation, PosixBackend, Priority, StorageTimeoutError
from tests.io.conftest import MemoryBackend, aligned

pytestmark = pytest.mark.timeout(60)

PAGE = 4096
MIB = 1 << 20


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "store.bin")


@pytest.fixture
def store(path, memory_backend):
    store = ExtentStore(path, memory_backend, growth_nbytes=16 * PAGE, timeout_s=20)
    yield store
    memory_backend.gate.set()
    memory_backend.fail = lambda operation, offset, tag: False
    try:
        store.close()
    except StorageError:
        store.close()


@pytest.fixture
def disk(path):
    backend = PosixBackend(n_lanes=3, request_nbytes=64 << 10)
    store = ExtentStore(path, backend, growth_nbytes=MIB, timeout_s=20)
    yield store
    store.close()
    backend.close()


def fails(operation):
    return lambda given, offset, tag: given is operation


def test_bytes_come_back(disk, path):
    extents = [disk.allocate(n, f"t{n}") for n in (1, PAGE, PAGE + 1, 300_000)]
    assert [extent.allocated_nbytes for extent in extents] == [PAGE, PAGE, 2 * PAGE, 74 * PAGE]
    assert extents[2] == Extent(path, 2 * PAGE, PAGE + 1, 2 * PAGE, f"t{PAGE + 1}")
    data = [aligned(extent.allocated_nbytes, fill=None, seed=i) for i, extent in enumerate(extents)]
    for extent, buffer in zip(extents, data, strict=True):
        disk.write(extent, buffer)
    disk.drain()
    for extent, buffer in zip(extents, data, strict=True):
        back = aligned(extent.allocated_nbytes)
        disk.read(extent, back, priority=Priority.URGENT).wait()
        assert torch.equal(back, buffer)
    assert disk.nbytes_allocated == 78 * PAGE
    assert disk.nbytes_files == MIB == os.stat(disk.location(path)).st_size


def test_close_gives_the_space_back(path, memory_backend):
    store = ExtentStore(path, memory_backend, preallocate_nbytes=10_000)
    status = os.stat(store.location(path))
    assert status.st_size == store.nbytes_files == 3 * PAGE
    assert status.st_blocks * 512 >= 3 * PAGE
    assert status.st_nlink == 0
    assert not os.path.exists(path)
    extent = store.allocate(PAGE, "t")
    descriptor = memory_backend.added[path]
    store.close()
    store.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert memory_backend.forgotten == [path]
    for use in (
        lambda: store.allocate(PAGE, "t"),
        lambda: store.write(extent, aligned(PAGE)),
        lambda: store.read(extent, aligned(PAGE)),
    ):
        with pytest.raises(StorageError, match="closed"):
            use()


def test_an_existing_file_is_not_taken_over(path, memory_backend):
    with open(path, "w") as file:
        file.write("somebody's")
    with pytest.raises(StorageError, match="create failed at .*File exists"):
        ExtentStore(path, memory_backend)
    assert os.path.getsize(path) == 10


def test_space_is_reused_and_merged(store):
    extents = [store.allocate(PAGE, f"t{i}") for i in range(16)]
    assert store.nbytes_files == 16 * PAGE
    for i in (3, 5, 4):
        store.free(extents[i])
    assert store.allocate(3 * PAGE, "merged").offset == 3 * PAGE
    assert store.nbytes_files == 16 * PAGE
    store.free(extents[15])
    assert store.allocate(20 * PAGE, "grown").offset == 15 * PAGE
    assert store.nbytes_files == 16 * PAGE + 19 * PAGE


def test_a_full_device_says_how_much_is_missing(store, path, monkeypatch):
    real = os.posix_fallocate

    def limited(fd, offset, nbytes):
        if offset + nbytes > 6 * PAGE:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    store.allocate(4 * PAGE, "fits")  # the usual growth does not fit, what is needed does
    assert store.nbytes_files == 4 * PAGE
    with pytest.raises(SpaceError, match="allocate of big failed.*No space left on device: .* bytes are missing") as e:
        store.allocate(8 * PAGE, "big")
    assert e.value.errno == errno.ENOSPC
    store.allocate(PAGE, "small")


def test_what_does_not_fit_is_never_asked_of_the_kernel(store, path, monkeypatch):
    """It would take all that is free before it fails, and somebody else's write would fail meanwhile."""
    asked = []
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, nbytes: asked.append(nbytes))
    status = os.statvfs(os.path.dirname(path))
    with pytest.raises(SpaceError, match="bytes are missing") as caught:
        store.allocate(2 * status.f_blocks * status.f_frsize, "big")
    assert caught.value.errno == errno.ENOSPC
    assert asked == []


def test_a_preallocation_that_does_not_fit_leaves_no_file(path, memory_backend):
    with pytest.raises(SpaceError, match="preallocation"):
        ExtentStore(path, memory_backend, preallocate_nbytes=1 << 55)
    assert not os.path.exists(path)


def test_wrong_use_is_refused(store, memory_backend):
    extent = store.allocate(2 * PAGE, "t")
    with pytest.raises(ValueError, match="positive"):
        store.allocate(0, "nothing")
    with pytest.raises(ValueError, match="t at offset 0 .* was never written"):
        store.read(extent, aligned(2 * PAGE))
    with pytest.raises(ValueError, match="needs a buffer of at most 8192 bytes, not 12288"):
        store.write(extent, aligned(3 * PAGE))
    with pytest.raises(ValueError, match="positive multiple of 4096 bytes, not 4608"):
        store.write(extent, aligned(PAGE + 512))
    with pytest.raises(ValueError, match="float32"):
        store.write(extent, torch.empty(2048))
    store.free(extent)
    for use in (store.free, lambda e: store.write(e, aligned(2 * PAGE)), lambda e: store.read(e, aligned(2 * PAGE))):
        with pytest.raises(ValueError, match="freed"):
            use(extent)


def test_a_part_is_read_as_it_was_written(store, memory_backend):
    """However much was written before it, and whether that write has ended."""
    extent = store.allocate(2 * PAGE, "t")
    memory_backend.gate.clear()
    parts = [aligned(2 * PAGE, 1), aligned(PAGE, 2)]
    back = [aligned(2 * PAGE), aligned(PAGE)]
    tickets = []
    for written, read in zip(parts, back, strict=True):
        tickets += [store.write(extent, written), store.read(extent, read)]
        assert [ticket.nbytes for ticket in tickets[-2:]] == [written.nbytes] * 2
    with pytest.raises(ValueError, match="t at offset 0 .* was written with 4096 bytes, 8192 were to be read"):
        store.read(extent, aligned(2 * PAGE))
    memory_backend.gate.set()
    for ticket in tickets:
        ticket.wait(20)
    for written, read in zip(parts, back, strict=True):
        assert torch.equal(written, read)


def test_a_read_sees_the_write_before_it(store, memory_backend):
    extent = store.allocate(4 * PAGE, "t")
    memory_backend.gate.clear()
    first, second = aligned(4 * PAGE, 1), aligned(4 * PAGE, 2)
    back = [aligned(4 * PAGE) for _ in range(3)]
    tickets = [
        store.write(extent, first),
        store.read(extent, back[0]),
        store.read(extent, back[1]),
        store.write(extent, second),
        store.read(extent, back[2]),
    ]
    assert not any(ticket.done for ticket in tickets)
    memory_backend.gate.set()
    for ticket in tickets:
        ticket.wait()
    assert [int(buffer[0]) for buffer in back] == [1, 1, 2]
    operations = [operation for operation, _ in memory_backend.order]  # two pieces each
    expected = [Operation.WRITE] * 2 + [Operation.READ] * 4 + [Operation.WRITE] * 2 + [Operation.READ] * 2
    assert operations == expected


def test_extents_do_not_wait_for_each_other(store, memory_backend):
    slow, fast = store.allocate(PAGE, "slow"), store.allocate(PAGE, "fast")
    gate = threading.Event()
    memory_backend.fail = lambda operation, offset, tag: tag == "slow" and not gate.wait(20)
    waiting = [store.write(slow, aligned(PAGE, 7)), store.read(slow, aligned(PAGE))]
    store.write(fast, aligned(PAGE, 8)).wait()
    assert not waiting[0].done
    gate.set()
    waiting[1].wait()


def test_freed_space_is_reused_only_after_what_is_in_flight(store, memory_backend):
    extent = store.allocate(16 * PAGE, "t")
    memory_backend.gate.clear()
    ticket = store.write(extent, aligned(16 * PAGE, 1))
    store.free(extent)
    assert store.allocate(PAGE, "other").offset == 16 * PAGE
    memory_backend.gate.set()
    ticket.wait()
    assert store.allocate(PAGE, "reuse").offset == 0


def test_a_failed_write_poisons_the_extent_until_a_later_one(store, memory_backend):
    extent = store.allocate(4 * PAGE, "chunk")
    store.write(extent, aligned(4 * PAGE, 1)).wait()
    memory_backend.gate.clear()
    memory_backend.fail = fails(Operation.WRITE)
    write = store.write(extent, aligned(4 * PAGE, 2))
    read = store.read(extent, aligned(4 * PAGE))
    memory_backend.gate.set()
    with pytest.raises(StorageError, match="write of chunk failed.*injected"):
        read.wait()
    with pytest.raises(StorageError, match="write of chunk failed.*injected"):
        write.wait()
    with pytest.raises(StorageError, match="write of chunk"):
        store.read(extent, aligned(4 * PAGE)).wait()
    memory_backend.fail = lambda operation, offset, tag: False
    store.check()  # the error was seen
    store.write(extent, aligned(4 * PAGE, 3)).wait()
    back = aligned(4 * PAGE)
    store.read(extent, back).wait()
    assert int(back[-1]) == 3


def test_an_error_nobody_waited_for_is_raised_once(store, memory_backend):
    extent = store.allocate(PAGE, "t")
    memory_backend.fail = fails(Operation.WRITE)
    ticket = store.write(extent, aligned(PAGE))
    ticket.wait_ended()
    with pytest.raises(StorageError, match="injected"):
        store.check()
    store.check()
    tickets = [store.write(extent, aligned(PAGE)) for _ in range(3)]
    with pytest.raises(StorageError, match="injected"):
        store.drain()
    assert all(ticket.done for ticket in tickets)


def test_a_failing_callback_of_a_write_is_an_error_of_drain(store, memory_backend):
    extent = store.allocate(PAGE, "t")
    memory_backend.gate.clear()
    store.write(extent, aligned(PAGE)).add_done_callback(lambda ticket: 1 // 0)
    memory_backend.gate.set()
    with pytest.raises(ZeroDivisionError):
        store.drain()


def test_close_reports_a_lost_write_and_still_gives_the_space_back(path, memory_backend):
    store = ExtentStore(path, memory_backend)
    memory_backend.fail = fails(Operation.WRITE)
    store.write(store.allocate(PAGE, "t"), aligned(PAGE))
    with pytest.raises(StorageError, match="injected"):
        store.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory_backend.added[path])
    store.close()


def test_drain_gives_up_in_time(path, memory_backend):
    store = ExtentStore(path, memory_backend, timeout_s=0.1)
    memory_backend.gate.clear()
    ticket = store.write(store.allocate(PAGE, "hung"), aligned(PAGE))
    with pytest.raises(StorageTimeoutError, match="write of hung failed"):
        store.drain()
    with pytest.raises(StorageTimeoutError, match="not finished after 0.1 s"):
        ticket.wait()
    memory_backend.gate.set()
    store.close()


def test_the_oldest_request_says_why_a_buffer_did_not_come_back(path, memory_backend):
    notes = []
    store = ExtentStore(path, memory_backend, timeout_s=20, explain=notes.append)
    store.raise_overdue(0.0)  # nothing is in flight
    memory_backend.gate.clear()
    store.write(store.allocate(PAGE, "first"), aligned(PAGE))
    store.write(store.allocate(PAGE, "second"), aligned(PAGE))
    store.raise_overdue(20.0)
    time.sleep(0.05)
    with pytest.raises(StorageTimeoutError, match=r"write of first failed .* not finished after 0.05 s") as caught:
        store.raise_overdue(0.05)
    assert notes == [caught.value]
    memory_backend.gate.set()
    store.close()


def test_what_waits_behind_a_request_that_hangs_never_starts(path, memory_backend):
    store = ExtentStore(path, memory_backend, timeout_s=0.1)
    extent = store.allocate(PAGE, "t")
    memory_backend.gate.clear()
    hung, behind = store.write(extent, aligned(PAGE)), store.write(extent, aligned(PAGE))
    with pytest.raises(StorageTimeoutError):
        store.close()
    memory_backend.gate.set()
    hung.wait_ended(10)
    with pytest.raises(StorageError, match="the store was closed before it could start"):
        behind.wait(10)
    assert len(memory_backend.order) == 1  # the file is gone, and its descriptor's number may be another's


def test_a_closed_backend_fails_tickets_and_does_not_hang(path):
    backend = MemoryBackend()
    store = ExtentStore(path, backend)
    extent = store.allocate(PAGE, "t")
    backend.close()
    ticket = store.write(extent, aligned(PAGE))
    with pytest.raises(StorageError, match="the backend is closed"):
        ticket.wait()
    with pytest.raises(StorageError, match="the backend is closed"):
        store.read(extent, aligned(PAGE)).wait()
    store.close()


def test_promote_reaches_the_write_a_read_waits_for(path):
    backend = MemoryBackend(n_lanes=1)
    store = ExtentStore(path, backend)
    busy, wanted = store.allocate(PAGE, "busy"), store.allocate(PAGE, "wanted")
    backend.gate.clear()
    tickets = [store.write(busy, aligned(PAGE, i)) for i in range(2)]
    assert backend.at_gate.wait(20)
    others = [store.allocate(PAGE, f"other {i}") for i in range(4)]
    tickets += [store.write(other, aligned(PAGE)) for other in others]
    tickets += [store.write(wanted, aligned(PAGE, 9)), store.read(wanted, aligned(PAGE))]
    tickets[-1].promote()
    backend.gate.set()
    for ticket in tickets:
        ticket.wait()
    order = [tag for _, tag in backend.order]
    assert order[:3] == ["busy", "wanted", "wanted"]
    tickets[-1].promote()
    store.close()
    backend.close()


def test_a_lost_write_is_found(disk, path, monkeypatch):
    extent = disk.allocate(64 * PAGE, "moments of layer 3")
    disk.write(extent, aligned(64 * PAGE, 1)).wait()
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: len(buffers[0]))
    disk.write(extent, aligned(64 * PAGE, 2)).wait()
    monkeypatch.setattr(os, "pwritev", real)
    with pytest.raises(CorruptionError, match="read of moments of layer 3 failed at .*not those of write 2.*lost"):
        disk.read(extent, aligned(64 * PAGE)).wait()


def test_one_torn_page_is_found(disk, path):
    extent = disk.allocate(64 * PAGE, "t")
    for generation in range(4):
        disk.write(extent, aligned(64 * PAGE, fill=None, seed=generation)).wait()
    with open(disk.location(path), "r+b") as file:
        file.seek(extent.offset + 17 * PAGE)
        file.write(bytes(PAGE))
    with pytest.raises(CorruptionError, match="not those of write 4"):
        disk.read(extent, aligned(64 * PAGE)).wait()


def test_without_verification_changes_go_unseen(path):
    backend = PosixBackend(n_lanes=1)
    store = ExtentStore(path, backend, fingerprint=None)
    extent = store.allocate(PAGE, "t")
    store.write(extent, aligned(PAGE, 1)).wait()
    with open(store.location(path), "r+b") as file:
        file.write(bytes(PAGE))
    back = aligned(PAGE, 5)
    store.read(extent, back).wait()
    assert int(back[0]) == 0
    store.close()
    backend.close()


def test_a_read_that_went_wrong_once_is_healed_and_counted(disk, monkeypatch, caplog):
    extent = disk.allocate(4 * PAGE, "t")
    data = aligned(4 * PAGE, fill=None)
    disk.write(extent, data).wait()
    real = os.preadv
    n_bad = 1

    def flaky(fd, buffers, offset):
        nonlocal n_bad
        n = real(fd, buffers, offset)
        if n_bad:
            n_bad -= 1
            buffers[0][:PAGE] = bytes(PAGE)
        return n

    monkeypatch.setattr(os, "preadv", flaky)
    back = aligned(4 * PAGE)
    disk.read(extent, back).wait()
    assert torch.equal(back, data)
    assert disk.n_healed_reads == 1
    assert "was read with wrong bytes" in caplog.text


def test_the_second_read_reports_the_devices_errno(store, path, memory_backend, monkeypatch):
    extent = store.allocate(PAGE, "t")
    store.write(extent, aligned(PAGE, 1)).wait()
    memory_backend.pages[store.paths[0], 0] = bytes(PAGE)  # what an op that ignores io_event.res leaves behind

    def broken(fd, buffers, offset):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StorageError, match="Input/output error") as caught:
        store.read(extent, aligned(PAGE)).wait()
    assert caught.value.errno == errno.EIO
    assert not isinstance(caught.value, CorruptionError)


def test_many_threads(disk):
    def work(seed):
        extents = [disk.allocate(PAGE * (1 + i), f"{seed}.{i}") for i in range(4)]
        for repetition in range(5):
            data = [aligned(e.allocated_nbytes, fill=None, seed=100 * seed + repetition) for e in extents]
            for extent, buffer in zip(extents, data, strict=True):
                disk.write(extent, buffer)
            back = [aligned(e.allocated_nbytes) for e in extents]
            for ticket in [disk.read(e, b) for e, b in zip(extents, back, strict=True)]:
                ticket.wait()
            results.append(all(torch.equal(a, b) for a, b in zip(data, back, strict=True)))
        for extent in extents:
            disk.free(extent)

    results: list[bool] = []
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 20
    assert disk.nbytes_allocated == 0


def test_several_files_share_the_extents_evenly(path, memory_backend):
    store = ExtentStore(path, memory_backend, preallocate_nbytes=8 * PAGE, growth_nbytes=PAGE, n_files=4)
    assert [os.path.basename(name) for name in store.paths] == [f"store-{index}.bin" for index in range(4)]
    assert not os.path.exists(path)
    extents = [store.allocate(PAGE, f"t{index}") for index in range(8)]
    assert sorted(extent.file for extent in extents) == sorted(store.paths * 2)
    assert store.nbytes_files == store.nbytes_allocated == 8 * PAGE
    for index, extent in enumerate(extents):
        buffer = aligned(PAGE)
        store.write(extent, buffer.fill_(index))
    for index, extent in enumerate(extents):
        back = aligned(PAGE)
        store.read(extent, back).wait()
        assert back.unique().tolist() == [index]
    with pytest.raises(ValueError, match="not an extent"):
        store.free(dataclasses.replace(extents[0], file=extents[1].file))
    large = store.allocate(3 * PAGE, "fits no share")
    assert store.nbytes_files == 11 * PAGE
    store.free(large)
    store.close()
    assert sorted(memory_backend.forgotten) == store.paths
    assert not any(os.path.exists(name) for name in store.paths)


def test_of_several_files_none_is_left_when_one_cannot_be_made(path, memory_backend):
    taken = path.replace("store.bin", "store-2.bin")
    with open(taken, "w") as file:
        file.write("somebody's")
    with pytest.raises(StorageError, match="create failed at .*store-2.bin"):
        ExtentStore(path, memory_backend, n_files=4)
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(taken)]
