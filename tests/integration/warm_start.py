# SPDX-License-Identifier: Apache-2.0
"""Training processes that are forked from one that has imported everything: see ``warm_parent.py``."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("warm_parent.py")
OF_A_JOB = {"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE"}
"""Variables that nothing reads before a job is initialized."""
SECONDS_TO_END = 10.0


class Forked:
    """A process that the warm parent has forked; it leads a session. What ``subprocess.Popen`` says of a child."""

    def __init__(self, parent: WarmParent, pid: int) -> None:
        self._parent = parent
        self.pid = pid

    def poll(self) -> int | None:
        """Exit status, negative for a signal; ``None`` while it runs."""
        return self._parent.code_of(self.pid, 0)

    def wait(self, timeout_s: float | None = None) -> int:
        """Exit status, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        code = self._parent.code_of(self.pid, timeout_s)
        if code is None:
            raise subprocess.TimeoutExpired(str(PROGRAM), timeout_s or 0)
        return code


class WarmParent:
    """Starts programs in an environment. For one thread.

    Args:
        environment: of the parent; a program's may differ in variables that name its job and rank.
        log: file for what the parent itself prints.
    """

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._environment = without_job(environment)
        self._log = log
        self._codes: dict[int, int] = {}
        self._unread = b""
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM)], env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=output, start_new_session=True,
            )  # fmt: skip

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether a program that is started in this environment would find what it finds in a fork."""
        return without_job(environment) == self._environment

    def start(self, words: Sequence[str], folder: Path, environment: Mapping[str, str], ranks: int) -> Forked:
        """Starts what ``python words`` starts, or so many ranks of it, with its output in ``folder/log``."""
        request = {"words": list(words), "environment": dict(environment), "folder": str(folder), "ranks": ranks}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request | {"log": str(folder / "log")}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._has_ended() from None
        while True:
            answer = self._answer(None)
            assert answer is not None
            if "code" not in answer:
                return Forked(self, answer["pid"])

    def code_of(self, pid: int, timeout_s: float | None) -> int | None:
        """Exit status of a process; ``None`` if it still runs after so long."""
        t_end = None if timeout_s is None else time.monotonic() + timeout_s
        while pid not in self._codes:
            if self._answer(None if t_end is None else max(0.0, t_end - time.monotonic())) is None:
                return None
        return self._codes[pid]

    def close(self) -> None:
        """Ends the parent. Programs that still run go on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(SECONDS_TO_END)
        finally:
            self._process.kill()
            self._process.wait()

    def _answer(self, timeout_s: float | None) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            if not select.select([self._process.stdout], [], [], timeout_s)[0]:
                return None
            found = self._process.stdout.read1()
            if not found:
                raise self._has_ended()
            self._unread += found
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "code" in answer:
            self._codes[answer["pid"]] = answer["code"]
        return answer

    def _has_ended(self) -> RuntimeError:
        return RuntimeError(f"{PROGRAM.name} has ended; its output ends with\n{self._log.read_text()[-3000:]}")


def without_job(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key not in OF_A_JOB}
