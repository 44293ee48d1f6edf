# SPDX-License-Identifier: Apache-2.0
"""Starts programs through the ``deepspeed`` launcher, watches them, and reports their outcome."""

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..record import Assignment, Caps, Outcome, Run, Task
from ..turns import Turnstile
from .conditions import HostLimit
from .peers import Peer
from .shared_buffers import remove_shared_buffers

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
            stem = f"{'trial' if request.round < 0 else 'run'}{abs(request.round):03d}_{request.configuration}"
            turnstile = Turnstile(file_of(folder, stem, "turns"))
            turnstile.prepare(os.getpid())
            stack.callback(shutil.rmtree, turnstile.folder, ignore_errors=True)
            in_turns = {"turns": n_turns, "gate": str(turnstile.folder)} if n_turns > 1 else {}
            program = Program(
                f"training.{request.peer.program}", request.task.model_copy(update=in_turns), folder, stem,
                timeout_s=request.timeout_s, ranks=request.task.workload.ranks, launcher=request.peer.launcher,
                host_limit=host_limit,
            )  # fmt: skip
            stack.callback(program.end)
            program.watch(on_progress, partial(turnstile.is_waiting, 0))
            side_by_side.append((request, program, turnstile))
        for turn in range(n_turns):
            for _, program, turnstile in side_by_side:
                turnstile.open(turn)
                # After its last turn a run ends before the next one continues: its clean-up disturbs no other run.
                program.watch(on_progress, partial(turnstile.is_waiting, turn + 1))
    return [_run(request, program, host_limit) for request, program, _ in side_by_side]


def _run(request: Request, program: Program, limit: HostLimit) -> Run:
    measured, error = program.result()
    return Run(
        configuration=request.configuration, round=request.round, started_at=program.started_at,
        wall_s=program.used_s, outcome=Outcome.failed if error else Outcome.ok, error=error, **measured,
        caps=Caps(host_nbytes=limit.nbytes, host_enforced_by=limit.enforced_by, gpu_nbytes=request.task.gpu_nbytes),
    )  # fmt: skip


class Program:
    """A program of this package, started through the ``deepspeed`` launcher and running until :meth:`end`.

    Args:
        module: in this package.
        task: what it is asked to do; gets the file for its result.
        folder: for task, result and log.
        stem: of the names of these.
        timeout_s: it is stopped when it has been watched for this time.
        ranks: processes.
        launcher: further arguments of the launcher.
        host_limit: the cap on its memory.

    Attributes:
        started_at: ISO 8601, UTC.
        used_s: seconds for which it was watched.
    """

    def __init__(
        self, module: str, task: Assignment, folder: Path, stem: str, *, timeout_s: float, ranks: int = 1,
        launcher: Sequence[str] = (), host_limit: HostLimit = HostLimit(),  # noqa: B008  # immutable
    ) -> None:  # fmt: skip
        file, self._result, self._log = (file_of(folder, stem, kind) for kind in ("task.json", "result.json", "log"))
        self._result.unlink(missing_ok=True)
        task.model_copy(update={"result": str(self._result)}).write(file)
        self._timeout_s, self._host_limit = timeout_s, host_limit
        self.started_at, self.used_s, self._timed_out = now(), 0.0, False
        self._port = free_port()
        with self._log.open("wb") as log:
            # Its own session: the launcher's children must not outlive it and disturb the next run.
            self._process = subprocess.Popen(
                host_limit.wrap(_command(module, file, ranks, self._port, launcher)), env=environment(),
                start_new_session=True, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def watch(self, on_progress: Callable[[], None] = lambda: None, until: Callable[[], bool] = lambda: False) -> None:
        """Returns when ``until`` is met, or it has ended; stops it when the time that it may use is over."""
        t_start = time.perf_counter()
        while self._process.poll() is None and not until():
            if self.used_s + time.perf_counter() - t_start >= self._timeout_s:
                self._timed_out = True
                self.end()
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_S)
            on_progress()
        self.used_s += time.perf_counter() - t_start

    def result(self) -> tuple[dict[str, Any], str]:
        """After its end: the fields of what it measured, as far as it came, and the error, if there was one."""
        measured = json.loads(self._result.read_text()) if self._result.exists() else {}
        error = ""
        if self._timed_out:
            error = f"not finished after {self._timeout_s:.0f} s"
        elif self._process.returncode != 0:
            error = self._host_limit.explain() or last_error(self._log.read_text(errors="replace"))
            error = error or f"exit status {self._process.returncode}"
        elif not measured:
            error = f"it exited normally without a result; see {self._log.name}"
        return measured, error

    def end(self) -> None:
        """Ends every process of the session, and removes what they left in shared memory. Idempotent."""
        for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
        remove_shared_buffers(self._port)


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Within it SIGTERM raises KeyboardInterrupt: programs have their own sessions, so it is ours to end them."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def file_of(folder: Path, stem: str, kind: str) -> Path:
    """A file of a program, named after a configuration."""
    return folder.resolve() / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', stem)}.{kind}"


def now() -> str:
    """ISO 8601, UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


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


def _command(module: str, task: Path, ranks: int, port: int, launcher: Sequence[str]) -> list[str]:
    return [
        sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(ranks),
        "--master_port", str(port), *launcher, "--module", f"{PACKAGE}.{module}", str(task),
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
