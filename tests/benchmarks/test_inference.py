# SPDX-License-Identifier: Apache-2.0
"""The comparison of generation, as a user starts it, and what its figures mean."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.inference import command
from benchmarks.inference.result import Generation
from benchmarks.inference.systems import SYSTEMS, parse
from benchmarks.workloads import census
from tencache_ds.profiling.hardware import Hardware, StorageRates

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(300)
COMPARED = ("stock-ram", "tencache-ram:gpu_memory=0", "tencache:host_memory=2MiB")
OTHERS = ("device", "accelerate-disk")


def compare(names: tuple[str, ...], tmp_path: Path) -> dict[str, Generation]:
    """What the command found, which leaves nothing on the storage."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TENCACHE_")}
    words = [sys.executable, "-m", "tencache_ds.cli", "bench", "inference", *names, "--nvme-path", str(tmp_path),
             "--out", str(tmp_path / "out"), "--model", "7M", "--batch", "2", "--prompt", "8", "--tokens", "3",
             "--rounds", "1", "--runs", "1"]  # fmt: skip
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for name in names:
        assert name in done.stdout
    record = json.loads((tmp_path / "out" / "inference.json").read_text())["by_batch"]["2"]
    found = {name: Generation.model_validate(each) for name, each in record.items()}
    assert set(found) == set(names)
    # Seconds for a token are a difference of two generations: on a busy machine it may be negative for a small model.
    assert all(min(each.prompt_s) > 0 and len(each.token_s) == 1 for each in found.values())
    assert all(each.model_nbytes > 10**7 for each in found.values())
    return found


def test_it_compares_and_leaves_nothing_on_the_storage(tmp_path: Path) -> None:
    stock, idle, ours = compare(COMPARED, tmp_path).values()
    assert ours.tokens == stock.tokens, "TenCache generates the same tokens"
    assert ours.nvme_nbytes > 10**7 > ours.host_nbytes > 0
    assert idle.tokens == stock.tokens
    assert idle.host_nbytes is None, "TenCache has nothing to do, and no statistics"


@pytest.mark.long
def test_it_compares_what_is_not_deepspeed(tmp_path: Path) -> None:
    device, disk = compare(OTHERS, tmp_path).values()
    assert device.tokens == disk.tokens


def test_names_are_readable_and_errors_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    names = ["stock-ram", "tencache-ram:gpu_memory=8GiB", "tencache:gpu_memory=16GiB+host_memory=32GiB"]

    def generate(arguments: Any, name: str, *_: Any) -> Any:
        if name == "stock-ram":
            raise ValueError("RuntimeError: out\nof memory")
        return Generation(built_s=100, prompt_s=[12.34] * 2, token_s=[12.34] * 2, tokens=[[1]], model_nbytes=10**11,
                          gpu_peak_nbytes=10**11, rss_peak_nbytes=10**11, gpu_nbytes=10**11, host_nbytes=10**11,
                          nvme_nbytes=10**11)  # fmt: skip

    monkeypatch.setattr(command, "_run", generate)
    monkeypatch.setattr(command, "Machine", FakeMachine)
    words = [*names, "--nvme-path", str(tmp_path), "--out", str(tmp_path), "--model", "7M", "--runs", "2"]
    assert command.run(words) == command.EXIT_PROBLEM
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in names)
    assert "stock-ram: RuntimeError: out of memory" in lines
    record = json.loads((tmp_path / "inference.json").read_text())["by_batch"]["8"]
    assert record["stock-ram"] == "RuntimeError: out of memory"
    assert record[names[1]]["token_s"] == [12.34] * 4, "of both processes"


