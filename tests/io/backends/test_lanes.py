# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tencache_ds.errors import StorageError
from tencache_ds.io import IoTotals, Operation, Priority, StorageCancelledError, StorageTimeoutError, Submission, Ticket
from tencache_ds.io.backends.lanes import LanePool
from tests.io.conftest import aligned

pytestmark = pytest.mark.timeout(60)

PIECE = 4096


class Device:
    """A transfer function that records its calls and waits at a gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.calls: list[tuple[str, int]] = []
        self.fail_at: set[int] = set()

    def __call__(self, lane, operation, path, offset, piece, tag):
        self.calls.append((tag, offset))
        self.entered.release()
        self.gate.wait()
        if offset in self.fail_at:
            raise StorageError(operation.value, path, offset, piece.numel(), "injected", errno=5, tag=tag)


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def one_lane(device):
    pool = LanePool(1, device, PIECE)
    yield pool
    device.gate.set()
    pool.close()


def test_a_large_request_is_cut_into_pieces_that_run_at_the_same_time(device):
    pool = LanePool(4, device, PIECE)
    ticket = pool.submit(Submission(Operation.READ, "f", 8192, aligned(4 * PIECE)))
    for _ in range(4):
        assert device.entered.acquire(timeout=10)
    assert not ticket.done
    device.gate.set()
    ticket.wait(10)
    assert sorted(device.calls) == [("", 8192 + i * PIECE) for i in range(4)]
    assert ticket.t_done_ns > ticket.t_submit_ns
    pool.close()
    totals = pool.counters.snapshot()
    assert (totals.bytes_read, totals.n_reads, totals.bytes_written) == (4 * PIECE, 1, 0)
    assert totals.read_ns > 0
    assert totals.write_ns == 0


def test_urgent_goes_first_but_background_gets_every_fourth_pick(device, one_lane):
    tickets = [one_lane.submit(Submission(Operation.READ, "f", 0, aligned(PIECE), tag="first"))]
    assert device.entered.acquire(timeout=10)
    tickets += [one_lane.submit(Submission(Operation.READ, "f", 0, aligned(PIECE), tag=f"b{i}")) for i in range(3)]
    tickets += [
        one_lane.submit(Submission(Operation.READ, "f", 0, aligned(PIECE), tag=f"u{i}", priority=Priority.URGENT))
        for i in range(7)
    ]
    device.gate.set()
    for ticket in tickets:
        ticket.wait(10)
    assert [tag for tag, _ in device.calls] == ["first", "u0", "u1", "u2", "b0", "u3", "u4", "u5", "b1", "u6", "b2"]


def test_promote_moves_a_waiting_request_ahead(device, one_lane):
    one_lane.submit(Submission(Operation.READ, "f", 0, aligned(PIECE), tag="first"))
    assert device.entered.acquire(timeout=10)
    tickets = [one_lane.submit(Submission(Operation.READ, "f", 0, aligned(PIECE), tag=f"b{i}")) for i in range(3)]
    tickets[2].promote()
    device.gate.set()
    for ticket in tickets:
        ticket.wait(10)
    assert [tag for tag, _ in device.calls] == ["first", "b2", "b0", "b1"]
    tickets[0].promote()


def test_cancel_drops_what_no_lane_has(device, one_lane):
    running = one_lane.submit(Submission(Operation.READ, "f", 0, aligned(3 * PIECE), tag="running"))
    assert device.entered.acquire(timeout=10)
    waiting = one_lane.submit(Submission(Operation.READ, "f", 0, aligned(PIECE), tag="waiting"))
    whole = one_lane.submit(Submission(Operation.READ, "f", 0, aligned(PIECE), tag="whole"))
    assert waiting.cancel()
    assert waiting.done
    with pytest.raises(StorageCancelledError, match="read of waiting failed at f, offset 0, 4096 bytes: cancelled"):
        waiting.wait(10)
    assert running.cancel()
    assert not running.done  # a lane still has a piece of it
    device.gate.set()
    with pytest.raises(StorageCancelledError):
        running.wait(10)
    whole.wait(10)
    assert not whole.cancel()
    assert not running.cancel()
    assert device.calls == [("running", 0), ("whole", 0)]


def test_the_first_error_wins_and_the_rest_is_dropped(device, one_lane):
    device.fail_at = {PIECE, 2 * PIECE}
    device.gate.set()
    ticket = one_lane.submit(Submission(Operation.WRITE, "some/file", 0, aligned(8 * PIECE), tag="weight"))
    with pytest.raises(StorageError, match="write of weight failed at some/file, offset 4096") as caught:
        ticket.wait(10)
    assert caught.value.errno == 5
    assert str(ticket.error) == str(caught.value)
    assert device.calls == [("weight", 0), ("weight", PIECE)]
    one_lane.submit(Submission(Operation.WRITE, "f", 0, aligned(PIECE))).wait(10)


def test_an_error_waits_for_the_pieces_that_are_running(device):
    pool = LanePool(2, device, PIECE)
    device.fail_at = {0}
    buffer = aligned(2 * PIECE)
    ticket = pool.submit(Submission(Operation.READ, "f", 0, buffer))
    assert device.entered.acquire(timeout=10)
    assert device.entered.acquire(timeout=10)
    assert not ticket.done
    device.gate.set()
    with pytest.raises(StorageError, match="injected"):
        ticket.wait(10)
    pool.close()


def test_finish_runs_before_the_end_and_can_fail_the_request(device, one_lane):
    device.gate.set()
    seen: list[str] = []

    def finish() -> None:
        seen.append(threading.current_thread().name)
        raise ValueError("not what was written")

    ticket = one_lane.submit(Submission(Operation.READ, "f", 0, aligned(2 * PIECE), finish=finish))
    with pytest.raises(ValueError, match="not what was written"):
        ticket.wait(10)
    assert seen == ["tencache-lane-0"]
    assert one_lane.counters.n_reads == 0


def test_callbacks_run_once_before_waiters_wake(device, one_lane):
    seen: list[tuple[str, bool]] = []
    ticket = one_lane.submit(Submission(Operation.READ, "f", 0, aligned(PIECE)))
    ticket.add_done_callback(lambda t: time.sleep(0.05))
    ticket.add_done_callback(lambda t: seen.append((threading.current_thread().name, t.done)))
    device.gate.set()
    ticket.wait(10)
    assert seen == [("tencache-lane-0", True)]
    ticket.add_done_callback(lambda t: seen.append((threading.current_thread().name, t.done)))
    assert seen[1] == ("MainThread", True)


def test_a_callback_may_wait_for_its_own_ticket_and_add_another(device, one_lane):
    seen: list[str] = []
    ticket = one_lane.submit(Submission(Operation.READ, "f", 0, aligned(PIECE)))

    def callback(t: Ticket) -> None:
        t.wait()
        t.add_done_callback(lambda _: seen.append("second"))

    ticket.add_done_callback(callback)
    device.gate.set()
    ticket.wait(10)
    assert seen == ["second"]


def test_every_waiter_of_a_ticket_goes_on(device, one_lane):
    ticket = one_lane.submit(Submission(Operation.READ, "f", 0, aligned(PIECE)))
    with ThreadPoolExecutor(8) as threads:
        waits = [threads.submit(ticket.wait, 10) for _ in range(8)]
        with pytest.raises(StorageTimeoutError):
            ticket.wait(0)
        device.gate.set()
        for wait in waits:
            wait.result(10)
    ticket.wait(0)


def test_an_exception_in_a_callback_is_kept(device, one_lane):
    ticket = one_lane.submit(Submission(Operation.READ, "f", 0, aligned(PIECE)))
    ticket.add_done_callback(lambda t: 1 // 0)
    device.gate.set()
    with pytest.raises(ZeroDivisionError):
        ticket.wait(10)
    late = one_lane.submit(Submission(Operation.READ, "f", 0, aligned(PIECE)))
    late.wait(10)
    late.add_done_callback(lambda t: 1 // 0)
    assert isinstance(late.error, ZeroDivisionError)


def test_an_exception_in_a_callback_does_not_hide_the_first_error(device, one_lane):
    device.fail_at = {0}
    ticket = one_lane.submit(Submission(Operation.READ, "f", 0, aligned(PIECE)))
    ticket.add_done_callback(lambda t: 1 // 0)
    device.gate.set()
    with pytest.raises(StorageError, match="injected") as caught:
        ticket.wait(10)
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_the_error_that_a_ticket_keeps_does_not_hold_who_waited(device, one_lane):
    class Held:
        """What a user's loop has in its variables."""

    def wait_and_fail() -> weakref.ref[Held]:
        held = Held()
        with pytest.raises(StorageError, match="injected"):
            ticket.wait(10)
        return weakref.ref(held)

    device.fail_at = {0}
    ticket = one_lane.submit(Submission(Operation.READ, "f", 0, aligned(PIECE)))
    device.gate.set()
    held = wait_and_fail()
    gc.collect()
    assert held() is None
    assert ticket.error is not None


