# SPDX-License-Identifier: Apache-2.0
"""The backend that needs nothing but the operating system: ``preadv``/``pwritev`` in several lanes.

Every byte count is checked and every errno reported. It works with any host memory, pinned or not, and on any file
system; :mod:`tencache_ds.io.backends.aio` uses the same :class:`PosixFiles` where Linux AIO cannot work.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from dataclasses import dataclass

import torch

from tencache_ds.errors import StorageError
from tencache_ds.io.backends.lanes import LaneBackend, OpenFile, OpenFiles
from tencache_ds.io.backends.protocol import Operation, storage_error
from tencache_ds.io.scratch import openable
from tencache_ds.layout import PAGE_NBYTES

_logger = logging.getLogger("DeepSpeed.tencache.io")

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_N_EAGAIN_RETRIES = 200
_EAGAIN_PAUSE_S = 0.005


@dataclass(slots=True)
class Descriptor(OpenFile):
    """A file of the operating system.

    Attributes:
        fd: the file.
        direct: its transfers bypass the page cache.
        previous_write: offset and bytes of the last write through the page cache.
    """

    fd: int
    direct: bool
    previous_write: tuple[int, int] = (0, 0)

    def close(self) -> None:
        """See :meth:`tencache_ds.io.backends.lanes.OpenFile.close`."""
        os.close(self.fd)


class PosixFiles(OpenFiles[Descriptor]):
    """Persistent descriptors and whole transfers on them. Thread-safe.

    Args:
        direct: bypass the page cache with O_DIRECT where the file system allows it. Where it does not, the cached pages
            are dropped after each transfer, so that scratch traffic does not push training data out of RAM.
    """

    def __init__(self, direct: bool = True) -> None:
        super().__init__()
        self._direct = direct and _O_DIRECT != 0
        self._buffered_paths: set[str] = set()

    def transfer(self, operation: Operation, path: str, offset: int, buffer: torch.Tensor, tag: str = "") -> None:
        """Moves the whole buffer, blocking; short transfers are continued.

        Raises:
            SpaceError: no space or quota left for a write.
            StorageError: any other failure, with errno where there is one.
        """
        view = buffer.numpy().data
        try:
            with self.using(operation, path) as descriptor:
                try:
                    self._move(operation, descriptor, offset, view)
                except OSError as error:
                    # Some file systems accept the flag at open() and refuse the transfer.
                    if not (descriptor.direct and error.errno == errno.EINVAL):
                        raise
                    self.fall_back(path)
                else:
                    return
            with self.using(operation, path) as descriptor:
                self._move(operation, descriptor, offset, view)
        except EOFError as error:
            raise StorageError(operation.value, path, offset, len(view), str(error), tag=tag) from None
        except OSError as error:
            raise storage_error(operation, path, offset, len(view), error, tag) from error

    def forget(self, path: str) -> None:
        """See :meth:`.open_files.OpenFiles.forget`; whether the file has O_DIRECT is forgotten too."""
        with self._lock:
            self._buffered_paths.discard(path)
        super().forget(path)

    def fall_back(self, path: str) -> None:
        """From now on the file goes through the page cache: its file system took the flag and refuses the transfer."""
        with self._lock:
            self._note_buffered(path, "its file system refuses O_DIRECT transfers")
            for operation in Operation:
                descriptor = self._files.get((path, operation))
                if descriptor is not None and descriptor.direct:
                    self._retire(path, operation)

    def _open(self, operation: Operation, path: str, location: str) -> Descriptor:
        flags = (os.O_RDONLY if operation is Operation.READ else os.O_WRONLY) | os.O_CLOEXEC
        if self._direct and path not in self._buffered_paths:
            try:
                return Descriptor(os.open(location, flags | _O_DIRECT), direct=True)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._note_buffered(path, "its file system has no O_DIRECT")
        return Descriptor(os.open(location, flags), direct=False)

    def _note_buffered(self, path: str, reason: str) -> None:
        if path not in self._buffered_paths:
            self._buffered_paths.add(path)
            _logger.warning("%s goes through the page cache: %s", path, reason)

    def _move(self, operation: Operation, descriptor: Descriptor, offset: int, view: memoryview) -> None:
        n_moved = _move_some(operation, descriptor.fd, offset, view)
        if n_moved < len(view):
            # A transfer that stopped in the middle of a block cannot continue with O_DIRECT: the kernel finishes it.
            fd = os.open(openable(descriptor.fd), os.O_RDONLY if operation is Operation.READ else os.O_WRONLY)
            try:
                while n_moved < len(view):
                    n_more = _move_some(operation, fd, offset + n_moved, view[n_moved:], stop_at_blocks=False)
                    if n_more == 0:
                        if operation is Operation.READ:
                            size = os.fstat(fd).st_size
                            raise EOFError(f"file ends after {size} bytes, {n_moved} of {len(view)} bytes were read")
                        raise OSError(errno.EIO, f"the device accepted {n_moved} of {len(view)} bytes")
                    n_moved += n_more
            finally:
                os.close(fd)
        if not descriptor.direct:
            give_back_pages(operation, descriptor, offset, len(view))


def _move_some(operation: Operation, fd: int, offset: int, view: memoryview, *, stop_at_blocks: bool = True) -> int:
    """Moves bytes until all are moved, none moves any more, or (``stop_at_blocks``) it stopped within a block."""
    n_moved = 0
    n_retries = 0
    while n_moved < len(view):
        try:
            if operation is Operation.READ:
                n = os.preadv(fd, [view[n_moved:]], offset + n_moved)
            else:
                n = os.pwritev(fd, [view[n_moved:]], offset + n_moved)
        except BlockingIOError:
            n_retries += 1
            if n_retries > _N_EAGAIN_RETRIES:
                raise
            time.sleep(_EAGAIN_PAUSE_S)
            continue
        n_moved += n
        if n == 0 or (stop_at_blocks and n_moved % PAGE_NBYTES):
            break
    return n_moved


def give_back_pages(operation: Operation, descriptor: Descriptor, offset: int, nbytes: int) -> None:
    """After a transfer through the page cache: drops its pages, so that they do not push training data out of RAM.

    For dirty ones this only starts write-back, so each write asks again for the one before.
    """
    os.posix_fadvise(descriptor.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
    if operation is Operation.WRITE:
        previous_offset, previous_nbytes = descriptor.previous_write
        descriptor.previous_write = (offset, nbytes)
        if previous_nbytes:
            os.posix_fadvise(descriptor.fd, previous_offset, previous_nbytes, os.POSIX_FADV_DONTNEED)


class PosixBackend(LaneBackend):
    """Storage through ``preadv`` and ``pwritev`` (satisfies :class:`tencache_ds.io.StorageBackend`).

    Args:
        n_lanes: threads; 4 to 8 reach the limit of one device.
        request_nbytes: longest single system call in bytes.
        direct: bypass the page cache where possible.
        close_timeout_s: longest time in seconds that :meth:`close` waits for the device.
    """

    name = "posix"
    _files: PosixFiles

    def __init__(
        self,
        n_lanes: int = 8,
        request_nbytes: int = 8 << 20,
        direct: bool = True,
        *,
        close_timeout_s: float = 600.0,
    ) -> None:
        super().__init__(PosixFiles(direct), n_lanes, request_nbytes, close_timeout_s=close_timeout_s)

    def _transfer(self, lane: int, operation: Operation, path: str, offset: int, piece: torch.Tensor, tag: str) -> None:
        self._files.transfer(operation, path, offset, piece, tag)
