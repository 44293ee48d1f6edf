# SPDX-License-Identifier: Apache-2.0
"""The wrapper that injects faults: its grammar, what each kind does to a request, and that the rest passes through."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from tencache_ds.errors import ConfigError, CorruptionError, SpaceError, StorageError
from tencache_ds.io import (
    BACKENDS,
    BackendSettings,
    ExtentStore,
    Operation,
    PosixBackend,
    Priority,
    StorageCancelledError,
    StorageTimeoutError,
    Submission,
)
from tencache_ds.io.wrappers.faults import LATE_BYTE, Fault, FaultBackend, Kind, parse_faults
from tests.io.conftest import MemoryBackend, aligned

pytestmark = pytest.mark.timeout(300)  # the first run builds the ops

PAGE = 4096
SETTINGS = BackendSettings(
    buffers_are_pinned=False, n_lanes=2, request_nbytes=PAGE * 4, block_nbytes=PAGE * 4, queue_depth=4
)


@pytest.fixture(params=BACKENDS)
def backend(request):
    backend = FaultBackend(BACKENDS[request.param].open(SETTINGS), ())
    yield backend
    try:
        backend.close()
    except StorageTimeoutError:
        assert backend.n_injected  # a hang that the test left


@pytest.fixture
def posix():
    backend = FaultBackend(PosixBackend(n_lanes=2), ())
    yield backend
    backend.inject(())
    backend.close()


def move(backend, operation, path, buffer, tag="layer"):
    backend.submit(Submission(operation, path, 0, buffer, tag=tag)).wait(30)
    return buffer


# Grammar


def test_every_key():
    text = "op=write,kind=eio,after=100; op=read, kind=bitflip,match=optimizer,seed=3,rank=1,every=2,times=4"
    assert parse_faults(text + ";kind=delay,seconds=0.5") == (
        Fault(Kind.eio, Operation.WRITE, after=100),
        Fault(Kind.bitflip, Operation.READ, "optimizer", rank=1, every=2, times=4, seed=3),
        Fault(Kind.delay, seconds=0.5),
    )
    assert parse_faults("none") == ()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "rule 1 .*'' is not key=value"),
        ("kind=eio;", "rule 2 .*'' is not key=value"),
        ("kind=eio;write", "rule 2 .*'write' is not key=value"),
        ("kind=", "'kind=' is not key=value"),
        ("op=read", '"kind" is missing.*bitflip'),
        ("kind=boom", "kind cannot be 'boom'.*eio"),
        ("kind=eio,op=erase", "op cannot be 'erase'.*read, write, any"),
        ("kind=eio,size=3", "unknown key 'size'.*match"),
        ("kind=eio,kind=short", "'kind' is given twice"),
        ("kind=eio,after=-1", "after must be a whole number of at least 0, not '-1'"),
        ("kind=eio,every=0", "every must be a whole number of at least 1, not '0'"),
        ("kind=eio,rank=one", "rank must be .*'one'"),
        ("kind=torn", 'only a write can be torn: add "op=write"'),
        ("kind=delay", '"seconds" belongs to kind=delay'),
        ("kind=eio,seconds=1", '"seconds" belongs to kind=delay'),
        ("kind=delay,seconds=nan", "seconds must be a number"),
    ],
)
def test_a_mistake_is_named(text, named):
    with pytest.raises(ConfigError, match=f"TENCACHE_FAULTS, .*{named}"):
        parse_faults(text)


# Selection


def outcomes(backend, path, n, tag="layer"):
    """Which of ``n`` writes failed."""
    failed = []
    for index in range(n):
        try:
            move(backend, Operation.WRITE, path, aligned(PAGE), tag)
        except StorageError:
            failed.append(index)
    return failed


@pytest.mark.parametrize(
    ("rule", "failed"),
    [
        ("kind=eio", [0, 1, 2, 3, 4, 5]),
        ("kind=eio,after=2", [2, 3, 4, 5]),
        ("kind=eio,after=1,every=2", [1, 3, 5]),
        ("kind=eio,every=2,times=2", [0, 2]),
        ("kind=eio,op=read", []),
        ("kind=eio,match=lay", [0, 1, 2, 3, 4, 5]),
        ("kind=eio,match=data", [0, 1, 2, 3, 4, 5]),
        ("kind=eio,match=head", []),
        ("kind=eio,rank=1", []),
        ("kind=eio,after=1,times=1;kind=eio,after=2,times=1", [1, 3]),  # the second counts what the first leaves
    ],
)
def test_selection(posix, path, rule, failed):
    posix.inject(parse_faults(rule))
    assert outcomes(posix, path, 6) == failed
    assert posix.n_injected == len(failed)


def test_the_rank_is_the_wrappers_own(path):
    backend = FaultBackend(PosixBackend(n_lanes=1), parse_faults("kind=eio,rank=3"), rank=3)
    assert outcomes(backend, path, 1) == [0]
    backend.close()


# Kinds, on every backend


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize(("kind", "number"), [("eio", 5), ("enospc", 28), ("eacces", 13), ("erofs", 30)])
def test_an_errno(backend, path, operation, kind, number):
    old = move(backend, Operation.WRITE, path, aligned(2 * PAGE, fill=None))
    backend.inject(parse_faults(f"kind={kind},op={operation.value}"))
    buffer = aligned(2 * PAGE, fill=7)
    with pytest.raises(
        StorageError, match=f"{operation.value} of layer failed at {path}, offset 0.*injected"
    ) as caught:
        move(backend, operation, path, buffer)
    assert caught.value.errno == number
    assert isinstance(caught.value, SpaceError) is (kind == "enospc")
    assert bool((buffer == 7).all())
    backend.inject(())
    assert torch.equal(move(backend, Operation.READ, path, aligned(2 * PAGE)), old)


@pytest.mark.parametrize("pages", [1, 4, 5])
def test_short(backend, path, pages):
    old = move(backend, Operation.WRITE, path, aligned(pages * PAGE, fill=None, seed=1))
    new = aligned(pages * PAGE, fill=None, seed=2)
    half = pages // 2 * PAGE
    finished = []
    backend.inject(parse_faults("kind=short"))
    with pytest.raises(StorageError, match=f"accepted {half} of {pages * PAGE} bytes") as caught:
        backend.submit(Submission(Operation.WRITE, path, 0, new, finish=lambda: finished.append(1))).wait(30)
    assert caught.value.errno == errno.EIO
    back = aligned(pages * PAGE)
    with pytest.raises(StorageError, match=f"file ends after {half} bytes"):
        backend.submit(Submission(Operation.READ, path, 0, back, finish=lambda: finished.append(1))).wait(30)
    assert torch.equal(back[:half], new[:half])
    assert not back[half:].any()
    assert not finished
    backend.inject(())
    move(backend, Operation.READ, path, back)
    assert torch.equal(back, torch.cat([new[:half], old[half:]]))


@pytest.mark.parametrize("pages", [1, 4])
def test_torn(backend, path, pages):
    old = move(backend, Operation.WRITE, path, aligned(pages * PAGE, fill=None, seed=1))
    new = aligned(pages * PAGE, fill=None, seed=2)
    finished = []
    backend.inject(parse_faults("kind=torn,op=write"))
    ticket = backend.submit(Submission(Operation.WRITE, path, 0, new, finish=lambda: finished.append(1)))
    ticket.wait(30)
    assert (ticket.nbytes, finished) == (pages * PAGE, [1])
    back = move(backend, Operation.READ, path, aligned(pages * PAGE))
    half = pages // 2 * PAGE
    assert torch.equal(back, torch.cat([new[:half], old[half:]]))


@pytest.mark.parametrize("operation", Operation)
def test_bitflip(backend, path, operation):
    data = aligned(3 * PAGE, fill=None)
    original = data.clone()
    backend.inject(parse_faults(f"kind=bitflip,op={operation.value},times=1,seed=5"))
    move(backend, Operation.WRITE, path, data)
    back = move(backend, Operation.READ, path, aligned(3 * PAGE))
    changed = (back ^ original).numpy()
    assert sum(int(byte).bit_count() for byte in changed) == 1
    assert torch.equal(data, original)  # the caller's own buffer stays as it is
    again = move(backend, Operation.READ, path, aligned(3 * PAGE))
    assert torch.equal(again, original) is (operation is Operation.READ)


def test_the_seed_chooses_the_bit(posix, path):
    data = move(posix, Operation.WRITE, path, aligned(4 * PAGE, fill=None))
    seen = []
    for seed in (1, 1, 2):
        posix.inject(parse_faults(f"kind=bitflip,op=read,seed={seed}"))
        seen.append(int((move(posix, Operation.READ, path, aligned(4 * PAGE)) ^ data).nonzero()))
    assert seen[0] == seen[1] != seen[2]


def test_delay(backend, path):
    data = move(backend, Operation.WRITE, path, aligned(2 * PAGE, fill=None))
    backend.inject(parse_faults("kind=delay,seconds=0.3"))
    back = aligned(2 * PAGE)
    t_start = time.monotonic()
    ticket = backend.submit(Submission(Operation.READ, path, 0, back))
    ticket.promote()
    assert time.monotonic() - t_start < 0.2
    ticket.wait(30)
    assert time.monotonic() - t_start >= 0.3
    assert torch.equal(back, data)


def test_lost_takes_the_folder_with_it(backend, tmp_path):
    (tmp_path / "other").mkdir()
    first, second, elsewhere = (str(tmp_path / name) for name in ("a", "b", "other/c"))
    for path in (first, second, elsewhere):
        open(path, "x").close()
    backend.inject(parse_faults("kind=lost,op=write,match=a-tag,after=1"))
    move(backend, Operation.WRITE, first, aligned(PAGE), "a-tag")
    move(backend, Operation.WRITE, second, aligned(PAGE), "b-tag")
    for operation, path, tag in (
        (Operation.WRITE, first, "a-tag"),
        (Operation.READ, first, "a-tag"),
        (Operation.READ, second, "b-tag"),
    ):
        with pytest.raises(StorageError, match=f"{tag} failed at {path}") as caught:
            move(backend, operation, path, aligned(PAGE), tag)
        assert caught.value.errno == errno.ENODEV
    move(backend, Operation.WRITE, elsewhere, aligned(PAGE))


def test_a_hang_ends_for_its_waiter_and_when_the_backend_is_closed(backend, path):
    backend.inject(parse_faults("kind=hang,op=write"))
    ticket = backend.submit(Submission(Operation.WRITE, path, PAGE, aligned(PAGE), tag="layer"))
    assert ticket.cancel() is False  # the device has it
    with pytest.raises(StorageTimeoutError, match="write of layer failed at .*, offset 4096.*not finished after 0.1 s"):
        ticket.wait(0.1)
    ended = threading.Event()
    ticket.add_done_callback(lambda _: ended.set())
    with pytest.raises(StorageTimeoutError, match="layer .*given up: .*injected by TENCACHE_FAULTS"):
        backend.close()
    assert ended.is_set()
    assert ticket.error is not None
    backend.close()


def test_a_hang_that_ends_in_time_is_a_delay(backend, path):
    data = aligned(PAGE, fill=None)
    backend.inject(parse_faults("kind=hang,op=write,seconds=0.1"))
    ticket = backend.submit(Submission(Operation.WRITE, path, 0, data))
    assert ticket.cancel() is False
    ticket.wait(5)
    with open(path, "rb") as file:
        assert file.read() == data.numpy().tobytes()


def test_a_hang_that_ends_too_late_still_writes_into_its_buffer(backend, path):
    buffer = aligned(PAGE)
    backend.inject(parse_faults("kind=hang,op=read,seconds=0.3"))
    ticket = backend.submit(Submission(Operation.READ, path, 0, buffer))
    with pytest.raises(StorageTimeoutError):
        backend.close()
    assert ticket.done
    assert ticket.given_up
    assert not bool((buffer == LATE_BYTE).any())
    t_end_s = time.monotonic() + 5
    while not bool((buffer == LATE_BYTE).all()) and time.monotonic() < t_end_s:
        time.sleep(0.02)
    assert bool((buffer == LATE_BYTE).all())


# The protocol


def test_a_delayed_request_can_be_cancelled(backend, path):
    move(backend, Operation.WRITE, path, aligned(PAGE))
    backend.inject(parse_faults("kind=delay,seconds=60"))
    ticket = backend.submit(Submission(Operation.READ, path, 0, aligned(PAGE), tag="layer"))
    assert ticket.cancel() is True
    assert ticket.cancel() is False
    with pytest.raises(StorageCancelledError, match="layer"):
        ticket.wait(0)


def test_close_waits_for_what_is_delayed(backend, path):
    data = aligned(PAGE, fill=None)
    backend.inject(parse_faults("kind=delay,seconds=60"))
    ticket = backend.submit(Submission(Operation.WRITE, path, 0, data))
    backend.close()
    assert ticket.done
    ticket.wait(0)
    with open(path, "rb") as file:
        assert file.read() == data.numpy().tobytes()
    for rule in ("none", "kind=eio", "kind=short", "kind=hang"):
        backend.inject(parse_faults(rule))
        with pytest.raises(StorageError, match="closed"):
            backend.submit(Submission(Operation.READ, path, 0, aligned(PAGE)))


def test_counters_name_and_descriptors_are_those_of_the_backend(backend, path):
    def open_here():
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum(os.path.lexists(link) and os.readlink(link).startswith(path) for link in links)

    assert backend.name in BACKENDS
    move(backend, Operation.WRITE, path, aligned(2 * PAGE))
    backend.inject(parse_faults("kind=eio"))
    with pytest.raises(StorageError):
        move(backend, Operation.WRITE, path, aligned(2 * PAGE))
    assert (backend.counters.bytes_written, backend.counters.n_writes) == (2 * PAGE, 1)
    assert open_here() == 1
    backend.forget(path)
    assert open_here() == 0
    with pytest.raises(ValueError, match="length"):
        backend.submit(Submission(Operation.READ, path, 0, aligned(PAGE)[:5]))


def test_what_the_wrapper_ends_itself_ends_in_its_own_thread(posix, path):
    """A caller may hold a lock that its callbacks take, as with every backend."""
    posix.inject(parse_faults("kind=torn,op=write"))
    seen = []

    def finish():
        seen.append(threading.current_thread().name)
        posix.close()

    with pytest.raises(RuntimeError, match="cannot be closed from a callback of one of its requests"):
        posix.submit(Submission(Operation.WRITE, path, 0, aligned(PAGE), finish=finish)).wait(30)
    assert seen == ["tencache-faults"]


def test_priority_and_cancellation_reach_the_backend(path):
    inner = MemoryBackend(n_lanes=1)
    backend = FaultBackend(inner, parse_faults("kind=short,op=write,match=halved"))
    inner.gate.clear()
    tickets = [
        backend.submit(Submission(Operation.WRITE, path, index * 4 * PAGE, aligned(4 * PAGE), tag=tag))
        for index, tag in enumerate(["first", "second", "halved urgent", "halved dropped"])
    ]
    tickets[2].promote()
    assert tickets[3].cancel() is True
    inner.gate.set()
    with pytest.raises(StorageCancelledError, match="halved dropped failed at .* 16384 bytes"):
        tickets[3].wait(30)
    with pytest.raises(StorageError, match="accepted 8192 of 16384"):
        tickets[2].wait(30)
    backend.close()
    order = [tag for _, tag in inner.order]
    assert order.index("halved urgent") < order.index("second")


def test_a_forked_child_is_refused(posix, path):
    posix.inject(parse_faults("kind=eio"))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            posix.submit(Submission(Operation.WRITE, path, 0, aligned(PAGE), priority=Priority.URGENT))
        except StorageError as error:
            code = 0 if "forked child" in str(error) else 2
        finally:
            posix.close()
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_the_interpreter_exits_with_a_hang_pending(tmp_path):
    code = f"""
