# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import logging
import os
import resource

import pytest
import torch

from tencache_ds.errors import SpaceError, StorageError
from tencache_ds.io import Operation, PosixBackend, Submission
from tests.io.conftest import aligned

pytestmark = pytest.mark.timeout(60)

MIB = 1 << 20


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def backend(request):
    backend = PosixBackend(n_lanes=4, request_nbytes=256 << 10, direct=request.param)
    yield backend
    backend.close()


def test_a_full_device_is_a_space_error(backend, path, monkeypatch):
    def full(fd, buffers, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(SpaceError, match="No space left"):
        backend.submit(Submission(Operation.WRITE, path, 0, aligned(4096))).wait(30)


def test_short_transfers_are_continued(backend, path, monkeypatch):
    real = {"preadv": os.preadv, "pwritev": os.pwritev}
    calls = []

    def short(name):
        def call(fd, buffers, offset):
            calls.append(name)
            return real[name](fd, [buffers[0][: max(4096, len(buffers[0]) // 2 // 4096 * 4096)]], offset)

        return call

    for name in real:
        monkeypatch.setattr(os, name, short(name))
    data = aligned(MIB, fill=None)
    backend.submit(Submission(Operation.WRITE, path, 0, data)).wait(30)
    back = aligned(MIB)
    backend.submit(Submission(Operation.READ, path, 0, back)).wait(30)
    assert torch.equal(back, data)
    assert calls.count("preadv") > 8


def test_a_transfer_that_stops_inside_a_block_is_continued(backend, path, monkeypatch):
    real = {"preadv": os.preadv, "pwritev": os.pwritev}
    cut = {"preadv": True, "pwritev": True}

    def torn(name):
        def call(fd, buffers, offset):
            if cut.pop(name, False):  # what a signal can do to a large transfer
                flags_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY if name == "preadv" else os.O_WRONLY)
                try:
                    return real[name](flags_fd, [buffers[0][:5000]], offset)
                finally:
                    os.close(flags_fd)
            return real[name](fd, buffers, offset)

        return call

    for name in real:
        monkeypatch.setattr(os, name, torn(name))
    data = aligned(65536, fill=None)
    backend.submit(Submission(Operation.WRITE, path, 0, data)).wait(30)
    back = aligned(65536)
    backend.submit(Submission(Operation.READ, path, 0, back)).wait(30)
    assert torch.equal(back, data)


def test_eagain_is_retried_but_not_for_ever(backend, path, monkeypatch):
    real = os.preadv
    n_refusals = 3

    def busy(fd, buffers, offset):
        nonlocal n_refusals
        n_refusals -= 1
        if n_refusals >= 0:
            raise BlockingIOError(errno.EAGAIN, "try again")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", busy)
    backend.submit(Submission(Operation.WRITE, path, 0, aligned(4096))).wait(30)
    backend.submit(Submission(Operation.READ, path, 0, aligned(4096))).wait(30)
    n_refusals = 10**9
    with pytest.raises(StorageError, match="try again"):
        backend.submit(Submission(Operation.READ, path, 0, aligned(4096))).wait(30)


def test_an_io_error_keeps_its_errno(backend, path, monkeypatch):
    def broken(fd, buffers, offset):
        raise OSError(errno.EIO, "Input/output error")

    backend.submit(Submission(Operation.WRITE, path, 0, aligned(4096))).wait(30)
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StorageError, match="Input/output error .errno 5") as caught:
        backend.submit(Submission(Operation.READ, path, 0, aligned(4096))).wait(30)
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("where", ["open", "transfer"])
def test_without_o_direct_it_falls_back_and_says_so_once(path, monkeypatch, caplog, where):
    real_open, real_pwritev = os.open, os.pwritev
    direct_fds = set()

    def open_(name, flags, mode=0o777):
        if flags & os.O_DIRECT and where == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real_open(name, flags, mode)
        (direct_fds.add if flags & os.O_DIRECT else direct_fds.discard)(fd)
        return fd

    def pwritev(fd, buffers, offset):
        if fd in direct_fds:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_pwritev(fd, buffers, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwritev", pwritev)
    backend = PosixBackend(n_lanes=4, request_nbytes=4096)
    data = aligned(65536, fill=None)
    with caplog.at_level(logging.WARNING, logger="DeepSpeed.tencache.io"):
        backend.submit(Submission(Operation.WRITE, path, 0, data)).wait(30)
        back = aligned(65536)
        backend.submit(Submission(Operation.READ, path, 0, back)).wait(30)
    backend.close()
    assert torch.equal(back, data)
    assert [path in record.getMessage() for record in caplog.records] == [True]


def test_a_file_size_limit_is_reported(backend, path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        ticket = backend.submit(Submission(Operation.WRITE, path, 0, aligned(65536)))
        with pytest.raises(StorageError, match="File too large") as caught:
            ticket.wait(30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
