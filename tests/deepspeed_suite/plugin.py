# SPDX-License-Identifier: Apache-2.0
"""pytest plugin inside DeepSpeed's own test run: forces TenCache on configs and writes one JSON line per test.

DeepSpeed's tests train in children of a fork server or in spawned processes (``DistributedExec`` in
``tests/unit/common.py``), so a change in pytest's process alone would not reach them: the function that each child is
given to run is wrapped in :class:`InChild`, which installs the forcing there first.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.comparison.shared_buffers import remove_shared_buffers
from tests.deepspeed_suite.forcing import Forcing, Mode
from tests.deepspeed_suite.selection import is_about_another_stage

COMMON = "unit.common"
PRELOADED = ["tests.deepspeed_suite.forcing", "tests.deepspeed_suite.preloaded_ops", "torch._dynamo"]
"""Imported once by the fork server, with the modules of the tests, instead of by every rank of every test."""
TRACEBACK_CHARACTERS = 6000
PORTS_PER_JOB = 1000
FIRST_PORT = 20000
"""Below the ephemeral ports, so that no other program gets them by chance."""


@dataclass(frozen=True)
class InChild:
    """What a child process runs in place of ``DistributedExec._dist_run``."""

    test: Any
    forcing: Forcing

    def __call__(self, *arguments: Any) -> Any:
        self.forcing.install()
        return type(self.test)._dist_run(self.test, *arguments)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tencache")
    group.addoption("--suite-mode", type=Mode)
    group.addoption("--suite-folder", type=Path, help="work of this process")
    group.addoption("--suite-results", type=Path, help="JSON lines are appended here")
    group.addoption("--suite-tests", type=Path, help="JSON: the tests to run; null for all")
    group.addoption("--suite-ids", type=Path, help="JSON: file for the node ids of the collected tests")
    group.addoption("--suite-job", type=int, default=0, help="number of this process among those at the same time")


def pytest_configure(config: pytest.Config) -> None:
    # The conftest.py of the checkout puts the package beside it on the path: the installed one is to be tested.
    checkout = config.rootpath.parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).absolute() != checkout]
    config.pluginmanager.register(Suite(config), "tencache-suite")


class Suite:
    """The run of one pytest process."""

    def __init__(self, config: pytest.Config) -> None:
        self._mode: Mode = config.option.suite_mode
        self._folder: Path = config.option.suite_folder
        self._results: Path = config.option.suite_results
        only = json.loads(config.option.suite_tests.read_text())
        self._only: set[str] | None = None if only is None else set(only)
        self._ids: Path | None = config.option.suite_ids
        self._first_port = FIRST_PORT + PORTS_PER_JOB * config.option.suite_job
        self._forcing = Forcing(self._mode, self._folder / "none")
        self._count = 0
        self._ports: set[str] = set()
        self._reports: list[pytest.TestReport] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept, dropped = [], []
        for item in items:
            call = getattr(item, "callspec", None)
            foreign = call is not None and is_about_another_stage(call.params)
            (dropped if foreign or not self._wanted(item.nodeid) else kept).append(item)
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept

    def _wanted(self, test: str) -> bool:
        return self._only is None or test in self._only

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self._ids is not None:
            self._ids.write_text(json.dumps([item.nodeid for item in session.items]))
            return
        if COMMON in sys.modules:
            self._reach_children(sys.modules[COMMON])
            modules = {item.module.__name__ for item in session.items if isinstance(item, pytest.Function)}
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # where the fork server finds them
            multiprocessing.set_forkserver_preload([*PRELOADED, COMMON, *sorted(modules)])

    def _reach_children(self, common: Any) -> None:
        launch: Callable[..., Any] = common.DistributedExec._launch_procs
        master_port: Callable[..., str] = common.get_master_port

        def _launch_procs(instance: Any, num_procs: int, init_method: str) -> None:
            instance._dist_run = InChild(copy.copy(instance), self._forcing)
            launch(instance, num_procs, init_method)

        def get_master_port() -> str:
            port = master_port(self._first_port, PORTS_PER_JOB)
            self._ports.add(port)
            return port

        common.DistributedExec._launch_procs = _launch_procs
        common.get_master_port = get_master_port

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._count += 1
        self._reports = []
        self._forcing = Forcing(self._mode, self._folder / f"test{self._count}")
        (self._forcing.folder / "seen").mkdir(parents=True)
        self._write({"test": item.nodeid, "started": True})
        t_start_s = time.perf_counter()
        if COMMON in sys.modules:  # tests that run in this process
            self._forcing.install()
        result = yield
        self._write({"test": item.nodeid, "seconds": round(time.perf_counter() - t_start_s, 1), **self._outcome()})
        self._clean()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def _outcome(self) -> dict[str, Any]:
        seen = sorted(self._forcing.seen())
        for report in self._reports:
            if report.failed:
                return {
                    "outcome": "failed",
                    "error": _first_line(report),
                    "traceback": report.longreprtext[-TRACEBACK_CHARACTERS:],
                    "seen": seen,
                }
        for report in self._reports:
            if report.skipped:
                reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
                return {"outcome": "skipped", "error": reason.removeprefix("Skipped: "), "seen": seen}
        return {"outcome": "passed", "seen": seen}

    def _write(self, line: dict[str, Any]) -> None:
        with open(self._results, "a") as results:
            results.write(json.dumps(line) + "\n")

    def _clean(self) -> None:
        shutil.rmtree(self._forcing.folder, ignore_errors=True)
        remove_buffers(self._ports)
        self._ports.clear()

    def pytest_sessionfinish(self) -> None:
        remove_buffers(self._ports)


def remove_buffers(ports: Iterable[str]) -> None:
    """What jobs at these ports left in shared memory."""
    for port in ports:
        remove_shared_buffers(port)


def _first_line(report: pytest.TestReport) -> str:
    """The error of a failed report in one line, its type first."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext.strip().rpartition("\n")[2]
    return str(text).strip().partition("\n")[0]
