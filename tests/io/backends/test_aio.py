# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from tencache_ds.errors import ConfigError, StorageError
from tencache_ds.io import AioBackend, BackendSettings, Operation, PosixBackend, Submission, open_backend
from tencache_ds.ops import tencache_aio
from tencache_ds.ops.async_io import load_async_io, load_pin_memory
from tests.io.conftest import aligned

pytestmark = pytest.mark.timeout(300)  # the first run builds the op

MIB = 1 << 20


@pytest.fixture(scope="module")
def backend():
    backend = AioBackend(n_lanes=3, request_nbytes=MIB, block_nbytes=256 << 10, queue_depth=8)
    yield backend
    backend.close()


@pytest.fixture
def locked():
    """Makes buffers that the handles take as they are."""
    handle, buffers = load_pin_memory().pin_handle(), []

    def make(nbytes: int) -> torch.Tensor:
        buffers.append(handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8)).zero_())
        return buffers[-1]

    yield make
    for buffer in buffers:
        handle.free_cpu_locked_tensor(buffer)


@pytest.fixture
def pinned(locked):
    return [locked(4 * MIB) for _ in range(2)]


def test_pinned_buffers(backend, path, pinned):
    data, back = pinned
    data.copy_(aligned(4 * MIB, fill=None))
    backend.submit(Submission(Operation.WRITE, path, 4096, data)).wait(30)
    backend.submit(Submission(Operation.READ, path, 4096, back)).wait(30)
    assert torch.equal(back, data)
    with open(path, "rb") as file:
        assert file.read()[4096:] == data.numpy().tobytes()


def test_a_length_that_is_no_multiple_of_the_block(backend, path, locked):
    data, back = locked(2 * MIB + 4096), locked(2 * MIB + 4096)
    data.copy_(aligned(data.numel(), fill=None))
    backend.submit(Submission(Operation.WRITE, path, 0, data)).wait(30)
    backend.submit(Submission(Operation.READ, path, 0, back)).wait(30)
    assert torch.equal(back, data)


def test_unpinned_buffers_never_reach_the_handle(path, monkeypatch):
    # The handle would lock a bounce buffer of that size, and end the process where it may not.
    class Handle:
        def is_pinned(self, buffer):
            return False

    backend = AioBackend(n_lanes=1)
    backend._handles[0] = Handle()
    data, back = aligned(65536, fill=None), aligned(65536)
    backend.submit(Submission(Operation.WRITE, path, 0, data)).wait(30)
    backend.submit(Submission(Operation.READ, path, 0, back)).wait(30)
    backend.close()
    assert torch.equal(back, data)


@pytest.mark.parametrize("options", [{"single_submit": True}, {"overlap_events": False}])
def test_options_of_the_handle(path, options):
    backend = AioBackend(n_lanes=1, block_nbytes=4096, queue_depth=2, **options)
    data, back = aligned(65536, fill=None), aligned(65536)
    backend.submit(Submission(Operation.WRITE, path, 0, data)).wait(30)
    backend.submit(Submission(Operation.READ, path, 0, back)).wait(30)
    backend.close()
    backend.close()
    assert torch.equal(back, data)


def test_a_short_file_is_an_error_and_not_an_abort(backend, path):
    backend.submit(Submission(Operation.WRITE, path, 0, aligned(8192))).wait(30)
    with pytest.raises(StorageError, match="read of w failed at .*offset 4096.* file ends after 8192 bytes"):
        backend.submit(Submission(Operation.READ, path, 4096, aligned(8192), tag="w")).wait(30)


@pytest.mark.parametrize("operation", Operation)
def test_a_removed_file_is_an_error_and_not_made_again(backend, path, pinned, operation):
    backend.submit(Submission(Operation.WRITE, path, 0, pinned[0])).wait(30)
    os.unlink(path)
    backend.forget(path)  # an open file outlives its name
    with pytest.raises(StorageError, match="No such file") as caught:
        backend.submit(Submission(operation, path, 0, pinned[0])).wait(30)
    assert caught.value.errno == errno.ENOENT
    assert not os.path.lexists(path)
    backend.forget(path)


