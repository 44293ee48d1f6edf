# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tencache_ds.errors import ConfigError
from tencache_ds.io import ScratchFolder, free_nbytes
from tencache_ds.io.scratch import remove_leftovers

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "nvme")


def jobs(root):
    parent = os.path.join(root, "tencache")
    return sorted(os.listdir(parent)) if os.path.isdir(parent) else []


def test_the_folder_exists_until_closed(root):
    folder = ScratchFolder(root, 3, "weights/of a model")
    assert re.fullmatch(
        re.escape(root) + rf"/tencache/weights_of_a_model-{os.getpid()}-[0-9a-f]{{8}}/rank3", folder.folder
    )
    path = folder.path("extents.bin")
    with open(path, "wb") as file:
        file.write(b"x" * 10000)
    folder.close()
    assert os.listdir(root) == []
    folder.close()


def test_two_engines_never_share(root):
    first, second = ScratchFolder(root, 0, "job"), ScratchFolder(root, 0, "job")
    assert first.folder != second.folder
    first.close()
    assert os.path.isdir(second.folder)
    second.close()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "a\0b"])
def test_only_plain_file_names(root, name):
    folder = ScratchFolder(root, 0, "job")
    with pytest.raises(ValueError, match="not a plain file name"):
        folder.path(name)
    folder.close()


def start_job(root, ending):
    script = f"""
import os, sys, time
from tencache_ds.io import ScratchFolder
folder = ScratchFolder({root!r}, 0, "job")
open(folder.path("data"), "wb").write(b"x" * 100000)
print("ready", flush=True)
{ending}
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_normal_exit_removes_the_folder(root):
    process = start_job(root, "")
    assert process.wait(30) == 0
    assert os.listdir(root) == []


def test_what_a_killed_job_left_is_removed_by_the_next_start(root, caplog):
    process = start_job(root, "time.sleep(100)")
    living = start_job(root, "time.sleep(100)")
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert len(jobs(root)) == 2
    with caplog.at_level("WARNING", logger="DeepSpeed.tencache.io"):
        folder = ScratchFolder(root, 0, "job")
    assert len(jobs(root)) == 2
    assert f"-{process.pid}-" in caplog.text
    assert any(f"-{living.pid}-" in name for name in jobs(root))
    folder.close()
    living.kill()
    living.wait(30)
    assert remove_leftovers(root) >= 100000
    assert jobs(root) == []


def test_a_forked_worker_does_not_keep_a_dead_job_alive(root):
    process = start_job(root, "if os.fork() == 0: print(os.getpid(), flush=True)\ntime.sleep(100)")
    worker_pid = int(process.stdout.readline())
    process.kill()
    process.wait(30)
    assert remove_leftovers(root) > 0
    os.kill(worker_pid, signal.SIGKILL)
    assert jobs(root) == []


def test_a_forked_child_removes_nothing(root):
    folder = ScratchFolder(root, 0, "job")
    pid = os.fork()
    if pid == 0:
        folder.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.path.isdir(folder.folder)
    assert remove_leftovers(root) == 0  # still locked by this process
    folder.close()


def test_a_folder_being_made_is_left_alone_an_old_one_is_not(root):
    young = os.path.join(root, "tencache", "job-12-0123abcd")
    old = os.path.join(root, "tencache", "job-13-0123abcd")
    for folder in (young, old):
        os.makedirs(folder)
    os.utime(old, (time.time() - 100, time.time() - 100))
    remove_leftovers(root)
    assert jobs(root) == ["job-12-0123abcd"]


def test_what_is_not_a_jobs_folder_is_never_removed(root):
    theirs = os.path.join(root, "tencache", "docs")
    os.makedirs(theirs)
    outside = os.path.join(root, "outside")
    os.makedirs(outside)
    link = os.path.join(root, "tencache", "job-14-0123abcd")
    os.symlink(outside, link)
    for folder in (theirs, outside):
        os.utime(folder, (0, 0))
    ScratchFolder(root, 0, "job").close()
    assert os.path.isdir(theirs)
    assert os.path.isdir(outside)
    assert os.path.islink(link)


def test_a_file_as_root_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConfigError, match=r"nvme_path '.*file' .* is not a folder; choose a folder"):
        ScratchFolder(str(file), 0, "job")
    with pytest.raises(ConfigError, match="is not a folder"):
        ScratchFolder(str(file / "below"), 0, "job")


def test_a_root_that_cannot_be_made_is_refused():
    with pytest.raises(ConfigError, match="nvme_path '/proc/nvme'"):
        ScratchFolder("/proc/nvme", 0, "job")


@pytest.mark.parametrize(
    ("number", "message"),
    [(30, "mounted read-only"), (13, "no permission"), (28, "no space left"), (37, "no file locks")],
)
def test_each_failure_has_its_remedy(root, monkeypatch, number, message):
    def refuse(*_):
        raise OSError(number, os.strerror(number), root)

    monkeypatch.setattr("fcntl.flock" if number == 37 else "os.mkdir", refuse)
    with pytest.raises(ConfigError, match=message):
        ScratchFolder(root, 0, "job")
    monkeypatch.undo()
    assert jobs(root) == []


def test_free_space(root, tmp_path):
    assert free_nbytes(root) > 0
    assert free_nbytes(str(tmp_path / "not" / "yet")) > 0
