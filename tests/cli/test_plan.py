# SPDX-License-Identifier: Apache-2.0
"""``tencache plan`` with the rates of a machine that are given, and once with measured ones."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl
import pytest
from transformers import GPT2Config

from tencache_ds import io
from tencache_ds.cli import main, plan
from tencache_ds.planning.budget import OVERHEAD_NBYTES
from tencache_ds.planning.chunks import RESIDENT_CHUNK_NBYTES
from tencache_ds.profiling import probe as probe_module
from tencache_ds.profiling.hardware import Hardware, StorageRates

pytestmark = pytest.mark.timeout(240)  # DeepSpeed may compile its CPU Adam

GIB = 2**30
DRIVE = StorageRates(
    read_bytes_per_s=2e9, write_bytes_per_s=2e9, mixed_bytes_per_s=2e9, request_nbytes=2**20, lanes=8, direct=True,
    filesystem="ext4",
)  # fmt: skip
MACHINE = Hardware(cpu="a CPU", cores=16, memory_nbytes=2**37, storage=DRIVE, cpu_adam_params_per_s=5e9)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 GiB of RAM, 100 GiB on the drive."""
    monkeypatch.setattr(probe_module, "probe", lambda path, **_: MACHINE)
    monkeypatch.setattr(plan, "available_nbytes", lambda: 64 * GIB)
    monkeypatch.setattr(io, "free_nbytes", lambda folder: 100 * GIB)


@pytest.mark.usefixtures("machine")
def test_a_model_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    argv = ["plan", "--params", "6.7B", "--nvme-path", str(tmp_path), "--json", str(file)]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "6.7 billion parameters on 1 x a CPU" in printed
    assert "51.2 GiB" in printed
    assert "does not fit" not in printed
    saved = json.loads(file.read_text())
    chosen = int(0.8 * 64 * GIB)
    assert saved["chosen"]["budget_nbytes"] == chosen
    assert saved["problems"] == []
    steps = [each["bound"]["seconds"] for each in saved["others"]]
    assert steps == sorted(steps, reverse=True)
    assert [each["budget_nbytes"] for each in saved["others"]] == [0, chosen, chosen + 8 * GIB, 6_700_000_000 * 16]
    assert printed.count("chosen") == 1
    peak = saved["peak_per_rank"]
    # Under the budget, beside it the staging buffers: 13 chunks, no weight.
    assert peak["host_nbytes"] == chosen + 13 * 32 * 2**20 + OVERHEAD_NBYTES
    assert peak["gpu_nbytes"] == peak["pinned_nbytes"] == 0
    assert "per rank at most, including start-up and moves: 51.7 GiB of RAM" in printed


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("options", "ram", "nvme"),
    [
        ([], "62.0 GiB", "57.7 GiB"),
        (["--split-master"], "62.0 GiB", "42.7 GiB"),  # without GPU memory
        (["--optimizer", "adamw8bit"], "62.0 GiB", "13.0 GiB"),
        (["--optimizer", "adamw8bit", "--split-master"], "61.0 GiB", "0 B"),
    ],
)
def test_an_optimizer_with_less_state(
    options: list[str], ram: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["plan", "--params", "8.03B", "--nvme-path", str(tmp_path), "--host-memory", "62GiB"]
    assert main([*argv, *options]) == 0
    total = next(line for line in capsys.readouterr().out.splitlines() if "total" in line)
    assert ram in total
    assert nvme in total


@pytest.mark.usefixtures("machine")
def test_split_master_weights_stay_whole_in_memory_where_state_goes_to_the_gpu(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    argv = ["plan", "--params", "8B", "--nvme-path", str(tmp_path), "--split-master", "--json", str(file)]
    assert main([*argv, "--gpu-memory", "8GiB"]) == 0
    training = json.loads(file.read_text())["training"]
    assert (training["state_nbytes"], training["split_nbytes"]) == (12, 2)


@pytest.mark.usefixtures("machine")
def test_nothing_goes_to_gpu_memory_with_8_bit_adam(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--params", "8B", "--nvme-path", str(tmp_path), "--optimizer", "adamw8bit"]
    assert main([*argv, "--gpu-memory", "8GiB"]) == 1
    assert "leave --gpu-memory out" in capsys.readouterr().err


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--params", "6.7B"], "name a drive with --nvme-path"),
        (["--params", "13B", "--nvme-path", "/", "--host-memory", "0"], "of NVMe are needed, 100.0 GiB are free"),
        (["--params", "6.7B", "--nvme-path", "/", "--host-memory", "90GiB"], "lower --host-memory"),
    ],
)
def test_a_model_that_does_not_fit(argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *argv]) == 1
    assert problem in " ".join(capsys.readouterr().out.split())


