# SPDX-License-Identifier: Apache-2.0
"""Alternation, search, failures, interruption and resumption of a benchmark, with scripted runs instead of training."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import command
from benchmarks.comparison import runner
from benchmarks.comparison.runner import RESULT_FILE, OutOfTime, Session
from benchmarks.comparison.suites import Plan, parse_entries, workload_of
from benchmarks.record import Benchmark, Outcome, Run, Step
from tencache_ds.errors import ConfigError
from tencache_ds.profiling.hardware import Hardware, StorageRates

STORAGE = StorageRates(
    read_bytes_per_s=2e9, write_bytes_per_s=1e9, mixed_bytes_per_s=2e9, request_nbytes=2**23, lanes=8, direct=True,
    filesystem="ext4",
)  # fmt: skip
HARDWARE = Hardware(cpu="a processor", cores=2, memory_nbytes=2**35, storage=STORAGE, cpu_adam_params_per_s=1e9)


class ScriptedMachine:
    """A machine with given rates."""

    versions_now = "1"
    n_gpus = 0

    def __init__(self) -> None:
        self.done: list[str] = []

    def gpus(self) -> int:
        return self.n_gpus

    def build_operators(self, others: Iterable[str]) -> None:
        self.done += ["operators", *sorted(others)]

    def identity(self) -> tuple[str, int, str | None]:
        return HARDWARE.cpu, HARDWARE.cores, None

    def versions(self) -> dict[str, str]:
        return {"torch": self.versions_now}

    def probe(self, nvme_path: Path, seconds: float) -> Hardware:
        self.done.append("probe")
        return HARDWARE


class ScriptedRuns:
    """Stands for ``process.execute``: seconds of a step from a function of the request; None means a failure."""

    def __init__(self, seconds: Callable[[Any], float | None]) -> None:
        self.seconds = seconds
        self.requests: list[Any] = []
        self.together: list[tuple[list[str], int]] = []

    @property
    def order(self) -> list[str]:
        return [request.configuration for request in self.requests if request.round >= 0]

    def __call__(self, requests: list[Any], folder: Path, *, n_turns: int, **_: Any) -> list[Run]:
        self.together.append(([request.configuration for request in requests], n_turns))
        return [self._run(request, folder) for request in requests]

    def _run(self, request: Any, folder: Path) -> Run:
        self.requests.append(request)
        nvme = Path(
            request.task.deepspeed_config["zero_optimization"].get("offload_optimizer", {}).get("nvme_path", folder)
        )
        if nvme != folder:
            (nvme / "zero_stage_3").mkdir()  # what a killed run of stock leaves behind; a second one would fail here
        seconds = self.seconds(request)
        fields: dict[str, Any] = {
            "configuration": request.configuration,
            "round": request.round,
            "wall_s": 20.0,
        }
        if seconds is None:
            return Run(outcome=Outcome.failed, error="RuntimeError: it broke", **fields)
        step = Step(
            losses=["0x1p+0"], seconds=seconds, forward_s=0, backward_s=0, update_s=0, storage_wait_s=0,
            nvme_read_nbytes=1, nvme_write_nbytes=1, kernel_read_nbytes=1, kernel_write_nbytes=1, rss_nbytes=1,
            host_used_nbytes=1,
        )  # fmt: skip
        stats = None
        if request.configuration == "tencache":
            stats = {"resident_weight_nbytes": 7_000_000, "paths": [{"path": f"{nvme}/scratch"}]}
        return Run(
            outcome=Outcome.ok, numel=7_000_000,
            steps=[step] * (request.task.warmup + request.task.steps), warmup_steps=request.task.warmup,
            tencache_stats=stats, **fields,
        )  # fmt: skip


def plan(*names: str, **changes: Any) -> Plan:
    return Plan(
        title="t", workload=workload_of("7M", ranks=1), entries=parse_entries(names or ("nvme-nvme", "tencache")),
        **({"max_trials": 0} | changes),
    )  # fmt: skip


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "out").mkdir()
    return {"out": tmp_path / "out", "nvme_path": tmp_path / "nvme", "command": "c"}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], float | None]], ScriptedRuns]:
    def install(seconds: Callable[[Any], float | None]) -> ScriptedRuns:
        runs = ScriptedRuns(seconds)
        monkeypatch.setattr(runner, "execute", runs)
        return runs

    return install


def test_configurations_alternate(options: dict[str, Any], scripted: Any) -> None:
    runs = scripted(lambda request: 2.0)
    benchmark = Session(plan(rounds=2, **options), ScriptedMachine()).run()
    assert runs.order == ["nvme-nvme", "tencache", "nvme-nvme", "tencache"]
    assert [run.round for run in benchmark.runs] == [0, 0, 1, 1]
    assert benchmark == Benchmark.read(options["out"] / RESULT_FILE)
    assert list(options["nvme_path"].iterdir()) == []


def test_turns_give_each_configuration_storage_of_its_own(options: dict[str, Any], scripted: Any) -> None:
    runs = scripted(lambda request: None if request.configuration == "ram-nvme" else 2.0)
    names = ("nvme-nvme", "ram-nvme", "tencache")
    benchmark = Session(plan(*names, rounds=2, turns=2, steps=4, **options), ScriptedMachine()).run()
    assert runs.together == [(["nvme-nvme", "ram-nvme", "tencache"], 2), (["nvme-nvme", "tencache"], 2)]
    paths = {
        request.task.deepspeed_config["zero_optimization"]["offload_optimizer"]["nvme_path"]
        for request in runs.requests[:3]
    }
    assert len(paths) == 3
    assert list(options["nvme_path"].iterdir()) == []
    assert len(benchmark.runs_of("tencache")) == 2
    for run in benchmark.runs:
        assert run.knobs or run.configuration == "tencache"
        assert run.deepspeed_config["zero_optimization"]["offload_optimizer"]["nvme_path"] == "FOLDER"
    Session(plan(*names, rounds=2, turns=2, steps=4, **options), ScriptedMachine()).run()
    assert len(runs.together) == 2  # nothing left to do


def test_turns_of_a_round_fit_the_time_limit_together(options: dict[str, Any]) -> None:
    limited = options | {"time_limit": 2 * runner.TYPICAL_RUN_S - 1}
    with pytest.raises(OutOfTime, match="about 180 s"):
        Session(plan(turns=2, steps=4, **limited), ScriptedMachine()).run()


def test_bounds_follow_the_placement(options: dict[str, Any], scripted: Any) -> None:
    scripted(lambda request: 2.0)
    benchmark = Session(plan(**options), ScriptedMachine()).run()
    assert benchmark.placements["nvme-nvme"].weights_nvme == 1
    assert benchmark.placements["tencache"].weights_nvme == pytest.approx(0.5)  # 7 of 14 MB stayed in memory
    assert benchmark.bounds_s["tencache"] < benchmark.bounds_s["nvme-nvme"]
    assert set(benchmark.limits.values()) == {"nvme"}
    # Without a rate of the arithmetic nothing says where it would take as long.
    assert benchmark.balance_tokens == {}


def test_where_arithmetic_takes_as_long_as_storage(options: dict[str, Any], scripted: Any) -> None:
    class Calculating(ScriptedMachine):
        def probe(self, nvme_path: Path, seconds: float) -> Hardware:
            return HARDWARE.model_copy(update={"matmul_flops_per_s": 1e12})

    scripted(lambda request: 2.0)
    benchmark = Session(plan("nvme-nvme", "tencache", "ram-ram", **options), Calculating()).run()
    assert set(benchmark.balance_tokens) == {"nvme-nvme", "tencache"}
    for name, tokens in benchmark.balance_tokens.items():
        arithmetic_s = 6 * 7_000_000 * tokens / 1e12
        assert benchmark.limits[name] == "nvme"
        assert arithmetic_s == pytest.approx(benchmark.bounds_s[name])


def test_the_best_of_the_search_is_measured(options: dict[str, Any], scripted: Any) -> None:
    def seconds(request: Any) -> float | None:
        threads = request.task.deepspeed_config.get("aio", {}).get("intra_op_parallelism")
        return {4: 3.0, 8: 1.0, 1: None, 16: 2.0, None: 1.0}[threads]

    runs = scripted(seconds)
    benchmark = Session(plan(max_trials=4, **options), ScriptedMachine()).run()
    stock, ours = benchmark.configurations
    assert stock.knobs["aio_threads"] == 8
    assert stock.searched == {"aio_threads": [4, 8, 1, 16]}
    assert ours.searched == {}
    tried = [(run.knobs["aio_threads"], run.outcome is Outcome.ok) for run in benchmark.tuning]
    assert tried == [(4, True), (8, True), (1, False), (16, True), (4, True), (8, True)]
    measured = [request for request in runs.requests if request.round >= 0 and request.configuration == "nvme-nvme"]
    assert all(request.task.deepspeed_config["aio"]["intra_op_parallelism"] == 8 for request in measured)


def test_what_fails_is_a_row_and_is_not_tried_in_each_round(options: dict[str, Any], scripted: Any) -> None:
    runs = scripted(lambda request: None if request.configuration == "nvme-nvme" else 1.0)
    benchmark = Session(plan(rounds=3, **options), ScriptedMachine()).run()
    assert runs.order == ["nvme-nvme", "tencache", "tencache", "tencache"]
    failure = benchmark.failure_of("nvme-nvme")
    assert failure is not None
    assert failure.error == "RuntimeError: it broke"

    runs = scripted(lambda request: 1.0)
    again = Session(plan(rounds=3, **(options | {"retry_failed": True})), ScriptedMachine()).run()
    assert runs.order == ["nvme-nvme"] * 3
    assert again.failure_of("nvme-nvme") is None


def test_what_cannot_run_is_a_row_with_its_reason(options: dict[str, Any], scripted: Any) -> None:
    runs = scripted(lambda request: 1.0)
    benchmark = Session(plan("gpu-gpu", "tencache", rounds=2, **options), ScriptedMachine()).run()
    assert runs.order == ["tencache", "tencache"]
    failure = benchmark.failure_of("gpu-gpu")
    assert failure is not None
    assert failure.outcome is Outcome.cannot_run
    assert "GPU" in failure.error
    Session(plan("gpu-gpu", "tencache", rounds=2, **options), ScriptedMachine()).run()
    assert len(Benchmark.read(options["out"] / RESULT_FILE).runs) == 3  # said once


def test_operators_are_built_before_the_probe_and_once_per_benchmark(options: dict[str, Any], scripted: Any) -> None:
    scripted(lambda request: 1.0)
    begun, resumed = ScriptedMachine(), ScriptedMachine()
    Session(plan(rounds=1, **options), begun).run()
    Session(plan(rounds=2, **options), resumed).run()
    assert begun.done == ["operators", "probe"]
    assert resumed.done == []


@pytest.mark.parametrize(("n_gpus", "built"), [(0, []), (1, ["FusedAdamBuilder"])])
def test_operators_of_configurations_that_cannot_run_are_not_built(
    options: dict[str, Any], scripted: Any, n_gpus: int, built: list[str]
) -> None:
    scripted(lambda request: 1.0)
    machine = ScriptedMachine()
    machine.n_gpus = n_gpus
    Session(plan("gpu-gpu", "tencache", **options), machine).run()
    assert machine.done == ["operators", *built, "probe"]


def test_the_record_has_every_config_without_paths(options: dict[str, Any], scripted: Any) -> None:
    scripted(lambda request: 1.0)
    benchmark = Session(plan(max_trials=2, **options), ScriptedMachine()).run()
    for run in benchmark.tuning + benchmark.runs:
        assert run.deepspeed_config["zero_optimization"]["offload_optimizer"]["nvme_path"] == "FOLDER"
    assert all(run.knobs for run in benchmark.tuning)
    (ours,) = benchmark.runs_of("tencache")[:1]
    assert ours.tencache_stats is not None
    assert ours.tencache_stats["paths"] == [{"path": "FOLDER/scratch"}]
    assert str(options["nvme_path"]) not in (options["out"] / RESULT_FILE).read_text()


@pytest.mark.parametrize("cut", range(1, 9))
def test_an_interruption_loses_nothing(options: dict[str, Any], scripted: Any, cut: int) -> None:
    def stop(request: Any) -> float:
        if len(runs.requests) == cut:
            raise KeyboardInterrupt
        return 1.0

    runs = scripted(stop)
    with pytest.raises(KeyboardInterrupt):
        Session(plan(max_trials=5, rounds=2, **options), ScriptedMachine()).run()
    assert list(options["nvme_path"].iterdir()) == []
    before = runs.requests[: cut - 1]
    runs = scripted(lambda request: 1.0)
    benchmark = Session(plan(max_trials=5, rounds=2, **options), ScriptedMachine()).run()
    everything = [(request.configuration, request.round) for request in before + runs.requests]
    assert everything == [(run.configuration, run.round) for run in benchmark.tuning + benchmark.runs]
    assert len(everything) == len(set(everything)) == 9


def test_the_time_limit_stops_between_runs(options: dict[str, Any], scripted: Any) -> None:
    scripted(lambda request: 1.0)
    limited = options | {"time_limit": runner.TYPICAL_RUN_S - 1}
    with pytest.raises(OutOfTime, match="about 90 s"):
        Session(plan(**limited), ScriptedMachine()).run()
    assert Benchmark.read(options["out"] / RESULT_FILE).runs == []


def test_results_of_another_machine_or_workload_are_not_mixed(options: dict[str, Any], scripted: Any) -> None:
    scripted(lambda request: 1.0)
    Session(plan(**options), ScriptedMachine()).run()
    other = ScriptedMachine()
    other.versions_now = "2"
    with pytest.raises(ConfigError, match="another set of versions"):
        Session(plan(**options), other).run()
    changed = replace(plan(**options), workload=workload_of("7M", ranks=1, micro_batch=3))
    with pytest.raises(ConfigError, match="another workload"):
        Session(changed, ScriptedMachine()).run()


def test_a_folder_that_cannot_be_written_is_named(options: dict[str, Any], scripted: Any) -> None:
    scripted(lambda request: 1.0)
    blocked = options["out"] / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="--nvme-path .*file"):
        Session(plan(**(options | {"nvme_path": blocked / "nvme"})), ScriptedMachine()).run()


def test_report_of_a_folder_without_a_benchmark_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--report", str(tmp_path)]) == command.EXIT_PROBLEM
    assert f"{tmp_path} holds no {RESULT_FILE}" in capsys.readouterr().err


def test_a_benchmark_that_is_terminated_gets_to_ending_its_runs(tmp_path, monkeypatch):
    ended = []

    def run(session: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        finally:
            ended.append(session)

    monkeypatch.setattr(command.Session, "run", run)
    before = signal.getsignal(signal.SIGTERM)
    t_start_s = time.monotonic()
    words = ["tencache", "--model", "7M", "--nvme-path", str(tmp_path), "--out", str(tmp_path / "out")]
    assert command.main(words) == command.EXIT_INTERRUPTED
    assert len(ended) == 1
    assert time.monotonic() - t_start_s < 20
    assert signal.getsignal(signal.SIGTERM) is before
