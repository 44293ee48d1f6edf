# SPDX-License-Identifier: Apache-2.0
"""Starts real DeepSpeed processes for the integration tests: many cases per process, because each start takes
seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.comparison.shared_buffers import remove_shared_buffers
from tencache_ds.ops.build_lock import remove_left_behind
from tencache_ds.profiling.filesystem import file_system_of
from tests.integration.oracle import remove_unused
from tests.integration.warm_start import Forked, WarmParent, without_job

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TAIL_CHARACTERS = 6000
ABORT_PATIENCE_S = 3.0
NOT_PASSED_ON = ("PYTEST", "TENCACHE_", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR")
"""Variables of pytest and the tests, and those that the imports of DeepSpeed and torch's compiler set."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A process (or all ranks of a launcher) that ended.

    Attributes:
        code: exit status; ``None`` when it had to be killed after its time limit.
        log: everything it printed.
        folder: its working folder.
    """

    code: int | None
    log: str
    folder: Path

    def succeeded(self) -> Finished:
        """Fails the test with the end of the log unless the process ended well."""
        assert self.code == 0, f"exit status {self.code}; the log ends with\n{self.log[-TAIL_CHARACTERS:]}"
        return self


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the cases of one harness process gave, per rank."""

    finished: Finished
    per_rank: tuple[dict[str, Any], ...]

    def result(self, name: str, engine: str, rank: int = 0) -> dict[str, Any]:
        """One case's result; fails the test with the reason when there is none."""
        ended = f"exit status {self.finished.code}" if self.finished.code is not None else "killed at its time limit"
        log = f"{ended}; the log ends with\n{self.finished.log[-TAIL_CHARACTERS:]}"
        for other, results in enumerate(self.per_rank):
            recorded = results.get(f"{name}/{engine}")
            assert recorded is not None, f"case {name} with {engine} did not run on rank {other}; {log}"
            assert "error" not in recorded, f"{name} with {engine}, rank {other}:\n{recorded['traceback']}"
        return self.per_rank[rank][f"{name}/{engine}"]

    @property
    def ranks(self) -> range:
        return range(len(self.per_rank))


