# SPDX-License-Identifier: Apache-2.0
"""A device that answers after all waits have ended: its bytes land in memory that is mapped and not reused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tencache_ds.io import ExtentStore, Operation, PosixBackend, StorageTimeoutError
from tencache_ds.memory import BufferPool, HostArena, Locking, PoolTimeout
from tencache_ds.observability.counters import Counters
from tencache_ds.planning.size_classes import SizeClass
from tencache_ds.tiers.weight_homes import ResidentMemory
from tencache_ds.tiers.weights import WeightTier
from tests.tiers.conftest import numbers

pytestmark = pytest.mark.timeout(60)

P = 4096
NUMEL = P // 4
LATE = 0xEE
PATIENCE_S = 0.1


class HungBackend(PosixBackend):
    """Hangs in one direction until the test lets the device answer; a closed backend has given up by then."""

    def __init__(self) -> None:
        self.hangs: Operation | None = None
        self.comes_back = threading.Event()
        self.n_hung, self.n_late = threading.Semaphore(0), threading.Semaphore(0)
        super().__init__(n_lanes=4, close_timeout_s=PATIENCE_S)

    def _transfer(self, lane: int, operation: Operation, path: str, offset: int, piece: torch.Tensor, tag: str) -> None:
        if operation is not self.hangs:
            super()._transfer(lane, operation, path, offset, piece, tag)
            return
        self.n_hung.release()
        self.comes_back.wait(30)
        if not is_mapped(piece.data_ptr()):
            raise RuntimeError("the device touched memory that was unmapped")
        if operation is Operation.READ:
            piece.fill_(LATE)
        self.n_late.release()

    def await_hung(self) -> None:
        """Returns when the device has a request, which can be cancelled no more."""
        assert self.n_hung.acquire(timeout=5)

    def answer(self, n_requests: int) -> None:
        """The device comes back; raises when it finds memory that is gone."""
        self.comes_back.set()
        for _ in range(n_requests):
            if not self.n_late.acquire(timeout=5):
                raise RuntimeError("the device's answer found no memory")


class Rig:
    """A tier over a device that may hang: two weights on NVMe, a pool with a slot for one of them."""

    def __init__(self, folder: Path) -> None:
        self.backend = HungBackend()
        self.store = ExtentStore(str(folder / "store.bin"), self.backend, growth_nbytes=1 << 20, timeout_s=PATIENCE_S)
        self.staging, self.transient = HostArena(None, Locking.NONE), HostArena(None, Locking.NONE)
        self.pool = BufferPool(self.staging, [SizeClass(P, 1)], poison=True, name="weights")
        self.tier = WeightTier(
            store=lambda: self.store,
            resident=ResidentMemory(HostArena(None, Locking.NONE)),
            transient_arena=self.transient,
            resident_budget_nbytes=lambda: 0,
            counters=Counters(),
            timeout_s=PATIENCE_S,
        )
        for key in range(2):
            self.add(key)
        self.tier.drain()
        self.tier.use_pool(self.pool)

    def add(self, key: int) -> None:
        self.tier.register(key, f"w{key}", NUMEL, torch.float32, always_resident=False).copy_(
            numbers(NUMEL, torch.float32, key)
        )
        self.tier.store_initial(key)

    def buffer(self, key: int) -> torch.Tensor:
        buffer = self.tier._weights[key].buffer
        assert buffer is not None
        return buffer.buffer

    def give_up(self) -> None:
        """What an engine does last: the store and the backend stop waiting for the device."""
        for end in (self.store.close, self.backend.close):
            with pytest.raises(StorageTimeoutError):
                end()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.backend.comes_back.set()


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        ranges = [line.split(maxsplit=1)[0].split("-") for line in maps]
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


def test_a_read_ahead_into_the_pool(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.backend.hangs = Operation.READ
    rig.tier.read_ahead([0])
    rig.backend.await_hung()
    memory = rig.buffer(0)
    rig.tier.close()
    assert rig.pool.try_lease(P, "somebody else", "test") is None  # not while the device has it
    with caplog.at_level(logging.WARNING, "DeepSpeed.tencache.memory"):
        for _ in range(2):
            with pytest.raises(PoolTimeout, match="w0"):
                rig.pool.close(timeout_s=PATIENCE_S)
        rig.staging.close()
    rig.give_up()
    rig.backend.answer(1)
    assert bool((memory == LATE).all())
    (said,) = caplog.messages
    assert f"{P} bytes" in said
    assert "w0 (read-ahead" in said


def test_the_backend_gives_up_before_the_pool_is_closed(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """The order in which an engine closes those that it adopted."""
    rig.backend.hangs = Operation.READ
    rig.tier.read_ahead([0])
    rig.backend.await_hung()
    memory = rig.buffer(0)
    rig.tier.close()
    rig.give_up()
    assert rig.pool.try_lease(P, "somebody else", "test") is None
    with caplog.at_level(logging.WARNING, "DeepSpeed.tencache.memory"):
        rig.pool.close(timeout_s=PATIENCE_S)
        rig.staging.close()
    rig.backend.answer(1)
    assert bool((memory == LATE).all())
    assert len(caplog.messages) == 1


def test_a_read_into_ordinary_memory(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """A weight that found no slot, waited for in vain, then dropped before an update, then everything closed."""
    rig.tier.expose([0])
    rig.backend.hangs = Operation.READ
    with pytest.raises(StorageTimeoutError, match="w1"):
        rig.tier.expose([1])
    memory = rig.buffer(1)
    rig.tier.drop_stale()
    assert is_mapped(memory.data_ptr())
    with caplog.at_level(logging.WARNING, "DeepSpeed.tencache.memory"):
        rig.tier.close()
        rig.transient.close()
    rig.give_up()
    rig.backend.answer(1)
    assert bool((memory == LATE).all())
    (said,) = caplog.messages
    assert f"{P} bytes" in said
    assert "w1" in said
    rig.pool.close()


def test_a_first_write(rig: Rig) -> None:
    rig.backend.hangs = Operation.WRITE
    rig.add(2)
    with pytest.raises(StorageTimeoutError, match="w2"):
        rig.tier.drain()
    rig.tier.close()
    rig.transient.close()
    assert rig.transient.nbytes_in_use == P
    rig.give_up()
    rig.backend.answer(1)
    rig.pool.close()


def test_memory_comes_back_when_the_device_does_in_time(rig: Rig) -> None:
    rig.tier.expose([0])
    rig.backend.hangs = Operation.READ
    with pytest.raises(StorageTimeoutError, match="w1"):
        rig.tier.expose([1])
    rig.backend.answer(1)
    rig.tier.close()
    assert rig.transient.nbytes_in_use == 0
    rig.pool.close(timeout_s=PATIENCE_S)
    assert rig.staging.nbytes_in_use == 0
    rig.store.close()
    rig.backend.close()
