# SPDX-License-Identifier: Apache-2.0
"""The probe on this machine, for about a second: real files, real copies, real updates."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from threadpoolctl import threadpool_info

from tencache_ds.errors import ConfigError, StorageError
from tencache_ds.profiling import probe as probing
from tencache_ds.profiling import probe_compute
from tencache_ds.profiling.filesystem import file_system_of
from tencache_ds.profiling.hardware import Hardware
from tencache_ds.profiling.host import processor_name
from tencache_ds.profiling.probe import LANES, area_nbytes_for, measure_storage, probe

MIB = 1 << 20
RATES = ("memory_copy_bytes_per_s", "cpu_adam_params_per_s", "matmul_flops_per_s")
GPU_RATES = ("h2d_bytes_per_s", "d2h_bytes_per_s", "gpu_adam_params_per_s")

pytestmark = pytest.mark.timeout(240)  # DeepSpeed may compile its operator


def test_probe_measures_this_machine_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    lines: list[str] = []
    hardware = probe(tmp_path, seconds=1.0, request_nbytes=MIB, cpu_threads=1, progress=lines.append)
    assert os.listdir(tmp_path) == []
    assert hardware.storage is not None
    assert hardware.storage.request_nbytes == MIB
    assert hardware.storage.lanes in LANES
    assert hardware.storage.filesystem == file_system_of(tmp_path).kind != "unknown"
    assert all(getattr(hardware, name) > 0 for name in RATES)
    assert [getattr(hardware, name) for name in (*GPU_RATES, "gpu", "gpu_memory_nbytes")] == [None] * 5
    assert hardware.gpus == 0
    assert hardware.cores == len(os.sched_getaffinity(0))
    assert hardware.cpu
    assert hardware.memory_nbytes > 64 * MIB
    assert hardware.probe_s > 0
    assert str(tmp_path) not in hardware.model_dump_json()
    assert Hardware.model_validate_json(hardware.model_dump_json()) == hardware
    assert [line.split(":")[0] for line in lines] == ["host memory", "CPU Adam", "CPU", "storage"]


@pytest.mark.gpu
def test_probe_measures_a_gpu(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    hardware = probe(None, seconds=2.0)
    assert hardware.storage is None
    assert all(getattr(hardware, name) > 0 for name in (*RATES, *GPU_RATES))
    assert hardware.gpu == torch.cuda.get_device_name()
    assert hardware.gpus == torch.cuda.device_count()
    assert hardware.gpu_memory_nbytes is not None
    assert hardware.gpu_memory_nbytes > 0


@pytest.mark.parametrize("seconds", [0.3, 1.0])
def test_storage_keeps_to_its_time(tmp_path, seconds):
    start = time.perf_counter()
    storage = measure_storage(tmp_path, seconds=seconds, request_nbytes=MIB)
    # A few requests at each number in flight are always made, and the disk may be busy with something else.
    assert time.perf_counter() - start < 5 * seconds + 5
    assert min(storage.read_bytes_per_s, storage.write_bytes_per_s, storage.mixed_bytes_per_s) > 0
    assert os.listdir(tmp_path) == []


def test_without_direct_io_it_says_so(tmp_path, monkeypatch):
    real_open = os.open

    def open_without_direct_io(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", open_without_direct_io)
    storage = measure_storage(tmp_path, seconds=0.3, request_nbytes=MIB)
    assert not storage.direct
    assert min(storage.read_bytes_per_s, storage.write_bytes_per_s, storage.mixed_bytes_per_s) > 0
    assert os.listdir(tmp_path) == []


def test_a_file_system_that_refuses_only_the_transfer(tmp_path, monkeypatch):
    refused = []
    real_pwritev = os.pwritev

    def pwritev(fd, buffers, offset):
        if not refused:
            refused.append(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_pwritev(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    assert not measure_storage(tmp_path, seconds=0.2, request_nbytes=MIB).direct


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("outcome", ["error", "short"])
def test_a_failing_device_is_named_and_leaves_nothing_behind(tmp_path, monkeypatch, call, outcome):
    real = getattr(os, call)

    def fail(fd, buffers, offset):
        if len(buffers[0]) < MIB:  # the trial of O_DIRECT
            return real(fd, buffers, offset)
        if outcome == "short":
            return 512
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError, match="storage probe") as caught:
        measure_storage(tmp_path, seconds=0.3, request_nbytes=MIB)
    assert caught.value.path == str(tmp_path)
    assert caught.value.operation == ("read" if call == "preadv" else "write")
    assert caught.value.errno == (errno.EIO if outcome == "error" else None)
    assert os.listdir(tmp_path) == []


def test_space_that_is_gone_when_it_is_taken(tmp_path, monkeypatch):
    def full(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="No space left") as caught:
        measure_storage(tmp_path, seconds=0.3, request_nbytes=MIB)
    assert str(tmp_path) in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("free", "request_nbytes", "expected"),
    [
        (64 * MIB, 8 * MIB, 16 * MIB),
        (100 * MIB, 8 * MIB, 24 * MIB),
        (1 << 50, 8 * MIB, 4 << 30),
        (1 << 50, 100 * MIB, (4096 // 100) * 100 * MIB),
    ],
)
def test_the_area_is_a_part_of_the_free_space_in_whole_requests(tmp_path, monkeypatch, free, request_nbytes, expected):
    monkeypatch.setattr(probing, "free_nbytes", lambda folder: free)
    assert area_nbytes_for(tmp_path, 10.0, request_nbytes) == expected


def test_the_least_space_is_enough_to_measure(tmp_path, monkeypatch):
    monkeypatch.setattr(probing, "free_nbytes", lambda folder: 64 * MIB)
    assert measure_storage(tmp_path, seconds=0.2, request_nbytes=8 * MIB).read_bytes_per_s > 0


@pytest.mark.parametrize(("free", "request_nbytes"), [(64 * MIB - 1, MIB), (127 * MIB, 16 * MIB)])
def test_too_little_space_is_an_error_before_anything_is_measured(tmp_path, monkeypatch, free, request_nbytes):
    monkeypatch.setattr(probing, "free_nbytes", lambda folder: free)
    lines: list[str] = []
    with pytest.raises(ConfigError, match=f"{free} bytes free") as caught:
        probe(tmp_path, request_nbytes=request_nbytes, progress=lines.append)
    assert str(tmp_path) in str(caught.value)
    assert lines == []


def test_impossible_arguments_are_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for path in (file, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="is not a folder"):
            probe(path)
    for request_nbytes in (0, -4096, 1000, 1 << 40):
        with pytest.raises(ConfigError, match="request_nbytes"):
            probe(tmp_path, request_nbytes=request_nbytes)
    for seconds in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="positive number of seconds"):
            probe(None, seconds=seconds)
    with pytest.raises(ConfigError, match="cpu_threads"):
        probe(None, cpu_threads=0)


def test_a_folder_of_somebody_else_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="cannot be written to"):
        probe(tmp_path)


def test_tmpfs_is_known_as_memory(monkeypatch):
    shared = Path("/dev/shm")
    if file_system_of(shared).kind != "tmpfs":
        pytest.skip("/dev/shm is not a tmpfs here")
    monkeypatch.setattr(probing, "available_nbytes", lambda: 5)
    assert probing.free_nbytes(shared) == 5


def test_threads_are_what_they_were_afterwards():
    before = {library["filepath"]: library["num_threads"] for library in threadpool_info()}
    with probe_compute.openmp_threads(2):
        assert torch.get_num_threads() == 2
    assert {library["filepath"]: library["num_threads"] for library in threadpool_info()} == before


def test_without_a_compiler_cpu_adam_is_left_out(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", None)
    monkeypatch.setattr(probe_compute.logger, "propagate", True)
    with caplog.at_level("WARNING"):
        assert probe_compute.cpu_adam_rate(0.1) is None
    assert "CPU Adam was not measured" in caplog.text


def test_processor_name():
    assert processor_name("processor : 0\nmodel name : AMD EPYC\nmodel name : other\n") == "AMD EPYC"
    assert processor_name("processor : 0\nCPU part : 0xd40\n")
    assert processor_name()


def test_importing_the_probe_brings_in_neither_torch_nor_deepspeed():
    check = (
        "import sys, tencache_ds.profiling.probe\n"
        "found = {'torch', 'deepspeed'} & set(sys.modules)\n"
        "sys.exit(str(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
