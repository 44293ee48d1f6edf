# SPDX-License-Identifier: Apache-2.0
"""The measured training runs: real ones of a small model, and the rules around them."""

from __future__ import annotations

import ast
import itertools
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.comparison.shared_buffers import remove_shared_buffers
from benchmarks.comparison.suites import workload_of
from benchmarks.record import Measurement, Task
from benchmarks.training.measured_run import MeasuredRun, nvme_paths, use_deterministic_kernels
from benchmarks.training.storage_meter import StorageMeter
from benchmarks.training.train_fsdp import loss_scaler
from benchmarks.training.train_step import DeepSpeedTrainee, meter_storage
from benchmarks.training.warm_up import MOST_MORE_STEPS
from benchmarks.turns import Turnstile

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parent.parent.parent
STEPS, WARMUP = 3, 1


def test_what_trains_imports_nothing_of_the_report() -> None:
    """Start-up time and memory are measured: pandas and matplotlib would be most of either."""
    package = ROOT / "benchmarks"
    files = [package / name for name in ("__init__.py", "record.py", "turns.py", "workloads.py")]
    for file in [*files, *(package / "training").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0], *(alias.name for alias in node.names)}
            elif isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            else:
                continue
            assert not names & {"adjustText", "comparison", "jinja2", "matplotlib", "pandas", "reporting", "scipy"}, (
                file
            )


def config_on(path: Path, engine: str) -> dict[str, Any]:
    section = {"device": "nvme", "nvme_path": str(path), "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "single_submit": False, "overlap_events": True},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 2_000_000,
            "stage3_prefetch_bucket_size": 2_000_000,
            "stage3_max_reuse_distance": 0,
            "offload_param": dict(section),
            "offload_optimizer": dict(section),
        },
    }
    zero = config["zero_optimization"]
    if engine == "stock":
        zero["offload_param"] |= {"buffer_count": 40, "buffer_size": 2_200_000, "max_in_cpu": 0}
        zero["offload_optimizer"] |= {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
    else:
        options = {"host_memory": 0, "io_backend": "aio", "chunk_size": 4 << 20}
        config |= {"offload_engine": "tencache", "tencache": options}
    return config


def train(folder: Path, config: dict[str, Any], program: str = "train_step", **further: Any) -> tuple[Measurement, str]:
    """One run in its own process; its result and its log."""
    file, result = folder / "task.json", folder / "result.json"
    workload = workload_of("7M", ranks=1, micro_batch=1, sequence=16, accumulation=2, deterministic=True)
    task = Task(
        workload=workload, deepspeed_config=config, result=str(result), steps=STEPS, warmup=WARMUP,
        timeline_hz=50, profile=True, **further,
    )  # fmt: skip
    file.write_text(task.model_dump_json())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"
    command = [sys.executable, "-m", f"benchmarks.training.{program}", "--local_rank=0", str(file)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    remove_shared_buffers(port)
    assert done.returncode == 0, done.stdout[-6000:]
    return Measurement.model_validate_json(result.read_text()), done.stdout


def test_deterministic_kernels_are_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    mode = torch.get_deterministic_debug_mode()
    try:
        use_deterministic_kernels()
        assert torch.get_deterministic_debug_mode() == 2, "an error and not a warning: cuDNN's attention looks at that"
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8", "a user's own choice stays"
    finally:
        torch.set_deterministic_debug_mode(mode)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Measurement, str]]:
    found = {}
    for engine in ("stock", "tencache"):
        folder = tmp_path_factory.mktemp(engine)
        found[engine] = train(folder, config_on(folder, engine))
    return found


@pytest.mark.parametrize("engine", ["stock", "tencache"])
def test_a_run_is_measured(runs: dict[str, tuple[Measurement, str]], engine: str) -> None:
    run, _ = runs[engine]
    assert len(run.steps) == WARMUP + STEPS
    assert run.warmup_steps == WARMUP
    assert run.numel == 7_358_720
    for step in run.steps:
        assert len(step.losses) == 2
        assert 8 < float.fromhex(step.losses[0]) < 11
        parts = step.forward_s + step.backward_s + step.update_s
        assert step.seconds == pytest.approx(parts)
        assert 0 < step.storage_wait_s < step.seconds
        assert not step.skipped
    assert run.memory is not None
    assert run.memory.peak_rss_steady_nbytes >= run.steps[-1].rss_nbytes > 100 << 20
    measured = run.measured
    last = run.timeline[-1]
    # What was read between the warm-up and the timeline's start belongs to the first step.
    assert last.nvme_read_nbytes >= sum(step.nvme_read_nbytes for step in measured[1:]) > 0
    assert run.timeline[0].nvme_read_nbytes == 0
    assert last.t_s == pytest.approx(sum(step.seconds for step in measured), rel=0.1)


