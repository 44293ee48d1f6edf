# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading

import pytest

from tencache_ds.io import ExtentStore, PosixBackend
from tencache_ds.io.integrity.fingerprint import whole_fingerprint
from tests.io.conftest import aligned

pytestmark = pytest.mark.timeout(60)

PAGE = 4096


class SlowFingerprint:
    """Takes as long as a test wants, and says in which threads it was asked."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.threads = []

    def __call__(self, buffer, generation):
        self.threads.append(threading.current_thread().name)
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
    assert [name.startswith("tencache-fingerprint") for name in fingerprint.threads] == [True]
    back = aligned(PAGE)
    store.read(extent, back).wait()
    assert back.unique().tolist() == [3]


def test_a_buffer_is_not_given_back_while_it_is_hashed_though_its_write_failed(store, memory_backend, fingerprint):
    memory_backend.fail = lambda operation, offset, tag: True
    ticket = store.write(store.allocate(PAGE, "t"), aligned(PAGE))
    while not memory_backend.order:
        pass
    assert not ticket.done
    fingerprint.gate.set()
    with pytest.raises(Exception, match="injected"):
        ticket.wait()


def test_a_write_without_a_fingerprint_is_no_write(store, monkeypatch):
    def fails(buffer, generation):
        raise MemoryError("no room to hash")

    monkeypatch.setattr(store._witnesses, "_fingerprint", fails)
    extent = store.allocate(PAGE, "t")
    with pytest.raises(MemoryError, match="no room"):
        store.write(extent, aligned(PAGE)).wait()
    with pytest.raises(MemoryError, match="no room"):
        store.read(extent, aligned(PAGE)).wait()


def test_the_threads_end_with_the_store(tmp_path):
    before = set(threading.enumerate())
    backend = PosixBackend(n_lanes=1)
    store = ExtentStore(str(tmp_path / "store.bin"), backend)
    store.write(store.allocate(PAGE, "t"), aligned(PAGE)).wait()
    assert any(thread.name.startswith("tencache-fingerprint") for thread in threading.enumerate())
    store.close()
    backend.close()
    assert set(threading.enumerate()) <= before
