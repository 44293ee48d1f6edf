# SPDX-License-Identifier: Apache-2.0
"""Runs pytest on DeepSpeed's tests, and again after a test that hung or crashed, until each has a result.

Results stay in ``WORK/<mode>.jsonl``: a stopped runner continues where it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tencache_ds.ops.build_lock import build_locks, is_held
from tests.deepspeed_suite.forcing import Mode
from tests.deepspeed_suite.outcomes import Outcome, Result, read_results, unfinished
from tests.deepspeed_suite.plugin import FIRST_PORT, PORTS_PER_JOB, remove_buffers
from tests.deepspeed_suite.selection import MARKERS

ROOT = Path(__file__).parent.parent.parent
MOST_RANKS = 4
"""Ranks that a test may ask for: the CPU accelerator counts them by a variable."""
MOST_TESTS_OF_A_BATCH = 25
"""The start of a batch takes as long as two tests; the last ones should end at about the same time."""
COLLECTION_LIMIT_S = 300.0
MARGIN_S = 60.0
"""After a test's own limit, in which DeepSpeed's harness ends it and says so."""
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Runner:
    """A work folder and a checkout.

    Attributes:
        tests: the ``tests`` folder of the checkout; only read.
        work: results and everything that the tests write.
        jobs: pytest processes at a time.
        limit_s: of one test.
        expression: pytest's ``-k``; empty for all.
    """

    tests: Path
    work: Path
    jobs: int = 1
    limit_s: float = 180.0
    expression: str = ""
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self, mode: Mode, files: Sequence[str], only: Sequence[str] | None = None) -> dict[str, Result]:
        """Results of a mode, of former runs too.

        Args:
            files: test files, relative to ``tests``.
            only: node ids to run; None for all in ``files``.

        Raises:
            RuntimeError: pytest cannot collect a file.
        """
        tests = self._collect(mode, files) if only is None else [test for test in only if file_of(test) in files]
        done = read_results(self.results_of(mode))
        left = [test for test in tests if test not in done]
        size = min(MOST_TESTS_OF_A_BATCH, -(-len(left) // self.jobs)) or 1
        numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(self.jobs):
            numbers.put(number)
        with ThreadPoolExecutor(self.jobs) as pool:
            jobs = [
                pool.submit(self._run_batch, mode, left[first : first + size], numbers)
                for first in range(0, len(left), size)
            ]
            try:
                for job in jobs:
                    job.result()
            except BaseException:  # the pool waits for its threads
                self._stop.set()
                raise
        return read_results(self.results_of(mode))

    def results_of(self, mode: Mode) -> Path:
        return self.work / f"{mode}.jsonl"

    def _collect(self, mode: Mode, files: Sequence[str]) -> list[str]:
        """Node ids of the tests of files, in pytest's order."""
        collected = self.work / "collected.json"
        collected.unlink(missing_ok=True)
        if not files:
            return []
        ended = self._run_pytest(mode, files, None, 0, "--collect-only", "--suite-ids", str(collected))
        if not collected.exists() or ended.code not in (0, 5):
            raise RuntimeError(f"pytest could not collect {files} (exit status {ended.code}):\n{ended.log[-3000:]}")
        ids: list[str] = json.loads(collected.read_text())
        return ids

    def _run_batch(self, mode: Mode, tests: Sequence[str], numbers: queue.SimpleQueue[int]) -> None:
        """Runs tests in one process at a time; a new one after each test that hung or crashed."""
        results, number = self.results_of(mode), numbers.get()
        try:
            while not self._stop.is_set():
                done = read_results(results)
                left = [test for test in tests if test not in done]
                if not left:
                    return
                nth_line = len(results.read_text().splitlines()) if results.exists() else 0
                files = list(dict.fromkeys(file_of(test) for test in left))
                ended = self._run_pytest(mode, files, left, number)
                if self._stop.is_set():
                    return
                lost = [test for test in unfinished(results, nth_line) if test in left]
                for test in lost:
                    self._record(mode, test, ended)
                if not lost and ended.code not in (0, 1, 5):  # 5: no test was left to run
                    raise RuntimeError(f"pytest could not run {files} (exit status {ended.code}):\n{ended.log[-3000:]}")
                if not lost:
                    return
        finally:
            numbers.put(number)

    def _run_pytest(
        self,
        mode: Mode,
        files: Sequence[str],
        only: Sequence[str] | None,
        number: int,
        *options: str,
    ) -> _Ended:
        """Runs one process to its end or to its time limit."""
        folder = self.work / f"job{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "tests.json").write_text(json.dumps(only))
        command = [
            sys.executable, "-m", "pytest", "-p", "tests.deepspeed_suite.plugin", "-p", "no:cacheprovider",
            "--rootdir", str(self.tests), "-c", str(self.tests / "pytest.ini"), "-m", MARKERS, "-q", "--no-header",
            "--continue-on-collection-errors",
            "--basetemp", str(folder / "tmp"), "--suite-mode", mode, "--suite-folder", str(folder),
            "--suite-results", str(self.results_of(mode)), "--suite-tests", str(folder / "tests.json"),
            "--suite-job", str(number), *(["-k", self.expression] if self.expression else []), *options, *files,
        ]  # fmt: skip
        t_start_s = time.time()
        with open(folder / "log", "wb") as output:
            process = subprocess.Popen(
                command, cwd=self.tests, env=self._environment(mode), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                in_time = self._wait(process, self.results_of(mode))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the fork server and all ranks
                code = process.wait()
        log = (folder / "log").read_text(errors="replace")
        shutil.rmtree(folder, ignore_errors=True)
        first = FIRST_PORT + PORTS_PER_JOB * number
        remove_buffers(str(port) for port in range(first, first + PORTS_PER_JOB))
        for lock in build_locks():  # of a process that was killed while it loaded an op
            with contextlib.suppress(FileNotFoundError):
                if lock.stat().st_mtime > t_start_s and not is_held(lock):
                    lock.unlink()
        return _Ended(code, log, hung=not in_time or "Test hanged" in log)

    def _wait(self, process: subprocess.Popen[bytes], results: Path) -> bool:
        """Whether the process ended before a test, or the collection, took longer than it may."""
        size, changed_s = -1, time.monotonic()
        while process.poll() is None and not self._stop.is_set():
            time.sleep(POLL_S)
            now = results.stat().st_size if results.exists() else 0
            if now != size:
                size, changed_s = now, time.monotonic()
            if time.monotonic() - changed_s > max(self.limit_s + MARGIN_S, COLLECTION_LIMIT_S):
                return False
        return True

    def _environment(self, mode: Mode) -> dict[str, str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "TENCACHE_"))}
        paths = [str(ROOT), str(ROOT / "tests" / "asked_once"), os.environ.get("PYTHONPATH", "")]
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",  # nothing is written to the checkout
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "DS_ACCELERATOR": "cpu",
            "DS_UNITTEST_TIMEOUT": str(int(self.limit_s)),
            "LOCAL_SIZE": str(MOST_RANKS),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        if not mode.with_tencache:
            environment["TENCACHE_DISABLE"] = "1"
        return environment

    def _record(self, mode: Mode, test: str, ended: _Ended) -> None:
        outcome = Outcome.hung if ended.hung else Outcome.crashed
        error = (
            f"{outcome}: no end after {self.limit_s:.0f} s"
            if ended.hung
            else f"crashed: exit status {ended.code} of pytest"
        )
        line = {"test": test, "outcome": outcome, "error": error, "traceback": ended.log[-6000:]}
        with open(self.results_of(mode), "a") as results:
            results.write(json.dumps(line) + "\n")


@dataclass(frozen=True, slots=True)
class _Ended:
    """A pytest process that ended.

    Attributes:
        hung: it was ended because of a test that took too long.
    """

    code: int
    log: str
    hung: bool


def file_of(test: str) -> str:
    return test.partition("::")[0]