def test_every_step_gets_its_tokens_on_the_device() -> None:
    """The profiled one too, which only a GPU has."""
    workload = workload_of("7M", ranks=1, micro_batch=3, sequence=5, accumulation=2)
    task = Task(workload=workload, deepspeed_config={}, steps=2, warmup=1)
    run = SimpleNamespace(task=task, _rank=0)
    trainee = SimpleNamespace(vocabulary=7, device=torch.device("meta"))
    batches = list(MeasuredRun._draw(run, trainee))  # type: ignore[arg-type]
    assert len(batches) == 1 + MOST_MORE_STEPS + 2 + 1
    for batch in batches:
        assert [(tokens.device.type, tokens.shape) for tokens in batch] == [("meta", (3, 5))] * 2


@pytest.mark.parametrize(
    ("warmup", "settles_after", "expected"),
    [(2, 0, 2), (0, 5, 0), (2, 8, 10), (9, 8, 10), (12, 8, 12), (2, 1000, 2 + MOST_MORE_STEPS)],
    ids=["settled", "none", "later", "at_its_end", "within", "never"],
)
def test_the_warm_up_lasts_until_a_system_has_settled(warmup: int, settles_after: int, expected: int) -> None:
    kept: list[object] = []
    updated: dict[str, int] = {}
    run = SimpleNamespace(
        task=Task(workload=workload_of("7M", ranks=1), deepspeed_config={}, steps=1, warmup=warmup),
        _keep=kept.append,
        _step=lambda trainee, batch: batch,
        _update=lambda **values: updated.update(values),
    )
    trainee = SimpleNamespace(settled=lambda: len(kept) >= settles_after)
    MeasuredRun._warm_up(run, trainee, itertools.repeat([]))  # type: ignore[arg-type]
    assert len(kept) == updated["warmup_steps"] == expected


def test_stock_bytes_are_those_known(runs: dict[str, tuple[Measurement, str]]) -> None:
    run, _ = runs["stock"]
    step = run.steps[-1]
    # Per parameter: optimizer state 12 read and written, gradients 4 and 4, weights 2 read by each forward and
    # backward of two micro-steps, and 2 written. Tensors too small for stock to swap (1 MiB) stay in memory.
    assert 16 < step.nvme_read_nbytes / run.numel <= 24
    assert 14 < step.nvme_write_nbytes / run.numel <= 18
    if step.kernel_read_nbytes:  # a disk: the kernel counts the same, and the result file
        assert step.kernel_read_nbytes == pytest.approx(step.nvme_read_nbytes, rel=0.01)
        assert step.kernel_write_nbytes == pytest.approx(step.nvme_write_nbytes, rel=0.01)


def test_the_meter_counts_what_tencache_counts(runs: dict[str, tuple[Measurement, str]]) -> None:
    run, log = runs["tencache"]
    assert "agree" in log
    assert "DIFFER" not in log
    assert run.tencache_stats is not None
    assert run.tencache_stats["io_backend"] == "aio"
    assert run.tencache_counts is not None
    n_after_warm_up = len(run.steps) - run.warmup_steps
    assert run.tencache_counts["step"] == n_after_warm_up == run.tencache_stats["total"]["step"] - run.warmup_steps
    assert 0 < run.tencache_counts["nbytes"]["nvme_read"] < run.tencache_stats["total"]["nbytes"]["nvme_read"]
    assert run.tencache_counts["accesses"]["demand"] == 0
    # Means: reads ahead and late writes cross from one step into another. Two micro-steps read the weights four times.
    assert 14 < statistics.fmean(step.nvme_read_nbytes for step in run.measured) / run.numel <= 21
    assert 10 < statistics.fmean(step.nvme_write_nbytes for step in run.measured) / run.numel <= 18


def test_both_train_the_same(runs: dict[str, tuple[Measurement, str]]) -> None:
    losses = {engine: [step.losses for step in run.steps] for engine, (run, _) in runs.items()}
    assert losses["stock"] == losses["tencache"]


