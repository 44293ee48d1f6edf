# SPDX-License-Identifier: Apache-2.0
"""A killed start leaves torch's build lock behind: nobody may wait at it without being told."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tencache_ds.cli.console import Level
from tencache_ds.cli.doctor import check_build_locks
from tencache_ds.ops import build_lock

pytestmark = pytest.mark.timeout(60)

HOLD = "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True); sys.stdin.read()"
"""What torch's FileBaton does, until its standard input ends."""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def lock_of(root: Path, op_name: str) -> Path:
    lock = root / "py311_cpu" / op_name / "lock"
    lock.parent.mkdir(parents=True)
    return lock


@pytest.fixture
def held(root: Path):
    lock = lock_of(root, "async_io")
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout.readline() == "held\n"
        yield lock, builder
        builder.kill()


def test_a_lock_is_held_until_its_process_is_killed(held) -> None:
    lock, builder = held
    assert build_lock.build_locks() == build_lock.build_locks("async_io") == [lock]
    assert build_lock.build_locks("cpu_adam") == []
    assert build_lock.is_held(lock)
    assert "is being built" in build_lock.explain(lock)
    builder.kill()
    builder.wait()
    assert not build_lock.is_held(lock)
    assert f"rm {lock}" in build_lock.explain(lock)


def test_the_folder_is_that_of_torch(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.cpp_extension import get_default_build_root

    assert build_lock.extension_root() == root
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    assert os.path.realpath(build_lock.extension_root()) == get_default_build_root()
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    assert os.path.realpath(build_lock.extension_root()) == get_default_build_root()


def test_a_wait_is_explained(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    from torch.utils.file_baton import FileBaton

    lock = lock_of(root, "tencache_aio")
    lock.touch()

    class Told(logging.Handler):
        """The user, who does what the message says."""

        def emit(self, record: logging.LogRecord) -> None:
            assert f"rm {lock}" in record.getMessage()
            lock.unlink()

    handler = Told()
    build_lock.logger.addHandler(handler)
    try:
        with build_lock.told_what_takes_so_long("tencache_aio", patience_s=0.2, poll_s=0.05):
            FileBaton(str(lock)).wait()  # indefinitely, if nobody says anything
    finally:
        build_lock.logger.removeHandler(handler)
    assert not lock.exists()


LOAD = """
import sys
from pathlib import Path
from torch.utils.file_baton import FileBaton
from tencache_ds.ops.build_lock import only_loader
print("starts", flush=True)
with only_loader("tencache_aio"):
    baton = FileBaton(sys.argv[1])
    assert baton.try_acquire()
    print("held", flush=True)
    sys.stdin.read()
    baton.release()
print("loaded", flush=True)
"""


@pytest.fixture
def loaders(root: Path):
    """Starts processes that load one of TenCache's ops, until their standard input ends."""
    lock = lock_of(root, "tencache_aio")
    started = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LOAD, str(lock)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield lock, start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_killed_process_keeps_nobody_from_loading_tencaches_ops(loaders) -> None:
    lock, start = loaders
    killed = start()
    assert [killed.stdout.readline() for _ in range(2)] == ["starts\n", "held\n"]
    killed.kill()
    killed.wait()
    assert lock.exists()
    output, _ = start().communicate(timeout=30)
    assert output.splitlines() == ["starts", "held", "loaded"]
    assert not lock.exists()


def test_a_living_process_is_waited_for(loaders) -> None:
    lock, start = loaders
    first = start()
    assert [first.stdout.readline() for _ in range(2)] == ["starts\n", "held\n"]
    second = start()
    assert second.stdout.readline() == "starts\n"
    with pytest.raises(subprocess.TimeoutExpired):
        second.communicate(timeout=1)
    assert lock.exists()
    first.communicate(timeout=30)
    output, _ = second.communicate(timeout=30)
    assert output.splitlines()[-2:] == ["held", "loaded"]


def test_a_lock_that_another_machine_may_have_left_stays(root: Path) -> None:
    lock = lock_of(root, "tencache_aio")
    lock.touch()
    record = root / "tencache_aio.loader"
    record.write_text("another machine")
    with build_lock.only_loader("tencache_aio"):
        assert lock.exists()
    assert record.read_text() == "another machine"


def test_a_folder_without_locks_is_used_as_it_is(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(build_lock.fcntl, "lockf", refuse)
    lock = lock_of(root, "tencache_aio")
    lock.touch()
    with build_lock.only_loader("tencache_aio"):
        assert lock.exists()


def test_a_short_wait_is_not_worth_a_word(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock_of(root, "tencache_aio").touch()
    with build_lock.told_what_takes_so_long("tencache_aio", patience_s=30):
        pass
    assert not caplog.records


def test_each_file_is_named_while_it_is_compiled(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiler = root / "compiler"
    compiler.write_text("#!/bin/sh\nsleep 0.5\n")
    compiler.chmod(0o755)
    command = [str(compiler), "-DTORCH_EXTENSION_NAME=tencache_aio", "-c", "/sources/lane.cpp", "-o", "lane.o"]
    with build_lock.told_what_takes_so_long("tencache_aio", poll_s=0.02):
        subprocess.run(command, check=True)
    begins, ends = [record.message for record in caplog.records]
    assert begins.startswith("compiling the tencache_aio op, once: lane.cpp (")
    assert ends.startswith("the tencache_aio op is compiled, after ")


def test_doctor_finds_what_nobody_holds(held) -> None:
    lock, builder = held
    assert check_build_locks() == []
    builder.kill()
    builder.wait()
    (finding,) = check_build_locks()
    assert finding.level is Level.PROBLEM
    assert "async_io" in finding.text
    assert str(lock) in finding.remedy
