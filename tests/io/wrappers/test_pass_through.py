# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect

import pytest
import torch

from tencache_ds.io import IoCounters, Operation, Priority, RoutedBackend, StorageBackend, Submission
from tencache_ds.io.backends.protocol import PassThroughBackend
from tencache_ds.io.wrappers.faults import FaultBackend
from tencache_ds.io.wrappers.routed import BandwidthMeter, MeteredBackend
from tests.io.conftest import aligned

pytestmark = pytest.mark.timeout(60)

METHODS = [name for name, _ in inspect.getmembers(StorageBackend, inspect.isfunction) if not name.startswith("_")]
WRAPPERS = {
    "plain": PassThroughBackend,
    "metered": lambda inner: MeteredBackend(inner, BandwidthMeter()),
    "routed": RoutedBackend,
    "faults": lambda inner: FaultBackend(inner, ()),
}


class Recorder:
    """A backend that notes its calls."""

    name = "recorder"
    alignment_nbytes = 4096

    def __init__(self):
        self.counters = IoCounters()
        self.calls = []

    def __getattr__(self, name):
        if name not in METHODS:
            raise AttributeError(name)

        def call(*arguments, **options):
            self.calls.append((name, arguments, options))
            return Ended()

        return call


class Ended:
    """Stands for a ticket."""

    nbytes = 4096
    error = None

    def add_done_callback(self, callback):
        callback(self)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_every_call_arrives_as_it_was_made(kind):
    inner = Recorder()
    wrapper = WRAPPERS[kind](inner)
    assert (wrapper.name, wrapper.alignment_nbytes) == ("recorder", 4096)
    assert wrapper.counters.snapshot() == inner.counters.snapshot()

    def finish():
        pass

    buffer = aligned(4096)
    request = Submission(Operation.WRITE, "/data", 8192, buffer, "layer", Priority.URGENT, finish)
    wrapper.submit(request)
    wrapper.add("/data", 7)
    wrapper.forget("/data")
    wrapper.close()
    written, *rest = inner.calls
    assert written == ("submit", (request,), {})
    closed = [] if kind == "metered" else [("close", (), {})]  # which owns nothing
    assert rest == [("add", ("/data", 7), {}), ("forget", ("/data",), {}), *closed]
    assert {name for name, *_ in inner.calls} | {"close"} == set(METHODS)


def test_a_path_is_not_busy_with_a_request_that_was_refused():
    class Refusing(Recorder):
        def submit(self, *arguments, **options):
            raise ValueError("no")

    now_ns = [0]
    meter = BandwidthMeter(lambda: now_ns[0])
    with pytest.raises(ValueError, match="no"):
        MeteredBackend(Refusing(), meter).submit(Submission(Operation.READ, "/data", 0, torch.empty(0)))
    now_ns[0] = 10**9
    meter.started()
    now_ns[0] = 2 * 10**9
    meter.ended(500)
    meter.end_interval()
    assert meter.bytes_per_s == 500