class Harness:
    """Runs programs of this folder under DeepSpeed."""

    def __init__(self, base: Path, oracle: Path | None = None) -> None:
        self._base = base
        self._oracle = oracle
        self._count = 0
        self._parent: WarmParent | None = None

    def close(self) -> None:
        if self._parent is not None:
            self._parent.close()

    def folder(self) -> Path:
        """A new empty folder on a disk."""
        self._count += 1
        folder = self._base / f"run{self._count}"
        folder.mkdir(parents=True)
        return folder

    def environment(self, ranks: int = 1, extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """What a training process needs, without what pytest's own process may have set."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(NOT_PASSED_ON)}
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONFAULTHANDLER": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }
        if not torch.cuda.is_available():
            environment["DS_ACCELERATOR"] = "cpu"
        if ranks == 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
        for key, value in (extra or {}).items():
            environment.pop(key, None)
            if value is not None:
                environment[key] = value
        return environment

    def start(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts a process in its own session, its output in ``folder/log``."""
        with open(folder / "log", "wb") as log:
            return subprocess.Popen(
                list(command), cwd=folder, env=dict(environment), stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def execute(
        self,
        command: Sequence[str],
        *,
        folder: Path | None = None,
        ranks: int = 1,
        env: Mapping[str, str | None] | None = None,
        timeout_s: float = 300,
    ) -> Finished:
        """Runs a command to its end, or kills it with its children after ``timeout_s``."""
        folder = folder or self.folder()
        environment = self.environment(ranks, env)
        return self._finish(self.start(command, folder, environment), folder, environment, timeout_s)

    def python(
        self,
        words: Sequence[str],
        *,
        folder: Path | None = None,
        ranks: int = 1,
        env: Mapping[str, str | None] | None = None,
        timeout_s: float = 300,
    ) -> Finished:
        """Runs what ``python words`` runs, once per rank, without the seconds that imports take.

        It is forked from a process that has made them. Where that is not possible, ``python`` or DeepSpeed's launcher
        starts it: with CUDA, which does not survive a fork, and in an environment that imports may look at.
        """
        folder = folder or self.folder()
        environment = self.environment(1, env)
        usual = self.environment(0)
        if self._parent is None and without_job(environment) == without_job(usual) and not torch.cuda.is_available():
            self._parent = WarmParent(usual, self._base / "warm_parent.log")
        if self._parent is not None and self._parent.fits(environment):
            process = self._parent.start(words, folder, environment, ranks)
            return self._finish(process, folder, environment, timeout_s)
        if ranks > 1:
            return self.launch(ranks, words, folder=folder, env=env, timeout_s=timeout_s)
        return self.execute([sys.executable, *words], folder=folder, env=env, timeout_s=timeout_s)

    def _finish(
        self,
        process: subprocess.Popen[bytes] | Forked,
        folder: Path,
        environment: Mapping[str, str],
        timeout_s: float,
    ) -> Finished:
        code: int | None = None
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                abort_in_turn(process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if "MASTER_PORT" in environment:
                remove_shared_buffers(environment["MASTER_PORT"])
        return Finished(code, (folder / "log").read_text(errors="replace"), folder)

    def launch(self, ranks: int, arguments: Sequence[str], **options: Any) -> Finished:
        """Runs a script (or ``--module name``) under ``deepspeed``, each rank on a GPU if there are any."""
        if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
            pytest.skip(f"needs {ranks} GPUs, or a machine without any; this one has {torch.cuda.device_count()}")
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner"]
        count = "--num_gpus" if torch.cuda.is_available() else "--num_accelerators"
        port = str(free_port())
        try:
            return self.execute([*launcher, count, str(ranks), "--master_port", port, *arguments], ranks=0, **options)
        finally:
            remove_shared_buffers(port)

    def run(
        self,
        cases: Sequence[tuple[str, dict[str, Any], str]],
        *,
        ranks: int = 1,
        program: str = "training.py",
        launcher: bool = False,
        folder: Path | None = None,
        env: Mapping[str, str | None] | None = None,
        timeout_s: float = 300,
    ) -> Outcome:
        """Runs ``(name, case, engine)`` cases in one process per rank, if wanted under DeepSpeed's launcher."""
        # A rank that the launcher kills while it loads an operator leaves torch's lock, at which all later loads hang.
        if "TORCH_EXTENSIONS_DIR" in os.environ:  # the tests' own folder
            remove_left_behind()
        folder = folder or self.folder()
        list_file = folder / "cases.json"
        list_file.write_text(json.dumps([list(case) for case in cases]))
        script = [str(HERE / program), "--cases", str(list_file), "--folder", str(folder)]
        if self._oracle is not None:
            script += ["--oracle", str(self._oracle)]
        if launcher:
            finished = self.launch(ranks, script, folder=folder, env=env, timeout_s=timeout_s)
        else:
            finished = self.python(script, folder=folder, ranks=ranks, env=env, timeout_s=timeout_s)
        results = []
        for rank in range(ranks):
            path = folder / f"results_{rank}.json"
            results.append(json.loads(path.read_text()) if path.exists() else {})
        return Outcome(finished, tuple(results))


def abort_in_turn(group: int) -> None:
    """Has each process of a group print where its threads are, one after another: they share a log. All are stopped
    first, so that none ends the others meanwhile; children come before their parents.
    """
    processes = [process for process in psutil.process_iter() if group_of(process) == group]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGSTOP)
    for process in sorted(processes, key=lambda process: -process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGABRT)
            process.send_signal(signal.SIGCONT)
            deadline_s = time.monotonic() + ABORT_PATIENCE_S
            while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline_s:
                time.sleep(0.02)


def group_of(process: psutil.Process) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(process.pid)
    return None


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def harness(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Harness]:
    """Runs training processes whose files lie on a disk: ``TENCACHE_TEST_NVME``, the temporary folder or /var/tmp.

    Results of stock DeepSpeed are kept in pytest's cache, unless ``TENCACHE_TEST_FRESH_ORACLE`` is set.
    """
    chosen = os.environ.get("TENCACHE_TEST_NVME")
    base = Path(chosen) if chosen else tmp_path_factory.getbasetemp()
    if not chosen and file_system_of(base).in_memory:
        base = Path("/var/tmp")
    base.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="tencache-integration-", dir=base))
    kept: Path | None = None
    if getattr(pytestconfig, "cache", None) is not None and not os.environ.get("TENCACHE_TEST_FRESH_ORACLE"):
        kept = pytestconfig.cache.mkdir("stock")
        remove_unused(kept)
    harness = Harness(folder, kept)
    yield harness
    harness.close()
    if os.environ.get("TENCACHE_TEST_KEEP"):
        print(f"kept: {folder}")
        return
    shutil.rmtree(folder, ignore_errors=True)
