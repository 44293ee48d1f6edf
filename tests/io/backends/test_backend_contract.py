# SPDX-License-Identifier: Apache-2.0
"""What every storage backend has to do, on real files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial

import pytest
import torch

from tencache_ds.errors import StorageError
from tencache_ds.io import (
    BACKENDS,
    BackendSettings,
    ExtentStore,
    NativeBackend,
    Operation,
    PosixBackend,
    Priority,
    StorageBackend,
    Submission,
)
from tests.io.conftest import aligned

pytestmark = pytest.mark.timeout(300)  # the first run builds the ops

MIB = 1 << 20
SETTINGS = BackendSettings(
    buffers_are_pinned=False, n_lanes=4, request_nbytes=256 << 10, block_nbytes=256 << 10, queue_depth=8
)
KINDS: dict[str, Callable[[], StorageBackend]] = {
    **{name: partial(entry.open, SETTINGS) for name, entry in BACKENDS.items()},
    "native-buffered": lambda: NativeBackend(n_lanes=4, block_nbytes=256 << 10, queue_depth=8, direct=False),
    "posix-buffered": lambda: PosixBackend(n_lanes=4, request_nbytes=256 << 10, direct=False),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def backend(kind):
    backend = KINDS[kind]()
    yield backend
    backend.close()


def test_what_is_written_is_read_back(backend, path):
    data = aligned(3 * MIB + 4096, fill=None)
    backend.submit(Submission(Operation.WRITE, path, 8192, data)).wait(30)
    back = aligned(data.numel())
    backend.submit(Submission(Operation.READ, path, 8192, back)).wait(30)
    assert torch.equal(back, data)
    assert os.stat(path).st_size == 8192 + data.numel()
    assert backend.counters.bytes_read == backend.counters.bytes_written == data.numel()
    assert backend.counters.n_reads == backend.counters.n_writes == 1
    assert backend.counters.read_ns > 0


@pytest.mark.parametrize("size", [0, 4096, 5000, 8192])
def test_the_end_of_the_file_is_an_error(backend, path, size):
    with open(path, "wb") as file:
        file.write(b"x" * size)
    with pytest.raises(StorageError, match=f"file ends after {size} bytes"):
        backend.submit(Submission(Operation.READ, path, 0, aligned(12288), tag="w")).wait(30)


@pytest.mark.parametrize("operation", Operation)
def test_a_missing_file_is_named_and_not_made(backend, path, operation):
    os.unlink(path)
    named = f"{operation.value} of layer failed at .*data, offset 4096.*errno 2"
    with pytest.raises(StorageError, match=named) as caught:
        backend.submit(Submission(operation, path, 4096, aligned(4096), tag="layer")).wait(30)
    assert caught.value.errno == errno.ENOENT
    assert caught.value.path == path
    assert not os.path.lexists(path)


def test_descriptors_persist_until_forgotten(backend, path):
    def open_here():
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum(os.path.lexists(link) and os.readlink(link).startswith(path) for link in links)

    for _ in range(5):
        backend.submit(Submission(Operation.WRITE, path, 0, aligned(4096))).wait(30)
        backend.submit(Submission(Operation.READ, path, 0, aligned(4096))).wait(30)
    assert open_here() == 2
    os.unlink(path)
    backend.forget(path)
    assert open_here() == 0
    backend.forget(path)
    for operation in Operation:
        with pytest.raises(StorageError, match="No such file"):
            backend.submit(Submission(operation, path, 0, aligned(4096))).wait(30)
    assert not os.path.lexists(path)


def test_close_leaves_no_descriptor(kind, path):
    KINDS[kind]().close()  # what a first use opens for good
    n_before = len(os.listdir("/proc/self/fd"))
    backend = KINDS[kind]()
    backend.submit(Submission(Operation.WRITE, path, 0, aligned(4096)))
    backend.close()
    backend.close()
    assert len(os.listdir("/proc/self/fd")) == n_before
    with pytest.raises(StorageError, match="closed"):
        backend.submit(Submission(Operation.READ, path, 0, aligned(4096)))


@pytest.mark.parametrize("priority", Priority)
def test_many_requests_of_every_size_and_priority(backend, path, priority):
    sizes = [4096 * n for n in (1, 2, 63, 64, 65, 200)]
    data = [aligned(n, fill=None, seed=n) for n in sizes]
    back = [aligned(n) for n in sizes]
    for operation, buffers in ((Operation.WRITE, data), (Operation.READ, back)):
        tickets = [
            backend.submit(Submission(operation, path, i * MIB, buffer, priority=priority))
            for i, buffer in enumerate(buffers)
        ]
        for ticket in tickets:
            ticket.promote()
            ticket.wait(60)
    assert all(torch.equal(a, b) for a, b in zip(data, back, strict=True))


@pytest.mark.parametrize(
    ("offset", "buffer", "message"),
    [
        (0, aligned(8192)[:100], "length"),
        (0, aligned(8192)[8:4104], "address"),
        (100, aligned(4096), "file offset"),
        (-4096, aligned(4096), "file offset"),
        (0, torch.zeros(4096), "uint8"),
    ],
)
def test_what_direct_io_cannot_take_is_refused(backend, path, offset, buffer, message):
    with pytest.raises(ValueError, match=message):
        backend.submit(Submission(Operation.WRITE, path, offset, buffer))


def test_a_store(backend, tmp_path):
    path = str(tmp_path / "store")
    store = ExtentStore(path, backend, growth_nbytes=MIB)
    assert os.stat(store.location(path)).st_mode & 0o777 == 0o600
    assert not os.path.lexists(path)
    extents = [store.allocate(300_000 + 5000 * i, f"chunk {i}") for i in range(6)]
    for repetition in range(3):
        buffers = [aligned(e.allocated_nbytes, fill=None, seed=10 * repetition + i) for i, e in enumerate(extents)]
        for extent, buffer in zip(extents, buffers, strict=True):
            store.write(extent, buffer)
        back = [aligned(e.allocated_nbytes) for e in extents]
        tickets = [store.read(extent, buffer) for extent, buffer in zip(extents, back, strict=True)]
        for ticket, got, expected in zip(tickets, back, buffers, strict=True):
            ticket.wait(30)
            assert torch.equal(got, expected)
    store.close()
    assert not os.path.lexists(path)