def test_a_wait_that_takes_too_long_names_the_request(device, one_lane):
    ticket = one_lane.submit(Submission(Operation.READ, "slow/file", 4096, aligned(PIECE), tag="chunk 7"))
    with pytest.raises(StorageTimeoutError, match="read of chunk 7 failed at slow/file, offset 4096.*0.05 s") as caught:
        ticket.wait(0.05)
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, StorageError)
    assert not ticket.error_seen
    device.gate.set()
    ticket.wait(10)


@pytest.mark.parametrize(
    ("buffer", "offset", "message"),
    [
        (torch.empty(4096), 0, "float32"),
        (torch.empty(64, 64, dtype=torch.uint8), 0, "2-D"),
        (torch.empty(4096, dtype=torch.uint8, device="meta"), 0, "on meta"),
        (aligned(16384)[::2], 0, "contiguous, not of stride"),
        (aligned(8192)[: 4096 - 512], 0, "length .* not 3584"),
        (aligned(8192)[:0], 0, "length .* not 0"),
        (aligned(12288)[512 : 512 + 4096], 0, "address"),
        (aligned(4096), -4096, "offset .* not -4096"),
        (aligned(4096), 512, "offset .* not 512"),
        (b"x" * 4096, 0, "not bytes"),
    ],
)
def test_wrong_requests_say_what_was_given(one_lane, buffer, offset, message):
    with pytest.raises(ValueError, match=message):
        one_lane.submit(Submission(Operation.READ, "f", offset, buffer))


