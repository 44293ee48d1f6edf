# SPDX-License-Identifier: Apache-2.0
"""The store against a dict of bytes: random allocations, overlapping requests, failures and lost writes."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from tencache_ds.errors import CorruptionError, StorageError
from tencache_ds.io import Extent, ExtentStore, Operation, Ticket
from tests.io.conftest import MemoryBackend, aligned

pytestmark = pytest.mark.timeout(60)

PAGE = 4096
POISONED = -1
"""In the model: the last write failed."""
LOST = -2
"""In the model: the device dropped the last write without an error."""


class StoreMachine(RuleBasedStateMachine):
    """Requests are made while the device stands still, then it runs: order must come from the store alone."""

    extents = Bundle("extents")

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self._folder.name, "store.bin")
        self.backend = MemoryBackend(n_lanes=2, request_nbytes=PAGE)
        self.store = ExtentStore(self.path, self.backend, growth_nbytes=4 * PAGE, timeout_s=20)
        self.model: dict[Extent, int | None] = {}  # byte that fills the extent, or what is wrong with it
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

    @rule(extent=extents)
    def write(self, extent):
        if extent.tag in self.failing:
            expected = POISONED
        else:
            self.value = self.value % 250 + 1
            expected = self.value
        buffer = aligned(extent.allocated_nbytes, expected if expected > 0 else 255)
        self.pending.append((self.store.write(extent, buffer), buffer, expected if expected < 0 else None))
        self.model[extent] = expected

    @rule(extent=extents)
    def read(self, extent):
        expected = self.model[extent]
        buffer = aligned(extent.allocated_nbytes)
        if expected is None:
            with pytest.raises(ValueError, match="never written"):
                self.store.read(extent, buffer)
        else:
            self.pending.append((self.store.read(extent, buffer), buffer, expected))

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
        ranges = sorted((extent.offset, extent.offset + extent.allocated_nbytes) for extent in self.model)
        assert all(left[1] <= right[0] for left, right in zip(ranges, ranges[1:], strict=False))
        assert all(stop <= self.store.nbytes_file for _, stop in ranges)
        in_use = sum(extent.allocated_nbytes for extent in self.model)
        assert self.store.nbytes_allocated >= in_use
        if not self.pending:
            assert self.store.nbytes_allocated == in_use
        assert os.stat(self.path).st_size == self.store.nbytes_file

    def teardown(self):
        self.settle()
        self.store.drain()
        self.store.close()
        self.backend.close()
        assert not os.path.exists(self.path)
        self._folder.cleanup()


StoreMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestStore = StoreMachine.TestCase
