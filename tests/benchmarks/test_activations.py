# SPDX-License-Identifier: Apache-2.0
"""The comparison of systems that move activations, on a small model."""

from __future__ import annotations

import json

import pytest

from benchmarks.activations import command as activations

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
"""Long, since test_smoke.py runs such processes, and tests/integration compares such training."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("activations")
    words = ["tencache:activation_min_size=64KiB", "stock-offload", "keep:no_such_option=1"]
    words += ["--model", "7M", "--sequence", "256", "--steps", "1", "--warmup", "1", "--out", str(folder)]
    assert activations.run(words) == 1, "the last one cannot run"
    return {each["system"]: each for each in json.loads((folder / "activations.json").read_text())["runs"]}


def test_systems_train_alike(runs: dict[str, dict[str, object]]) -> None:
    moved, stock, _ = runs.values()
    assert moved["losses"] == stock["losses"]
    assert moved["host_activation_nbytes"] > 2 * 256 * 256 * 2, "inputs of the first two blocks, in 16 bits"


def test_what_cannot_run_says_why(runs: dict[str, dict[str, object]]) -> None:
    assert "no_such_option" in str(runs["keep:no_such_option=1"]["error"])
