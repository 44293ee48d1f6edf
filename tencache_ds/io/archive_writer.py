# SPDX-License-Identifier: Apache-2.0
"""Writes archives (:mod:`tencache_ds.io.torch_archive`) on a thread of its own, from copies of what they are to hold.

Whoever has the tensors is free to change them as soon as they are copied. The copies of all that is not written yet
take a bounded amount of memory: beyond that, the next copy waits for the writer.

[Note: the drive is somebody else's] Where optimizer state is on the drive that the archive goes to, a step waits for
the drive, and an archive need not: it is written while no step uses the drive, as long as nobody waits for it, memory
suffices, and not too much time has passed.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.io.torch_archive import LEAST_DIRECT_NBYTES, ArchiveFile, DeferredTensor, begin_archive
from tencache_ds.layout import PAGE_NBYTES
from tencache_ds.memory.arena import untouched_zeros
from tencache_ds.memory.device_memory import HostCopy

MOST_SECONDS_GIVEN = 60.0
"""For which an archive may be left unwritten because others use the drive: so much later it is complete in a run that
always does."""

_LOOK_SECONDS = 0.02
"""After which the writer looks whether somebody waits for it, while others use the drive."""


COPY_NBYTES = 16 * 2**20
"""The largest copy: as fast to write as larger ones."""

AT_ONCE_NBYTES = 2 * (COPY_NBYTES + PAGE_NBYTES)
"""Memory for copies where an archive is written at once: one is written while the next is made."""


class CopyBuffers:
    """Memory for copies, of one :class:`ArchiveWriter` after the other. Memory that is written to for the first time
    takes several times as long.

    Args:
        most_nbytes: at most, and one copy at least.
        copy: makes them.
        kept: whether memory is kept from one writer to the next.

    Attributes:
        nbytes: of all buffers.
    """

    def __init__(self, most_nbytes: int, copy: HostCopy = torch.Tensor.copy_, *, kept: bool = False) -> None:
        self.nbytes = 0
        self.copy = copy
        self._most_nbytes = most_nbytes
        self._kept = kept
        self._free: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor | None:
        """A buffer of at least this size; None while there is no room for it."""
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= nbytes:
                return self._free.pop(index)
        while self._free and self.nbytes + nbytes > self._most_nbytes:
            self.nbytes -= self._free.pop().numel()
        if self.nbytes and self.nbytes + nbytes > self._most_nbytes:
            return None
        self.nbytes += nbytes
        return untouched_zeros(nbytes, torch.uint8)

    def put(self, buffer: torch.Tensor) -> None:
        """Takes back a buffer."""
        self._free.append(buffer)

    def writer_ended(self, *, failed: bool) -> None:
        """No buffer is in use any more; after a failure some are lost."""
        if failed or not self._kept:
            self._free.clear()
            self.nbytes = 0


class ArchiveWriter:
    """Fills archives that have been begun. One thread calls :meth:`write`, then :meth:`end` or :meth:`fail`.

    Args:
        files: the archives, which are this object's from now on.
        buffers: for copies; this object's until ``ended`` is called.
        ended: called on the writing thread when all files are finished (None), or with the error. After an error they
            are gone.
        drive_in_use: waits at most some seconds until nobody else uses the drive, and returns whether somebody still
            does. See [Note: the drive is somebody else's].
    """

    def __init__(
        self,
        files: Sequence[ArchiveFile],
        buffers: CopyBuffers,
        ended: Callable[[BaseException | None], None],
        drive_in_use: Callable[[float], bool] = lambda seconds: False,
    ) -> None:
        self._files = files
        self._buffers = buffers
        self._ended = ended
        self._drive_in_use = drive_in_use
        self._seconds_given = 0.0
        self._awaited = False
        self._copies: collections.deque[tuple[ArchiveFile, DeferredTensor, torch.Tensor, torch.Tensor]] = (
            collections.deque()
        )  # and their buffers
        self._copied_nbytes: collections.Counter[DeferredTensor] = collections.Counter()
        self._complete = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        # Not a daemon: at the end of the process, Python waits for what is being saved.
        self._thread = threading.Thread(target=self._run, name="tencache-checkpoint")
        self._thread.start()

    def write(self, file: ArchiveFile, tensor: DeferredTensor, data: torch.Tensor) -> None:
        """Appends elements to a deferred tensor: :meth:`ArchiveFile.write`, later. ``data`` is free again on return.

        Raises:
            TenCacheError: the writer has failed; :attr:`ended <ArchiveWriter>` gets the reason.
        """
        for part in data.split(COPY_NBYTES // data.element_size()):
            self._write(file, tensor, part)

    def _write(self, file: ArchiveFile, tensor: DeferredTensor, data: torch.Tensor) -> None:
        nbytes = data.nbytes
        first = spare_nbytes = 0
        if nbytes >= LEAST_DIRECT_NBYTES:  # they lie in their pages of memory as in those of the file, for its write()
            first = (file.offset_of(tensor) + self._copied_nbytes[tensor]) % PAGE_NBYTES
            spare_nbytes = PAGE_NBYTES
        buffer = self._buffer(nbytes + spare_nbytes)
        copy = buffer[first : first + nbytes].view(data.dtype)
        self._buffers.copy(copy, data)
        self._copied_nbytes[tensor] += nbytes
        with self._changed:
            self._copies.append((file, tensor, copy, buffer))
            self._changed.notify_all()

    def end(self) -> None:
        """Everything has been passed to :meth:`write`."""
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The rest cannot be had."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def join(self) -> None:
        """Returns when the thread has ended."""
        self._awaited = True
        self._thread.join()

    def _buffer(self, nbytes: int) -> torch.Tensor:
        with self._changed:
            while self._error is None:
                buffer = self._buffers.take(nbytes)
                if buffer is not None:
                    return buffer
                self._awaited = True
                self._changed.wait()
        raise TenCacheError("the checkpoint is not being written any more")

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for file in self._files:
                file.write_kept()
            while self._write_next():
                pass
            for file in self._files:
                file.finish()
        except BaseException as raised:
            self.fail(raised)
            error = self._error
            for file in self._files:
                file.discard()
        self._buffers.writer_ended(failed=error is not None)
        self._ended(error)

    def _write_next(self) -> bool:
        """Writes a copy; False after the last one."""
        with self._changed:
            while not (self._copies or self._complete or self._error):
                self._changed.wait()
            if self._error is not None:
                raise self._error
            if not self._copies:
                return False
            file, tensor, copy, buffer = self._copies.popleft()
        self._give_way()
        file.write(tensor, copy)
        with self._changed:
            self._buffers.put(buffer)
            self._changed.notify_all()
        return True

    def _give_way(self) -> None:
        """Returns when a write takes the drive from nobody, or has to."""
        began = time.monotonic()
        until = began + MOST_SECONDS_GIVEN - self._seconds_given
        while not self._awaited and self._error is None and time.monotonic() < until:
            if not self._drive_in_use(_LOOK_SECONDS):
                break
        self._seconds_given += time.monotonic() - began


Write = Callable[[ArchiveFile, DeferredTensor, torch.Tensor], None]
"""Appends elements to a deferred tensor of a file."""


def write_archive(
    obj: Any,
    path: str,
    fill: Callable[[ArchiveFile, Write], None],
    buffers: CopyBuffers,
    *,
    name: str | None = None,
) -> None:
    """Writes what ``torch.save(obj, path)`` would, with every :class:`DeferredTensor` in ``obj`` as a tensor, and ends
    the file. The caller copies while a thread writes.

    Args:
        obj: the object; tensors in memory are written from where they are.
        path: the file; replaced if it exists. After an error it is gone.
        fill: gets the file, and the function by which it writes every element of every deferred tensor.
        buffers: for the copies.
        name: of the archive in the file, where it is not the file's.

    Raises:
        StorageError, TenCacheError: see :func:`begin_archive` and :meth:`ArchiveFile.finish`.
    """
    file = begin_archive(obj, path, name=name)
    outcome: list[BaseException | None] = []
    writer = ArchiveWriter([file], buffers, outcome.append)
    try:
        fill(file, writer.write)
        writer.end()
        writer.join()
    except BaseException as error:
        writer.fail(error)  # unless that was the writer's own
        writer.join()
        raise outcome[0] or error from None
    if outcome[0] is not None:
        raise outcome[0]
