# SPDX-License-Identifier: Apache-2.0
"""The backend that moves bytes between files and GPU memory: GPUDirect Storage through KvikIO.

From the source of KvikIO 26.10, beyond its documentation:

- ``raw_read`` and ``raw_write`` block without the GIL, in the calling thread and in its current CUDA context, without
  KvikIO's own pool of threads: so every lane is a thread with the device current, and the lanes are the parallelism.
- Without the driver (compatibility mode) the bytes pass through one pinned bounce buffer per concurrent call, on a
  stream that waits for the default stream and that the call waits for. With the driver the call first waits for the
  default stream. No other stream is waited for: see [Note: quiet device memory] in
  :mod:`tencache_ds.memory.arena`.
- Its reads go through the page cache unless ``auto_direct_io_read`` is set, a setting of the whole process.
- Every error is a ``RuntimeError`` whose text ends with that of the errno. A read past the end raises in compatibility
  mode and is short with the driver.
- The file modes ``"r"`` and ``"r+"`` neither create nor truncate a file.

[Note: trial] A round trip at startup tells whether reads into GPU memory are correct, and faster than through pinned
host memory.

Both ways are used as in training: several requests at the same time, and copies to the GPU while other reads are in
flight. They alternate, so that a disk whose speed drifts favours neither. The GPU is idle meanwhile; for the
consequences see :data:`tencache_ds.planning.gds.COMPATIBILITY_GAIN`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tencache_ds.errors import StorageError
from tencache_ds.io.backends.lanes import LaneBackend, OpenFile, OpenFiles
from tencache_ds.io.backends.protocol import Operation, Priority, StorageBackend, Submission, Ticket, storage_error
from tencache_ds.io.scratch import close_unnamed, make_unnamed
from tencache_ds.memory.arena import DeviceArena, HostArena, Locking, wait_for_device
from tencache_ds.planning.gds import GdsTrial

_WHERE = re.compile(r"^.*? at: \S+:\d+:? ?")
_MODES = {Operation.READ: "r", Operation.WRITE: "r+"}


class DeviceFile(Protocol):
    """The subset of ``kvikio.CuFile`` in use."""

    def raw_read(self, buf: Any, size: int, file_offset: int) -> int:
        """Bytes read into device memory."""
        ...

    def raw_write(self, buf: Any, size: int, file_offset: int) -> int:
        """Bytes written from device memory."""
        ...

    def fileno(self) -> int:
        """The descriptor."""
        ...

    def close(self) -> None:
        """Closes it."""
        ...


def missing_kvikio() -> str:
    """The reason why KvikIO is unavailable, with the remedy; "" if it is available. Imports nothing."""
    if importlib.util.find_spec("kvikio") is None:
        major = (torch.version.cuda or "13").split(".")[0]
        return f"KvikIO is not installed: pip install 'tencache-ds[gds-cu{major}]'"
    return ""


def compatibility_mode() -> str:
    """Why KvikIO passes bytes through host memory here; "" where GPUDirect Storage works. Imports KvikIO.

    A file system that cuFile refuses goes through host memory all the same; only a measurement sees that.
    """
    import kvikio.cufile_driver
    import kvikio.defaults

    if kvikio.defaults.is_compat_mode_preferred():
        return "libcufile or /run/udev is missing, or KVIKIO_COMPAT_MODE requests it"
    try:
        loaded = kvikio.cufile_driver.get("is_gds_available")
    except Exception as error:  # a C++ exception of any kind: cuFile does not work
        return f"cuFile does not respond: {plain_cause(error)}"
    return "" if loaded else "the nvidia-fs driver is not loaded"


class GdsBackend(LaneBackend):
    """Moves bytes between files and GPU memory (satisfies :class:`tencache_ds.io.StorageBackend`, for 1-D
    contiguous uint8 tensors of one CUDA device instead of host memory).

    The caller hands over *quiet* memory: no GPU work that touches it may be pending at :meth:`submit`, for a read as
    for a write. Leases of a pool are quiet; see [Note: quiet device memory]. Nothing is recorded on a stream here,
    because the extent store may submit a request later, from another thread.

    Args:
        device: where the buffers are.
        n_lanes: threads.
        request_nbytes: longest piece in bytes; in compatibility mode each lane pins so much host memory.
        close_timeout_s: longest time in seconds that :meth:`close` waits for the device.
        open_file: opens a file by path and mode (``"r"``, ``"r+"``); KvikIO's when omitted.

    Raises:
        ImportError, RuntimeError: KvikIO cannot be imported.
    """

    name = "gds"
    _files: _Files

    def __init__(
        self,
        device: torch.device,
        n_lanes: int = 8,
        request_nbytes: int = 8 << 20,
        *,
        close_timeout_s: float = 600.0,
        open_file: Callable[[str, str], DeviceFile] | None = None,
    ) -> None:
        self._device = device
        self._pid = os.getpid()
        self._on_close: Callable[[], object] = int
        if open_file is None:
            open_file, self._on_close = _use_kvikio(request_nbytes)
        self._streams: dict[int, torch.cuda.Stream] = {}  # by lane, each used by its own thread alone
        super().__init__(
            _Files(open_file), n_lanes, request_nbytes, device_type=device.type, close_timeout_s=close_timeout_s
        )

    def close(self) -> None:
        """Also frees KvikIO's buffers; does nothing in a forked child, which has no driver for the handles.

        Raises: see :meth:`tencache_ds.io.backends.lanes.LaneBackend.close`.
        """
        if os.getpid() != self._pid:
            return
        super().close()
        if self._streams:
            self._bind_context()  # engines are closed in threads, too, that never used the GPU
            self._on_close()

    def _transfer(self, lane: int, operation: Operation, path: str, offset: int, piece: torch.Tensor, tag: str) -> None:
        nbytes = piece.numel()
        try:
            self._enter(lane)
            with self._files.using(operation, path) as handle:
                try:
                    _move_all(operation, handle.file, offset, piece)
                except Exception:
                    size_nbytes = os.fstat(handle.file.fileno()).st_size
                    if operation is Operation.READ and offset + nbytes > size_nbytes:
                        there = max(0, size_nbytes - offset)
                        raise EOFError(
                            f"file ends after {size_nbytes} bytes, {there} of {nbytes} bytes were read"
                        ) from None
                    raise
        except Exception as error:  # KvikIO's are of C++, and any of them ends in a ticket
            raise _typed(operation, path, offset, nbytes, error, tag) from error

    def _enter(self, lane: int) -> None:
        """Once in each lane's thread: makes the device, its context and a stream of the lane's own current.

        Fingerprints are taken on that stream; on the default stream they would wait for the training's kernels.
        """
        if self._device.type == "cuda" and lane not in self._streams:
            torch.cuda.set_device(self._device)
            self._bind_context()
            self._streams[lane] = torch.cuda.Stream(self._device)
            torch.cuda.set_stream(self._streams[lane])

    def _bind_context(self) -> None:
        """Makes a CUDA context current in this thread, which KvikIO needs to find. ``set_device`` alone does not, where
        the device is the current one already; a call that asks the device something does.
        """
        if self._device.type == "cuda":
            torch.cuda.mem_get_info(self._device)


@dataclass(slots=True)
class _Handle(OpenFile):
    """A file of KvikIO."""

    file: DeviceFile

    def close(self) -> None:
        """See :meth:`tencache_ds.io.backends.lanes.OpenFile.close`."""
        self.file.close()


class _Files(OpenFiles[_Handle]):
    """Files of KvikIO. Opening one may raise its RuntimeError, too.

    Args:
        open_file: opens a file by path and mode.
    """

    def __init__(self, open_file: Callable[[str, str], DeviceFile]) -> None:
        super().__init__()
        self._open_file = open_file

    def _open(self, operation: Operation, path: str, location: str) -> _Handle:
        # KvikIO's error has no errno, so the file is first opened through the system.
        os.close(os.open(location, (os.O_RDONLY if operation is Operation.READ else os.O_RDWR) | os.O_CLOEXEC))
        return _Handle(self._open_file(location, _MODES[operation]))


def plain_cause(error: BaseException) -> str:
    """KvikIO's message without its source location."""
    return _WHERE.sub("", str(error)) or type(error).__name__