import sys, torch
sys.path.insert(0, {os.getcwd()!r})
from tests.io.conftest import aligned
from tencache_ds.io import Operation, PosixBackend, Submission
from tencache_ds.io.wrappers.faults import parse_faults
from tencache_ds.io.wrappers.faults import FaultBackend
backend = FaultBackend(PosixBackend(), parse_faults("kind=hang;kind=delay,seconds=1000"))
ticket = backend.submit(Submission(Operation.WRITE, {str(tmp_path / "data")!r}, 0, aligned(4096)))
ticket.add_done_callback(lambda t: print(t.error))
"""
    t_start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "the interpreter exits" in done.stdout
    assert time.monotonic() - t_start < 30


def test_nothing_is_imported_without_the_variable():
    code = "import sys, tencache_ds.runtime.engine; print('tencache_ds.io.wrappers.faults' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
    )
    assert done.stdout.split()[-1] == "False"


# Under the extent store


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("pages", [1, 64])
def test_the_store_finds_a_torn_write_and_passes_errors_on(posix, tmp_path, operation, pages):
    store = ExtentStore(str(tmp_path / "store"), posix, growth_nbytes=1 << 20, timeout_s=10)
    extent = store.allocate(pages * PAGE, "layer")
    store.write(extent, aligned(pages * PAGE, fill=None, seed=1)).wait()
    back = aligned(pages * PAGE)
    if operation is Operation.READ:
        posix.inject(parse_faults("kind=eio,op=read,times=1"))
        with pytest.raises(StorageError, match="read of layer"):
            store.read(extent, back).wait()
        store.read(extent, back).wait()
    else:
        posix.inject(parse_faults("kind=torn,op=write,times=1"))
        store.write(extent, aligned(pages * PAGE, fill=None, seed=2)).wait()
        with pytest.raises(CorruptionError, match="lost or torn"):
            store.read(extent, back).wait()
    store.close()