def test_a_handle_that_returns_a_failure_is_an_error(path):
    class Broken:
        def is_pinned(self, buffer):
            return True

        def sync_pwrite(self, buffer, filename, offset):
            return -1

    backend = AioBackend(n_lanes=1)
    backend._handles[0] = Broken()
    with pytest.raises(StorageError, match="returned -1"):
        backend.submit(Submission(Operation.WRITE, path, 0, aligned(4096))).wait(30)
    backend.close()


def test_without_o_direct_plain_descriptors_do_the_work(backend, path, monkeypatch):
    monkeypatch.setattr(backend._files, "_direct", False)
    monkeypatch.setattr(backend, "_handles", [None, None, None])
    data, back = aligned(65536, fill=None), aligned(65536)
    backend.submit(Submission(Operation.WRITE, path, 0, data)).wait(30)
    backend.submit(Submission(Operation.READ, path, 0, back)).wait(30)
    backend.forget(path)
    assert torch.equal(back, data)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"block_nbytes": 1000}, "aio.block_size"), ({"queue_depth": 0}, "aio.queue_depth"),
     ({"n_lanes": 64, "queue_depth": 1 << 20}, "fs.aio-max-nr")],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        AioBackend(**options)


def test_the_interpreter_exits_while_lanes_are_in_the_op(path):
    script = f"""
import torch
from tencache_ds.io import AioBackend, Operation, Submission
backend = AioBackend(n_lanes=4)
base = torch.empty((16 << 20) + 4096, dtype=torch.uint8)
buffer = base[-base.data_ptr() % 4096:][:16 << 20]
for i in range(8):
    backend.submit(Submission(Operation.WRITE, {path!r}, i << 24, buffer))
"""
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr


def refuse(builder, op_name):
    raise ConfigError("no compiler")


class Builder:
    """Stands for a DeepSpeed builder whose build fails."""

    def __init__(self, has_libaio: bool = True) -> None:
        self._has_libaio = has_libaio

    def load(self, verbose: bool) -> None:
        raise RuntimeError("first line\nError building extension 'async_io'")

    def has_function(self, name, libraries):
        return self._has_libaio


def fail_with(monkeypatch, builder):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "create_op_builder", lambda name: builder)


def test_a_missing_libaio_names_its_package(monkeypatch):
    fail_with(monkeypatch, Builder(has_libaio=False))
    with pytest.raises(ConfigError, match="async_io op cannot be built or loaded: .*apt install libaio-dev"):
        load_async_io()
    with pytest.raises(ConfigError, match="libaio"):
        open_backend("aio", BackendSettings(buffers_are_pinned=True))
    monkeypatch.setattr(tencache_aio, "load_op", refuse)
    backend, reason = open_backend("auto", BackendSettings(buffers_are_pinned=True))
    assert isinstance(backend, PosixBackend)
    assert "libaio-dev" in reason
    backend.close()


def test_missing_build_tools_name_their_packages(monkeypatch, tmp_path):
    fail_with(monkeypatch, Builder())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match="ninja.*'c\\+\\+' is missing .`apt install build-essential`"):
        load_async_io()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pin_memory op .*`pip install ninja`"):
        load_pin_memory()


def test_any_other_failure_shows_its_last_lines(monkeypatch):
    fail_with(monkeypatch, Builder())
    with pytest.raises(ConfigError, match="Error building extension") as caught:
        load_async_io()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_accelerator_without_the_op(monkeypatch):
    fail_with(monkeypatch, None)
    from deepspeed.accelerator import get_accelerator

    with pytest.raises(ConfigError, match=f"no async_io op for the accelerator '{get_accelerator().device_name()}'"):
        load_async_io()
