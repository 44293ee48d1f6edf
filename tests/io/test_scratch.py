# SPDX-License-Identifier: Apache-2.0
"""Sharing a machine: what other users, cleaners and earlier jobs do in the folder, and how a job ends."""

from __future__ import annotations

import errno
import os
import re
import select
import shutil
import signal
import stat
import tempfile
import time
from pathlib import Path

import pytest
import torch

from tencache_ds.errors import ConfigError
from tencache_ds.io import NvmePaths, PosixBackend, ScratchFolder, free_nbytes
from tencache_ds.io.scratch import close_unnamed, make_unnamed, openable
from tencache_ds.io.stripes import Striping
from tests.integration.stop_cases import holders
from tests.io.conftest import aligned

pytestmark = pytest.mark.timeout(60)

PAGE = 4096
SOMEBODY, SOMEBODY_ELSE = 65533, 65534


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "nvme")


def open_store(root, rank=0):
    nvme = NvmePaths(rank, lambda: (PosixBackend(n_lanes=1), "a test"), Striping)
    options = {"preallocate_nbytes": 1 << 20, "growth_nbytes": PAGE, "n_files": 2, "fingerprint": None, "timeout_s": 20}
    return nvme, nvme.open_store("weights", [root], **options)


class Job:
    """A separate process that has written to its scratch files and reads them back on request."""

    def __init__(self, root, *, uid=None, prepare=lambda: None):
        ready, self._ready = os.pipe()
        self._go, go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(go)
                if uid is not None:
                    os.setuid(uid)
                self._run(root, prepare, ready)
                code = 0
            finally:
                os._exit(code)
        os.close(self._ready)
        os.close(self._go)
        self._go = go
        assert select.select([ready], [], [], 30)[0], "the job hangs"
        self.told = os.read(ready, 100)
        os.close(ready)

    def _run(self, root, prepare, ready):
        nvme, store = open_store(root)
        extent = store.allocate(64 * PAGE, "t")
        data = aligned(64 * PAGE, None, seed=1)
        store.write(extent, data).wait()
        prepare()
        os.close(ready)
        os.write(self._ready, b"ready")
        os.close(self._ready)
        os.read(self._go, 1)
        back = aligned(64 * PAGE)
        store.read(extent, back).wait()
        assert torch.equal(back, data)
        nvme.close()

    def reads_back(self):
        """Whether it still has its bytes, and ends well."""
        os.write(self._go, b"x")
        return self.ended() == 0

    def ended(self):
        os.close(self._go)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def everything_below(folder):
    return sorted(os.path.join(where, name) for where, folders, files in os.walk(folder) for name in folders + files)


# How a job ends


ENDINGS = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGABRT]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_signal_leaves_nothing_and_is_what_the_process_died_of(root, ending):
    job = Job(root, prepare=lambda: signal.signal(ending, signal.SIG_DFL) if ending != signal.SIGKILL else None)
    assert holders(Path(root)) == [job.pid]
    os.kill(job.pid, ending)
    assert job.ended() == -ending
    assert everything_below(root) == []
    assert holders(Path(root)) == []


def test_an_end_without_any_cleaning_up_leaves_nothing(root):
    job = Job(root)
    assert job.reads_back()  # and leaves by os._exit
    assert everything_below(root) == []


def test_signals_are_left_as_they_are(root):
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    nvme, _ = open_store(root)
    during = {number: signal.getsignal(number) for number in signal.valid_signals()}
    nvme.close()
    assert before == during == {number: signal.getsignal(number) for number in signal.valid_signals()}


