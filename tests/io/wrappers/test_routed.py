# SPDX-License-Identifier: Apache-2.0
"""Two backends on one path, the second for memory that stands in for a GPU's."""

from __future__ import annotations

import os

import pytest
import torch

from tencache_ds.errors import StorageError
from tencache_ds.io import ExtentStore, GdsBackend, Operation, PosixBackend, RoutedBackend, Submission
from tencache_ds.io.wrappers.faults import FaultBackend, parse_faults
from tencache_ds.memory import DeviceArena
from tests.io.conftest import aligned
from tests.io.device_files import new_kind

pytestmark = pytest.mark.timeout(120)

P = 4096
TIMEOUT_S = 30.0
CPU = torch.device("cpu")


@pytest.fixture
def routed(files, path):
    """A path with both backends, the arena of its 'device' memory, and a buffer there."""
    arena = DeviceArena(CPU)
    routed = RoutedBackend(PosixBackend(2))
    routed.add_device(GdsBackend(CPU, n_lanes=2, open_file=files), arena.owns)
    yield routed, arena
    routed.close()
    arena.close()


def test_the_memory_of_a_buffer_says_which_backend(routed, files, path):
    backend, arena = routed
    buffer = arena.allocate(3 * P, "test")
    written = aligned(3 * P, fill=None, seed=3)
    backend.submit(Submission(Operation.WRITE, path, 0, written)).wait(TIMEOUT_S)
    assert files.n_opened == {}
    backend.submit(Submission(Operation.READ, path, 0, buffer)).wait(TIMEOUT_S)
    assert files.n_opened == {"r": 1}
    assert torch.equal(buffer, written)
    assert (backend.counters.bytes_written, backend.counters.bytes_read) == (3 * P, 3 * P)
    assert (backend.counters.n_writes, backend.counters.n_reads) == (1, 1)
    backend.forget(path)
    assert files.n_open == 0


def test_each_device_memory_has_its_backend_until_it_is_taken_away(routed, files, path):
    """Two engines over the same weights, each with its own GPU memory."""
    backend, arena = routed
    backend.submit(Submission(Operation.WRITE, path, 0, aligned(P, fill=None, seed=3))).wait(TIMEOUT_S)
    with new_kind() as others:
        other_arena = DeviceArena(CPU)
        backend.add_device(GdsBackend(CPU, n_lanes=1, open_file=others), other_arena.owns)
        for memory in (arena, other_arena):
            backend.submit(Submission(Operation.READ, path, 0, memory.allocate(P, "test"))).wait(TIMEOUT_S)
        assert (files.n_opened, others.n_opened) == ({"r": 1}, {"r": 1})
        backend.remove_device(arena.owns)
        backend.remove_device(arena.owns)
        assert files.n_open == 0
        backend.submit(Submission(Operation.READ, path, 0, other_arena.allocate(P, "test"))).wait(TIMEOUT_S)
        assert others.n_open == 1
        backend.remove_device(other_arena.owns)
        assert others.n_open == 0
        other_arena.close()


def test_device_memory_without_a_backend_for_it(path):
    backend = RoutedBackend(PosixBackend(1))
    with pytest.raises(ValueError, match="on the CPU"):
        backend.submit(Submission(Operation.READ, path, 0, torch.empty(P, dtype=torch.uint8, device="meta")))
    backend.close()


def test_extents_are_read_after_the_write_before_them(routed, tmp_path):
    backend, arena = routed
    store = ExtentStore(str(tmp_path / "store"), backend, timeout_s=TIMEOUT_S)
    extent = store.allocate(8 * P, "w")
    buffer = arena.allocate(8 * P, "test")
    for seed in range(20):
        written = aligned(8 * P, fill=None, seed=seed)
        store.write(extent, written)
        store.read(extent, buffer).wait()
        assert torch.equal(buffer, written)
    store.close()


@pytest.mark.parametrize("kind", ["eio", "short", "bitflip"])
def test_injected_faults_hit_reads_into_device_memory(files, path, tmp_path, kind):
    arena = DeviceArena(CPU)
    routed = RoutedBackend(PosixBackend(2))
    backend = FaultBackend(routed, parse_faults(f"op=read,kind={kind}"))
    routed.add_device(GdsBackend(CPU, n_lanes=2, open_file=files), arena.owns)
    buffer = arena.allocate(4 * P, "test")
    os.truncate(path, 4 * P)
    ticket = backend.submit(Submission(Operation.READ, path, 0, buffer))
    if kind == "bitflip":
        ticket.wait(TIMEOUT_S)
        assert int(buffer.count_nonzero()) == 1
    else:
        with pytest.raises(StorageError, match="injected"):
            ticket.wait(TIMEOUT_S)
    assert backend.n_injected == 1
    backend.close()