@pytest.mark.parametrize(("n_lanes", "request_nbytes"), [(0, 4096), (1, 0), (1, 5000)])
def test_wrong_sizes_are_refused(device, n_lanes, request_nbytes):
    with pytest.raises(ValueError, match="must be"):
        LanePool(n_lanes, device, request_nbytes)


def test_close_waits_for_what_was_submitted_and_then_refuses(device):
    pool = LanePool(2, device, PIECE)
    tickets = [pool.submit(Submission(Operation.WRITE, "f", 0, aligned(3 * PIECE))) for _ in range(5)]
    threading.Timer(0.05, device.gate.set).start()
    pool.close()
    assert all(ticket.done for ticket in tickets)
    assert pool.counters.snapshot().n_writes == 5
    pool.close()
    with pytest.raises(StorageError, match="closed"):
        pool.submit(Submission(Operation.READ, "f", 0, aligned(PIECE)))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tencache-lane")]


def test_close_gives_up_on_a_device_that_hangs(device):
    pool = LanePool(1, device, PIECE, close_timeout_s=0.1)
    stuck = pool.submit(Submission(Operation.READ, "f", 0, aligned(3 * PIECE), tag="weight"))
    waiting = pool.submit(Submission(Operation.WRITE, "f", 0, aligned(PIECE)))
    ends: list[str] = []
    for ticket in (stuck, waiting):
        ticket.add_done_callback(lambda ticket: ends.append(type(ticket.error).__name__))
    assert device.entered.acquire(timeout=10)
    with pytest.raises(StorageTimeoutError, match="read of weight failed at f.* and 0 other requests 0.1 s after"):
        pool.close()
    with pytest.raises(StorageTimeoutError, match="given up"):
        stuck.wait(1)
    with pytest.raises(StorageCancelledError):
        waiting.wait(1)
    pool.close()
    device.gate.set()  # the device comes back, too late to end a ticket again
    for thread in pool._threads:
        thread.join(10)
        assert not thread.is_alive()
    assert sorted(ends) == ["StorageCancelledError", "StorageGivenUpError"]
    assert len(device.calls) == 1