def errno_in(text: str) -> int | None:
    """The errno whose text a message of KvikIO ends with."""
    numbers = [number for number in errno.errorcode if text.rstrip(" .)").endswith(os.strerror(number))]
    return max(numbers, key=lambda number: len(os.strerror(number)), default=None)


def _move_all(operation: Operation, file: DeviceFile, offset: int, piece: torch.Tensor) -> None:
    """Moves the whole piece; short transfers are continued."""
    move = file.raw_read if operation is Operation.READ else file.raw_write
    n_moved, nbytes = 0, piece.numel()
    while n_moved < nbytes:
        n = move(piece[n_moved:], nbytes - n_moved, offset + n_moved)
        if n <= 0:
            raise OSError(errno.EIO, f"the device transferred {n_moved} of {nbytes} bytes")
        n_moved += n


def _typed(operation: Operation, path: str, offset: int, nbytes: int, error: Exception, tag: str) -> StorageError:
    if isinstance(error, OSError):
        return storage_error(operation, path, offset, nbytes, error, tag)
    cause = plain_cause(error)
    number = errno_in(cause)
    if number is None:
        return StorageError(operation.value, path, offset, nbytes, cause, tag=tag)
    return storage_error(operation, path, offset, nbytes, OSError(number, cause), tag)


def _use_kvikio(request_nbytes: int) -> tuple[Callable[[str, str], DeviceFile], Callable[[], object]]:
    """KvikIO's functions to open a file and to free its bounce buffers.

    Its settings are those of the process; settings from the environment are kept.
    """
    import kvikio
    import kvikio.defaults

    settings = {"auto_direct_io_read": True, "bounce_buffer_size": request_nbytes}
    kvikio.defaults.set({name: value for name, value in settings.items() if f"KVIKIO_{name.upper()}" not in os.environ})
    return kvikio.CuFile, kvikio.bounce_buffer_free