def test_a_line_of_the_table() -> None:
    def generation(**changes: Any) -> Generation:
        known = {"built_s": 1.26, "prompt_s": [0.5, 0.25], "token_s": [0.2], "tokens": [[1]], "model_nbytes": 10**9,
                 "gpu_peak_nbytes": 3 * 2**30, "rss_peak_nbytes": 2**30}  # fmt: skip
        return Generation(**(known | changes))

    places = {"gpu_nbytes": 2**30, "host_nbytes": 0, "nvme_nbytes": 10**8}
    found = {"stock-ram": generation(), "tencache": generation(token_s=[0.1, 0.1, 0.3], **places)}
    systems = {name: SYSTEMS[name] for name in ("stock-ram", "tencache", "device")}
    shown = command.table(4, systems, found, HARDWARE)
    assert list(shown.loc["tencache"]) == [
        "100.0", "40.0", "2.00", "0.50", "0.25", "1.3", "3.0", "1.0", "1.0, 0.0, 0.1", "equal"
    ]  # fmt: skip
    assert list(shown.loc["stock-ram"][["x stock-ram", "of bound", "weights: GPU, RAM, NVMe"]]) == ["1.00", "0.10", "-"]
    assert list(shown.loc["device"]) == ["failed", *[""] * 9]


@pytest.mark.parametrize(("timeout_s", "error"), [(60, "KeyError: 'no such program'"), (0, "not finished after 0 s")])
def test_what_went_wrong_is_said(tmp_path: Path, timeout_s: float, error: str) -> None:
    words = ["device", "--nvme-path", str(tmp_path), "--out", str(tmp_path / "out"), "--timeout", str(timeout_s)]
    arguments = command.make_parser().parse_args([*words, "--model", "7M"])
    arguments.out.mkdir()
    broken = replace(SYSTEMS["device"], program="no such program")
    with pytest.raises(ValueError, match=error):
        command._run(arguments, "device", broken, census("7M", 16), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


class FakeMachine:
    """A machine of known figures."""

    def build_operators(self) -> None:
        pass

    def probe(self, path: Path, seconds: float) -> Hardware:
        return HARDWARE

    def versions(self) -> dict[str, str]:
        return {}


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
        built_s=1, prompt_s=[1], token_s=[1], tokens=[[1]], model_nbytes=10**10, gpu_peak_nbytes=None,
        rss_peak_nbytes=0, **{key: int(nbytes) for key, nbytes in places.items()},
    )  # fmt: skip
    assert generation.bound_s(HARDWARE, on_nvme) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    ("tokens", "varies", "said"),
    [
        ([[1, 2, 3], [4, 5, 6]], False, "equal"),
        ([[1, 2, 9], [4, 9, 6]], False, "2 of 2 differ, from 2 on"),
        ([[1, 2, 3], [4, 5, 9]], False, "1 of 2 differ, from 3 on"),
        ([[1, 2, 3], [4, 5, 6]], True, "vary"),
    ],
)
def test_tokens_are_compared_by_their_places(tokens: list[list[int]], varies: bool, said: str) -> None:
    figures = {
        "built_s": 1,
        "prompt_s": [1],
        "token_s": [1],
        "model_nbytes": 1,
        "gpu_peak_nbytes": None,
        "rss_peak_nbytes": 0,
    }
    expected = Generation(tokens=[[1, 2, 3], [4, 5, 6]], **figures)
    assert Generation(tokens=tokens, varies=varies, **figures).compare(expected) == said


def test_a_comparison_that_is_terminated_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[psutil.Process] = []

    def watch(program: Any) -> None:
        started.append(psutil.Process(program._process.pid))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    monkeypatch.setattr(command, "Machine", FakeMachine)
    monkeypatch.setattr(command.Program, "watch", watch)
    words = ["device", "--nvme-path", str(tmp_path), "--out", str(tmp_path / "out"), "--model", "7M"]
    before = signal.getsignal(signal.SIGTERM)
    assert command.run(words) == command.EXIT_INTERRUPTED
    assert len(started) == 1
    assert psutil.wait_procs(started, timeout=10)[1] == []
    assert signal.getsignal(signal.SIGTERM) is before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_configs_of_all_systems(tmp_path: Path) -> None:
    counted = census("7M", 16)
    for name, system in SYSTEMS.items():
        config = system.config(str(tmp_path), counted, 2)
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
