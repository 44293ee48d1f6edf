# SPDX-License-Identifier: Apache-2.0
"""The native queue against real files, pipes and the errors a kernel really gives."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time

import pytest
import torch

from tencache_ds.ops.tencache_aio import load_tencache_aio
from tests.io.conftest import aligned
from tests.ops.conftest import PAGE, HeldLane, page

pytestmark = pytest.mark.timeout(300)  # the first run builds the op


def test_a_request_is_cut_into_blocks_and_every_byte_arrives(make, file):
    driver = make(n_lanes=3)
    buffer = page(n=64)
    driver.submit(file, 0, buffer)
    end = driver.one()
    assert (end.error, end.end_of_file, end.nbytes_moved) == (0, False, 64 * PAGE)
    assert torch.equal(buffer.view(64, PAGE)[:, 0], torch.arange(64, dtype=torch.uint8))
    new = aligned(64 * PAGE, None)
    driver.submit(file, 0, new, write=True)
    assert driver.one().error == 0
    driver.submit(file, 0, buffer, urgent=True)
    assert driver.one().error == 0
    assert torch.equal(buffer, new)
    stats = driver.queue.stats()
    assert (stats["bytes_read"], stats["bytes_written"], stats["n_requests"]) == (2 * 64 * PAGE, 64 * PAGE, 0)
    assert stats["read_ns"] > 0
    assert stats["write_ns"] > 0


@pytest.mark.parametrize("size", [0, PAGE, 5000, 3 * PAGE])
def test_the_end_of_the_file_is_an_error(make, tmp_path, size):
    path = tmp_path / "short"
    path.write_bytes(b"x" * size)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    driver = make(n_lanes=1, block_nbytes=4 * PAGE)
    driver.submit(fd, 0, page(n=4))
    end = driver.one()
    assert (end.error, end.end_of_file) == (0, True)
    assert (end.error_offset, end.error_nbytes, end.nbytes_moved) == (0, 4 * PAGE, size)
    os.close(fd)


def test_a_file_truncated_underneath_is_an_error(make, file):
    driver = make()
    driver.submit(file, 0, page(n=64))
    assert driver.one().error == 0
    os.ftruncate(file, 10 * PAGE)
    driver.submit(file, 0, page(n=64))
    end = driver.one()
    assert end.end_of_file
    assert end.error_offset >= 10 * PAGE


def test_a_bad_descriptor_fails_alone_in_a_batch(make, file):
    driver = make(n_lanes=1, queue_depth=8)
    held = HeldLane(driver)
    requests = {driver.submit(fd, 0, page()): fd for fd in (file, file, 987, file, 986, file)}
    held.release()
    for end in driver.collect(7):
        expected = errno.EBADF if requests.get(end.id) in (986, 987) else 0
        assert end.error == expected
    held.close()


def test_a_descriptor_of_the_wrong_mode_and_an_unaligned_buffer(make, file, tmp_path):
    driver = make()
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    driver.submit(fd, 0, page(), write=True)
    end = driver.one()
    assert (end.error, end.error_offset, end.error_nbytes) == (errno.EBADF, 0, PAGE)
    driver.submit(file, 0, page(n=2)[100 : 100 + PAGE])
    assert driver.one().error == errno.EINVAL
    os.close(fd)


def test_a_full_device(make, small_device):
    fd = os.open(small_device / "data", os.O_RDWR | os.O_CREAT, 0o600)
    driver = make(n_lanes=2, block_nbytes=16 * PAGE)
    driver.submit(fd, 0, page(n=1024), write=True)
    end = driver.one()
    assert end.error == errno.ENOSPC
    assert end.nbytes_moved < 1024 * PAGE
    os.close(fd)


def test_a_bad_address(make, file):
    driver = make()
    assert driver.queue.submit(10**6, False, file, 0, 0x1000, PAGE, False)
    assert driver.one().error == errno.EFAULT


def test_a_write_cut_short_by_a_limit_is_continued_and_then_fails(make, tmp_path):
    fd = os.open(tmp_path / "limited", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    driver = make(n_lanes=1, block_nbytes=16 * PAGE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE, limits[1]))
    try:
        driver.submit(fd, 0, page(7, 16), write=True)
        end = driver.one()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert end.error == errno.EFBIG
    assert end.nbytes_moved == 2 * PAGE == os.fstat(fd).st_size
    assert driver.queue.stats()["n_short"] >= 1
    os.close(fd)


def test_urgent_goes_first_and_every_eighth_block_is_background(make, file):
    driver = make(n_lanes=1, queue_depth=1)
    held = HeldLane(driver)
    names = {driver.submit(file, 0, page()): f"b{i}" for i in range(3)}
    names |= {driver.submit(file, 0, page(), urgent=True): f"u{i}" for i in range(15)}
    held.release()
    order = [names[end.id] for end in driver.collect(19)[1:]]
    assert order[order.index("b0") : order.index("b1")] == ["b0", *(f"u{i}" for i in range(order.index("b0"), 13))]
    assert order.index("b0") <= 7
    assert order.index("b1") - order.index("b0") == 8
    assert [name for name in order if name[0] == "u"] == [f"u{i}" for i in range(15)]
    assert [name for name in order if name[0] == "b"] == ["b0", "b1", "b2"]
    held.close()


@pytest.mark.parametrize(("urgent_waits", "n_expected"), [(True, 2), (False, 3)])
def test_background_leaves_room_while_an_urgent_request_is_unfinished(make, urgent_waits, n_expected):
    # Reads of pipes hang in the lanes, so what has been taken can be counted: it cannot be cancelled any more.
    driver = make(n_lanes=4, background_nbytes=8 * PAGE)
    held = HeldLane(driver)
    if not urgent_waits:
        held.release()
        assert driver.one().error == 0
    read_end, write_end = os.pipe()
    ids = [driver.submit(read_end, 0, torch.zeros(PAGE, dtype=torch.uint8)) for _ in range(3)]
    time.sleep(0.3)
    assert [driver.queue.cancel(request) for request in ids].count(False) == n_expected
    if urgent_waits:
        held.release()
    os.write(write_end, b"z" * 3 * PAGE)
    assert len(driver.collect(3 + urgent_waits)) == 3 + urgent_waits
    for fd in (read_end, write_end):
        os.close(fd)
    held.close()


def test_a_lane_does_not_wait_for_a_file_that_another_one_writes_to(make, file):
    driver = make(n_lanes=2)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    n_full = os.write(write_end, bytes(1 << 20))
    os.set_blocking(write_end, True)
    # A write to a full pipe hangs in its lane; another one to it would hang in the other lane.
    held, next_one, dropped = (driver.submit(write_end, 0, page(), write=True) for _ in range(3))
    time.sleep(0.1)
    elsewhere = driver.submit(file, 0, page(7), write=True)
    assert driver.one().id == elsewhere
    assert not driver.queue.cancel(held)
    assert driver.queue.cancel(dropped)
    assert driver.one().id == dropped
    for _ in range(n_full // PAGE + 2):
        os.read(read_end, PAGE)
    assert [(end.id, end.error) for end in driver.collect(2)] == [(held, 0), (next_one, 0)]
    for fd in (read_end, write_end):
        os.close(fd)


def test_promote(make, file):
    driver = make(n_lanes=1, queue_depth=1)
    held = HeldLane(driver)
    ids = [driver.submit(file, 0, page()) for _ in range(4)]
    assert driver.queue.promote(ids[3])
    assert driver.queue.promote(ids[3])
    held.release()
    assert [end.id for end in driver.collect(5)[1:]] == [ids[3], *ids[:3]]
    assert not driver.queue.promote(ids[3])
    held.close()


def test_cancel_drops_what_is_not_submitted(make, file):
    driver = make(n_lanes=1, queue_depth=1)
    held = HeldLane(driver)
    buffers = [page(99) for _ in range(3)]
    ids = [driver.submit(file, 0, buffer) for buffer in buffers]
    assert driver.queue.cancel(ids[1])
    end = driver.one()
    assert (end.id, end.error, end.nbytes_moved) == (ids[1], errno.ECANCELED, 0)
    assert not driver.queue.cancel(ids[1])
    assert not driver.queue.cancel(held.id)  # the kernel has all of it
    held.release()
    assert [(end.id, end.error) for end in driver.collect(3)] == [(held.id, 0), (ids[0], 0), (ids[2], 0)]
    assert [int(buffer[0]) for buffer in buffers] == [0, 99, 0]
    held.close()


def test_a_partly_submitted_request_ends_after_what_is_in_flight(make):
    driver = make(n_lanes=1, queue_depth=1)
    read_end, write_end = os.pipe()
    request = driver.submit(read_end, 0, torch.zeros(3 * PAGE, dtype=torch.uint8))
    time.sleep(0.1)
    assert driver.queue.cancel(request)
    assert driver.queue.collect(1, 0.1) == []
    os.write(write_end, b"y" * PAGE)
    end = driver.one()
    assert (end.error, end.nbytes_moved, end.error_offset) == (errno.ECANCELED, PAGE, PAGE)
    os.close(read_end)
    os.close(write_end)


def test_thousands_of_requests_from_many_threads(make, file):
    driver = make(n_lanes=4, queue_depth=16, background_nbytes=16 * PAGE)
    target = torch.zeros(64 * PAGE + PAGE, dtype=torch.uint8)
    base = target.data_ptr() + -target.data_ptr() % PAGE
    n_each, n_threads = 2000, 4

    def submit(thread: int) -> None:
        for i in range(n_each):
            at = (i * 7 + thread) % 64 * PAGE
            assert driver.queue.submit(10**6 * thread + i, False, file, at, base + at, PAGE, i % 3 == 0)

    threads = [threading.Thread(target=submit, args=(thread,)) for thread in range(n_threads)]
    for thread in threads:
        thread.start()
    ends = driver.collect(n_each * n_threads, timeout_s=120)
    for thread in threads:
        thread.join()
    assert {end.error for end in ends} == {0}
    assert len({end.id for end in ends}) == n_each * n_threads
    assert driver.queue.stats()["n_requests"] == 0


def test_collect_waits_without_the_gil_and_wakes_on_close(make):
    driver = make()
    results = []
    waiters = [threading.Thread(target=lambda: results.append(driver.queue.collect(4, -1.0))) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    time.sleep(0.1)
    assert driver.queue.collect(1, 0.0) == []
    assert driver.queue.close(1.0) == 0
    for waiter in waiters:
        waiter.join(10)
    assert results == [[], [], []]


def test_collectors_share_what_has_ended_and_none_sleeps_meanwhile(make, file):
    driver = make(n_lanes=3)
    queue, target = driver.queue, aligned(64 * PAGE)
    n_requests, ended, all_ended = 3000, [], threading.Event()

    def collect() -> None:
        while ends := queue.collect(2, -1.0):
            ended.extend(end.id for end in ends)
            if len(ended) >= n_requests:
                all_ended.set()

    collectors = [threading.Thread(target=collect) for _ in range(3)]
    for collector in collectors:
        collector.start()
    for i in range(n_requests):  # some alone, for collectors that sleep, and some at a time
        if i % 5 == 0:
            time.sleep(0.0002)
        if i % 7 == 0:
            assert queue.submit_failed(i + 1, errno.EIO)
        else:
            address = target.data_ptr() + i % 64 * PAGE
            assert queue.submit(i + 1, False, file, i % 64 * PAGE, address, PAGE, i % 2 == 0)
    assert all_ended.wait(30), f"{len(ended)} of {n_requests} were collected before the queue was closed"
    assert queue.close(5.0) == 0
    for collector in collectors:
        collector.join(10)
        assert not collector.is_alive()
    assert sorted(ended) == list(range(1, n_requests + 1))


def test_close_waits_for_all_and_then_refuses(make, file):
    driver = make()
    for i in range(64):
        driver.submit(file, i * PAGE, page())
    assert driver.queue.close(30.0) == 0
    assert driver.queue.closed
    assert {end.error for end in driver.collect(64)} == {0}
    assert driver.queue.collect(1, -1.0) == []
    assert not driver.queue.submit(10**6, False, file, 0, page().data_ptr(), PAGE, False)
    assert not driver.queue.submit_failed(10**6, errno.EIO)
    assert driver.queue.close(1.0) == 0


def test_close_gives_up_on_a_device_that_hangs(make, file):
    driver = make(n_lanes=1)
    held = HeldLane(driver)
    waiting = driver.submit(file, 0, page())
    t_start = time.monotonic()
    assert driver.queue.close(0.3) == 1
    assert time.monotonic() - t_start < 5
    ends = {end.id: end for end in driver.collect(2)}
    assert (ends[held.id].error, ends[held.id].in_flight) == (errno.ETIMEDOUT, True)
    assert (ends[waiting].error, ends[waiting].in_flight) == (errno.ECANCELED, False)
    held.release()  # the lane finds the queue closed and ends
    time.sleep(0.2)
    assert driver.queue.collect(1, 0.0) == []
    held.close()


def test_nothing_is_left_behind(file):
    op = load_tencache_aio()

    def count() -> tuple[int, int, int]:
        with open("/proc/sys/fs/aio-nr") as used:
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), int(used.read())

    def cycle() -> None:
        queue = op.IoQueue(4, PAGE, 64, 1 << 20)
        buffer = page()
        assert queue.submit(1, False, file, 0, buffer.data_ptr(), PAGE, False)
        assert queue.close(10.0) == 0

    cycle()
    before = count()
    for _ in range(20):
        cycle()
    queue = op.IoQueue(4, PAGE, 64, 1 << 20)
    del queue  # without close
    after = count()
    assert after[:2] == before[:2]
    assert after[2] < before[2] + 20 * 4 * 64  # system-wide: other processes may hold some


def test_a_forked_child_neither_hangs_nor_touches_the_queue(make, file):
    driver = make(n_lanes=1)
    held = HeldLane(driver)
    pid = os.fork()
    if pid == 0:
        status = 100
        try:
            queue, driver.queue = driver.queue, None
            refused = not queue.submit(5, False, file, 0, held.buffer.data_ptr(), PAGE, False)
            status = (
                refused
                + 2 * (queue.collect(1, -1.0) == [])
                + 4 * (queue.close(60.0) == 0)
                + 8 * queue.closed
                + 16 * (not queue.cancel(held.id))
            )
            del queue
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 31
    held.release()
    assert driver.one().error == 0
    held.close()


def test_what_makes_no_sense_is_refused(make, file):
    op = load_tencache_aio()
    for options in ((0, PAGE, 8, 0), (1, 100, 8, 0), (1, 5000, 8, 0), (1, PAGE, 0, 0), (1, PAGE, 8, -1)):
        with pytest.raises(ValueError, match="positive"):
            op.IoQueue(*options)
    driver = make(n_lanes=1)
    held = HeldLane(driver)
    with pytest.raises(ValueError, match="in use"):
        driver.queue.submit(held.id, False, file, 0, page().data_ptr(), PAGE, False)
    with pytest.raises(ValueError, match="must"):
        driver.queue.submit(7, False, file, -1, page().data_ptr(), PAGE, False)
    held.release()
    held.close()


def test_the_kernels_limit_is_an_os_error():
    with pytest.raises(OSError, match="io_setup") as caught:
        load_tencache_aio().IoQueue(64, PAGE, 1 << 24, 0)
    assert caught.value.errno in (errno.EAGAIN, errno.EINVAL)
