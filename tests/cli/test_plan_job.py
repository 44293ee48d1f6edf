# SPDX-License-Identifier: Apache-2.0
"""``tencache plan --job`` with the figures of a job that are given."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tencache_ds.cli import main, plan, plots
from tencache_ds.errors import TenCacheError
from tencache_ds.observability.channel import Channel
from tencache_ds.observability.counters import Stats, StepRecord
from tencache_ds.observability.paths import Contents, PathStats
from tencache_ds.planning.step_prediction import ObservedStep

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("channel_folder")]

GIB = 2**30


@pytest.fixture(autouse=True)
def available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "available_nbytes", lambda: 100 * GIB)


def record(step: int, seconds: float, state_nbytes: int) -> StepRecord:
    """0.8 s of passes, which hide 0.3 s of an update; this takes 0.5 s and waits for NVMe for the rest."""
    update = seconds - 0.8 + 0.3
    return StepRecord(
        step=step,
        seconds=seconds,
        update_seconds=0.1,
        nbytes={"nvme_read": state_nbytes, "nvme_write": state_nbytes, "h2d": 0, "d2h": 0},
        stall_seconds={"weight_read": 0.0, "optimizer_read": 0.0, "buffer": 0.0, "update": update - 0.4},
        accesses={"resident": 6, "prefetched": 0, "late": 0, "demand": 0},
        events={},
        background_seconds=update - 0.1,
        background_stall_seconds={"optimizer_read": update - 0.5},
    )


def snapshot(
    last: StepRecord | None,
    *,
    rank: int = 0,
    world_size: int = 1,
    stored_nbytes: int = 20 * GIB,
    steps: int = 20,
    settled: bool = True,
) -> dict[str, Any]:
    contents = (Contents("optimizer", 9, stored_nbytes),) if stored_nbytes else ()
    stats = Stats(
        total=dataclasses.replace(record(0, 10.0, 0), step=steps),
        last_step=last,
        resident_weight_nbytes=5 * GIB,
        host_gradient_nbytes=4 * GIB,
        resident_state_nbytes=2 * GIB,
        gpu_state_nbytes=3 * GIB,
        state_nbytes=5 * GIB + stored_nbytes * 12 // 10,  # its master weights are split
        stored_nbytes=stored_nbytes,
        settled=settled,
        placement="3.00 GiB of optimizer state are in GPU memory",
        paths=(PathStats("/nvme", "native", 0, 0, 0.0, 0.0, None, contents),),
    )
    engine = {"number": 0, "steps": steps, "seconds_in_step": 0.25, "stats": dataclasses.asdict(stats)}
    return {
        "pid": os.getpid() + rank, "rank": rank, "world_size": world_size, "host": "node1", "run_id": "run-1",
        "program": "train.py", "engines": [engine],
    }  # fmt: skip


@contextmanager
def serving(*answers: Callable[[], dict[str, Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for answer in answers:
            channel = Channel(lambda request, client, answer=answer: client.send(answer()))  # type: ignore[misc]
            stack.enter_context(closing(channel))
        yield


def printed_of(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_job_that_waits_for_state_from_nvme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = [10]

    def answer() -> dict[str, Any]:  # a slow step and two usual ones
        number[0] += 1
        return snapshot(record(number[0], 30.0 if number[0] == 11 else 10.8, 20 * GIB))

    file = tmp_path / "job.json"
    with serving(answer):
        assert main(["plan", "--job", "--seconds", "0.5", "--json", str(file)]) == 0
    printed = printed_of(capsys)
    for expected in (
        "run run-1, rank 0 of 1 on node1",
        "weights 0 B 5.0 GiB 0 B",
        "gradients 0 B 4.0 GiB 0 B",
        "optimizer state 3.0 GiB 2.0 GiB 20.0 GiB",
        "a step takes 10.8 s",
        "forward and backward 0.8 s, waits for NVMe 9.8 s, update 0.2 s",
        "as now 42.9 10.8 s waits for NVMe 9.8 s",
        "+ 8.0 GiB 28.6 7.37 s",  # a third of 24 GiB in memory, of an update of 10.3 s
        "+ 16.0 GiB 14.3 3.93 s",
        "+ 24.0 GiB 0.0 1 s forward and backward 0.8 s",
        "100.0 GiB are available on this host",
        "GPU memory: 3.00 GiB of optimizer state are in GPU memory",
    ):
        assert expected in printed, expected
    assert "warming up" not in printed
    saved = json.loads(file.read_text())
    assert saved["run_id"] == "run-1"
    assert [row[0]["more_nbytes"] for row in saved["rows"]] == [0, 8 * GIB, 16 * GIB, 24 * GIB]
    assert saved["ranks"][0]["state_in_memory_nbytes"] == 24 * GIB


def test_the_slowest_rank_counts_and_bytes_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [
        lambda: snapshot(record(20, 4.8, 5 * GIB), rank=0, world_size=2, stored_nbytes=5 * GIB),
        lambda: snapshot(record(20, 8.8, 20 * GIB), rank=1, world_size=2),
    ]
    with serving(*ranks):
        assert main(["plan", "--job", "run-1", "--seconds", "0.1"]) == 0
    printed = printed_of(capsys)
    assert "ranks 0-1 of 2 on node1" in printed
    assert "optimizer state 6.0 GiB 4.0 GiB 25.0 GiB" in printed
    assert "a step takes 8.8 s (step 20)" in printed
    assert "as now 53.7 8.8 s" in printed
    assert "+ 8.0 GiB 28.6 6.03 s" in printed  # nothing of the first is left on NVMe


def test_what_each_layer_keeps_where_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def places(*nbytes: int) -> dict[str, list[int]]:
        return {"weights": list(nbytes), "gradients": [nbytes[0], 0, 0], "optimizer state": [0, 0, 6 * sum(nbytes)]}

    weights = {
        "model.embed_tokens.weight": places(GIB, 0, 0),
        **{f"model.layers.{layer}.mlp.{name}.weight": places(0, GIB, 0) for layer in range(12) for name in "ud"},
        "lm_head.weight": places(0, 0, GIB),
        "scale": places(0, 4, 0),
    }

    def answer(request: dict[str, Any], client: Any) -> None:
        looks_at_places = request["command"] == "residency" and request["engine"] == 0
        client.send({"weights": weights} if looks_at_places else snapshot(record(20, 10.8, 20 * GIB)))

    file = tmp_path / "places.svg"
    with closing(Channel(answer)):
        assert main(["plan", "--job", "--seconds", "0.1", "--plot", str(file)]) == 0
    assert f"layers drawn in {file}" in printed_of(capsys)
    drawn = file.read_text()
    for expected in ("model.layers.11", "lm_head", "GPU memory", "RAM", "NVMe", "26.00 GiB", "156.00 GiB"):
        assert f"<!-- {expected}" in drawn or f", {expected} -->" in drawn, expected
    layers = plots.by_layer([weights, weights])
    assert list(layers) == ["model.embed_tokens", *(f"model.layers.{layer}" for layer in range(12)), "lm_head", "scale"]
    assert layers["model.layers.3"]["weights"] == [0, 4 * GIB, 0]


def test_a_job_of_an_earlier_version_cannot_say_what_is_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: dict[str, Any], client: Any) -> None:
        if request["command"] == "residency":
            raise TenCacheError("there is no command 'residency' in this version of tencache_ds")
        client.send(snapshot(record(20, 10.8, 20 * GIB)))

    with closing(Channel(answer)):
        assert main(["plan", "--job", "--seconds", "0.1", "--plot", str(tmp_path / "places.png")]) == 1
    assert "there is no command 'residency'" in capsys.readouterr().err


def test_a_job_whose_gpu_memory_has_not_its_contents_yet(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda: snapshot(record(20, 1.3, 20 * GIB), settled=False)):
        assert main(["plan", "--job", "--seconds", "0.1"]) == 0
    assert "The job is still warming up" in printed_of(capsys)


def test_nothing_on_nvme(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda: snapshot(record(5, 1.3, 0), stored_nbytes=0, steps=5)):
        assert main(["plan", "--job", "--seconds", "0.1"]) == 0
    printed = printed_of(capsys)
    assert "Nothing is on NVMe: more RAM would not make it faster." in printed
    assert "RAM per rank" not in printed
    assert "The job is still warming up" in printed


def test_a_job_without_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda: snapshot(None)):
        assert main(["plan", "--job", "--seconds", "0.1"]) == 1
    assert "rank 0 of job run-1 has not finished a step yet" in capsys.readouterr().err


def test_no_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--job", "--seconds", "0.1"]) == 1
    assert "tencache plan: no training with TenCache was found" in capsys.readouterr().err


def test_the_job_ends_while_it_is_observed(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([snapshot(record(20, 10.8, 20 * GIB))])
    with serving(lambda: next(answers, {"error": "ended"})):
        assert main(["plan", "--job", "--seconds", "1"]) == 0
    assert "a step takes 10.8 s (step 20)" in printed_of(capsys)


def test_a_job_is_not_described_by_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--job", "--params", "7B", "--micro-batch", "4", "--plot", str(tmp_path / "plan.png")]
    assert main(argv) == 1
    assert "leave --params, --micro-batch out" in capsys.readouterr().err


@pytest.mark.parametrize(("gib", "amounts"), [(0, [0]), (4, [0, 2, 4]), (12, [0, 8, 12]), (40, [0, 8, 16, 40])])
def test_amounts_of_memory(gib: int, amounts: list[int]) -> None:
    step = ObservedStep(seconds=1.0, stored_state_nbytes=gib * GIB, state_in_memory_nbytes=gib * GIB)
    assert plan.amounts([step]) == [each * GIB for each in amounts]
