# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from tencache_ds.errors import CorruptionError
from tencache_ds.io import ExtentStore, Operation
from tencache_ds.io.integrity import whole_fingerprint
from tests.io.conftest import aligned

pytestmark = pytest.mark.timeout(60)

PAGE = 4096


class SlowFingerprint:
    """Takes as long as a test wants, and says in which threads it was asked."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.threads = []

    def __call__(self, buffer, generation):
        self.threads.append(threading.current_thread())
        if not self.gate.wait(30):
            raise TimeoutError("the test forgot the gate")
        return whole_fingerprint(buffer, generation)


@pytest.fixture
def fingerprint():
    return SlowFingerprint()


@pytest.fixture
def store(tmp_path, memory_backend, fingerprint):
    store = ExtentStore(str(tmp_path / "store.bin"), memory_backend, fingerprint=fingerprint, timeout_s=20)
    yield store
    fingerprint.gate.set()
    store.close()


def test_neither_the_writer_nor_the_transfer_waits_for_a_fingerprint(store, memory_backend, fingerprint):
    extent = store.allocate(PAGE, "t")
    ticket = store.write(extent, aligned(PAGE, fill=3))
    while not memory_backend.pages:
        pass  # the bytes arrive: the test's time limit is the alternative
    assert not ticket.done  # its owner would overwrite a buffer that is still being hashed
    fingerprint.gate.set()
    ticket.wait()
    assert len(fingerprint.threads) == 1
    assert fingerprint.threads[0] is not threading.current_thread()
    back = aligned(PAGE)
    store.read(extent, back).wait()
    assert back.unique().tolist() == [3]


def test_a_read_waits_for_the_fingerprint_of_its_write(store, memory_backend, fingerprint):
    extent = store.allocate(PAGE, "t")
    written, read = store.write(extent, aligned(PAGE, fill=3)), store.read(extent, aligned(PAGE))
    while not fingerprint.threads:
        pass
    assert [operation for operation, _ in memory_backend.order] == [Operation.WRITE]
    fingerprint.gate.set()
    written.wait()
    read.wait()


def test_of_a_failed_write_no_fingerprint_is_taken(store, memory_backend, fingerprint):
    memory_backend.fail = lambda operation, offset, tag: True
    with pytest.raises(Exception, match="injected"):
        store.write(store.allocate(PAGE, "t"), aligned(PAGE)).wait()
    assert not fingerprint.threads


def test_a_write_without_a_fingerprint_is_no_write(store, monkeypatch):
    def fails(buffer, generation):
        raise MemoryError("no room to hash")

    monkeypatch.setattr(store, "_fingerprint", fails)
    extent = store.allocate(PAGE, "t")
    with pytest.raises(MemoryError, match="no room"):
        store.write(extent, aligned(PAGE)).wait()
    with pytest.raises(MemoryError, match="no room"):
        store.read(extent, aligned(PAGE)).wait()


def test_a_backend_that_does_not_say_when_a_write_has_ended_is_found(store, memory_backend, fingerprint, monkeypatch):
    """It keeps the second promise of ``submit`` for reads only: nothing is left to compare them with."""
    submit = memory_backend.submit

    def forgets(request):
        return submit(replace(request, finish=None) if request.operation is Operation.WRITE else request)

    monkeypatch.setattr(memory_backend, "submit", forgets)
    fingerprint.gate.set()
    extent = store.allocate(PAGE, "t")
    store.write(extent, aligned(PAGE)).wait()
    with pytest.raises(CorruptionError, match="not those of write 1"):
        store.read(extent, aligned(PAGE)).wait()
