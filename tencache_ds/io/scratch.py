# SPDX-License-Identifier: Apache-2.0
"""Folders for scratch files: one per engine and rank, never shared, removed at the end and by the next start.

Ownership is a file lock, which the kernel releases however a process ends; process numbers alone say nothing across
containers. The lock file appears under its final name only when it is locked, so that nobody can take a folder for
dead while it is being made.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import time

from tencache_ds import limits
from tencache_ds.errors import ConfigError

_logger = logging.getLogger("DeepSpeed.tencache.io")

_PARENT = "tencache"
_LOCK = "owner.lock"
_JOB_FOLDER = re.compile(r".+-\d+-[0-9a-f]{8}")
"""Only what is named like a job's folder is ever removed: ``tencache`` under the root may be somebody's own folder."""
_LOCKLESS_AGE_S = 60.0
_N_ATTEMPTS = 8
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class ScratchFolder:
    """``<root>/tencache/<label>-<pid>-<8 hex>/rank<r>/``, owned for the life of this process.

    Making one first removes what dead jobs of the same user left under ``<root>/tencache/``.

    Args:
        root: the user's ``nvme_path``; made if it is missing.
        rank: global rank, part of the path.
        label: what the folder is for, part of the path.

    Raises:
        ConfigError: the root is not a folder, cannot be made or written, or its file system is read-only or has no
            file locks; names the path and what to do.
    """

    def __init__(self, root: str, rank: int, label: str) -> None:
        self._pid = os.getpid()
        self._lock_fd = -1
        parent = os.path.join(os.path.abspath(root), _PARENT)
        try:
            self._make(root, parent, rank, re.sub(r"[^A-Za-z0-9._-]", "_", label))
        except OSError as error:
            raise ConfigError(_explain(root, error)) from error
        _owned.add(self)
        atexit.register(self.close)
        remove_leftovers(root)

    @property
    def folder(self) -> str:
        """Absolute path of the rank's folder."""
        return self._folder

    def path(self, name: str) -> str:
        """Absolute path of a file in the folder.

        Raises:
            ValueError: the name is not a plain file name.
        """
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"not a plain file name: {name!r}")
        return os.path.join(self._folder, name)

    def close(self) -> None:
        """Removes the folder with everything in it. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid or self._lock_fd < 0:
            return
        atexit.unregister(self.close)
        _owned.discard(self)
        job_folder = os.path.dirname(self._folder)
        try:
            shutil.rmtree(job_folder)
        except OSError as error:
            _logger.warning("scratch folder %s could not be removed: %s", job_folder, error)
        finally:
            os.close(self._lock_fd)
            self._lock_fd = -1
        with contextlib.suppress(OSError):  # other jobs may be using it
            os.rmdir(os.path.dirname(job_folder))

    def _make(self, root: str, parent: str, rank: int, label: str) -> None:
        if os.path.lexists(root) and not os.path.isdir(root):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), root)
        for attempt in range(_N_ATTEMPTS):
            job_folder = os.path.join(parent, f"{label}-{self._pid}-{secrets.token_hex(4)}")
            try:
                os.makedirs(root, exist_ok=True)
                _make_shared(parent)
                os.mkdir(job_folder, 0o700)
            except (FileExistsError, FileNotFoundError):
                # The name was taken, or another job's end removed the empty parent in between.
                if attempt == _N_ATTEMPTS - 1:
                    raise
            else:
                break
        draft = os.path.join(job_folder, f".{_LOCK}")
        try:
            self._lock_fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._lock_fd, f"{self._pid}\n".encode())
            os.rename(draft, os.path.join(job_folder, _LOCK))
            self._folder = os.path.join(job_folder, f"rank{rank}")
            os.mkdir(self._folder, 0o700)
        except OSError:
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1
            shutil.rmtree(job_folder, ignore_errors=True)
            raise


def remove_leftovers(root: str) -> int:
    """Removes folders of dead jobs under ``<root>/tencache/`` that belong to this user.

    A folder whose lock can be taken has no living owner; neither has one without a lock file after a minute.

    Returns:
        Bytes of storage given back.
    """
    parent = os.path.join(os.path.abspath(root), _PARENT)
    n_removed_bytes = 0
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return 0
    for name in filter(_JOB_FOLDER.fullmatch, names):
        folder = os.path.join(parent, name)
        try:
            status = os.lstat(folder)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            n_removed_bytes += _remove_if_dead(folder, time.time() - status.st_mtime)
        except FileNotFoundError:
            continue  # its owner, or another job's start, was faster
        except OSError as error:
            _logger.warning("left-over scratch folder %s could not be removed: %s", folder, error)
    return n_removed_bytes


def free_nbytes(root: str) -> int:
    """Bytes a normal user can still store at ``root`` (or, while it is missing, at its nearest existing parent).

    Raises:
        OSError: the file system cannot be asked.
    """
    status = os.statvfs(_existing_parent(root))
    return status.f_bavail * status.f_frsize


def device_of(root: str) -> int:
    """Number of the file system that ``root`` (or its nearest existing parent) is on: equal ones share their space.

    Raises:
        OSError: the file system cannot be asked.
    """
    return os.stat(_existing_parent(root)).st_dev


def _existing_parent(root: str) -> str:
    folder = os.path.abspath(root)
    while not os.path.exists(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    return folder


def _remove_if_dead(folder: str, age_s: float) -> int:
    lock_path = os.path.join(folder, _LOCK)
    try:
        fd = os.open(lock_path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if age_s < _LOCKLESS_AGE_S:
            return 0
        return _remove(folder)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES, *_NO_LOCKS):
                return 0
            raise
        return _remove(folder)
    finally:
        os.close(fd)


def _remove(folder: str) -> int:
    nbytes = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                nbytes += os.lstat(os.path.join(where, name)).st_blocks * 512
    shutil.rmtree(folder)
    _logger.warning("removed the scratch folder of a dead job: %s (%.3f GB)", folder, nbytes / 1e9)
    return nbytes


def _make_shared(parent: str) -> None:
    """Like /tmp: every user may make folders in it, nobody may remove another user's."""
    try:
        os.mkdir(parent)
    except FileExistsError:
        return
    os.chmod(parent, 0o1777)


def _explain(root: str, error: OSError) -> str:
    remedies = {
        errno.EROFS: "its file system is mounted read-only; choose a writable one",
        errno.EACCES: f"no permission at {error.filename}; give this user write access or choose another folder",
        errno.EPERM: f"no permission at {error.filename}; give this user write access or choose another folder",
        errno.ENOTDIR: f"{error.filename} is not a folder; choose a folder",
        errno.EEXIST: f"{error.filename} is not a folder; choose a folder",
        errno.ENOSPC: "no space left; free some or choose another device",
        errno.ENOENT: f"{error.filename} does not exist and cannot be made; mount the device or correct the path",
    }
    remedies |= dict.fromkeys(_NO_LOCKS, "its file system has no file locks; choose a local one")
    remedies |= {number: f"{error.strerror}{limits.remedy(number)}" for number in (errno.EMFILE, errno.ENFILE)}
    remedy = remedies.get(error.errno or 0, f"{error.strerror or error}; choose another folder")
    return f"nvme_path {root!r} cannot hold scratch files: {remedy}"


# A forked child (a data loader's worker) shares the lock and would keep a dead job's folder alive: it lets go at once.
_owned: set[ScratchFolder] = set()


def _let_go_in_child() -> None:
    for folder in list(_owned):
        if folder._lock_fd >= 0:
            os.close(folder._lock_fd)
            folder._lock_fd = -1
    _owned.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