TRIAL_NBYTES = 64 << 20
MAX_REPEATS = 5
MAX_SECONDS = 2.0
"""Longest measurement, on slow disks; both ways are measured at least once."""


def obstacle(on_cuda: bool, verify: str) -> str:
    """The obstacle to GDS known before a trial; "" for none. Does not import KvikIO.

    Args:
        on_cuda: whether the compute device is a CUDA GPU.
        verify: the option of that name.
    """
    if not on_cuda:
        return "the compute device is not a CUDA GPU"
    if verify == "full":
        return '"tencache.verify" is "full", which needs every byte in host memory'
    return missing_kvikio()


def try_gds(
    path: str,
    device: torch.device,
    open_host: Callable[[], StorageBackend],
    open_gds: Callable[[], StorageBackend],
    *,
    locking: Locking,
    request_nbytes: int,
    timeout_s: float,
    compatibility: Callable[[], str] = compatibility_mode,
    nbytes: int = TRIAL_NBYTES,
) -> GdsTrial:
    """Writes a file, reads it into device memory both ways, compares and times.

    Args:
        path: initial name of the file, which is unlinked at once.
        device: target of GDS reads.
        open_host, open_gds: open backends for host and for device memory; closed here.
        locking: of the host memory that weights would be staged in.
        request_nbytes: bytes of one request.
        timeout_s: longest wait for one.
        compatibility: says why the bytes pass through host memory, or "".
        nbytes: of the file.

    Returns:
        The result. Errors of GDS and of the disk are its ``problem``; they are not raised.
    """
    folder = os.path.dirname(path)
    try:
        with contextlib.ExitStack() as stack:
            mode = compatibility()
            host_arena, device_arena = HostArena(None, locking), DeviceArena(device)
            submitted: list[Ticket] = []
            stack.callback(_free, host_arena, submitted)
            stack.callback(device_arena.close)  # the backend keeps the buffers of unanswered requests
            gds = open_gds()
            stack.callback(gds.close)
            host = open_host()
            stack.callback(host.close)
            staged, wanted = (host_arena.allocate(nbytes, "GDS trial") for _ in range(2))
            direct = device_arena.allocate(nbytes, "GDS trial")
            wanted.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
            fd = make_unnamed(path)
            stack.callback(close_unnamed, fd)
            for backend in (host, gds):
                backend.add(path, fd)
            submitted.append(host.submit(Submission(Operation.WRITE, path, 0, wanted, "GDS trial")))
            submitted[0].wait(timeout_s)

            def read_by_gds() -> None:
                _read(gds, path, direct, direct, request_nbytes, timeout_s, [])

            def read_staged() -> None:
                _read(host, path, staged, direct, request_nbytes, timeout_s, submitted)

            read_by_gds()
            staged.copy_(direct)
            if not torch.equal(staged, wanted):
                return GdsTrial(problem=f"the data that GDS read from {folder} differs from the data written")
            read_staged()
            wait_for_device(direct)
            seconds = _seconds_in_turn([read_by_gds, read_staged], lambda: wait_for_device(direct))
            return GdsTrial("", mode, *(nbytes / statistics.median(each) for each in seconds))
    except Exception as error:  # of the disk, of C++, of a KvikIO that is too old: none of them ends a training
        return GdsTrial(problem=f"the round trip in {folder} failed: {plain_cause(error)}")


def _read(
    backend: StorageBackend,
    path: str,
    buffer: torch.Tensor,
    target: torch.Tensor,
    request_nbytes: int,
    timeout_s: float,
    submitted: list[Ticket],
) -> None:
    """Reads the file into ``buffer``, in separate requests, and copies each to ``target`` if that is elsewhere."""
    spans = [slice(start, start + request_nbytes) for start in range(0, buffer.numel(), request_nbytes)]
    tickets = [
        backend.submit(Submission(Operation.READ, path, span.start, buffer[span], "GDS trial", Priority.URGENT))
        for span in spans
    ]
    submitted.extend(tickets)
    for ticket, span in zip(tickets, spans, strict=True):
        ticket.wait(timeout_s)
        if buffer is not target:
            target[span].copy_(buffer[span], non_blocking=True)


def _free(arena: HostArena, submitted: list[Ticket]) -> None:
    """Frees host memory after the backends were closed, unless a device that hangs may still write there."""
    late = next((ticket for ticket in submitted if not ticket.done or ticket.given_up), None)
    if late is not None:
        arena.keep_all(late.tag)
    arena.close()


def _seconds_in_turn(ways: list[Callable[[], None]], settle: Callable[[], None]) -> list[list[float]]:
    """Times each way, one after the other, again and again."""
    seconds: list[list[float]] = [[] for _ in ways]
    t_end = time.perf_counter() + MAX_SECONDS
    for _ in range(MAX_REPEATS):
        for way, taken in zip(ways, seconds, strict=True):
            t_start = time.perf_counter()
            way()
            settle()
            taken.append(time.perf_counter() - t_start)
        if time.perf_counter() > t_end:
            break
    return seconds
