# SPDX-License-Identifier: Apache-2.0
"""Device memory for staging. A CPU stands in for the device; what only streams show is in ``test_gds.py``."""

from __future__ import annotations

import pytest
import torch

from tencache_ds.errors import MemoryLimitError
from tencache_ds.memory import BufferPool, DeviceArena
from tencache_ds.memory import arena as arena_module
from tencache_ds.memory.arena import POISON_BYTE
from tencache_ds.planning.size_classes import SizeClass

P = 4096


@pytest.fixture
def arena():
    arena = DeviceArena(torch.device("cpu"))
    yield arena
    arena.close()


@pytest.mark.parametrize(("nbytes", "rounded"), [(1, P), (P, P), (3 * P + 1, 4 * P)])
def test_memory_is_aligned_and_rounded_up(arena, nbytes, rounded):
    block = arena.allocate(nbytes, "test")
    assert (block.numel(), block.dtype, block.dim()) == (rounded, torch.uint8, 1)
    assert block.data_ptr() % P == 0


def test_what_belongs_to_the_arena(arena):
    first, second = arena.allocate(4 * P, "test"), arena.allocate(P, "test")
    assert arena.owns(first)
    assert arena.owns(first[P:])
    assert arena.owns(second)
    assert not arena.owns(torch.empty(P, dtype=torch.uint8))
    arena.free(first)
    assert not arena.owns(first)
    with pytest.raises(ValueError, match="freed before"):
        arena.free(first)
    with pytest.raises(ValueError, match="at least 1"):
        arena.allocate(0, "test")


def test_a_full_device(arena, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(arena_module, "empty", full)
    with pytest.raises(MemoryLimitError, match=r'pool needs 8192 bytes of GPU memory.*"tencache.gds_memory"'):
        arena.allocate(2 * P, "pool")


def test_a_pool_of_device_memory(arena):
    pool = BufferPool(arena, [SizeClass(2 * P, 2)], poison=True)
    lease = pool.lease(2 * P, "w", "test")
    assert arena.owns(lease.buffer)
    assert bool((lease.buffer == POISON_BYTE).all())
    lease.buffer.fill_(1)
    lease.release()
    again = pool.lease(P, "w", "test")
    assert bool((again.buffer == POISON_BYTE).all())
    again.release()
    pool.close()
    assert not arena.owns(again.slot.tensor)
