# SPDX-License-Identifier: Apache-2.0
"""Writes archives (:mod:`tencache_ds.io.torch_archive`) on a thread of its own, from copies of what they are to hold.

Whoever has the tensors is free to change them as soon as they are copied. The copies of all that is not written yet
take a bounded amount of memory: beyond that, the next copy waits for the writer.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.io.torch_archive import ArchiveFile, DeferredTensor
from tencache_ds.tensors import empty


class ArchiveWriter:
    """Fills archives that have been begun. One thread calls :meth:`write`, then :meth:`end` or :meth:`fail`.

    Args:
        files: the archives, which are this object's from now on.
        most_nbytes: memory of copies, at most, and one copy at least.
        ended: called on the writing thread when all files are finished (None), or with the error. After an error they
            are gone.
    """

    def __init__(
        self, files: Sequence[ArchiveFile], most_nbytes: int, ended: Callable[[BaseException | None], None]
    ) -> None:
        self._files = files
        self._most_nbytes = most_nbytes
        self._ended = ended
        self._copies: collections.deque[tuple[ArchiveFile, DeferredTensor, torch.Tensor]] = collections.deque()
        self._free: collections.deque[torch.Tensor] = collections.deque()  # buffers of copies that are written
        self._nbytes = 0  # of all buffers
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
        buffer = self._buffer(data.numel() * data.element_size())
        copy = buffer[: data.numel() * data.element_size()].view(data.dtype)
        copy.copy_(data)
        with self._changed:
            self._copies.append((file, tensor, copy))
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
        self._thread.join()

    def _buffer(self, nbytes: int) -> torch.Tensor:
        with self._changed:
            while True:
                if self._error is not None:
                    raise TenCacheError("the checkpoint is not being written any more")
                if self._free and self._free[0].numel() >= nbytes:
                    return self._free.popleft()
                if not self._nbytes or self._nbytes + nbytes <= self._most_nbytes:
                    self._nbytes += nbytes
                    break
                if self._free:  # too small for this one
                    self._nbytes -= self._free.popleft().numel()
                else:
                    self._changed.wait()
        return empty(nbytes, torch.uint8)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._write_next():
                pass
            for file in self._files:
                file.finish()
        except BaseException as raised:
            self.fail(raised)
            error = self._error
            self._copies.clear()
            self._free.clear()
            for file in self._files:
                file.discard()
        self._free.clear()
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
            file, tensor, copy = self._copies.popleft()
        file.write(tensor, copy)
        with self._changed:
            self._free.append(empty(0, torch.uint8).set_(copy.untyped_storage()))
            self._changed.notify_all()
        return True
