# SPDX-License-Identifier: Apache-2.0
"""Store and pool under traffic and faults for as long as one likes: nothing may grow.

``TENCACHE_TEST_SOAK_S=3600 pytest -s tests/io/test_soak.py`` runs an hour per backend, in pieces of half a minute, with
a line for each. Between pieces everything is at rest and is counted: descriptors, threads, memory, leases, requests.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch

from tencache_ds.errors import StorageError
from tencache_ds.io import Extent, ExtentStore, NativeBackend, Operation, PosixBackend, Priority, StorageBackend
from tencache_ds.io.integrity import whole_fingerprint
from tencache_ds.io.wrappers.faults import Fault, FaultBackend, Kind
from tencache_ds.memory import BufferPool, HostArena, Locking
from tencache_ds.planning.size_classes import SizeClass

SECONDS = float(os.environ.get("TENCACHE_TEST_SOAK_S", "4"))
"""Per backend."""
PIECE_S = min(30.0, SECONDS / 3)
N_WORKERS = 3
N_EXTENTS_EACH = 12
PAGE = 4096
CLASSES = (SizeClass(4 * PAGE, 6), SizeClass(64 * PAGE, 4))
RSS_SLACK_NBYTES = 24 << 20
"""Growth after the first pieces that is the allocator's, not a leak: an hour is some millions of requests."""
N_WARM_UP = 2
FAULTS = (Kind.eio, Kind.enospc, Kind.short, Kind.torn, Kind.bitflip, Kind.delay)

BACKENDS: dict[str, Callable[[], StorageBackend]] = {
    "native": lambda: NativeBackend(n_lanes=2, block_nbytes=16 * PAGE, queue_depth=8),
    "posix": lambda: PosixBackend(n_lanes=2, request_nbytes=16 * PAGE),
}


@dataclass(frozen=True, slots=True)
class Census:
    """What a process at rest holds."""

    n_descriptors: int
    n_threads: int
    n_leases: int
    nbytes_arena: int
    n_requests: int
    nbytes_extents: int
    nbytes_resident: int


class Rig:
    """A pool, a backend with faults and a store, and what they hold."""

    def __init__(self, backend: StorageBackend, path: str) -> None:
        self.native = backend if isinstance(backend, NativeBackend) else None
        self.faults = FaultBackend(backend, ())
        self.arena = HostArena(sum(c.nbytes for c in CLASSES), Locking.NONE)
        self.pool = BufferPool(self.arena, CLASSES)
        self.store = ExtentStore(
            path, self.faults, preallocate_nbytes=8 << 20, n_files=2, fingerprint=whole_fingerprint, timeout_s=120
        )

    def open_every_file(self) -> None:
        """Descriptors are kept: those of a lasting store must not look like a leak when the first request comes."""
        extents = [self.store.allocate(PAGE, f"first {index}") for index in range(2 * len(self.store.paths))]
        with self.pool.lease(PAGE, "first", "read and write") as lease:
            for extent in extents:
                self.store.write(extent, lease.buffer).wait(60)
                self.store.read(extent, lease.buffer).wait(60)
                self.store.free(extent)
        assert {extent.file for extent in extents} == set(self.store.paths)

    def rest(self) -> None:
        """No fault any more, nothing in flight."""
        self.faults.inject(())
        while True:  # each error that nobody has seen yet is raised once
            try:
                self.store.drain()
                break
            except StorageError:
                continue
        self.pool.drain(timeout_s=60)
        self.pool.assert_idle()

    def n_requests(self) -> int:
        """What the backend and the store still know of requests."""
        n = len(self.store._in_flight) + len(self.faults._due) + len(self.faults._hung)
        if self.native is not None:
            n += len(self.native._requests) + self.native._queue.stats()["n_requests"]
        return n

    def close(self) -> None:
        self.rest()
        self.store.close()
        self.faults.close()
        self.pool.close(timeout_s=10)
        self.arena.close()


class Worker(threading.Thread):
    """Training's part: leases, writes, reads, compares, frees; takes errors for what they are."""

    def __init__(self, rig: Rig, seed: int, t_end: float) -> None:
        super().__init__(name=f"worker-{seed}", daemon=True)
        self.counts: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self._rig, self._t_end = rig, t_end
        self._random = random.Random(seed)
        self._values = itertools.count(1 + seed * 10**9)
        self._extents: dict[Extent, int] = {}

    def run(self) -> None:
        try:
            while time.monotonic() < self._t_end:
                self._one()
            for extent in self._extents:
                self._rig.store.free(extent)
        except BaseException as error:  # shown by the test, which waits for this thread
            self.failure = error

    def _one(self) -> None:
        extents, store = self._extents, self._rig.store
        what = self._random.random()
        if len(extents) < N_EXTENTS_EACH and (not extents or what < 0.1):
            extent = store.allocate(self._random.choice((1, 3, 4, 17, 64)) * PAGE, f"e{self._random.getrandbits(32)}")
            extents[extent] = 0
            self._write(extent)
        elif what < 0.15:
            extent = self._random.choice(list(extents))
            del extents[extent]
            store.free(extent)  # the write may still be in flight
        elif what < 0.55:
            self._write(self._random.choice(list(extents)))
        else:
            self._read(self._random.choice(list(extents)), cancel=what > 0.95)

    def _write(self, extent: Extent) -> None:
        lease = self._rig.pool.lease(extent.allocated_nbytes, extent.tag, "write", timeout_s=60)
        value = self._extents[extent] = next(self._values)
        lease.buffer.view(torch.int64).fill_(value)
        lease.release_with(self._rig.store.write(extent, lease.buffer))  # nobody waits: check() tells of errors
        self.counts["writes"] += 1
        try:
            self._rig.store.check()
        except StorageError:
            self.counts["write errors"] += 1

    def _read(self, extent: Extent, *, cancel: bool) -> None:
        priority = self._random.choice(list(Priority))
        with self._rig.pool.lease(extent.allocated_nbytes, extent.tag, "read", urgent=True, timeout_s=60) as lease:
            ticket = self._rig.store.read(extent, lease.buffer, priority=priority)
            if cancel:
                ticket.cancel()
            else:
                ticket.promote()
            try:
                ticket.wait(60)
            except StorageError:
                self.counts["cancelled" if cancel else "read errors"] += 1
            else:
                assert bool((lease.buffer.view(torch.int64) == self._extents[extent]).all()), f"wrong bytes: {extent}"
                self.counts["reads"] += 1


