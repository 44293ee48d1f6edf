# SPDX-License-Identifier: Apache-2.0
"""Limits of the process: what meets one says which it is, and leaves nothing running."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tencache_ds.errors import ConfigError, ProcessLimitError, SpaceError, StorageError
from tencache_ds.io import Submission
from tencache_ds.io.backends import native
from tencache_ds.io.backends.posix import PosixBackend
from tencache_ds.io.backends.protocol import Operation
from tencache_ds.io.scratch import SpaceFile
from tencache_ds.limits import start_threads


@contextlib.contextmanager
def soft_limit(which: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def lowest_free_descriptor() -> int:
    descriptor = os.open("/dev/null", os.O_RDONLY)
    os.close(descriptor)
    return descriptor


@pytest.fixture
def no_third_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def limited(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


def test_threads_that_cannot_be_started(no_third_thread: None) -> None:
    threads = [threading.Thread(target=lambda: None) for _ in range(3)]
    with pytest.raises(
        ProcessLimitError, match="only 2 of 3 tests could be started: can't start new thread.*ulimit -u"
    ):
        start_threads(threads, "tests")


def test_lanes_that_could_be_started_end(no_third_thread: None) -> None:
    before = threading.active_count()
    with pytest.raises(ProcessLimitError, match='only 2 of 4 I/O lanes.*"tencache.io_lanes"'):
        PosixBackend(4)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("error", "kind", "fragment"),
    [
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), ProcessLimitError, "ulimit -u"),
        (OSError(errno.EAGAIN, "io_setup: Resource temporarily unavailable"), ConfigError, "aio-max-nr"),
        (OSError(errno.EMFILE, "eventfd: Too many open files"), ProcessLimitError, "ulimit -n"),
        (OSError(errno.ENOSYS, "io_setup: Function not implemented"), ConfigError, '"io_backend": "posix"'),
    ],
)
def test_why_the_native_op_cannot_start(error: OSError, kind: type[Exception], fragment: str) -> None:
    explained = native._explained(error, 8, 32)
    assert type(explained) is kind
    assert fragment in str(explained)


def test_a_file_that_cannot_be_opened_names_the_limit(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    Path(path).write_bytes(bytes(4096))
    backend = PosixBackend(1)
    buffer = torch.frombuffer(bytearray(8192), dtype=torch.uint8)
    start = -buffer.data_ptr() % 4096
    try:
        with soft_limit(resource.RLIMIT_NOFILE, lowest_free_descriptor()):
            ticket = backend.submit(Submission(Operation.READ, path, 0, buffer[start : start + 4096]))
            with pytest.raises(StorageError, match="raise the limit with `ulimit -n`"):
                ticket.wait(10)
            with pytest.raises(StorageError, match="create failed .*raise the limit with `ulimit -n`"):
                SpaceFile(path + "2", preallocate_nbytes=0, growth_nbytes=0)
    finally:
        backend.close()


def test_the_limit_on_file_size_is_named(tmp_path: Path) -> None:
    file = SpaceFile(str(tmp_path / "file"), preallocate_nbytes=8192, growth_nbytes=4096)
    with soft_limit(resource.RLIMIT_FSIZE, 12288):
        file.reserve(4096, "fits")
        with pytest.raises(SpaceError, match="needs 16384 bytes, and this process may write 12288 per file.*ulimit -f"):
            file.reserve(4096, "does not")
    file.reserve(4096, "fits")
    file.close()


@pytest.mark.parametrize(
    ("number", "fragment"),
    [
        (errno.EFBIG, "more than the file system allows in one"),
        (errno.EDQUOT, "raise the quota"),
        (errno.ENOSPC, r"bytes are missing \(\d+ free\)"),
    ],
)
def test_what_a_full_device_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fragment: str) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SpaceError, match=fragment):
        SpaceFile(str(tmp_path / "file"), preallocate_nbytes=4096, growth_nbytes=4096)
    assert list(tmp_path.iterdir()) == []
