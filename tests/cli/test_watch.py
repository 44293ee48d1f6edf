# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tencache_ds.cli import main
from tencache_ds.observability.channel import Channel
from tencache_ds.observability.counters import Stats, StepRecord
from tencache_ds.observability.paths import Contents, PathStats

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("channel_folder")]

MIB = 2**20


def record(step: int, seconds: float, nvme_read: int) -> StepRecord:
    return StepRecord(
        step=step,
        seconds=seconds,
        update_seconds=0.5,
        nbytes={"nvme_read": nvme_read, "nvme_write": 0, "h2d": 2 * MIB, "d2h": 0},
        stall_seconds={"weight_read": 1.0, "optimizer_read": 0.0, "buffer": 0.25, "write_back": 0.0, "update": 0.0},
        accesses={"resident": 6, "prefetched": 1, "late": 1, "demand": 0},
        events={},
    )


CONTENTS = (Contents("weights", 3, 30 * MIB), Contents("optimizer", 4, 40 * MIB), Contents("activations", 2, 8 * MIB))


def snapshot(rank: int = 0, run_id: str = "run-1", world_size: int = 1, **changes: Any) -> dict[str, Any]:
    stats = Stats(
        total=record(7, 20.0, 100 * MIB),
        last_step=record(7, 2.0, 20 * MIB),
        gpu_state_nbytes=3 * MIB,
        resident_weight_nbytes=5 * MIB,
        gpu_activation_nbytes=6 * MIB,
        activation_buffer_nbytes=9 * MIB,
        checkpoint_nbytes=5 * MIB,
        nvme_activation_nbytes=8 * MIB,
        paths=(PathStats("/nvme", "native", 0, 0, 0.0, 0.0, None, CONTENTS),),
        placement="all weights in GPU memory",
        predicted_seconds=1.9,
    )
    engine = {"number": 0, "steps": 7, "seconds_in_step": 0.25, "stats": dataclasses.asdict(stats)}
    return {
        "pid": os.getpid() + rank,
        "rank": rank,
        "world_size": world_size,
        "host": "node1",
        "run_id": run_id,
        "program": "train.py",
        "engines": [engine],
    } | changes


def serve(answer: Callable[[], dict[str, Any]]) -> Channel:
    return Channel(lambda request, client: client.send(answer()))


def test_the_figures_of_a_rank(capsys: pytest.CaptureFixture[str]):
    channel = serve(snapshot)
    assert main(["watch", "--once"]) == 0
    channel.close()
    printed = capsys.readouterr().out
    for expected in (
        "run run-1, rank 0 of 1 on node1",
        "last step 2.00 s",
        "predicted 1.90 s",
        "since then 250 ms",
        "activations, last pass 6.0 MiB RAM",
        "activation buffers 9.0 MiB",
        "checkpoint being written 5.0 MiB",
        "NVMe weights 30.0 MiB optimizer state 40.0 MiB activations, last pass 8.0 MiB",
        "NVMe read 10.0 MiB/s",  # of the last step
        "resident 6 (75%)",
        "late 1 (12%)",
        "weight_read 1.00 s (50.0%)",
        "NVMe 1.25 s (62.5%)",
        "bound by NVMe",
        "placement: all weights in GPU memory",
    ):
        assert expected in " ".join(printed.split()), expected


def test_ranks_of_other_hosts_are_mentioned(capsys: pytest.CaptureFixture[str]):
    channels = [serve(lambda rank=rank: snapshot(rank, world_size=16)) for rank in (8, 9)]
    assert main(["watch", "--once", "run-1"]) == 0
    for channel in channels:
        channel.close()
    printed = capsys.readouterr().out
    assert "ranks 8-9 of 16 (the others are on other hosts" in printed
    assert "rank 8" in printed
    assert "rank 9" in printed


def test_several_jobs_are_listed(capsys: pytest.CaptureFixture[str]):
    channels = [serve(lambda name=name: snapshot(run_id=name)) for name in ("run-1", "run-2")]
    assert main(["watch", "--once"]) == 1
    assert main(["watch", "--once", "run-3"]) == 1
    assert main(["watch", "--once", "run-2"]) == 0
    for channel in channels:
        channel.close()
    printed = capsys.readouterr()
    assert "run-1" in printed.out
    assert "2 jobs are running: name one" in printed.err
    assert "no job run-3" in printed.err


def test_without_a_job(capsys: pytest.CaptureFixture[str]):
    idle = serve(lambda: snapshot(engines=[]))
    for command in ("watch", "trace"):
        assert main([command]) == 1
        assert f"tencache {command}: no training with TenCache was found" in capsys.readouterr().err
    idle.close()


def test_it_refreshes_with_the_rates_since_then_until_the_job_ends(capsys: pytest.CaptureFixture[str]):
    asked = threading.Semaphore(0)
    counted = [0]

    def answer() -> dict[str, Any]:
        state = snapshot()
        counted[0] += 1
        state["engines"][0]["stats"]["total"]["nbytes"]["nvme_read"] += counted[0] * 1024 * MIB
        asked.release()
        return state

    channel = serve(answer)

    def end() -> None:
        for _ in range(3):
            asked.acquire()
        channel.close()

    ending = threading.Thread(target=end)
    ending.start()
    assert main(["watch", "--interval", "0.05"]) == 0
    ending.join()
    printed = capsys.readouterr().out
    assert "The job has ended." in printed
    assert counted[0] >= 3
    rate = re.search(r"NVMe read +([\d.]+) GiB/s", printed)
    assert rate is not None, printed
    assert float(rate[1]) > 1