def test_close_in_a_callback_is_refused(device, one_lane):
    device.gate.set()
    ticket = one_lane.submit(Submission(Operation.READ, "f", 0, aligned(PIECE), finish=one_lane.close))
    with pytest.raises(RuntimeError, match="callback"):
        ticket.wait(10)


def test_an_idle_pool_keeps_no_buffer_alive(device, one_lane):
    device.gate.set()
    import gc
    import weakref

    buffer = aligned(PIECE)
    reference = weakref.ref(buffer)
    ticket = one_lane.submit(Submission(Operation.READ, "f", 0, buffer))
    ticket.wait(10)
    one_lane.submit(Submission(Operation.READ, "f", 0, aligned(PIECE))).wait(10)
    del buffer
    gc.collect()
    assert reference() is None


def test_a_forked_child_gets_an_error_instead_of_hanging(device, one_lane):
    ticket = one_lane.submit(Submission(Operation.READ, "f", 0, aligned(PIECE)))
    assert device.entered.acquire(timeout=10)
    buffer = aligned(PIECE)
    pid = os.fork()
    if pid == 0:  # report through the exit status: nothing else of pytest may run in the child
        status = 1
        try:
            try:
                one_lane.submit(Submission(Operation.READ, "f", 0, buffer))
            except StorageError as error:
                status += 2 * ("forked child" in str(error))
            try:
                ticket.wait()
            except StorageError as error:
                status += 4 * ("forked child" in str(error))
            one_lane.close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    device.gate.set()
    ticket.wait(10)


def test_the_interpreter_exits_with_requests_queued():
    script = """
import time, torch
from tencache_ds.io.backends.lanes import LanePool
from tencache_ds.io import Operation, Submission
pool = LanePool(2, lambda *request: time.sleep(0.2), 4096)
base = torch.empty(8192, dtype=torch.uint8)
buffer = base[-base.data_ptr() % 4096:][:4096]
ticket = [pool.submit(Submission(Operation.READ, "f", 0, buffer)) for _ in range(1000)][-1]
ticket.add_done_callback(lambda t: print(t.error))
"""
    t_start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    assert "dropped, the interpreter exits" in result.stdout
    assert time.monotonic() - t_start < 40
    assert result.stderr == ""


def test_counters_measure_the_time_with_work_in_flight_once(device):
    pool = LanePool(4, device, PIECE)
    ticket = pool.submit(Submission(Operation.WRITE, "f", 0, aligned(4 * PIECE)))
    for _ in range(4):
        assert device.entered.acquire(timeout=10)
    time.sleep(0.1)
    running = pool.counters.snapshot()
    assert running.write_ns >= 90_000_000
    device.gate.set()
    ticket.wait(10)
    pool.close()
    totals = pool.counters.snapshot()
    assert 90_000_000 <= totals.write_ns < 350_000_000
    assert totals == IoTotals(0, 4 * PIECE, 0, 1, 0, totals.write_ns)
