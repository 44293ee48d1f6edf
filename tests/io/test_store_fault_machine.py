# SPDX-License-Identifier: Apache-2.0
"""The store on real files and real lanes, with faults injected below it, against a dict of what every extent holds.

The model sees which fault hit which request, so that every outcome is exact: an error that names path, offset and tag,
or the right bytes. Requests overlap as they like. ``TENCACHE_TEST_STORE_OPERATIONS=1000000`` makes a long run of it.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tencache_ds.errors import CorruptionError, SpaceError, StorageError
from tencache_ds.io import (
    Extent,
    ExtentStore,
    NativeBackend,
    Operation,
    PosixBackend,
    Priority,
    StorageBackend,
    StorageCancelledError,
    StorageTimeoutError,
    Submission,
    Ticket,
)
from tencache_ds.io.integrity import sampled_fingerprint, whole_fingerprint
from tencache_ds.io.wrappers.faults import Fault, FaultBackend, Kind
from tests.io.conftest import aligned

PAGE = 4096
N_OPERATIONS = int(os.environ.get("TENCACHE_TEST_STORE_OPERATIONS", "4000"))
"""In all, over the backends."""
N_EXAMPLES = 10
"""At a time: the number of operations is looked at in between."""
WAIT_S = 120.0
"""For a request that has to end; only a store that lost one takes so long."""
PICK = st.integers(0, 2**16)
ERRNOS = {Kind.eio: errno.EIO, Kind.enospc: errno.ENOSPC, Kind.eacces: errno.EACCES, Kind.erofs: errno.EROFS,
          Kind.lost: errno.ENODEV}  # fmt: skip
SILENT = (Kind.torn, Kind.bitflip)
"""Faults of a write that reports success although the bytes are not there."""


class WatchedFaults(FaultBackend):
    """Remembers what hit a request, by the address of its buffer; the model keeps every buffer until it has looked."""

    def __init__(self, inner: StorageBackend) -> None:
        self.hits: dict[int, Kind] = {}
        self._submitting = threading.local()
        super().__init__(inner, ())

    def submit(self, request: Submission) -> Ticket:
        self._submitting.address = request.buffer.data_ptr()
        return super().submit(request)

    def _choose(self, operation: Operation, path: str, tag: str) -> tuple[Fault, int] | None:
        chosen = super()._choose(operation, path, tag)
        if chosen is not None:
            self.hits[self._submitting.address] = chosen[0].kind
        return chosen


@dataclass(slots=True, eq=False)
class Request:
    """A read or a write that the store accepted."""

    extent: Extent
    buffer: torch.Tensor
    ticket: Ticket
    value: int  # that a write writes, or that a read should find
    filled_by: Request | None = None  # the write that a read follows
    damaged: bool = False  # of a read: the file was cut short since then
    cancelled: bool = False
    hit: Kind | None = None
    failed: bool = False

    @property
    def is_write(self) -> bool:
        return self.ticket.operation is Operation.WRITE


@dataclass(slots=True, eq=False)
class Content:
    """What an extent should hold."""

    last_write: Request | None = None
    damaged: bool = False


@dataclass(slots=True)
class Tally:
    """Over all examples of a run."""

    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)


def census() -> tuple[int, list[str]]:
    """Open descriptors, and the names of the threads of this package."""
    names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("tencache"))
    return len(os.listdir("/proc/self/fd")), names


def words(nbytes: int, value: int) -> torch.Tensor:
    """A buffer in which every word says by which write it was made: no old page can pass for a new one."""
    buffer = aligned(nbytes)
    buffer.view(torch.int64).fill_(value)
    return buffer


def raised_by(act: Callable[[], None]) -> StorageError | None:
    """The storage error that this raises, if it does."""
    try:
        act()
    except StorageError as error:
        return error
    return None


class FaultyStoreMachine(RuleBasedStateMachine):
    make_backend: Callable[[], StorageBackend]
    tally: Tally

    @initialize(whole=st.booleans(), direct_hang=st.integers(0, 15))
    def start(self, whole: bool, direct_hang: int) -> None:
        self.whole = whole
        self.may_hang = direct_hang == 1
        self.census = census()
        self.folder = tempfile.TemporaryDirectory()
        self.values = itertools.count(1)
        self.names = itertools.count(1)
        self.open(new_backend=True)

    def open(self, *, new_backend: bool, timeout_s: float = WAIT_S) -> None:
        if new_backend:
            self.faults = WatchedFaults(type(self).make_backend())
        self.store = ExtentStore(
            os.path.join(self.folder.name, f"store{next(self.names)}.bin"),
            self.faults,
            growth_nbytes=8 * PAGE,
            n_files=2,
            fingerprint=whole_fingerprint if self.whole else sampled_fingerprint,
            timeout_s=timeout_s,
        )
        self.n_since_open = 0
        self.contents: dict[Extent, Content] = {}
        self.pending: list[Request] = []
        self.cut_files: set[str] = set()

    # Operations

    @rule(script=st.binary(min_size=64, max_size=256))
    def operate(self, script: bytes) -> None:
        """Some operations in a row, two bytes each: what, and which extent or request."""
        for what, pick in zip(script[::2], script[1::2], strict=False):
            operation = MIX[what % 16] if self.contents else "allocate"
            if operation in ("promote", "cancel") and not self.pending:
                operation = "read"
            if operation == "allocate" and len(self.contents) == MAX_EXTENTS:
                operation = "free"
            self.tally.operations[operation] += 1
            self.n_since_open += 1
            OPERATIONS[operation](self, pick, Priority(what >> 4 & 1))

    def allocate(self, pick: int, _: Priority) -> None:
        n_pages = 1 + pick % 5
        extent = self.store.allocate(n_pages * PAGE - pick * 16 % PAGE, f"e{next(self.names)}.")
        assert extent.allocated_nbytes == n_pages * PAGE
        self.contents[extent] = Content()

    def free(self, pick: int, _: Priority) -> None:
        extent = self.picked(pick)
        self.store.free(extent)
        del self.contents[extent]
        with pytest.raises(ValueError, match="or freed"):
            self.store.free(extent)

    def write(self, pick: int, priority: Priority) -> None:
        extent = self.picked(pick)
        value = next(self.values)
        buffer = words(extent.allocated_nbytes, value)
        request = Request(extent, buffer, self.store.write(extent, buffer, priority=priority), value)
        self.pending.append(request)
        self.contents[extent] = Content(request)

    def read(self, pick: int, priority: Priority) -> None:
        extent = self.picked(pick)
        before, damaged = self.contents[extent].last_write, self.contents[extent].damaged
        buffer = aligned(extent.allocated_nbytes)
        if before is None:
            with pytest.raises(ValueError, match="never written"):
                self.store.read(extent, buffer)
            return
        ticket = self.store.read(extent, buffer, priority=priority)
        self.pending.append(Request(extent, buffer, ticket, before.value, before, damaged))

    def promote(self, pick: int, _: Priority) -> None:
        self.pending[pick % len(self.pending)].ticket.promote()

    def cancel(self, pick: int, _: Priority) -> None:
        request = self.pending[-1 - pick % min(8, len(self.pending))]
        if request.ticket.cancel():
            assert not request.is_write
            request.cancelled = True

    def check(self, _: int, __: Priority) -> None:
        self.may_raise_an_unseen_error(self.store.check)

    def drain(self, _: int, __: Priority) -> None:
        self.may_raise_an_unseen_error(self.store.drain)
        assert all(request.ticket.done for request in self.pending if request.is_write)

    @precondition(lambda self: self.n_since_open >= 200)
    @rule(new_backend=st.booleans())
    def close(self, new_backend: bool) -> None:
        self.shut(close_backend=new_backend)
        self.open(new_backend=new_backend)

    # Faults

    @rule(
        kind=st.sampled_from([kind for kind in Kind if kind not in (Kind.hang, Kind.torn)]),
        operation=st.sampled_from([None, *Operation]),
        every=st.integers(1, 5),
        seed=st.integers(0, 999),
    )
    def break_the_device(self, kind: Kind, operation: Operation | None, every: int, seed: int) -> None:
        self.faults.inject([Fault(kind, operation, every=every, seconds=0.001, seed=seed)])

    @rule(every=st.integers(1, 3))
    def tear_writes(self, every: int) -> None:
        self.faults.inject([Fault(Kind.torn, Operation.WRITE, every=every)])

    @rule()
    def repair_the_device(self) -> None:
        self.faults.inject([])

    @precondition(lambda self: self.contents)
    @rule(pick=PICK, n_pages=st.integers(0, 6))
    def cut_a_file_short(self, pick: int, n_pages: int) -> None:
        """Really, underneath the store, while it is at rest."""
        self.settle()
        path = self.picked(pick).file
        location = self.store.location(path)
        end = min(os.stat(location).st_size, n_pages * PAGE)
        os.truncate(location, end)
        self.cut_files.add(path)
        self.tally.faults["cut short"] += 1
        for extent, content in self.contents.items():
            if extent.file == path and extent.offset + extent.allocated_nbytes > end:
                content.damaged = True

    @precondition(lambda self: self.may_hang)
    @rule(operations=st.lists(st.booleans(), min_size=1, max_size=6), pick=PICK)
    def hang_the_device(self, operations: list[bool], pick: int) -> None:
        """A request that never ends: closing says so, and every ticket behind it ends."""
        self.may_hang = False  # once in an example: it takes its time
        self.shut(close_backend=True)
        self.open(new_backend=True, timeout_s=0.05)
        for pick in range(2):
            self.allocate(pick, Priority.BACKGROUND)
            self.write(pick, Priority.BACKGROUND)
        self.settle()
        self.faults.inject([Fault(Kind.hang, times=1)])
        for index, is_write in enumerate(operations):
            (self.write if is_write else self.read)(pick + index, Priority.BACKGROUND)
        with pytest.raises(StorageTimeoutError):
            self.store.close()
        with pytest.raises(StorageTimeoutError, match="given up"):
            self.faults.close()
        behind: set[Extent] = set()
        for request in self.pending:
            assert request.ticket.done
            hit = self.faults.hits.pop(request.buffer.data_ptr(), None)
            if hit is Kind.hang:
                self.tally.faults["hang"] += 1
                assert isinstance(request.ticket.error, StorageTimeoutError)
                behind.add(request.extent)
            elif request.extent in behind and request.ticket.error is not None:
                self.expect_error(request, request.ticket.error)
            else:  # another extent, or a read beside the one that hung
                assert request.ticket.error is None
        assert behind
        self.open(new_backend=True)

    # The model

    def picked(self, pick: int) -> Extent:
        return list(self.contents)[pick % len(self.contents)]

    def may_raise_an_unseen_error(self, act: Callable[[], None]) -> None:
        """``act`` raises the error of a write that failed and whose error nobody has seen, and nothing else."""
        seen = {request.ticket for request in self.pending if request.ticket.error_seen}
        unseen = [request for request in self.pending if request.is_write and request.ticket not in seen]
        error = raised_by(act)
        if error is not None:
            blamed = [r for r in unseen if str(r.ticket.error) == str(error)]
            assert blamed, f"not the error of a write in flight: {error}"
            self.expect_error(blamed[0], error)
        elif act != self.store.check:  # which looks only at what has ended
            assert not [request for request in unseen if request.ticket.error and not request.ticket.error_seen]

    @rule()
    def settle(self) -> None:
        """Waits for everything that was asked, and compares it."""
        pending, self.pending = self.pending, []
        for request in pending:
            error = raised_by(lambda request=request: request.ticket.wait(WAIT_S))
            request.hit = self.faults.hits.pop(request.buffer.data_ptr(), None)
            if request.hit is not None:
                self.tally.faults[f"{request.hit} {request.ticket.operation.value}"] += 1
            self.tally.outcomes["right" if error is None else type(error).__name__] += 1
            if request.is_write:
                self.judge_write(request, error)
            else:
                self.judge_read(request, error)
        assert not self.faults.hits

    def judge_write(self, request: Request, error: StorageError | None) -> None:
        request.failed = error is not None
        if request.hit in (None, Kind.delay, *SILENT):
            assert error is None, f"no fault hit this write: {error}"
        else:
            self.expect_fault(request, error)

    def judge_read(self, request: Request, error: StorageError | None) -> None:
        before = request.filled_by
        assert before is not None
        if request.cancelled:
            assert isinstance(error, StorageCancelledError)
            self.expect_error(request, error)
        elif before.failed:
            assert request.hit is None, "a read of an extent whose write failed reached the device"
            assert str(error) == str(before.ticket.error)
        elif request.hit in ERRNOS or request.hit is Kind.short:
            self.expect_fault(request, error)
        elif request.damaged:
            self.expect_error(request, error)
        elif before.hit is Kind.torn:
            self.expect_error(request, error)
            assert isinstance(error, CorruptionError) or request.extent.file in self.cut_files
        elif before.hit is Kind.bitflip and self.whole:
            assert isinstance(error, CorruptionError)
            self.expect_error(request, error)
        elif isinstance(error, CorruptionError):  # one word of a page was looked at, and it was the one
            assert before.hit is Kind.bitflip
            self.expect_error(request, error)
        else:
            assert error is None, f"no fault hit this read: {error}"
            n_flips = [before.hit, request.hit].count(Kind.bitflip)
            assert self.n_wrong_bits(request) <= (0 if self.whole else n_flips)

    def n_wrong_bits(self, request: Request) -> int:
        result = request.buffer.view(torch.int64)
        wrong = (result ^ request.value)[result != request.value].tolist()
        return sum((word % 2**64).bit_count() for word in wrong)

    def expect_fault(self, request: Request, error: StorageError | None) -> None:
        """The error of the fault that hit this request."""
        self.expect_error(request, error)
        assert error is not None
        if request.hit is Kind.short:
            assert ("the device accepted" if request.is_write else "file ends after") in str(error)
        else:
            assert error.errno == ERRNOS[request.hit]
            assert isinstance(error, SpaceError) == (request.hit is Kind.enospc)

    def expect_error(self, request: Request, error: BaseException | None) -> None:
        """An error that says what it was about, where, and why."""
        extent = request.extent
        assert isinstance(error, StorageError), f"{request.ticket} ended with {error!r}"
        assert error.tag == extent.tag
        assert error.path == extent.file
        assert 0 <= error.offset - extent.offset < extent.allocated_nbytes
        for part in (error.tag, error.path, f"offset {error.offset}", error.operation):
            assert part in str(error)

    @invariant()
    def extents_are_apart_and_accounted_for(self) -> None:
        if not hasattr(self, "store"):
            return
        for path in self.store.paths:
            mine = [extent for extent in self.contents if extent.file == path]
            ranges = sorted((extent.offset, extent.offset + extent.allocated_nbytes) for extent in mine)
            assert all(left[1] <= right[0] for left, right in itertools.pairwise(ranges))
        in_use = sum(extent.allocated_nbytes for extent in self.contents)
        assert self.store.nbytes_allocated >= in_use
        if not self.pending:
            assert self.store.nbytes_allocated == in_use

    def shut(self, *, close_backend: bool) -> None:
        self.tally.operations["close"] += 1
        paths = self.store.paths
        self.may_raise_an_unseen_error(self.store.close)
        assert not any(os.path.exists(path) for path in paths)
        assert all(request.ticket.done for request in self.pending)
        with pytest.raises(StorageError, match="closed"):
            self.store.allocate(PAGE, "late")
        self.settle()
        self.store.close()
        if close_backend:
            self.faults.close()

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self.shut(close_backend=True)
        self.folder.cleanup()
        assert census() == self.census


OPERATIONS: dict[str, Callable[[FaultyStoreMachine, int, Priority], None]] = {
    name: getattr(FaultyStoreMachine, name)
    for name in ("allocate", "free", "write", "read", "promote", "cancel", "check", "drain")
}
MIX = ["write"] * 5 + ["read"] * 5 + ["allocate", "free", "promote", "cancel", "check", "drain"]
MAX_EXTENTS = 24

BACKENDS: dict[str, Callable[[], StorageBackend]] = {
    "native": lambda: NativeBackend(n_lanes=2, block_nbytes=PAGE, queue_depth=4, background_nbytes=4 * PAGE),
    "posix": lambda: PosixBackend(n_lanes=2, request_nbytes=PAGE),
}


@pytest.mark.timeout(300 + N_OPERATIONS // 20)
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_operations_with_faults(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="DeepSpeed.tencache.io")  # each read that healed is a warning
    tally = Tally()
    members = {"make_backend": staticmethod(BACKENDS[backend]), "tally": tally}
    machine = type(f"{backend.title()}FaultyStoreMachine", (FaultyStoreMachine,), members)
    BACKENDS[backend]().close()  # what the process keeps from its first one is no leak
    wanted = N_OPERATIONS // len(BACKENDS)
    t_start = time.monotonic()
    # By chance a few short runs may have hardly any fault: some more then.
    while (n := tally.operations.total()) < wanted or (n < 10 * wanted and tally.faults.total() <= n // 100):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=N_EXAMPLES,
                stateful_step_count=30,
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            ),
        )
        seconds = time.monotonic() - t_start
        print(f"{backend}: {tally.operations.total()} of {wanted} operations, {seconds:.0f} s", flush=True)
    for what, counts in (("operations", tally.operations), ("faults", tally.faults), ("outcomes", tally.outcomes)):
        print(f"{backend}: {what}: {dict(sorted(counts.items()))}")
    assert tally.faults.total() > tally.operations.total() // 100
    assert tally.outcomes["right"] > tally.outcomes["StorageError"]


@pytest.mark.timeout(60)
def test_what_waits_behind_a_hanging_write_ends_too(tmp_path: Path) -> None:
    """It starts when the backend gives up, after the store has closed: then nothing can take its fingerprint."""
    faults = FaultBackend(PosixBackend(n_lanes=1), [Fault(Kind.hang, times=1)])
    store = ExtentStore(str(tmp_path / "store.bin"), faults, growth_nbytes=PAGE, timeout_s=0.1)
    extent = store.allocate(PAGE, "chunk")
    tickets = [store.write(extent, words(PAGE, value)) for value in (1, 2)]
    tickets.append(store.read(extent, aligned(PAGE)))
    for close in (store.close, faults.close):
        with pytest.raises(StorageTimeoutError, match="write of chunk failed"):
            close()
    for ticket in tickets:
        ticket.wait_ended(10)
        assert ticket.error is not None
