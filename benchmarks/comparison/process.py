# SPDX-License-Identifier: Apache-2.0
"""Starts training runs through the ``deepspeed`` launcher, watches them, and reports their outcome."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..record import Caps, Outcome, Run, Task, write_at_once
from ..turns import Turnstile
from .conditions import HostLimit
from .peers import Peer

PACKAGE = __name__.partition(".comparison.")[0]
"""``benchmarks`` in a checkout, ``tencache_ds.benchmarks`` where it is installed."""

POLL_S = 0.2
GRACE_S = 5.0
"""Time for an interrupted or timed-out run to stop before it is killed."""

ERROR_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Request:
    """One run to make."""

    configuration: str  # its name in the record
    round: int  # see :attr:`..record.Run.round`
    peer: Peer  # the peer to run
    task: Task  # without files, turns and the cap on host memory
    timeout_s: float  # the run is stopped after this time, the turns of others left out
    knobs: dict[str, Any] = field(default_factory=dict)  # see :attr:`..record.Run.knobs`
    nvme_path: str = ""  # its own folder on the storage


def execute(
    requests: Sequence[Request],
    folder: Path,
    *,
    n_turns: int = 1,
    host_limit: HostLimit = HostLimit(),  # noqa: B008  # immutable
    on_progress: Callable[[], None] = lambda: None,
) -> list[Run]:
    """Makes runs: one, or several that stay in memory side by side and have their measured steps in turns.

    Those start one after another and warm up; then each has a part of its steps while the others wait, ``n_turns``
    times round. A run that fails leaves its turns to the others. Task, result and log of each go to ``folder``;
    ``on_progress`` is called a few times a second.

    Returns:
        What was measured, also by a run that was stopped, and why something is missing. Knobs and config are filled in
        by the caller, who knows the paths in them.

    Raises:
        KeyboardInterrupt: the user stopped the benchmark; the processes of the runs are gone by then.
    """
    with contextlib.ExitStack() as stack:
        side_by_side = []
        for request in requests:
            launched = _Launched(request, folder, host_limit, n_turns)
            stack.callback(launched.end)
            launched.watch(on_progress, until_turn=0)
            side_by_side.append(launched)
        for turn in range(n_turns):
            for launched in side_by_side:
                launched.turnstile.open(turn)
                # After its last turn a run ends before the next one continues: its clean-up disturbs no other run.
                launched.watch(on_progress, until_turn=turn + 1)
    return [launched.run() for launched in side_by_side]


class _Launched:
    """A running run, until :meth:`end`."""

    def __init__(self, request: Request, folder: Path, host_limit: HostLimit, n_turns: int) -> None:
        self._request = request
        self._host_limit = host_limit
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", request.configuration)
        stem = folder.resolve() / f"{'trial' if request.round < 0 else 'run'}{abs(request.round):03d}_{name}"
        task, self._result, self._log = (Path(f"{stem}.{kind}") for kind in ("task.json", "result.json", "log"))
        self.turnstile = Turnstile(Path(f"{stem}.turns"))
        self.turnstile.prepare(os.getpid())
        self._result.unlink(missing_ok=True)
        given: dict[str, Any] = {"result": str(self._result), "host_nbytes": host_limit.nbytes}
        if n_turns > 1:
            given |= {"turns": n_turns, "gate": str(self.turnstile.folder)}
        write_at_once(request.task.model_copy(update=given), task)
        self._used_s = 0.0
        self._timed_out = False
        self._started_at = now()
        with self._log.open("wb") as log:
            # Its own session: the launcher's children must not outlive it and disturb the next run.
            self._process = subprocess.Popen(
                host_limit.wrap(_command(request, task)), env=environment(), start_new_session=True,
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def end(self) -> None:
        """Leaves none of its processes, in any case."""
        self._stop()
        shutil.rmtree(self.turnstile.folder, ignore_errors=True)

    def watch(self, on_progress: Callable[[], None], until_turn: int) -> None:
        """Returns when the run waits for a turn, or has ended; stops it when the time that it may use is over."""
        t_start = time.perf_counter()
        while self._process.poll() is None and not self.turnstile.is_waiting(until_turn):
            if self._used_s + time.perf_counter() - t_start >= self._request.timeout_s:
                self._timed_out = True
                self._stop()
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_S)
            on_progress()
        self._used_s += time.perf_counter() - t_start

    def run(self) -> Run:
        """The record of the run, after its end."""
        request, limit = self._request, self._host_limit
        measured = json.loads(self._result.read_text()) if self._result.exists() else {}
        error = ""
        if self._timed_out:
            error = f"not finished after {request.timeout_s:.0f} s"
        elif self._process.returncode != 0:
            error = limit.explain() or last_error(self._log.read_text(errors="replace"))
            error = error or f"exit status {self._process.returncode}"
        elif not measured:
            error = f"it exited normally without a result; see {self._log.name}"
        caps = Caps(host_nbytes=limit.nbytes, host_enforced_by=limit.enforced_by, gpu_nbytes=request.task.gpu_nbytes)
        return Run(
            configuration=request.configuration, round=request.round, started_at=self._started_at,
            wall_s=self._used_s, caps=caps, outcome=Outcome.failed if error else Outcome.ok, error=error, **measured,
        )  # fmt: skip

    def _stop(self) -> None:
        """Ends every process of the session. Idempotent."""
        for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)


def now() -> str:
    """ISO 8601, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def last_error(log: str) -> str:
    """The line of a log that says best why its process ended: the last one that names an exception, clipped."""
    lines = [line.strip() for line in log.splitlines()]
    # "[rank0]: RuntimeError: ..." first; then whatever speaks of an error, but not the launcher's own summary.
    named = [line for line in lines if re.search(r"(^|\s|\.)\w*(Error|Exception|Interrupt|Refused)\b\s*:", line)]
    named = named or [line for line in lines if "error" in line.lower() and "launch.py" not in line]
    text = re.sub(r"^\[rank\d+\]:\s*", "", named[-1]) if named else ""
    return text if len(text) <= ERROR_CHARACTERS else text[: ERROR_CHARACTERS - 1] + "…"


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _command(request: Request, task: Path) -> list[str]:
    return [
        sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(request.task.workload.ranks),
        "--master_port", str(free_port()), *request.peer.launcher,
        "--module", f"{PACKAGE}.training.{request.peer.program}", str(task),
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """Environment of a process that imports this package and runs this interpreter's tools."""
    variables = dict(os.environ)
    if PACKAGE == "benchmarks":  # run from a checkout: the children must find it too
        root = str(Path(__file__).resolve().parents[2])
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [root, variables.get("PYTHONPATH", "")]))
    # The launcher calls "python" helpers by name: those of this interpreter.
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), variables.get("PATH", "")])
    return variables


def describe_command(arguments: Sequence[str]) -> str:
    """The command that repeats a benchmark, without paths of this machine."""
    pairs = zip(["", *arguments], arguments, strict=False)
    words = ["FOLDER" if option in ("--nvme-path", "--out") else word for option, word in pairs]
    return " ".join(["python -m benchmarks", *words])
