# SPDX-License-Identifier: Apache-2.0
"""What is written on the command line becomes configurations that DeepSpeed and TenCache accept, or a clear error."""

from __future__ import annotations

import copy
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from benchmarks.command import add_arguments, main, plans
from benchmarks.comparison.peers import PEERS, Setting
from benchmarks.comparison.suites import (
    ALL,
    PAPER,
    PAPER_MODELS,
    SETS,
    paper,
    parse_entries,
    parse_entry,
    smoke,
    workload_of,
)
from benchmarks.workloads import SPECS, census
from tencache_ds.config import options_from

GIB = 2**30


def setting(gpus: int = 1, gpu_gib: int = 140, host_gib: int = 128, model: str = "1.3B") -> Setting:
    return Setting(workload_of(model, ranks=1), 1_335_986_176, 65_536_000, "/nvme", gpus, gpu_gib * GIB, host_gib * GIB)


@pytest.mark.parametrize("name", PEERS)
def test_every_value_of_every_knob_is_a_valid_config(name: str) -> None:
    peer = PEERS[name]
    start = {knob: values[0] for knob, values in peer.space.items()}
    for knob, values in [*peer.space.items(), ("", ("",))]:
        for value in values:
            config = peer.configure(setting(), start | ({knob: value} if knob else {}))
            zero = DeepSpeedZeroConfig(**copy.deepcopy(config["zero_optimization"]))
            assert zero.stage == 3
            assert config["gradient_clipping"] == 1.0
            assert config["train_micro_batch_size_per_gpu"] == 4
            options_from(config.get("tencache"))


def test_stock_gets_buffers_that_hold_the_largest_weight() -> None:
    peer = PEERS["nvme-nvme"]
    config = peer.configure(setting(), {knob: values[0] for knob, values in peer.space.items()})
    assert config["zero_optimization"]["offload_param"]["buffer_size"] >= 65_536_000
    assert config["zero_optimization"]["offload_optimizer"]["buffer_count"] == 12


def test_host_memory_share_is_a_share_of_weights_gradients_and_state() -> None:
    config = PEERS["tencache"].configure(setting(), {"host_memory_share": 0.5, "io_lanes": 4})
    assert config["tencache"] == {"host_memory": 10_687_889_408, "io_lanes": 4}
    assert PEERS["tencache"].configure(setting(), {})["tencache"] == {}


def test_a_peer_that_cannot_run_says_why() -> None:
    assert "needs a GPU" in PEERS["gpu-ram"].refuse(setting(gpus=0))
    assert "GiB of host memory" in PEERS["ram-ram"].refuse(setting(host_gib=16))
    assert "GiB of GPU memory" in PEERS["gpu-gpu"].refuse(setting(gpu_gib=16))
    assert PEERS["nvme-nvme"].refuse(setting(gpus=0, host_gib=1)) == ""
    assert PEERS["gpu-gpu"].refuse(setting()) == ""


def test_superoffload_is_not_started_without_its_core_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.comparison.peers.shutil.which", lambda name: None)
    assert "numactl" in PEERS["superoffload"].refuse(setting())
    monkeypatch.setattr("benchmarks.comparison.peers.shutil.which", lambda name: "/usr/bin/numactl")
    assert PEERS["superoffload"].refuse(setting()) == ""


def test_zenflow_builds_the_model_whole_and_starts_its_optimizer_process_in_the_warm_up() -> None:
    peer = PEERS["zenflow"]
    config = peer.configure(setting(), {knob: values[0] for knob, values in peer.space.items()})
    assert config["zero_optimization"]["zenflow"]["full_warm_up_rounds"] == 1
    assert not peer.zero_init


def test_entries() -> None:
    entry = parse_entry("nvme-nvme:aio_threads=8+pipeline=false")
    assert (entry.peer, entry.fixed) == ("nvme-nvme", {"aio_threads": 8, "pipeline": False})
    assert entry.label == "stock NVMe + NVMe, aio_threads 8, pipeline False"
    assert parse_entry("tencache:host_memory_share=0.25").label == "TenCache, RAM for 25%"
    assert parse_entry("tencache:gpu_memory=0+host_memory=1590000000").label == (
        "TenCache, gpu_memory 0, host_memory 1.59 GB"
    )
    assert parse_entry("tencache:io_backend=posix").fixed == {"io_backend": "posix"}
    assert [e.name for e in parse_entries(["tencache", "pair"])] == ["tencache", "nvme-nvme"]
    for names in [*SETS.values(), ALL, PAPER]:
        assert parse_entries(names)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tencash", "'tencash'"),
        ("nvme-nvme:aio_treads=8", "aio_treads"),
        ("nvme-nvme:aio_threads", "aio_threads"),
        ("gpu-gpu:ratio=1", "gpu-gpu"),
    ],
)
def test_wrong_entries_are_named(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_entry(text)


@pytest.mark.parametrize(
    ("model", "billions"),
    [("1.3B", 1.336), ("OPT-6.7B", 6.65), ("OPT-13B", 12.84), ("Bloom-7B", 7.07), ("Falcon-7B", 6.92),
     ("Falcon3-10B", 10.31), ("Falcon-11B", 11.10)],
)  # fmt: skip
def test_models_have_their_published_sizes(model: str, billions: float) -> None:
    counts = census(model, SPECS[model].sequence)
    assert counts.numel / 1e9 == pytest.approx(billions, abs=0.01)
    assert 0 < counts.largest < counts.numel


def test_suites() -> None:
    assert smoke(0).workload.model == "7M"
    assert len(PAPER_MODELS) == 6
    plan = paper("OPT-6.7B")
    assert (plan.workload.micro_batch, plan.workload.precision) == (16, "fp16")
    with pytest.raises(ValueError, match="no model 'GPT-5'"):
        workload_of("GPT-5", ranks=1)


@pytest.mark.parametrize(
    ("words", "folders"),
    [
        ([], [(".", 4, 1)]),
        (["--micro-batch", "2"], [(".", 2, 1)]),
        (["--micro-batch", "4,64,4"], [("batch_4x1", 4, 1), ("batch_64x1", 64, 1)]),
        (["--accumulation", "1,8"], [("batch_4x1", 4, 1), ("batch_4x8", 4, 8)]),
    ],
)
def test_several_batches_are_benchmarks_of_their_own(words: list[str], folders: list[tuple[str, int, int]]) -> None:
    arguments = ArgumentParser()
    add_arguments(arguments)
    chosen = plans(arguments.parse_args([*words, "--model", "1.3B", "--out", "."]), SimpleNamespace(gpus=lambda: 1))
    assert [(str(p.out), p.workload.micro_batch, p.workload.accumulation) for p in chosen] == folders
    assert len({plan.title for plan in chosen}) == len(chosen)


@pytest.mark.parametrize(
    ("option", "word"),
    [("--micro-batch", "4,"), ("--micro-batch", "0"), ("--micro-batch", "1,x"), ("--micro-batch", ""),
     ("--warmup", "-1"), ("--max-trials", "-1"), ("--busy-cores", "x")],
)  # fmt: skip
def test_what_is_no_number_is_refused(option: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([f"{option}={word}"])
    assert option in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "10", "--turns", "4"], "--steps (10) must be a multiple of --turns (4)"),
        (["--steps", "8", "--turns", "4", "--host-memory", "8GiB"], "use one of them"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--nvme-path", str(tmp_path / "nvme"), "--out", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "nvme").exists()
