# SPDX-License-Identifier: Apache-2.0
"""What an engine makes of a trial: a pool in device memory (here ordinary memory), or a reason why not."""

from __future__ import annotations

import functools

import pytest
import torch

from tencache_ds.config import options_from
from tencache_ds.errors import ConfigError, MemoryLimitError
from tencache_ds.io import GdsBackend, Operation, PosixBackend, RoutedBackend, Submission
from tencache_ds.memory import Locking
from tencache_ds.planning.gds import GdsTrial
from tencache_ds.runtime import gpu_staging
from tencache_ds.runtime.gpu_staging import GpuStaging, gpu_staging_possible
from tests.io.conftest import aligned
from tests.io.device_files import new_kind

P = 4096
SHARDS = [3 * P - 100, 3 * P, 3 * P, P]
FAST, SLOW = GdsTrial("", "", 2e9, 1e9), GdsTrial("", "", 1e9, 2e9)


class Bench:
    """Two paths and the trials that are found on them."""

    def __init__(self, monkeypatch, files) -> None:
        self.trials = [FAST, FAST]
        self.folders: list[str] = []
        self.warnings: list[str] = []
        self.routes = [RoutedBackend(PosixBackend(1)) for _ in range(2)]
        self.staging: GpuStaging | None = None
        monkeypatch.setattr(gpu_staging, "obstacle", lambda on_cuda, verify: "")
        monkeypatch.setattr(gpu_staging, "try_gds", self._try)
        monkeypatch.setattr(gpu_staging, "GdsBackend", functools.partial(GdsBackend, open_file=files))

    def _try(self, folder, *args, **options):
        self.folders.append(folder)
        return self.trials[len(self.folders) - 1]

    def build(self, shards=tuple(SHARDS), **options) -> GpuStaging:
        self.staging = GpuStaging(
            options_from({"gds": "on", "io_lanes": 1} | options),
            False,
            Locking.NONE,
            lambda: PosixBackend(1),
            warn=self.warnings.append,
        )
        self.staging.build(list(zip(["first", "second"], self.routes, strict=True)), shards)
        return self.staging

    def close(self) -> None:
        if self.staging is not None and self.staging.pool is not None:
            self.staging.pool.close()
        for route in self.routes:
            route.close()
        if self.staging is not None:
            self.staging.close()


@pytest.fixture
def bench(monkeypatch):
    with new_kind() as files:
        bench = Bench(monkeypatch, files)
        yield bench
        bench.close()


def test_every_path_reads_into_the_pool(bench, tmp_path):
    staging = bench.build()
    assert bench.folders == ["first", "second"]
    assert staging.nbytes == 10 * P
    assert "weights read by GPUDirect Storage into 40.00 KiB on the GPU (asked for, 4.00 GB/s" in staging.describe()
    lease = staging.pool.lease(3 * P, "w", "test")
    for index, route in enumerate(bench.routes):
        path = tmp_path / str(index)
        data = aligned(3 * P, fill=None, seed=index)
        path.write_bytes(data.numpy().tobytes())
        route.submit(Submission(Operation.READ, str(path), 0, lease.buffer)).wait(10)
        assert torch.equal(lease.buffer, data)
    lease.release()


def test_a_slower_path_decides_for_all(bench):
    bench.trials = [FAST, GdsTrial("no space")]
    staging = bench.build(gds="auto")
    assert (staging.pool, staging.nbytes) == (None, 0)
    assert staging.describe() == "no GPUDirect Storage (no space)"


def test_too_slow(bench):
    bench.trials = [SLOW, SLOW]
    assert "not faster" in bench.build(gds="auto").describe()


def test_compatibility_mode_is_a_warning(bench):
    bench.trials = [GdsTrial("", "no driver", 1e9, 2e9)] * 2
    assert bench.build().pool is not None
    (warning,) = bench.warnings
    assert "COMPATIBILITY MODE" in warning


def test_an_obstacle_ends_it_before_the_trial(bench, monkeypatch):
    monkeypatch.setattr(gpu_staging, "obstacle", lambda on_cuda, verify: f"cuda {on_cuda}, verify {verify}")
    assert bench.build(gds="auto", verify="full").describe() == "no GPUDirect Storage (cuda False, verify full)"
    assert bench.folders == []
    with pytest.raises(ConfigError, match="cuda False, verify sampled"):
        bench.build()


def test_too_small_a_limit_is_found_before_the_trial(bench):
    with pytest.raises(ConfigError, match=r'"tencache.gds_memory" is 4096 bytes'):
        bench.build(gds_memory=P)
    assert bench.folders == []


def test_a_gpu_without_memory(bench, monkeypatch):
    class Full(gpu_staging.DeviceArena):
        def allocate(self, nbytes, purpose):
            raise MemoryLimitError("the GPU is full")

    monkeypatch.setattr(gpu_staging, "DeviceArena", Full)
    assert bench.build(gds="auto").describe() == "no GPUDirect Storage (the GPU is full)"
    bench.folders.clear()
    with pytest.raises(ConfigError, match="the GPU is full"):
        bench.build()


def test_nothing_on_nvme_needs_no_decision(bench):
    assert bench.build(shards=()).describe() == ""
    assert bench.folders == []


@pytest.mark.parametrize(
    ("wanted", "on_cuda", "possible"),
    [("auto", True, True), ("auto", False, False), ("on", False, True), ("off", True, False)],
)
def test_where_it_is_looked_into(wanted, on_cuda, possible):
    options = options_from({"gds": wanted})
    assert gpu_staging_possible(options, on_cuda) is possible
