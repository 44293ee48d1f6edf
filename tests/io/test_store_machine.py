# SPDX-License-Identifier: Apache-2.0
"""The store against a dict of bytes: random allocations, overlapping requests, failures and lost writes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from tencache_ds.errors import CorruptionError, StorageError
from tencache_ds.io import Extent, ExtentStore, NativeBackend, Operation, StorageCancelledError, Submission, Ticket
from tencache_ds.io.backends.protocol import PassThroughBackend
from tests.io.conftest import MemoryBackend, aligned

pytestmark = pytest.mark.timeout(300)

PAGE = 4096
POISONED = -1
"""In the model: the last write failed."""
LOST = -2
"""In the model: the device dropped the last write without an error."""
CANCELLED = -3
"""Result of a request that was cancelled."""


class Gate:
    """While it is shut, requests are kept; when it opens they continue, newest first."""

    def __init__(self) -> None:
        self.kept: list[Callable[[], None]] | None = None

    def clear(self) -> None:
        if self.kept is None:
            self.kept = []

    def set(self) -> None:
        kept, self.kept = self.kept or [], None
        for go_on in reversed(kept):
            go_on()

    def pass_through(self, go_on: Callable[[], None]) -> None:
        if self.kept is None:
            go_on()
        else:
            self.kept.append(go_on)


class NativeOnDisk(PassThroughBackend):
    """The native backend, with writes that really fail (no such folder) or really get lost (another file) on demand."""

    def __init__(self, folder: str) -> None:
        super().__init__(NativeBackend(n_lanes=2, block_nbytes=PAGE, queue_depth=2, background_nbytes=2 * PAGE))
        self.gate = Gate()
        self.fail: Callable[[Operation, int, str], bool] = lambda operation, offset, tag: False
        self.lose_writes = False
        self._folder = folder
        with open(os.path.join(folder, "elsewhere"), "wb"):
            pass

    def submit(self, request: Submission) -> Ticket:
        if self.fail(request.operation, request.offset, request.tag):
            request = replace(request, path=os.path.join(self._folder, "injected", "missing"))
        elif self.lose_writes and request.operation is Operation.WRITE:
            request = replace(request, path=os.path.join(self._folder, "elsewhere"))
        ticket = Ticket(request.operation, request.path, request.offset, request.buffer.numel(), request.tag)

        def go_on() -> None:
            inner = self._inner.submit(request)
            ticket.bind(promote=inner.promote, cancel=inner.cancel)
            inner.add_done_callback(lambda inner: ticket.complete(inner.error))

        self.gate.pass_through(go_on)
        return ticket

    def close(self) -> None:
        self.gate.set()
        super().close()


class StoreMachine(RuleBasedStateMachine):
    """Requests are made while the device stands still, then it runs: order must come from the store alone."""

    extents = Bundle("extents")

    @staticmethod
    def make_backend(folder: str) -> MemoryBackend | NativeOnDisk:
        return MemoryBackend(n_lanes=2, request_nbytes=PAGE)

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self._folder.name, "store.bin")
        self.backend = self.make_backend(self._folder.name)
        self.store = ExtentStore(self.path, self.backend, growth_nbytes=8 * PAGE, n_files=2, timeout_s=20)
        self.model: dict[Extent, int | None] = {}  # byte that fills the extent, or what is wrong with it
        self.written: dict[Extent, int] = {}  # bytes of the last write
        self.pending: list[tuple[Ticket, torch.Tensor, int | None]] = []
        self.failing: set[str] = set()
        self.backend.fail = lambda operation, offset, tag: operation is Operation.WRITE and tag in self.failing
        self.n_made = 0
        self.value = 0

    @rule(target=extents, n_pages=st.integers(1, 5), ragged=st.integers(0, PAGE - 1))
    def allocate(self, n_pages, ragged):
        self.n_made += 1
        extent = self.store.allocate(n_pages * PAGE - ragged, f"e{self.n_made}")
        assert extent.allocated_nbytes == n_pages * PAGE
        self.model[extent] = None
        return extent

    @rule(extent=consumes(extents))
    def free(self, extent):
        self.store.free(extent)
        del self.model[extent]

    @rule(extent=extents, share=st.sampled_from([0.0, 0.5, 1.0, 1.0]))
    def write(self, extent, share):
        if extent.tag in self.failing:
            expected = POISONED
        else:
            self.value = self.value % 250 + 1
            expected = self.value
        self.written[extent] = nbytes = max(int(extent.allocated_nbytes // PAGE * share), 1) * PAGE
        buffer = aligned(nbytes, expected if expected > 0 else 255)
        self.pending.append((self.store.write(extent, buffer), buffer, expected if expected < 0 else None))
        self.model[extent] = expected

    @rule(extent=extents)
    def read(self, extent):
        expected = self.model[extent]
        buffer = aligned(self.written.get(extent, extent.allocated_nbytes))
        if expected is None:
            with pytest.raises(ValueError, match="never written"):
                self.store.read(extent, buffer)
        else:
            self.pending.append((self.store.read(extent, buffer), buffer, expected))

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def cancel(self, data):
        ticket, buffer, expected = data.draw(st.sampled_from(self.pending))
        if ticket.cancel():
            assert ticket.operation is Operation.READ
            self.pending = [(*entry[:2], CANCELLED) if entry[0] is ticket else entry for entry in self.pending]

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def promote(self, data):
        data.draw(st.sampled_from(self.pending))[0].promote()

    @rule()
    def stop_the_device(self):
        self.settle()
        self.backend.gate.clear()

    @rule(extent=extents)
    def break_writes(self, extent):
        self.settle()
        self.failing.add(extent.tag)

    @precondition(lambda self: self.failing)
    @rule()
    def repair_writes(self):
        self.settle()
        self.failing.clear()

    @rule(extent=extents)
    def lose_a_write(self, extent):
        if self.model[extent] is None or self.model[extent] < 0 or extent.tag in self.failing:
            return
        self.settle()
        self.backend.lose_writes = True
        self.written[extent] = extent.allocated_nbytes
        self.store.write(extent, aligned(extent.allocated_nbytes, 251)).wait()
        self.backend.lose_writes = False
        self.model[extent] = LOST

    @rule()
    def drain(self):
        self.backend.gate.set()
        failed = any(
            ticket.operation is Operation.WRITE and expected == POISONED for ticket, _, expected in self.pending
        )
        if failed:
            with pytest.raises(StorageError, match="injected"):
                self.store.drain()
        else:
            self.store.drain()
        self.settle()

    def settle(self):
        """Lets the device run and compares everything that was asked of it."""
        self.backend.gate.set()
        for ticket, buffer, expected in self.pending:
            if expected == POISONED:
                with pytest.raises(StorageError, match="write of .* failed"):
                    ticket.wait()
            elif expected == CANCELLED:
                with pytest.raises(StorageCancelledError):
                    ticket.wait()
            elif expected == LOST:
                with pytest.raises(CorruptionError, match="lost"):
                    ticket.wait()
            else:
                ticket.wait()
                if expected is not None:
                    assert torch.equal(buffer, torch.full_like(buffer, expected))
        self.pending.clear()

    @invariant()
    def extents_are_apart_and_accounted_for(self):
        for path in self.store.paths:
            mine = [extent for extent in self.model if extent.file == path]
            ranges = sorted((extent.offset, extent.offset + extent.allocated_nbytes) for extent in mine)
            assert all(left[1] <= right[0] for left, right in zip(ranges, ranges[1:], strict=False))
            assert all(stop <= os.stat(self.store.location(path)).st_size for _, stop in ranges)
        in_use = sum(extent.allocated_nbytes for extent in self.model)
        assert self.store.nbytes_allocated >= in_use
        if not self.pending:
            assert self.store.nbytes_allocated == in_use
        assert sum(os.stat(self.store.location(path)).st_size for path in self.store.paths) == self.store.nbytes_files

    def teardown(self):
        self.settle()
        self.store.drain()
        self.store.close()
        self.backend.close()
        assert not any(os.path.exists(path) for path in self.store.paths)
        self._folder.cleanup()


StoreMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestStore = StoreMachine.TestCase


class NativeStoreMachine(StoreMachine):
    """The same on a real file through native lanes."""

    @staticmethod
    def make_backend(folder: str) -> NativeOnDisk:
        return NativeOnDisk(folder)


NativeStoreMachine.TestCase.settings = settings(StoreMachine.TestCase.settings, max_examples=25)
TestNativeStore = NativeStoreMachine.TestCase
