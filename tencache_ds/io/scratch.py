# SPDX-License-Identifier: Apache-2.0
"""Scratch files without names: unreachable for others, and gone with the process that created them.

A file is created under an unguessable name and unlinked at once; from then on only its descriptor refers to it. So
there is nothing to clean up, and nothing to be mistaken for another user's files:

- *However a process ends*, normally, by SIGTERM, SIGHUP, SIGKILL, out of memory or in an abort, the kernel closes its
  descriptors and thereby frees the space. Signal handlers would do that for some signals only, not while the main
  thread waits in a collective, and would have to be shared with the user's; a process that watches this one and cleans
  up after it dies with it when a control group is killed. Here the signals stay as the user and Python have set them.
- *No other user*, not even the folder's owner, can replace, rename or open a file that has no name; a planted link can
  redirect nothing; no cleaner of old files finds one.
- *Nothing is removed at startup*: there are no leftovers, so nodes on one shared file system need no coordination, and
  a user's own folders cannot be mistaken for ours.

The drawback: ``df`` counts the space and ``du`` does not; ``lsof +L1 <folder>`` shows the process that holds it, with
the former names of its files. Backends open a file for reading, for writing, with or without O_DIRECT, through
``/proc/self/fd``, which is proven when a folder is taken into use.

A process that is killed between creating a file and unlinking it leaves an empty file. On NFS the client keeps its own
name (``.nfs...``) until the file is closed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets

from tencache_ds import limits
from tencache_ds.errors import ConfigError


class ScratchFolder:
    """The user's folder, proven to take files without names. Holds nothing open.

    Args:
        root: the user's ``nvme_path``; created if it is missing.
        rank: global rank, part of the files' names in messages.
        label: purpose of the files, likewise.

    Raises:
        ConfigError: the root is not a folder, cannot be created or written, its file system is read-only or full, or
            unlinked files cannot be reopened there; names the path and the remedy.
    """

    def __init__(self, root: str, rank: int, label: str) -> None:
        self._folder = os.path.abspath(root)
        label = re.sub(r"[^A-Za-z0-9._-]", "_", label)
        self._prefix = f"tencache-{label}-{os.getpid()}-{secrets.token_hex(8)}-rank{rank}-"
        try:
            os.makedirs(self._folder, exist_ok=True)
            fd = make_unnamed(self.path("proof"))
        except OSError as error:
            raise ConfigError(_explain(root, error)) from error
        try:
            _prove_that_it_opens(root, fd)
        finally:
            close_unnamed(fd)

    @property
    def folder(self) -> str:
        """Absolute path of the root."""
        return self._folder

    def path(self, name: str) -> str:
        """Name of a file in messages, and at its creation: an absolute path in the folder.

        Raises:
            ValueError: the name is not a plain file name.
        """
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"not a plain file name: {name!r}")
        return os.path.join(self._folder, self._prefix + name)


def make_unnamed(path: str) -> int:
    """Makes a file and takes its name away. Any thread.

    Returns:
        A descriptor to read and write it; :func:`close_unnamed` ends it. The space is freed with the last descriptor.

    Raises:
        OSError: the file exists or cannot be created.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(path)
    except BaseException:
        os.close(fd)
        raise
    _unnamed[fd] = _identity(fd)
    return fd


def close_unnamed(fd: int) -> None:
    """Closes what :func:`make_unnamed` gave. Once."""
    _unnamed.pop(fd, None)
    os.close(fd)


def openable(fd: int) -> str:
    """A path at which this process can open the file of ``fd`` anew, with other flags, while ``fd`` is open."""
    return f"/proc/self/fd/{fd}"


def free_nbytes(root: str) -> int:
    """Bytes a normal user can still store at ``root`` (or, while it is missing, at its nearest existing parent).

    Raises:
        OSError: the file system cannot be queried.
    """
    status = os.statvfs(_existing_parent(root))
    return status.f_bavail * status.f_frsize


def device_of(root: str) -> int:
    """Number of the file system that ``root`` (or its nearest existing parent) is on: equal ones share their space.

    Raises:
        OSError: the file system cannot be queried.
    """
    return os.stat(_existing_parent(root)).st_dev


def _existing_parent(root: str) -> str:
    folder = os.path.abspath(root)
    while not os.path.exists(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    return folder


def _prove_that_it_opens(root: str, fd: int) -> None:
    try:
        again = os.open(openable(fd), os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        why = "/proc is not mounted" if not os.path.exists("/proc/self/fd") else error.strerror
        raise ConfigError(
            f"nvme_path {root!r} cannot hold scratch files: unlinked files cannot be reopened there ({why}). "
            "Choose a folder on a local file system (ext4, xfs), and mount /proc where it is missing"
        ) from error
    try:
        if _identity(again) != _identity(fd):
            raise ConfigError(f"nvme_path {root!r} cannot hold scratch files: its files change their identity")
    finally:
        os.close(again)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _explain(root: str, error: OSError) -> str:
    remedies = {
        errno.EROFS: "its file system is mounted read-only; choose a writable one",
        errno.EACCES: f"no permission at {error.filename}; give this user write access or choose another folder",
        errno.EPERM: f"no permission at {error.filename}; give this user write access or choose another folder",
        errno.ENOTDIR: f"{error.filename} is not a folder; choose a folder",
        errno.EEXIST: f"{error.filename} is not a folder; choose a folder",
        errno.ENOSPC: "no space left; free some or choose another device",
        errno.EDQUOT: "this user's quota is exhausted; free some space or choose another device",
        errno.ENOENT: f"{error.filename} does not exist and cannot be created; mount the device or correct the path",
    }
    remedies |= {number: f"{error.strerror}{limits.remedy(number)}" for number in (errno.EMFILE, errno.ENFILE)}
    remedy = remedies.get(error.errno or 0, f"{error.strerror or error}; choose another folder")
    return f"nvme_path {root!r} cannot hold scratch files: {remedy}"


# A forked child (a data loader's worker) inherits the descriptors and would keep a dead job's space. It closes all of
# them at once, those that backends opened too. Their numbers stay taken: what closes one later in the child must not
# close another file that got its number.
_unnamed: dict[int, tuple[int, int]] = {}


def _release_in_child() -> None:
    ours = set(_unnamed.values())
    _unnamed.clear()
    if not ours:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing is closed by now
            if _identity(int(name)) in ours:
                os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_release_in_child)
