# SPDX-License-Identifier: Apache-2.0
"""The backend on DeepSpeed's own Linux-AIO op: one ``aio_handle`` per lane.

``sync_pread``/``sync_pwrite`` release the GIL, the ``async_*`` variants do not, so every lane has its own thread and
handle. Shortcomings of the op are handled here or one level up:

- it opens the file by a path for each request, which is that of an open descriptor here;
- the op aborts the process (a C++ ``assert``) when it reads from a missing or short file, and creates a missing file
  when it writes: checked before each request;
- it never checks ``io_event.res``, so a failed or short transfer counts as done: the extent store's fingerprints detect
  that, and a re-read through plain descriptors gives the errno;
- it needs O_DIRECT: files on a file system without it go through :class:`tencache_ds.io.backends.posix.PosixFiles`;
- at the first write of a process it logs a warning inside ``std::call_once`` while it holds the GIL: a second lane that
  writes meanwhile takes the GIL and waits for the once-flag, and both hang indefinitely. So the first write runs alone;
- a failed ``io_setup`` is ignored and aborts at the first request: the kernel's limit is checked at startup.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch

from tencache_ds.errors import ConfigError, StorageError
from tencache_ds.io.backends.posix import PosixBackend
from tencache_ds.io.backends.protocol import Operation, StorageTimeoutError, storage_error
from tencache_ds.io.scratch import openable
from tencache_ds.layout import PAGE_NBYTES

_first_write_lock = threading.Lock()
_first_write_done = threading.Event()
"""Set after the first write of the process: the op's once-flag is the process's too."""

_N_CONTEXTS_PER_HANDLE = 2
"""An ``aio_handle`` sets up one kernel context for itself and one for its worker thread."""


class AioBackend(PosixBackend):
    """Storage through DeepSpeed's async_io op, and through plain descriptors for transfers that the op cannot handle.

    Pinned buffers (by torch, or by DeepSpeed's pin manager) go through the handles; others are moved by plain system
    calls, because a handle would copy them through a locked bounce buffer.

    Args:
        n_lanes: threads, each with one handle.
        request_nbytes: longest piece given to a handle, in bytes.
        block_nbytes: size of one kernel request in bytes (DeepSpeed's ``aio.block_size``).
        queue_depth: kernel requests in flight per handle (``aio.queue_depth``).
        single_submit: one ``io_submit`` per block instead of one for all (``aio.single_submit``).
        overlap_events: submit while completions arrive (``aio.overlap_events``).
        close_timeout_s: longest time in seconds that :meth:`close` waits for the device.

    Raises:
        ConfigError: the op cannot be built or loaded, a block size is not a multiple of 4096 bytes, or the kernel's
            limit on AIO requests is too low.
    """

    name = "aio"

    def __init__(
        self,
        n_lanes: int = 8,
        request_nbytes: int = 8 << 20,
        block_nbytes: int = 1 << 20,
        queue_depth: int = 32,
        single_submit: bool = False,
        overlap_events: bool = True,
        *,
        close_timeout_s: float = 600.0,
    ) -> None:
        from tencache_ds.ops.async_io import load_async_io

        if block_nbytes < PAGE_NBYTES or block_nbytes % PAGE_NBYTES:
            raise ConfigError(f"aio.block_size must be a positive multiple of {PAGE_NBYTES}, not {block_nbytes}")
        if queue_depth < 1:
            raise ConfigError(f"aio.queue_depth must be at least 1, not {queue_depth}")
        op = load_async_io()
        if not hasattr(op.aio_handle, "is_pinned"):
            raise ConfigError(
                "the async_io op of this DeepSpeed does not tell which buffers it takes without a copy: set "
                '"io_backend": "native" or "posix", or install a newer DeepSpeed'
            )
        _check_kernel_limit(n_lanes * _N_CONTEXTS_PER_HANDLE * queue_depth)
        self._handles: list[Any] = [
            op.aio_handle(block_nbytes, queue_depth, single_submit, overlap_events, 1) for _ in range(n_lanes)
        ]
        super().__init__(n_lanes, request_nbytes, close_timeout_s=close_timeout_s)

    def close(self) -> None:
        """Waits for all submitted requests, joins the lanes, frees the handles, closes the files. Idempotent.

        Raises: see :meth:`tencache_ds.io.backends.lanes.LaneBackend.close`.
        """
        try:
            super().close()
        except StorageTimeoutError:
            self._handles.clear()  # a lane that hangs keeps its own: with a request in flight it cannot be freed
            raise
        self._handles.clear()

    def _transfer(self, lane: int, operation: Operation, path: str, offset: int, piece: torch.Tensor, tag: str) -> None:
        handle = self._handles[lane]
        try:
            with self._files.using(operation, path) as descriptor:
                size_nbytes = os.fstat(descriptor.fd).st_size
                if operation is Operation.READ and offset + piece.numel() > size_nbytes:
                    cause = f"file ends after {size_nbytes} bytes"
                    raise StorageError(operation.value, path, offset, piece.numel(), cause, tag=tag)
                # Not pinned, the handle would copy through a locked bounce buffer, and end the process where memory
                # cannot be locked.
                if descriptor.direct and handle.is_pinned(piece):
                    self._move(handle, operation, path, openable(descriptor.fd), offset, piece, tag)
                    return
        except StorageError:
            raise
        except OSError as error:
            raise storage_error(operation, path, offset, piece.numel(), error, tag) from error
        self._files.transfer(operation, path, offset, piece, tag)

    @staticmethod
    def _move(
        handle: Any, operation: Operation, path: str, location: str, offset: int, piece: torch.Tensor, tag: str
    ) -> None:
        if operation is Operation.READ:
            n_completed = handle.sync_pread(piece, location, offset)
        elif _first_write_done.is_set():
            n_completed = handle.sync_pwrite(piece, location, offset)
        else:
            with _first_write_lock:
                n_completed = handle.sync_pwrite(piece, location, offset)
            _first_write_done.set()
        if n_completed != 1:
            raise StorageError(
                operation.value,
                path,
                offset,
                piece.numel(),
                f"DeepSpeed's aio_handle returned {n_completed}; see the reason on the standard error of the process",
                tag=tag,
            )


def _check_kernel_limit(n_events: int) -> None:
    try:
        n_used = int(Path("/proc/sys/fs/aio-nr").read_text())
        n_allowed = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    except OSError:
        return  # /proc hidden by a sandbox: nothing to compare with
    if n_used + n_events > n_allowed:
        raise ConfigError(
            f"the aio backend needs {n_events} kernel AIO requests (lanes x 2 x aio.queue_depth), but {n_used} of "
            f"{n_allowed} are in use: raise the limit with `sysctl -w fs.aio-max-nr={max(1 << 20, 2 * n_allowed)}`, "
            'lower aio.queue_depth, or set "io_backend": "posix"'
        )