def test_turns_change_nothing_but_what_counts(runs: dict[str, tuple[Measurement, str]], tmp_path: Path) -> None:
    turnstile = Turnstile(tmp_path / "turns")
    turnstile.prepare(os.getpid())
    for turn in range(STEPS):
        turnstile.open(turn)
    run, _ = train(tmp_path, config_on(tmp_path, "tencache"), turns=STEPS, gate=str(turnstile.folder))
    assert all(turnstile.is_waiting(turn) for turn in range(STEPS))
    assert [(step.turn, step.resumed) for step in run.steps] == [(0, False)] * WARMUP + [
        (turn, resumed) for turn in range(STEPS) for resumed in (True, False)
    ]
    assert len(run.measured) == STEPS
    alone = [step.losses for step in runs["tencache"][0].steps]
    assert [step.losses for step in run.steps][: len(alone)] == alone
    assert run.timeline[-1].t_s < sum(step.seconds for step in run.steps[WARMUP:])
    assert run.timeline[-1].t_s > 0.8 * sum(step.seconds for step in run.measured)


def test_a_step_lasts_until_the_next_one_ends() -> None:
    """What an engine has not done when a step returns is no gain: it counts where the training waits for it."""
    quick, slow_s = torch.zeros(1), 0.2
    trainee = SimpleNamespace(
        loss_scale=lambda: None, n_skipped=lambda: 0, forward=lambda tokens: quick, backward=lambda loss: None,
        step=lambda: None, stall_s=lambda: 0.0,
    )  # fmt: skip
    run = MeasuredRun.__new__(MeasuredRun)
    run._last_mark = run._t_last_step = None
    run._children_nbytes = run._host_used_before = run._peak_rss = 0
    run.meter = StorageMeter()
    first = MeasuredRun._step(run, trainee, [quick])  # type: ignore[arg-type]
    time.sleep(slow_s)
    second = MeasuredRun._step(run, trainee, [quick])  # type: ignore[arg-type]
    assert first.seconds < slow_s <= second.seconds
    assert second.seconds == pytest.approx(second.forward_s + second.backward_s + second.update_s)


def test_the_statistics_of_a_step_do_not_wait_for_its_update() -> None:
    waits: list[str] = []
    session = SimpleNamespace(
        stats=lambda: waits.append("stats"),
        look=lambda: SimpleNamespace(total=SimpleNamespace(stall_seconds={"buffer": 1.5})),
    )
    assert DeepSpeedTrainee.stall_s(SimpleNamespace(tencache=session)) == 1.5  # type: ignore[arg-type]
    assert not waits


def test_pinned_memory_of_tencache_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; elsewhere nothing is registered."""
    made = SimpleNamespace(
        _can_reset_peak=False, _children_nbytes=0, _peak_rss=7, _gather=lambda value: [value], _rank=0,
    )  # fmt: skip
    assert MeasuredRun._memory(made, 5, {"pinned_nbytes": 9}).registered_nbytes == 0  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3)
    monkeypatch.setattr("benchmarks.training.instruments.pinned_by_torch_nbytes", lambda: 2)
    memory = MeasuredRun._memory(made, 5, {"pinned_nbytes": 9})  # type: ignore[arg-type]
    assert (memory.registered_nbytes, memory.gpu_peak_nbytes) == (9, 3)
    assert MeasuredRun._memory(made, 5, None).registered_nbytes == 0  # type: ignore[arg-type]


def test_fsdp_trains_about_the_same(runs: dict[str, tuple[Measurement, str]], tmp_path: Path) -> None:
    run, _ = train(tmp_path, config_on(tmp_path, "stock"), "train_fsdp")
    assert run.numel == runs["stock"][0].numel
    for step, stock in zip(run.steps, runs["stock"][0].steps, strict=True):
        ours, theirs = ([float.fromhex(loss) for loss in found.losses] for found in (step, stock))
        assert ours == pytest.approx(theirs, rel=2e-3)
        assert step.nvme_read_nbytes == step.nvme_write_nbytes == 0


def test_where_a_config_offloads_to(tmp_path: Path) -> None:
    config = config_on(tmp_path, "stock")
    assert nvme_paths(config) == [str(tmp_path)] * 2
    config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    del config["zero_optimization"]["offload_optimizer"]
    assert nvme_paths(config) == []
    assert nvme_paths({}) == []


def test_gpu_direct_storage_is_not_measured(tmp_path: Path) -> None:
    config = config_on(tmp_path, "stock")
    config["aio"]["use_gds"] = True
    with pytest.raises(ValueError, match="use_gds"):
        meter_storage(StorageMeter(), config)


def test_fsdp_has_the_loss_scaler_of_the_config() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}
    scaler = loss_scaler({"fp16": fp16})
    assert (scaler.loss_scale, scaler.scale_window, scaler.delayed_shift, scaler.min_scale) == (16, 2, 1, 1)
    assert loss_scaler({"fp16": {"enabled": True, "loss_scale": 128}}).loss_scale == 128
    assert loss_scaler({"bf16": {"enabled": True}}).loss_scale == 1
