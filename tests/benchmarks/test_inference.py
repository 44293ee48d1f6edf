# SPDX-License-Identifier: Apache-2.0
"""The comparison of generation, as a user starts it, and what its figures mean."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.inference.result import Generation
from benchmarks.inference.systems import SYSTEMS, parse
from benchmarks.workloads import census
from tencache_ds.profiling.hardware import Hardware, StorageRates

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(300)
COMPARED = ("device", "stock-ram", "accelerate-disk", "tencache:host_memory=2MiB")


def test_it_compares_and_leaves_nothing_on_the_storage(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TENCACHE_")}
    command = [sys.executable, "-m", "tencache_ds.cli", "bench", "inference", *COMPARED, "--nvme-path", str(tmp_path),
               "--out", str(tmp_path / "out"), "--model", "7M", "--batch", "2", "--prompt", "8", "--tokens", "3",
               "--rounds", "1", "--runs", "1"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    record = json.loads((tmp_path / "out" / "inference.json").read_text())["by_batch"]["2"]
    found = {name: Generation.model_validate(each) for name, each in record.items()}
    assert set(found) == set(COMPARED)
    assert all(each.seconds_per_token > 0 and each.model_nbytes > 10**7 for each in found.values())
    assert found["stock-ram"].digest == found[COMPARED[-1]].digest, "TenCache generates the same tokens"
    assert found["device"].digest == found["accelerate-disk"].digest
    ours = found[COMPARED[-1]]
    assert ours.nvme_nbytes > 10**7 > ours.host_nbytes > 0
    for name in COMPARED:
        assert name in done.stdout


STORAGE = StorageRates(read_bytes_per_s=2e9, write_bytes_per_s=1e9, mixed_bytes_per_s=1e9, request_nbytes=4096, lanes=1,
                       direct=True, filesystem="ext4")  # fmt: skip
HARDWARE = Hardware(cpu="x", cores=1, memory_nbytes=1, storage=STORAGE, h2d_bytes_per_s=50e9)


@pytest.mark.parametrize(
    ("places", "on_nvme", "seconds"),
    [
        ({}, False, 10 / 50),
        ({}, True, 10 / 2),
        ({"gpu_nbytes": 6e9, "host_nbytes": 4e9, "nvme_nbytes": 0}, False, 4 / 50),
        ({"gpu_nbytes": 6e9, "host_nbytes": 3e9, "nvme_nbytes": 1e9}, False, 1 / 2),
        ({"gpu_nbytes": 10e9, "host_nbytes": 0, "nvme_nbytes": 0}, False, None),
    ],
)
def test_the_bound_is_that_of_the_slowest_link(places: dict[str, float], on_nvme: bool, seconds: float | None) -> None:
    generation = Generation(
        built_s=1, prompt_s=[1], token_s=[1], digest="", model_nbytes=10**10, gpu_peak_nbytes=None, rss_peak_nbytes=0,
        **{key: int(nbytes) for key, nbytes in places.items()},
    )  # fmt: skip
    assert generation.bound_s(HARDWARE, on_nvme) == (None if seconds is None else pytest.approx(seconds))


def test_configs_of_all_systems(tmp_path: Path) -> None:
    counted = census("7M", 16)
    for name, system in SYSTEMS.items():
        config = system.config(tmp_path, counted, 2)
        if system.device is None:
            assert config == {}
            continue
        zero = config["zero_optimization"]
        assert ("offload_engine" in zero) == name.startswith("tencache")
        assert zero["offload_param"]["device"] == system.device
    assert parse("tencache:gpu_memory=8GiB+host_memory=0").options == {"gpu_memory": "8GiB", "host_memory": 0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stock", "unknown system 'stock'; known: device, stock-ram"),
        ("stock-ram:gpu_memory=1", "stock-ram takes no options of TenCache"),
        ("tencache:gpu_memory", "expected KEY=VALUE, found 'gpu_memory'"),
    ],
)
def test_a_wrong_system_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(name)
