# SPDX-License-Identifier: Apache-2.0
"""Starts one training run through the ``deepspeed`` launcher, watches it, and says how it ended."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..record import Caps, Outcome, Run, Workload
from .host_limit import HostLimit
from .peers import Peer

PACKAGE = __name__.partition(".comparison.")[0]
"""``benchmarks`` in a checkout, ``tencache_ds.benchmarks`` where it is installed."""

POLL_S = 0.2
GRACE_S = 5.0
"""What an interrupted or timed-out run gets to stop by itself, with its scratch folder removed, before it is killed."""

ERROR_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Request:
    """One run to make.

    Attributes:
        configuration: its name in the record.
        round: see :attr:`..record.Run.round`.
        peer: what is run.
        config: its DeepSpeed config.
        workload: what is trained.
        steps: measured optimizer steps.
        warmup: steps before them, which do not count.
        profile: whether a further step is made under the profiler.
        gpu_nbytes: cap on GPU memory, or None.
        timeout_s: the run is stopped after this time.
    """

    configuration: str
    round: int
    peer: Peer
    config: dict[str, Any]
    workload: Workload
    steps: int
    warmup: int
    profile: bool
    gpu_nbytes: int | None
    timeout_s: float


def execute(
    request: Request, folder: Path, *, host_limit: HostLimit, on_progress: Callable[[], None] = lambda: None
) -> Run:
    """Makes a run; its files (config, result, log) go to ``folder``.

    Args:
        request: what to run.
        folder: an existing folder.
        host_limit: cap on the host memory of the run.
        on_progress: called a few times a second while it runs.

    Returns:
        The measured run, or one that says why there is no measurement. Finished steps of a run that was stopped are
        in it. Knobs and config are left to the caller, who knows what they stand for and which paths are in them.

    Raises:
        KeyboardInterrupt: the user stopped the benchmark; the run's processes are gone by then.
    """
    stem = f"{'trial' if request.round < 0 else 'run'}{abs(request.round):03d}_{_file_name(request.configuration)}"
    config_file, result_file, log_file = (folder / f"{stem}.{kind}" for kind in ("config.json", "result.json", "log"))
    config_file.write_text(json.dumps(request.config, indent=1))
    result_file.unlink(missing_ok=True)
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    t_start = time.perf_counter()
    with log_file.open("wb") as log:
        # A session of its own: the launcher's children must not outlive it and disturb the next run.
        process = subprocess.Popen(
            host_limit.wrap(_command(request, config_file, result_file, host_limit)),
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=environment(), start_new_session=True,
        )  # fmt: skip
        with _stopped_at_the_end(process):
            timed_out = not _watch(process, t_start + request.timeout_s, on_progress)
    wall_s = time.perf_counter() - t_start
    fields: dict[str, Any] = {
        "configuration": request.configuration,
        "round": request.round,
        "started_at": started_at,
        "wall_s": wall_s,
        "caps": Caps(
            host_nbytes=host_limit.nbytes, host_enforced_by=host_limit.enforced_by, gpu_nbytes=request.gpu_nbytes
        ),
    }
    if result_file.exists():
        fields |= json.loads(result_file.read_text())
    if timed_out:
        return Run(outcome=Outcome.failed, error=f"not finished after {request.timeout_s:.0f} s", **fields)
    if process.returncode != 0:
        reason = host_limit.explain() or last_error(log_file.read_text(errors="replace"))
        return Run(outcome=Outcome.failed, error=reason or f"exit status {process.returncode}", **fields)
    if not result_file.exists():
        return Run(outcome=Outcome.failed, error=f"it ended well without a result; see {log_file.name}", **fields)
    return Run(outcome=Outcome.ok, **fields)


def last_error(log: str) -> str:
    """The line of a log that says best why its process ended: the last one that names an exception, clipped."""
    lines = [line.strip() for line in log.splitlines()]
    # "[rank0]: RuntimeError: ..." first; then whatever speaks of an error, but not the launcher's own summary.
    named = [line for line in lines if re.search(r"(^|\s|\.)\w*(Error|Exception|Interrupt|Refused)\b\s*:", line)]
    named = named or [line for line in lines if "error" in line.lower() and "launch.py" not in line]
    text = re.sub(r"^\[rank\d+\]:\s*", "", named[-1]) if named else ""
    return text if len(text) <= ERROR_CHARACTERS else text[: ERROR_CHARACTERS - 1] + "…"


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _command(request: Request, config: Path, result: Path, host_limit: HostLimit) -> list[str]:
    workload = request.workload
    command = [
        sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(workload.ranks),
        "--master_port", str(free_port()), *request.peer.launcher,
        "--module", f"{PACKAGE}.training.{request.peer.program}",
        "--model", workload.model, "--micro-batch", str(workload.micro_batch), "--sequence", str(workload.sequence),
        "--accumulation", str(workload.accumulation), "--precision", workload.precision,
        "--steps", str(request.steps), "--warmup", str(request.warmup),
        "--config", str(config.resolve()), "--result", str(result.resolve()),
    ]  # fmt: skip
    if workload.activation_checkpointing:
        command.append("--checkpointing")
    if request.profile:
        command.append("--profile-device")
    if request.gpu_nbytes is not None:
        command += ["--gpu-memory", str(request.gpu_nbytes)]
    if host_limit.nbytes is not None:
        command += ["--host-memory", str(host_limit.nbytes)]
    return command


def environment() -> dict[str, str]:
    """Environment of a process that imports this package and runs this interpreter's tools."""
    variables = dict(os.environ)
    if PACKAGE == "benchmarks":  # run from a checkout: the children must find it too
        root = str(Path(__file__).resolve().parents[2])
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [root, variables.get("PYTHONPATH", "")]))
    # The launcher calls "python" helpers by name: those of this interpreter.
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), variables.get("PATH", "")])
    return variables


def _watch(process: subprocess.Popen[bytes], t_deadline: float, on_progress: Callable[[], None]) -> bool:
    """Waits for the end; False if the deadline came first."""
    while time.perf_counter() < t_deadline:
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            on_progress()
        else:
            return True
    return False


@contextlib.contextmanager
def _stopped_at_the_end(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leaves no process of the session behind, whatever happens within."""
    try:
        yield
    finally:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _file_name(configuration: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", configuration)


def describe_command(arguments: Sequence[str]) -> str:
    """The command that repeats a benchmark, without paths of this machine."""
    words: list[str] = []
    hide = False
    for argument in arguments:
        words.append("FOLDER" if hide else argument)
        hide = argument in ("--nvme-path", "--out")
    return " ".join(["python -m benchmarks", *words])
