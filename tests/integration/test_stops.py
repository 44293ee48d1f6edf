# SPDX-License-Identifier: Apache-2.0
"""However a training ends, it leaves nothing on the device; signals do what they did without TenCache."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Any

import pytest

from benchmarks.comparison.shared_buffers import remove_shared_buffers
from tests.integration.conftest import HERE, free_port
from tests.integration.stop_cases import holders, left_in

pytestmark = pytest.mark.timeout(240)

PROGRAM = "stop_cases.py"
TERM, HUP, INT, KILL = (int(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL))
CASES: dict[str, dict[str, Any]] = {
    "term": {"signal": TERM},
    "term_while_initializing": {"signal": TERM, "while": "initializing"},
    "hup_in_native_code": {"signal": HUP, "in_native_code": True},
    "interrupt": {"signal": INT},
    "kill_with_workers": {"signal": KILL, "workers": True},
    "handler": {"signal": TERM, "handler": "before"},
    "ignored": {"signal": HUP, "ignored": "after"},
}
ENDS_WITH = {"interrupt": 130, "handler": 0, "ignored": 0}
"""Exit status of those that do not die of the signal."""


KILLS: dict[str, dict[str, Any]] = {
    "kills": {"kills": 4, "seed": 1, "longest_s": 1.0, "tencache": {"checkpoint": "async"}},
    "kills_of_synchronous_saves": {"kills": 2, "seed": 2, "longest_s": 1.0, "offload_optimizer": "cpu"},
}
"""Trainers that save after each step and are killed at random moments."""


@pytest.fixture(scope="module")
def outcome(harness: Any) -> Any:
    cases = [(name, case, "tencache") for name, case in (CASES | KILLS).items()]
    return harness.run(cases, program=PROGRAM, timeout_s=200)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left(outcome: Any, name: str) -> None:
    result = outcome.result(name, "tencache")
    assert result["code"] == ENDS_WITH.get(name, -CASES[name]["signal"]), result["log"]
    if CASES[name].get("while") == "initializing":  # possibly between the creation of a file and its unlinking
        assert list(result["left"].values()) in ([], [0])
    else:
        assert result["left"] == {}
    assert result["holders"] == []
    if "while" not in CASES[name]:
        assert result["holders_while_training"] == [result["trainer"]], "workers hold no file of the trainer's"


@pytest.mark.parametrize("name", KILLS)
def test_the_checkpoint_of_a_killed_trainer_is_whole(outcome: Any, name: str) -> None:
    """The next one goes on from it with the same losses: in each step that several runs have come to."""
    result = outcome.result(name, "tencache")
    losses: dict[str, str] = {}
    for run in result["runs"]:
        first = int(run["latest"].removeprefix("global_step") or 0) + 1
        assert list(run["losses"]) == [str(step) for step in range(first, first + len(run["losses"]))]
        assert all(losses.setdefault(step, loss) == loss for step, loss in run["losses"].items())
    assert [run["status"] for run in result["runs"]] == [-KILL] * KILLS[name]["kills"] + [0]
    assert any(run["latest"] for run in result["runs"])
    assert result["latest"] == f"global_step{max(map(int, losses))}"


def test_a_keyboard_interrupt_reaches_the_script(outcome: Any) -> None:
    assert "KeyboardInterrupt reached the script" in outcome.result("interrupt", "tencache")["log"]


def test_all_ranks_of_a_job_that_is_cancelled(harness: Any) -> None:
    """As SLURM does it: the signal goes to every process of the job."""
    folder, port = harness.folder(), str(free_port())
    nvme = folder / "nvme"
    (folder / "cases.json").write_text('[["long", {"model": "mlp", "steps": 100000}, "tencache"]]')
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", port]
    command += [str(HERE / "training.py"), "--cases", str(folder / "cases.json"), "--folder", str(folder)]
    process = harness.start(command, folder, harness.environment(2))
    try:
        t_end = time.monotonic() + 90
        # Not before: an operator whose loading is killed leaves a lock at which all later starts wait.
        while len(holders(nvme, "-optimizer-")) < 2:
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < t_end, "training did not start"
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(30) != 0
        t_end = time.monotonic() + 30  # the launcher does not wait for its ranks
        while holders(nvme) and time.monotonic() < t_end:
            time.sleep(0.05)
        assert holders(nvme) == []
        assert left_in(nvme) == {}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        remove_shared_buffers(port)
