# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from tencache_ds.errors import ConfigError, SpaceError, StorageError
from tencache_ds.io import (
    ExtentStore,
    NativeBackend,
    Operation,
    Priority,
    StorageCancelledError,
    StorageTimeoutError,
    Submission,
)
from tests.io.conftest import aligned, build_libaio_faults

pytestmark = pytest.mark.timeout(300)  # the first run builds the op

MIB = 1 << 20


@pytest.fixture
def backend():
    backend = NativeBackend(n_lanes=3, block_nbytes=64 << 10, queue_depth=8)
    yield backend
    backend.close()


@pytest.fixture
def slow():
    """One lane, one block at a time: a large request keeps it busy."""
    backend = NativeBackend(n_lanes=1, block_nbytes=4096, queue_depth=1, background_nbytes=4096)
    yield backend
    backend.close()


def test_a_full_device_is_a_space_error(backend, small_device):
    path = small_device / "data"
    path.touch()
    with pytest.raises(SpaceError, match="write of chunk failed at .*No space left") as caught:
        backend.submit(Submission(Operation.WRITE, str(path), 0, aligned(4 * MIB), tag="chunk")).wait(30)
    assert caught.value.errno == errno.ENOSPC


def test_a_file_that_cannot_be_opened_fails_in_its_ticket(backend, path):
    threads: list[str] = []
    os.unlink(path)
    ticket = backend.submit(Submission(Operation.WRITE, path, 0, aligned(4096), tag="w"))
    ticket.add_done_callback(lambda _: threads.append(threading.current_thread().name))
    with pytest.raises(StorageError, match="write of w failed at .*No such file"):
        ticket.wait(30)
    assert ticket.error.errno == errno.ENOENT
    # Or here, if it had ended by then; never inside submit().
    assert threads[0].startswith(("tencache-finisher", "MainThread"))


def test_a_file_system_that_refuses_direct_transfers(backend, path, monkeypatch, caplog):
    backend.submit(Submission(Operation.WRITE, path, 0, aligned(65536, fill=None))).wait(30)
    odd = torch.empty(65536 + 4096 + 8, dtype=torch.uint8)
    start = -odd.data_ptr() % 4096 + 8  # unaligned: O_DIRECT gives EINVAL, as such file systems do for all buffers
    back = odd[start : start + 65536]
    monkeypatch.setattr("tencache_ds.io.backends.protocol.check_request", lambda *arguments: None)
    with caplog.at_level(logging.WARNING, logger="DeepSpeed.tencache.io"):
        backend.submit(Submission(Operation.READ, path, 0, back)).wait(30)
    assert torch.equal(back, aligned(65536, fill=None))
    assert ["refuses O_DIRECT" in record.getMessage() for record in caplog.records] == [True]


def test_finish_runs_before_the_end_and_can_fail_the_request(backend, path):
    seen: list[str] = []

    def finish() -> None:
        seen.append(threading.current_thread().name)
        raise ValueError("not what was written")

    with pytest.raises(ValueError, match="not what was written"):
        backend.submit(Submission(Operation.WRITE, path, 0, aligned(4096), finish=finish)).wait(30)
    assert seen[0].startswith("tencache-finisher")
    assert backend.counters.n_writes == 0
    backend.submit(Submission(Operation.WRITE, path, 0, aligned(4096))).wait(30)
    totals = backend.counters.snapshot()
    assert (totals.n_writes, totals.bytes_written, totals.bytes_read) == (1, 8192, 0)
    assert totals.write_ns > 0


def test_urgent_requests_overtake_the_queue(slow, path):
    slow.submit(Submission(Operation.WRITE, path, 0, aligned(4 * MIB))).wait(30)
    order: list[str] = []
    background = [slow.submit(Submission(Operation.READ, path, 0, aligned(4 * MIB))) for _ in range(4)]
    promoted = slow.submit(Submission(Operation.READ, path, 0, aligned(65536)))
    promoted.promote()
    urgent = slow.submit(Submission(Operation.READ, path, 0, aligned(65536), priority=Priority.URGENT))
    for name, ticket in [("promoted", promoted), ("urgent", urgent), *(("background", t) for t in background)]:
        ticket.add_done_callback(lambda _, name=name: order.append(name))
    for ticket in [*background, promoted, urgent]:
        ticket.wait(60)
    assert order[:2] == ["promoted", "urgent"]


def test_cancel(slow, path):
    slow.submit(Submission(Operation.WRITE, path, 0, aligned(4 * MIB))).wait(30)
    running = slow.submit(Submission(Operation.READ, path, 0, aligned(4 * MIB)))
    waiting = slow.submit(Submission(Operation.READ, path, 0, aligned(4096), tag="weight"))
    assert waiting.cancel()
    with pytest.raises(StorageCancelledError, match="read of weight failed at .*cancelled .errno 125"):
        waiting.wait(30)
    assert not waiting.cancel()
    running.cancel()  # most of it has not started
    with pytest.raises(StorageCancelledError):
        running.wait(30)
    done = slow.submit(Submission(Operation.READ, path, 0, aligned(4096)))
    done.wait(30)
    assert not done.cancel()


