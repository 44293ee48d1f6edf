# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the io tests: aligned buffers, and a backend in memory that fails on demand."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tencache_ds.errors import StorageError
from tencache_ds.io import Operation, Submission, Ticket
from tencache_ds.io.backends.lanes import LanePool
from tencache_ds.layout import PAGE_NBYTES
from tests.io.device_files import new_kind


def aligned(nbytes: int, fill: int | None = 0, seed: int = 0) -> torch.Tensor:
    """A 4 KiB aligned uint8 tensor, filled with a byte, or with random bytes when ``fill`` is None."""
    base = torch.empty(nbytes + PAGE_NBYTES, dtype=torch.uint8)
    start = -base.data_ptr() % PAGE_NBYTES
    buffer = base[start : start + nbytes]
    if fill is None:
        buffer.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    else:
        buffer.fill_(fill)
    return buffer


class MemoryBackend:
    """Keeps 'files' in a dict; loses, fails or delays what a test asks it to."""

    name = "memory"
    alignment_nbytes = PAGE_NBYTES

    def __init__(self, n_lanes: int = 3, request_nbytes: int = 8192) -> None:
        self.pages: dict[tuple[str, int], bytes] = {}
        self.fail: Callable[[Operation, int, str], bool] = lambda operation, offset, tag: False
        self.lose_writes = False
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Event()  # a lane has taken up a transfer; a test clears it
        self.order: list[tuple[Operation, str]] = []
        self.added: dict[str, int] = {}
        self.forgotten: list[str] = []
        self._pool = LanePool(n_lanes, self._transfer, request_nbytes)
        self.counters = self._pool.counters

    def submit(self, request: Submission) -> Ticket:
        return self._pool.submit(request)

    def add(self, path: str, fd: int) -> None:
        self.added[path] = fd

    def forget(self, path: str) -> None:
        self.forgotten.append(path)

    def close(self) -> None:
        self.gate.set()
        self._pool.close()

    def _transfer(self, lane: int, operation: Operation, path: str, offset: int, piece: torch.Tensor, tag: str) -> None:
        self.at_gate.set()
        self.gate.wait()
        self.order.append((operation, tag))
        if self.fail(operation, offset, tag):
            raise StorageError(operation.value, path, offset, piece.numel(), "injected", errno=5, tag=tag)
        for start in range(0, piece.numel(), PAGE_NBYTES):
            part = piece[start : start + PAGE_NBYTES]
            if operation is Operation.READ:
                part.copy_(torch.frombuffer(bytearray(self.pages[path, offset + start]), dtype=torch.uint8))
            elif not self.lose_writes or (path, offset + start) not in self.pages:
                self.pages[path, offset + start] = part.numpy().tobytes()


@pytest.fixture
def path(tmp_path):
    """An empty file for a backend, which makes none."""
    path = tmp_path / "data"
    path.touch(mode=0o600)
    return str(path)


def build_libaio_faults(folder: Path) -> Path:
    """The library that makes libaio misbehave as its source says, for ``LD_PRELOAD``."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = folder / "libaio_faults.so"
    source = Path(__file__).with_name("libaio_faults.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    return library


@pytest.fixture
def small_device(tmp_path):
    """A file system of 1 MiB, where the tests may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def memory_backend():
    backend = MemoryBackend()
    yield backend
    backend.close()


@pytest.fixture
def files():
    """Stand-ins for KvikIO's files, of a separate kind."""
    with new_kind() as kind:
        yield kind