def test_a_folder_that_training_will_create(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = []
    monkeypatch.setattr(probe_module, "probe", lambda path, **_: measured.append(path) or MACHINE)
    absent = tmp_path / "absent" / "scratch"
    assert main(["plan", "--params", "1B", "--nvme-path", str(absent)]) == 0
    assert measured == [tmp_path]
    assert f"{absent} will be created in {tmp_path}" in capsys.readouterr().err
    assert not absent.exists()
    file = tmp_path / "file"
    file.touch()
    monkeypatch.undo()
    assert main(["plan", "--params", "1B", "--nvme-path", str(file)]) == 1
    assert f"{file} is not a folder" in capsys.readouterr().err


@pytest.mark.usefixtures("machine")
def test_ranks_share_the_memory_of_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "1B", "--ranks", "4", "--nvme-path", str(tmp_path)]) == 0
    assert "4 x a CPU, 8192 tokens per step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "count"), [("6.7B", 6_700_000_000), ("350M", 350_000_000), ("7e9", 7 * 10**9), ("5", 5)]
)
def test_numbers_of_parameters(text: str, count: int) -> None:
    assert plan._count(text) == count


@pytest.mark.parametrize("text", ["", "0", "many", "-1", "1.2.3"])
def test_what_is_no_number_of_parameters(text: str) -> None:
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        plan._count(text)


@pytest.mark.parametrize("argv", [[], ["--params", "1B", "--model", "x"], ["--layers", "2"], ["--hidden", "2"]])
def test_one_model_is_asked_for(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *argv]) == 1
    assert "give exactly one model" in capsys.readouterr().err


def test_a_hugging_face_config_is_counted(tmp_path: Path) -> None:
    GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=100, n_positions=32).save_pretrained(tmp_path)
    per_layer = 12 * 64**2 + 13 * 64
    assert plan.count_parameters(str(tmp_path)) == 100 * 64 + 32 * 64 + 2 * per_layer + 2 * 64


def test_a_model_that_nobody_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(tmp_path)]) == 1
    assert f"--model {tmp_path}" in capsys.readouterr().err


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--layers", "2", "--hidden", "256", "--nvme-path", str(tmp_path), "--seconds", "2"]
    assert main(argv) == 0
    assert "shortest step" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("machine")
def test_a_picture(tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    argv = ["plan", "--params", "6.7B", "--nvme-path", str(tmp_path), "--gpu-memory", "8GiB", "--plot", str(file)]
    assert main(argv) == 0
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert file.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("chosen", "memory", "expected"),
    [
        (0, 0, [0]),
        (0, 8 * GIB, [0, 2 * GIB, 4 * GIB]),
        (6 * GIB, 8 * GIB, [0, 3 * GIB, 6 * GIB, 8 * GIB]),
        (6 * GIB, 0, [0, 3 * GIB, 6 * GIB, 12 * GIB]),
    ],
)
def test_gpu_memory_sizes_of_the_frontier(chosen: int, memory: int, expected: list[int]) -> None:
    assert plan.gpu_budgets(chosen, memory) == expected


@pytest.mark.usefixtures("machine")
def test_a_picture_shows_the_frontier(tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    plotted = ["plan", "--params", "6.7B", "--nvme-path", str(tmp_path), "--gpu-memory", "8GiB", "--plot", str(file)]
    with mpl.rc_context({"svg.fonttype": "none"}):
        assert main(plotted) == 0
    text = file.read_text()
    assert all(f">{size} GiB<" in text for size in (0, 4, 8, 16)), "one curve for each GPU memory size"
    assert "limited by" in text


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("name", "problem"), [("plan.txt", "ends with .png"), ("no/plan.png", "is not a folder")])
def test_a_picture_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, problem: str
) -> None:
    argv = ["plan", "--params", "6.7B", "--nvme-path", str(tmp_path), "--plot", str(tmp_path / name)]
    assert main(argv) == 1
    assert problem in capsys.readouterr().err


@pytest.mark.usefixtures("machine")
def test_gpu_memory_takes_what_fits_nowhere_else(tmp_path: Path) -> None:
    argv = ["plan", "--params", "6.7B", "--host-memory", "60GiB"]
    assert main(argv) == 1
    assert main([*argv, "--gpu-memory", "44GiB"]) == 0


@pytest.mark.usefixtures("machine")
def test_gpu_memory_is_used_up_to_its_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    argv = ["plan", "--params", "1B", "--gpu-memory", "8GiB", "--json", str(file)]
    assert main(argv) == 0
    peak = json.loads(file.read_text())["peak_per_rank"]
    assert peak["gpu_nbytes"] == 8 * GIB + 2 * RESIDENT_CHUNK_NBYTES  # 3 chunks without their weights are under way
    assert peak["host_nbytes"] == 16 * 10**9 + RESIDENT_CHUNK_NBYTES + OVERHEAD_NBYTES
    assert "8.2 GiB of GPU memory for weights, gradients and optimizer state, and" in capsys.readouterr().out