def test_a_cancelled_read_of_a_store(slow, tmp_path):
    nbytes = 8 * MIB  # in 2,048 blocks, one after the other: enough time to cancel
    store = ExtentStore(str(tmp_path / "store"), slow, growth_nbytes=nbytes, timeout_s=30)
    extent = store.allocate(nbytes, "weight")
    write = store.write(extent, aligned(nbytes, 7))
    read = store.read(extent, aligned(nbytes))  # waits for the write
    again = store.read(extent, aligned(nbytes))
    assert not write.cancel()
    assert read.cancel()
    with pytest.raises(StorageCancelledError):
        read.wait()
    write.wait()
    again.wait()
    back = aligned(nbytes)
    store.read(extent, back).wait()
    assert int(back[-1]) == 7
    store.close()


def test_thousands_of_requests_at_once(backend, path):
    backend.submit(Submission(Operation.WRITE, path, 0, aligned(4 * MIB, fill=None))).wait(30)
    expected, back = aligned(4 * MIB, fill=None), aligned(4 * MIB)
    tickets = [
        backend.submit(Submission(Operation.READ, path, at, back[at : at + 4096], priority=Priority(at // 4096 % 2)))
        for _ in range(4)
        for at in range(0, 4 * MIB, 4096)
    ]
    for ticket in tickets:
        ticket.wait(60)
    assert torch.equal(back, expected)
    assert backend.counters.n_reads == 4096


def test_an_idle_backend_keeps_no_buffer_alive(backend, path):
    buffer = aligned(4096)
    reference = weakref.ref(buffer)
    ticket = backend.submit(Submission(Operation.WRITE, path, 0, buffer))
    ticket.wait(30)
    for _ in range(4):  # both finishers release their last
        backend.submit(Submission(Operation.WRITE, path, 0, aligned(4096))).wait(30)
    del buffer
    deadline_s = time.monotonic() + 10
    while reference() is not None and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.01)
    assert reference() is None


def test_close_waits_and_then_refuses(path):
    backend = NativeBackend(n_lanes=2, block_nbytes=4096)
    tickets = [backend.submit(Submission(Operation.WRITE, path, i * MIB, aligned(MIB))) for i in range(8)]
    backend.close()
    backend.close()
    assert all(ticket.done and ticket.error is None for ticket in tickets)
    with pytest.raises(StorageError, match="closed"):
        backend.submit(Submission(Operation.READ, path, 0, aligned(4096)))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tencache-finisher")]
    assert backend.counters.bytes_written == 8 * MIB


def test_close_in_a_callback_is_refused(backend, path):
    ticket = backend.submit(Submission(Operation.WRITE, path, 0, aligned(4096), finish=backend.close))
    with pytest.raises(RuntimeError, match="callback"):
        ticket.wait(30)


def test_close_gives_up_on_a_device_that_hangs(tmp_path):
    # A pipe with a name blocks its reader for as long as nobody writes: a lane that hangs in the kernel.
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    keep_open = os.open(path, os.O_RDWR)
    backend = NativeBackend(n_lanes=1, block_nbytes=4096, direct=False, close_timeout_s=0.3)
    ticket = backend.submit(Submission(Operation.READ, path, 0, aligned(4096), tag="weight"))
    with pytest.raises(StorageTimeoutError, match="not finished after 0.1 s"):
        ticket.wait(0.1)
    other = backend.submit(Submission(Operation.READ, path, 0, aligned(4096)))
    t_start = time.monotonic()
    with pytest.raises(StorageTimeoutError, match="read of weight failed at .*pipe.* and 0 other requests"):
        backend.close()
    assert time.monotonic() - t_start < 10
    with pytest.raises(StorageTimeoutError, match="given up"):
        ticket.wait(1)
    with pytest.raises(StorageCancelledError):
        other.wait(1)
    os.write(keep_open, b"x" * 4096)
    os.close(keep_open)


def test_a_forked_child_gets_an_error_instead_of_hanging(backend, path):
    backend.submit(Submission(Operation.WRITE, path, 0, aligned(MIB))).wait(30)
    tickets = [backend.submit(Submission(Operation.READ, path, 0, aligned(MIB))) for _ in range(50)]
    buffer = aligned(4096)
    pid = os.fork()
    if pid == 0:  # report through the exit status: nothing else of pytest may run in the child
        status = 1
        try:
            try:
                backend.submit(Submission(Operation.READ, path, 0, buffer))
            except StorageError as error:
                status += 2 * ("forked child" in str(error))
            backend.close()
            status += 4
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    for ticket in tickets:
        ticket.wait(30)


def test_nothing_leaks(path):
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def cycle() -> None:
        backend = NativeBackend(n_lanes=4, block_nbytes=4096)
        backend.submit(Submission(Operation.WRITE, path, 0, aligned(MIB))).wait(30)
        backend.close()

    cycle()
    before = count()
    for _ in range(10):
        cycle()
    t_end_s = time.monotonic() + 10
    while count()[1] > before[1] and time.monotonic() < t_end_s:  # a thread that was joined is listed a little longer
        time.sleep(0.01)
    after = count()
    assert after[0] == before[0]
    assert after[1] <= before[1]  # a lane that an earlier test let hang may have ended


@pytest.mark.parametrize(
    ("options", "message"),
    [({"block_nbytes": 1000}, "aio.block_size"), ({"queue_depth": 0}, "aio.queue_depth"),
     ({"n_lanes": 0}, "n_lanes"), ({"n_lanes": 64, "queue_depth": 1 << 20}, "/proc/sys/fs/aio-max-nr.*sysctl -w fs")],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        NativeBackend(**options)


SCRIPT = """
import json, os, sys
import torch
from tencache_ds.errors import StorageError
from tencache_ds.io import NativeBackend, Operation, Priority, Submission
from tests.io.conftest import aligned

path, *faults = sys.argv[1:]
data, back = aligned(4 << 20, fill=None), aligned(4 << 20)

def outcome(ticket, timeout_s=60):
    try:
        ticket.wait(timeout_s)
    except StorageError as error:
        return f"{type(error).__name__} {error.errno} {error.operation} {error.path == path} {error.nbytes}"
    return "ok"

def outcomes(backend, what):
    if what == "hang":
        ticket = backend.submit(Submission(Operation.WRITE, path, 0, data))
        yield outcome(ticket, 0.5)
        try:
            backend.close()
        except StorageError as error:
            yield type(error).__name__
        yield outcome(ticket)
        return
    small = 16 << 10
    n = 4 << 20 if what == "transient" else small
    for repetition in range(3 if what == "transient" else 1):
        yield outcome(backend.submit(Submission(Operation.WRITE, path, 0, data[:n])))
        yield outcome(backend.submit(Submission(Operation.READ, path, 0, back[:n], priority=Priority.URGENT)))
    if what == "eio":
        yield [outcome(backend.submit(Submission(Operation.READ, path, 0, back[:n]))) for _ in range(20)].count("ok")
    yield torch.equal(back[:n], data[:n])
    yield {k: v > 0 for k, v in backend._queue.stats().items() if k[:2] == "n_"}
    backend.close()

for what in faults:
    # The library asks for it at every call.
    os.environ["AIO_FAULT"] = f"kind={what}" + (",every=11" if what == "eio" else "")
    backend = NativeBackend(n_lanes=2, block_nbytes=16 << 10, queue_depth=8, close_timeout_s=0.5)
    print(json.dumps([what, list(outcomes(backend, what))]), flush=True)
"""

EXIT_SCRIPT = """
import sys
from tencache_ds.io import NativeBackend, Operation, Submission
from tests.io.conftest import aligned

backend = NativeBackend(n_lanes=2, block_nbytes=16 << 10, queue_depth=8)
data = aligned(4 << 20, fill=None)
for i in range(16):
    ticket = backend.submit(Submission(Operation.WRITE, sys.argv[1], i << 22, data))
ticket.add_done_callback(lambda t: print(t.error))
"""


def run(script: str, *arguments: str, library: Path | None = None) -> list[str]:
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[3])])
    )
    if library is not None:
        environment["LD_PRELOAD"] = str(library)
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=200, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def under_faults(tmp_path_factory):
    """What requests gave while libaio misbehaved as ``libaio_faults.c`` says; all in one process, the hang last."""
    folder = tmp_path_factory.mktemp("faults")
    library, path = build_libaio_faults(folder), folder / "data"
    path.touch()
    return dict(map(json.loads, run(SCRIPT, str(path), "eio", "transient", "again", "zero", "hang", library=library)))


def test_refused_interrupted_partial_and_short_calls_are_survived(under_faults):
    assert under_faults["transient"] == ["ok"] * 6 + [True, {"n_requests": False, "n_short": True, "n_retries": True}]


def test_a_device_that_is_always_busy_is_an_error_after_a_while(under_faults):
    failure = f"StorageError {errno.EAGAIN} {{}} True 16384"
    assert under_faults["again"][:2] == [failure.format("write"), failure.format("read")]


def test_an_error_of_the_device_is_told_where_it_happened(under_faults):
    assert under_faults["eio"][:3] == ["ok", "ok", 18]


def test_a_write_that_moves_nothing_is_an_error(under_faults):
    assert under_faults["zero"][0] == f"StorageError {errno.EIO} write True 16384"


def test_a_device_that_never_answers(under_faults):
    request = f"{errno.ETIMEDOUT} write True {4 << 20}"
    ends = [f"StorageTimeoutError {request}", "StorageTimeoutError", f"StorageGivenUpError {request}"]
    assert under_faults["hang"] == ends


def test_the_interpreter_exits_with_requests_queued(path):
    assert "dropped, the interpreter exits" in run(EXIT_SCRIPT, path)[0]
