# SPDX-License-Identifier: Apache-2.0
"""The quick check of the benchmark on real training, as a user starts it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.record import Benchmark, Outcome

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(480)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("bench")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TENCACHE_")}
    command = [sys.executable, "-m", "tencache_ds.cli", "bench", "--smoke", "--nvme-path", str(folder / "nvme"),
               "--out", str(folder / "out")]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=460, check=False
    )  # fmt: skip
    return done, folder


def test_it_ends_well_and_leaves_nothing_on_the_storage(
    finished: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, folder = finished
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert list((folder / "nvme").iterdir()) == []
    assert (folder / "out" / "report.md").read_text().startswith("# ")
    assert list((folder / "out").glob("report_*.png"))


def test_every_configuration_was_measured(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    benchmark = Benchmark.read(finished[1] / "out" / "benchmark.json")
    assert [run.error for run in benchmark.runs if run.outcome is not Outcome.ok] == []
    assert [trial.configuration for trial in benchmark.tuning] == ["nvme-nvme"] * 2
    for configuration in benchmark.configurations:
        (run,) = benchmark.runs_of(configuration.name)
        assert 0 < run.step_s < math.inf
        assert benchmark.bounds_s[configuration.name] > 0


def test_bytes_are_those_that_each_side_has_to_move(
    finished: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    benchmark = Benchmark.read(finished[1] / "out" / "benchmark.json")
    per_param = {}
    for configuration in benchmark.configurations:
        (run,) = benchmark.runs_of(configuration.name)
        moved = [step.nvme_read_nbytes + step.nvme_write_nbytes for step in run.measured]
        per_param[configuration.name] = sum(moved) / len(moved) / run.numel
    stock, ours, ram = (per_param[c.name] for c in benchmark.configurations)
    assert 31 < stock < 40  # at most 38; stock keeps the gradients of a small model in its buffers
    # There is RAM for half of the 16 bytes: weights and gradients take 4 of them, state that does not fit goes to NVMe
    # in chunks of 4 MiB.
    placement = benchmark.placements[benchmark.configurations[1].name]
    assert placement.weights_nvme < 0.01  # statistics do not count what DeepSpeed keeps on the device
    assert 0.6 < placement.optimizer_nvme < 1
    # Reads ahead and late writes of some chunks may cross the ends of the three measured steps; each is 1.4 bytes of
    # the mean. Gradients on NVMe would be 8 more; tests/integration measures it exactly.
    assert ours == pytest.approx(24 * placement.optimizer_nvme, abs=3 * 1.4)
    assert ram == 0


def test_losses_are_identical(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    benchmark = Benchmark.read(finished[1] / "out" / "benchmark.json")
    runs = {run.configuration: [step.losses for step in run.steps] for run in benchmark.runs}
    oracle = runs["ram-ram"]
    for name, losses in runs.items():
        if name.startswith("tencache"):
            assert losses == oracle