def test_a_forked_worker_does_not_keep_the_space_of_a_dead_job(root, tmp_path):
    note = tmp_path / "worker"

    def fork_a_worker():
        if (pid := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        note.write_text(str(pid))

    job = Job(root, prepare=fork_a_worker)
    worker = int(note.read_text())
    try:
        os.kill(job.pid, signal.SIGKILL)
        job.ended()
        t_end = time.monotonic() + 10  # the worker may just have begun
        while holders(Path(root)) and time.monotonic() < t_end:
            time.sleep(0.01)
        assert holders(Path(root)) == []
        os.kill(worker, 0)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_worker_that_gets_the_signal_takes_nothing_along(root):
    def lose_a_worker():
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        os.waitpid(pid, 0)

    assert Job(root, prepare=lose_a_worker).reads_back()


def test_what_a_child_closes_is_nobody_elses(root):
    """The engine's clean-up may run in a child, too: the numbers it closes must not have gone to other files."""
    nvme, store = open_store(root)
    (first, second) = (int(os.path.basename(store.location(name))) for name in store.paths)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            other, other_end = os.pipe()
            numbers_stay_taken = not {other, other_end} & {first, second}
            is_nothing = stat.S_ISCHR(os.fstat(first).st_mode) and not os.get_inheritable(first)
            nvme.close()
            os.write(other_end, b"x")
            code = 0 if numbers_stay_taken and is_nothing and os.read(other, 1) == b"x" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert os.fstat(first).st_size > 0
    nvme.close()


# What others do in the folder


def test_files_have_no_names_and_belong_to_the_user_alone(root):
    nvme, store = open_store(root)
    for name in store.paths:
        assert re.fullmatch(rf"{re.escape(root)}/tencache-engine-\d+-[0-9a-f]{{16}}-rank0-weights-\d\.bin", name)
        status = os.stat(store.location(name))
        assert (status.st_nlink, status.st_mode & 0o777, status.st_uid) == (0, 0o600, os.geteuid())
    assert everything_below(root) == []
    nvme.close()


def test_engines_on_one_folder_never_share(root):
    first, second = open_store(root), open_store(root)
    assert not set(first[1].paths) & set(second[1].paths)
    first[0].close()
    extent = second[1].allocate(PAGE, "t")
    second[1].write(extent, aligned(PAGE, 1)).wait()
    second[0].close()


@pytest.fixture
def shared():
    """A folder of another user's, where this one may be one; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        root = os.path.join(base, "nvme")
        os.mkdir(root)
        if os.geteuid() == 0:
            os.chown(root, SOMEBODY_ELSE, SOMEBODY_ELSE)
        yield root


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_the_owner_of_the_folder_and_a_cleaner_can_do_no_harm(shared, mode):
    """Everything that is there goes, and something else gets its name: by age, by malice, or by `rm -rf`."""
    root = shared
    os.chmod(root, mode)
    as_root = os.geteuid() == 0
    job = Job(root, uid=SOMEBODY if as_root else None)
    assert job.told == b"ready"
    pid = os.fork()
    if pid == 0:  # the owner
        code = 1
        try:
            if as_root:
                os.setuid(SOMEBODY_ELSE)
            for path in reversed(everything_below(root)):
                os.rename(path, path + ".taken")
                with open(path, "wb") as file:
                    file.write(bytes(1 << 20))
            for name in os.listdir(root):
                shutil.rmtree(os.path.join(root, name), ignore_errors=True)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert job.reads_back()


def test_planted_links_and_folders_redirect_nothing(root, tmp_path):
    """`tencache` below the root was where files went once."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "weights-0.bin").write_text("the victim's")
    os.mkdir(root)
    os.symlink(victim, os.path.join(root, "tencache"))
    nvme, store = open_store(root)
    extent = store.allocate(PAGE, "t")
    store.write(extent, aligned(PAGE, 1)).wait()
    nvme.close()
    assert everything_below(victim) == [str(victim / "weights-0.bin")]
    assert (victim / "weights-0.bin").read_text() == "the victim's"
    assert os.path.islink(os.path.join(root, "tencache"))


@pytest.mark.parametrize("taken", ["link", "file"])
def test_a_name_that_is_taken_is_refused(tmp_path, taken):
    path, victim = tmp_path / "data.bin", tmp_path / "victim"
    victim.write_text("somebody's")
    os.symlink(victim, path) if taken == "link" else path.write_text("somebody's")
    with pytest.raises(FileExistsError):
        make_unnamed(str(path))
    assert victim.read_text() == "somebody's" == path.read_text()


# What was there before


def test_a_users_own_folders_stay_whatever_they_are_called(root, caplog):
    for name in ("exp-7-20261121", "tencache-engine-12-0123abcd-rank0-data"):
        folder = os.path.join(root, "tencache", name, "rank0")
        os.makedirs(folder)
        with open(os.path.join(folder, "weights-0.bin"), "wb") as opened:
            opened.write(bytes(PAGE))
    before = everything_below(root)
    with caplog.at_level("WARNING", logger="DeepSpeed.tencache.io"):
        open_store(root)[0].close()
    assert everything_below(root) == before
    assert caplog.text == ""


# Folders that will not do


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "a\0b"])
def test_only_plain_file_names(root, name):
    folder = ScratchFolder(root, 0, "job")
    with pytest.raises(ValueError, match="not a plain file name"):
        folder.path(name)


def test_a_label_becomes_part_of_a_plain_name(root):
    path = ScratchFolder(root, 3, "weights/of a model").path("data")
    assert re.fullmatch(rf"{root}/tencache-weights_of_a_model-{os.getpid()}-[0-9a-f]{{16}}-rank3-data", path)


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
    [
        (errno.EROFS, "mounted read-only"),
        (errno.EACCES, "no permission at"),
        (errno.ENOSPC, "no space left"),
        (errno.EDQUOT, "quota"),
        (errno.EIO, "Input/output error; choose another folder"),
    ],
)
def test_each_failure_has_its_remedy(root, monkeypatch, number, message):
    def refuse(path, *_, **__):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr("os.unlink" if number == errno.EIO else "os.makedirs", refuse)
    with pytest.raises(ConfigError, match=message):
        ScratchFolder(root, 0, "job")


def test_a_file_system_that_loses_what_has_no_name_is_refused(root, monkeypatch):
    real_open = os.open

    def lose(path, *rest, **named):
        if path.startswith("/proc/self/fd/"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return real_open(path, *rest, **named)

    monkeypatch.setattr(os, "open", lose)
    n_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"cannot be reopened there \(Stale file handle\).*local file system"):
        ScratchFolder(root, 0, "job")
    assert len(os.listdir("/proc/self/fd")) == n_before
    assert everything_below(root) == []


def test_a_file_is_opened_anew_through_its_descriptor(tmp_path):
    fd = make_unnamed(str(tmp_path / "data"))
    os.write(fd, b"bytes")
    with open(openable(fd), "rb") as file:
        assert file.read() == b"bytes"
    close_unnamed(fd)
    assert not os.path.exists(openable(fd))


def test_free_space(root, tmp_path):
    assert free_nbytes(root) > 0
    assert free_nbytes(str(tmp_path / "not" / "yet")) > 0
