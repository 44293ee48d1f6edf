# SPDX-License-Identifier: Apache-2.0
"""Runs that stay in memory side by side have their steps in turns: never two at once, and nobody waits for the dead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.comparison import process
from benchmarks.comparison.peers import PEERS
from benchmarks.comparison.process import Request, execute
from benchmarks.comparison.suites import workload_of
from benchmarks.record import Measurement, Outcome, Task
from benchmarks.turns import Gate, Turnstile

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).resolve().parents[2]
N_TURNS = 3

PROGRAM = """
import json, os, sys, time
from pathlib import Path
from typing import Any
from benchmarks.turns import Gate

name, task, journal, fails_at, sleeps_at = sys.argv[1:]
task = json.loads(Path(task).read_text())
turns, gate, result = task["turns"], Gate(Path(task["gate"])), task["result"]
print("started", name, flush=True)
for turn in range(turns):
    gate.announce(turn)
    gate.wait(turn)
    if str(turn) == fails_at:
        raise RuntimeError("it broke")
    if str(turn) == sleeps_at:
        time.sleep(60)
    begin = time.monotonic()
    time.sleep(0.05)
    with open(journal, "a") as file:
        file.write(json.dumps([name, turn, begin, time.monotonic()]) + "\\n")
Path(result).write_text(json.dumps({"numel": 7}))
"""


@dataclass
class Scripted:
    """Programs that write down when they had their turns, in place of training."""

    folder: Path
    fails_at: dict[str, int]
    sleeps_at: dict[str, int]

    def command(self, module: str, task: Path, ranks: int, port: int, launcher: Any) -> list[str]:
        name = task.name.removeprefix("run000_").removesuffix(".task.json")
        at = [str(when.get(name, "")) for when in (self.fails_at, self.sleeps_at)]
        return [sys.executable, "-c", PROGRAM, name, str(task), str(self.folder / "journal"), *at]

    def journal(self) -> list[tuple[str, int, float, float]]:
        lines = (self.folder / "journal").read_text().splitlines()
        return sorted((tuple(json.loads(line)) for line in lines), key=lambda entry: entry[2])  # type: ignore[misc]


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    made = Scripted(tmp_path, {}, {})
    monkeypatch.setattr(process, "_command", made.command)
    return made


def request(name: str, timeout_s: float = 60.0) -> Request:
    task = Task(workload=workload_of("7M", ranks=1), deepspeed_config={}, steps=N_TURNS, warmup=1)
    return Request(name, 0, PEERS["tencache"], task, timeout_s)


def test_turns_go_round_and_never_overlap(scripted: Scripted) -> None:
    runs = execute([request("a"), request("b"), request("c")], scripted.folder, n_turns=N_TURNS)
    journal = scripted.journal()
    assert [(name, turn) for name, turn, _, _ in journal] == [(name, t) for t in range(N_TURNS) for name in "abc"]
    assert all(before[3] <= after[2] for before, after in zip(journal, journal[1:], strict=False))
    assert [(run.configuration, run.outcome, run.numel) for run in runs] == [(n, Outcome.ok, 7) for n in "abc"]
    assert list(scripted.folder.glob("*.turns")) == []


def test_the_time_of_a_run_is_its_own(scripted: Scripted) -> None:
    t_start = time.monotonic()
    runs = execute([request("a"), request("b")], scripted.folder, n_turns=N_TURNS)
    assert sum(run.wall_s for run in runs) <= time.monotonic() - t_start


@pytest.mark.parametrize("turn", [0, 1, N_TURNS - 1])
def test_who_fails_leaves_the_turns_to_the_others(scripted: Scripted, turn: int) -> None:
    scripted.fails_at["a"] = turn
    broken, well = execute([request("a"), request("b")], scripted.folder, n_turns=N_TURNS)
    assert (broken.outcome, broken.error) == (Outcome.failed, "RuntimeError: it broke")
    assert well.outcome is Outcome.ok
    assert [t for name, t, _, _ in scripted.journal() if name == "b"] == list(range(N_TURNS))


def test_who_takes_too_long_is_stopped_and_the_waiting_is_not_held_against_the_others(scripted: Scripted) -> None:
    scripted.sleeps_at["a"] = 1
    runs = execute([request("a", 6.0), request("b", 5.0)], scripted.folder, n_turns=N_TURNS)
    assert (runs[0].outcome, runs[0].error) == (Outcome.failed, "not finished after 6 s")
    assert runs[1].outcome is Outcome.ok


def test_an_interruption_leaves_no_process(scripted: Scripted) -> None:
    def interrupt() -> None:
        if (scripted.folder / "journal").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute([request("a"), request("b")], scripted.folder, n_turns=50, on_progress=interrupt)
    had = len(scripted.journal())
    time.sleep(0.5)
    assert len(scripted.journal()) == had


def test_a_gate_is_closed_until_its_turn(tmp_path: Path) -> None:
    turnstile = Turnstile(tmp_path / "turns")
    turnstile.prepare(os.getpid())
    gate = Gate(turnstile.folder)
    passed = threading.Event()
    waiting = threading.Thread(target=lambda: (gate.wait(1), passed.set()))
    waiting.start()
    assert not turnstile.is_waiting(1)
    gate.announce(1)
    assert turnstile.is_waiting(1)
    turnstile.open(0)
    assert not passed.wait(0.2)
    turnstile.open(1)
    assert passed.wait(10)
    waiting.join()
    turnstile.prepare(os.getpid())  # what an interrupted benchmark left there lets nobody through
    assert not turnstile.is_waiting(1)


def test_nobody_waits_for_a_benchmark_that_is_gone(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    turnstile = Turnstile(tmp_path / "turns")
    turnstile.prepare(ended.pid)
    with pytest.raises(RuntimeError, match="has ended"):
        Gate(turnstile.folder).wait(0)


def test_first_steps_of_turns_do_not_count() -> None:
    from tests.benchmarks.examples import step

    steps = [
        step(9.0),
        *(step(s, turn=t, resumed=r) for s, t, r in [(5, 0, True), (1, 0, False), (5, 1, True), (3, 1, False)]),
    ]
    run = Measurement(warmup_steps=1, steps=steps)
    assert [step.seconds for step in run.measured] == [1, 3]