def traffic(rig: Rig, seconds: float, seed: int) -> Counter[str]:
    """Some threads at work on a rig, whose device breaks and is repaired again and again."""
    t_end = time.monotonic() + seconds
    workers = [Worker(rig, seed * N_WORKERS + index, t_end) for index in range(N_WORKERS)]
    chance = random.Random(seed)
    for worker in workers:
        worker.start()
    while time.monotonic() < t_end:
        kind = chance.choice(FAULTS)
        operation = Operation.WRITE if kind is Kind.torn else chance.choice([None, *Operation])
        rig.faults.inject([Fault(kind, operation, every=chance.randint(3, 20), seconds=0.01)])
        time.sleep(min(0.1, seconds / 10))
        rig.faults.inject(())
        time.sleep(min(0.1, seconds / 10))
    counts: Counter[str] = Counter()
    for worker in workers:
        worker.join(180)
        assert not worker.is_alive(), "a worker waits indefinitely"
        if worker.failure is not None:
            raise worker.failure
        counts += worker.counts
    return counts


def count(rig: Rig) -> Census:
    """Counts what is there, after everything unused was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Census(
        n_descriptors=len(os.listdir("/proc/self/fd")),
        n_threads=len(os.listdir("/proc/self/task")),
        n_leases=rig.pool.stats().nbytes_leased,
        nbytes_arena=rig.arena.nbytes_in_use,
        n_requests=rig.n_requests(),
        nbytes_extents=rig.store.nbytes_allocated,
        nbytes_resident=resident_pages * os.sysconf("SC_PAGE_SIZE"),
    )


def require_no_growth(seen: list[Census]) -> None:
    """Compares the latest count with those of the first pieces."""
    if len(seen) <= N_WARM_UP:
        return
    for field in fields(Census):
        before = max(getattr(census, field.name) for census in seen[:N_WARM_UP])
        slack = RSS_SLACK_NBYTES if field.name == "nbytes_resident" else 0
        now = getattr(seen[-1], field.name)
        assert now <= before + slack, f"{field.name} grew from {before} to {now} by piece {len(seen)}"


@pytest.mark.timeout(300 + 2 * SECONDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_grows(backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="DeepSpeed.tencache.io")  # each read that healed is a warning
    rig = Rig(BACKENDS[backend](), str(tmp_path / "lasting.bin"))
    try:
        soak(backend, rig, tmp_path)
        rig.close()
    finally:
        rig.faults.close()


def soak(backend: str, rig: Rig, folder: Path) -> None:
    """Pieces of traffic on a rig that lasts and on one that comes and goes, until the time is over."""
    rig.open_every_file()
    seen: list[Census] = []
    total: Counter[str] = Counter()
    t_start = time.monotonic()
    while len(seen) <= N_WARM_UP or time.monotonic() - t_start < SECONDS:
        piece = len(seen)
        passing = Rig(BACKENDS[backend](), str(folder / f"passing{piece}.bin"))
        total += traffic(passing, PIECE_S / 4, 2 * piece)
        passing.close()
        del passing
        total += traffic(rig, PIECE_S * 3 / 4, 2 * piece + 1)
        rig.rest()
        seen.append(count(rig))
        print(f"{backend}: {time.monotonic() - t_start:.0f} s, {total.total()} requests: {seen[-1]}", flush=True)
        require_no_growth(seen)
    print(f"{backend}: {dict(total)}, {rig.faults.n_injected} faults in the lasting store")
    assert seen[-1].n_leases == seen[-1].n_requests == seen[-1].nbytes_extents == 0
    assert rig.faults.n_injected > 0
    assert total["reads"] > total["read errors"] > 0


@pytest.mark.parametrize("field", [field.name for field in fields(Census)])
def test_growth_is_found(field: str) -> None:
    held = dict.fromkeys((field.name for field in fields(Census)), 100)
    seen = [Census(**held)] * N_WARM_UP
    require_no_growth([*seen, Census(**held)])
    with pytest.raises(AssertionError, match=f"{field} grew from 100"):
        require_no_growth([*seen, Census(**held | {field: 101 + RSS_SLACK_NBYTES})])
