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

[Note: reserved space] They hand out only space that the device has actually reserved.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import secrets
import threading
from collections.abc import Sequence

from tencache_ds import limits
from tencache_ds.errors import ConfigError, SpaceError, StorageError
from tencache_ds.io.extents import FreeList
from tencache_ds.layout import round_up
from tencache_ds.limits import limit, remedy


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


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SpaceFile:
    """Makes a file and hands out ranges of it. Every method may be called from any thread.

    Args:
        path: its name; must not exist, and does not exist afterwards either.
        preallocate_nbytes: length reserved at once.
        growth_nbytes: least growth when no free range is long enough; less if the device has no more.

    Raises:
        SpaceError: the device cannot hold ``preallocate_nbytes``.
        StorageError: the file exists or cannot be created.
    """

    def __init__(self, path: str, *, preallocate_nbytes: int, growth_nbytes: int) -> None:
        self._path = path
        self._growth_nbytes = round_up(max(1, growth_nbytes))
        self._lock = threading.Lock()
        self._free = FreeList()
        self._n_taken = 0
        try:
            self._fd = make_unnamed(path)
        except OSError as error:
            cause = f"{error.strerror or error}{remedy(error.errno)}"
            raise StorageError("create", path, 0, 0, cause, errno=error.errno) from error
        if preallocate_nbytes > 0:
            try:
                self._reserve(round_up(preallocate_nbytes), "preallocation")
            except StorageError:
                self.close()
                raise

    @property
    def descriptor(self) -> int:
        """The file, until :meth:`close`."""
        return self._fd

    @property
    def nbytes_file(self) -> int:
        """Length of the file in bytes."""
        with self._lock:
            return self._free.end

    @property
    def nbytes_taken(self) -> int:
        """Bytes handed out and not returned."""
        with self._lock:
            return self._free.end - self._free.free_nbytes

    @property
    def n_taken(self) -> int:
        """Ranges handed out and not returned."""
        with self._lock:
            return self._n_taken

    def device_nbytes(self) -> tuple[int, int]:
        """Bytes that are free for a normal user on the file system, and its size.

        Raises:
            OSError: the file system cannot be queried.
        """
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize

    def take(self, nbytes: int, tag: str) -> int:
        """Offset of a reserved range of ``nbytes`` (a multiple of 4096) bytes, first fit, growing the file if need be.

        Raises:
            SpaceError: the device is full; says how much is missing.
            StorageError: the file cannot grow for another reason.
        """
        with self._lock:
            offset = self._free.take(nbytes)
            if offset is None:
                self._grow(nbytes - self._free.tail_nbytes, tag)
                offset = self._free.take(nbytes)
            if offset is None:
                raise RuntimeError(f"{self._path} has grown, yet has no free range of {nbytes} bytes")
            self._n_taken += 1
            return offset

    def take_free(self, nbytes: int) -> int | None:
        """Like :meth:`take`, but without growing the file: None when there is no such range."""
        with self._lock:
            offset = self._free.take(nbytes)
            self._n_taken += offset is not None
            return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Returns a range."""
        with self._lock:
            self._free.give(offset, nbytes)
            self._n_taken -= 1

    def reserve(self, nbytes: int, tag: str) -> None:
        """Makes the file longer by ``nbytes`` (rounded up to 4096), to be handed out later.

        Raises:
            SpaceError: the device is full; says how much is missing.
            StorageError: the file cannot grow for another reason.
        """
        with self._lock:
            self._reserve(round_up(nbytes), tag)

    def close(self) -> None:
        """Releases the space as soon as the file is not open elsewhere. Called once."""
        fd, self._fd = self._fd, -1  # its number may soon be another file's
        close_unnamed(fd)

    def _grow(self, needed_nbytes: int, tag: str) -> None:
        if self._growth_nbytes > needed_nbytes:
            with contextlib.suppress(SpaceError):
                self._reserve(self._growth_nbytes, tag)
                return
        self._reserve(needed_nbytes, tag)

    def _reserve(self, nbytes: int, tag: str) -> None:
        start = self._free.end
        try:
            if nbytes > self.device_nbytes()[0]:
                # Not left to the kernel: it would first take all there is, and until it gives that back nobody else
                # could write a byte.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self._fd, start, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, start)  # a failed reservation may have taken a part
            cause = error.strerror or str(error)
            if error.errno not in _FULL:
                raise StorageError("allocate", self._path, start, nbytes, cause, errno=error.errno, tag=tag) from error
            raise SpaceError(
                "allocate",
                self._path,
                start,
                nbytes,
                f"{cause}: {self._what_is_missing(error, start + nbytes)}",
                errno=error.errno,
                tag=tag,
            ) from error
        self._free.extend(nbytes)

    def _what_is_missing(self, error: OSError, end: int) -> str:
        """The limit that a file of ``end`` bytes exceeds, and the remedy."""
        if error.errno == errno.EFBIG:
            most = limit(resource.RLIMIT_FSIZE)
            if most != "unlimited":
                return f"the file needs {end} bytes, and this process may write {most} per file; raise `ulimit -f`"
            return f"the file needs {end} bytes, more than the file system allows in one; choose another nvme_path"
        free_nbytes, _ = self.device_nbytes()
        if error.errno == errno.EDQUOT:
            return (
                f"this user's quota does not allow {end} bytes for the file, although the device has {free_nbytes} "
                "bytes free; raise the quota, or choose another nvme_path"
            )
        return (
            f"{max(0, end - self._free.end - free_nbytes)} bytes are missing ({free_nbytes} free); free some space, "
            "choose a larger nvme_path, or keep more state in RAM"
        )


class SpaceFiles:
    """Several files as one space, each range within one file, evenly spread. Any thread may call every method.

    Why several: writes to one file can wait for each other in the kernel, even on a fast device. tmpfs allows one
    writer per file at a time, ext4 does so until every block has been written once.

    Args:
        paths: names of the files, see :class:`SpaceFile`.
        preallocate_nbytes: length reserved at once, over all files. A range that fits no share grows one of them.
        growth_nbytes: least growth when no free range is long enough, over all files.

    Raises:
        SpaceError: the device cannot hold ``preallocate_nbytes``.
        StorageError: a file exists or cannot be created.
    """

    def __init__(self, paths: Sequence[str], *, preallocate_nbytes: int, growth_nbytes: int) -> None:
        self._lock = threading.Lock()  # so that two takers do not choose the same emptiest file
        self._files: dict[str, SpaceFile] = {}
        try:
            for path in paths:
                self._files[path] = SpaceFile(
                    path,
                    preallocate_nbytes=-(-preallocate_nbytes // len(paths)),
                    growth_nbytes=-(-growth_nbytes // len(paths)),
                )
        except BaseException:
            self.close()
            raise

    def descriptor(self, path: str) -> int:
        """See :attr:`SpaceFile.descriptor`."""
        return self._files[path].descriptor

    @property
    def nbytes(self) -> int:
        """Length of all files in bytes."""
        return sum(file.nbytes_file for file in self._files.values())

    @property
    def nbytes_taken(self) -> int:
        """Bytes handed out and not returned."""
        return sum(file.nbytes_taken for file in self._files.values())

    @property
    def n_taken(self) -> int:
        """Ranges handed out and not returned."""
        return sum(file.n_taken for file in self._files.values())

    def held(self) -> list[tuple[int, int]]:
        """Ranges handed out and not returned on this one device: how many, and their bytes."""
        return [(self.n_taken, self.nbytes_taken)]

    def device_nbytes(self) -> tuple[int, int]:
        """See :meth:`SpaceFile.device_nbytes`."""
        return next(iter(self._files.values())).device_nbytes()

    def take(self, nbytes: int, tag: str) -> tuple[str, int]:
        """File and offset of a reserved range of ``nbytes`` (a multiple of 4096), in the emptiest file that has one.

        Raises:
            SpaceError: the device is full; says how much is missing.
            StorageError: a file cannot grow for another reason.
        """
        with self._lock:
            emptiest_first = self._emptiest_first()
            free = self._take_free(emptiest_first, nbytes)
            return free or (emptiest_first[0], self._files[emptiest_first[0]].take(nbytes, tag))

    def take_free(self, nbytes: int) -> tuple[str, int] | None:
        """Like :meth:`take`, but without growing a file: None when there is no such range."""
        with self._lock:
            return self._take_free(self._emptiest_first(), nbytes)

    def reserve(self, nbytes: int, tag: str) -> None:
        """Makes the files longer by ``nbytes`` together, to be handed out later.

        Raises:
            SpaceError: the device is full; says how much is missing.
            StorageError: a file cannot grow for another reason.
        """
        for file in self._files.values():
            file.reserve(-(-nbytes // len(self._files)), tag)

    def give(self, path: str, offset: int, nbytes: int) -> None:
        """Returns a range."""
        self._files[path].give(offset, nbytes)

    def close(self) -> None:
        """Gives the space back, see :meth:`SpaceFile.close`. Called once."""
        for file in self._files.values():
            file.close()

    def _emptiest_first(self) -> list[str]:
        return sorted(self._files, key=lambda path: self._files[path].nbytes_taken)

    def _take_free(self, paths: Sequence[str], nbytes: int) -> tuple[str, int] | None:
        for path in paths:
            offset = self._files[path].take_free(nbytes)
            if offset is not None:
                return path, offset
        return None
