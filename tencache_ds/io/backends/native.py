# SPDX-License-Identifier: Apache-2.0
"""The backend on TenCache's own aio op: lanes in C++, a completion per request, every result checked.

The lanes are independent of Python and never wait for the GIL. Two Python threads sleep in the op, without the GIL,
until requests have completed; they turn results into errors, fingerprint writes, verify reads and end the tickets.
Descriptors and the rules for files without O_DIRECT are those of :class:`tencache_ds.io.backends.posix.PosixFiles`.
"""

from __future__ import annotations

import atexit
import dataclasses
import errno
import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tencache_ds.errors import ConfigError, ProcessLimitError, StorageError
from tencache_ds.io.backends.lanes import keep_for_the_device, stop_at_exit
from tencache_ds.io.backends.posix import Descriptor, PosixFiles, give_back_pages
from tencache_ds.io.backends.protocol import (
    IoCounters,
    IoTotals,
    Operation,
    Priority,
    Submission,
    Ticket,
    admit,
    cancelled,
    given_up,
    never_finished,
    refusal,
    storage_error,
)
from tencache_ds.layout import PAGE_NBYTES
from tencache_ds.limits import remedy, start_threads, too_few_threads

BACKGROUND_NBYTES = 6 << 20
"""Background bytes the kernel has at a time when urgent requests are about: so few that an urgent read of 4 MiB takes
less than three times as long as on an idle device (see "latency of urgent requests" in the op's ``io_queue.h``)."""

_N_FINISHERS = 2
_N_COLLECTED_AT_ONCE = 8  # few, so that the other finisher gets some as well
_FOR_EVER_S = -1.0


@dataclass(slots=True, eq=False)
class _Request:
    """A submitted request, until its ticket ends."""

    ticket: Ticket
    buffer: torch.Tensor
    finish: Callable[[], None] | None
    descriptor: Descriptor | None = None
    error: StorageError | None = None  # known before the op saw the request


class _Counters(IoCounters):
    """Bytes and times of requests are counted in the op, whole requests and edits here."""

    def __init__(self, queue: Any) -> None:
        super().__init__()
        self._queue = queue

    def snapshot(self) -> IoTotals:
        """All totals at one moment."""
        moved, counted = self._queue.stats(), super().snapshot()
        return dataclasses.replace(
            counted,
            bytes_read=counted.bytes_read + moved["bytes_read"],
            bytes_written=counted.bytes_written + moved["bytes_written"],
            read_ns=counted.read_ns + moved["read_ns"],
            write_ns=counted.write_ns + moved["write_ns"],
        )


class NativeBackend:
    """Storage through Linux AIO (satisfies :class:`tencache_ds.io.StorageBackend`). Any host memory will do.

    Args:
        n_lanes: native threads, each with its own kernel context; 4 to 8 reach the limit of fast storage.
        block_nbytes: longest piece given to the kernel at once, in bytes.
        queue_depth: blocks the kernel has at a time, per lane.
        direct: bypass the page cache with O_DIRECT where possible.
        background_nbytes: bytes of BACKGROUND requests the kernel has at a time, in all lanes, within a second of
            URGENT ones; otherwise three times as much. Larger values make URGENT requests wait longer.
        close_timeout_s: longest time in seconds that :meth:`close` waits for the device.

    Raises:
        ConfigError: the op cannot be built or loaded, a size makes no sense, or the kernel refuses its contexts.
        ProcessLimitError: a limit of this process on threads or open files is too low.
    """

    name = "native"
    alignment_nbytes = PAGE_NBYTES

    def __init__(
        self,
        n_lanes: int = 8,
        block_nbytes: int = 1 << 20,
        queue_depth: int = 32,
        *,
        direct: bool = True,
        background_nbytes: int = BACKGROUND_NBYTES,
        close_timeout_s: float = 600.0,
    ) -> None:
        from tencache_ds.ops.tencache_aio import load_tencache_aio

        if n_lanes < 1:
            raise ConfigError(f"n_lanes must be at least 1, not {n_lanes}")
        if block_nbytes < PAGE_NBYTES or block_nbytes % PAGE_NBYTES:
            raise ConfigError(f"aio.block_size must be a positive multiple of {PAGE_NBYTES}, not {block_nbytes}")
        if queue_depth < 1:
            raise ConfigError(f"aio.queue_depth must be at least 1, not {queue_depth}")
        op = load_tencache_aio()
        try:
            self._queue = op.IoQueue(n_lanes, block_nbytes, queue_depth, background_nbytes)
        except OSError as error:
            raise _explained(error, n_lanes, queue_depth) from error
        self.counters: IoCounters = _Counters(self._queue)
        self._files = PosixFiles(direct)
        self._close_timeout_s = close_timeout_s
        self._pid = os.getpid()
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._requests: dict[int, _Request] = {}
        self._stuck: list[Ticket] = []
        self._exiting = False
        self._finishers = [
            threading.Thread(target=self._run, name=f"tencache-finisher-{index}", daemon=True)
            for index in range(_N_FINISHERS)
        ]
        try:
            start_threads(self._finishers, "threads that complete requests")
        except ProcessLimitError:
            self._finishers = [thread for thread in self._finishers if thread.is_alive()]
            self._stop(close_timeout_s, drop_waiting=True)
            raise
        # A daemon thread that returns from native code while the interpreter is torn down can abort the process.
        self._at_exit = stop_at_exit(self.abandon)

    def submit(self, request: Submission) -> Ticket:
        """See :meth:`tencache_ds.io.StorageBackend.submit`."""
        ticket = admit(request, pid=self._pid, alignment_nbytes=PAGE_NBYTES)
        self._submit(_Request(ticket, request.buffer, request.finish), request.priority)
        return ticket

    def add(self, path: str, fd: int) -> None:
        """See :meth:`tencache_ds.io.StorageBackend.add`."""
        self._files.add(path, fd)

    def forget(self, path: str) -> None:
        """Closes the descriptors of a file that is about to be, or has been, removed. Any thread."""
        self._files.forget(path)

    def close(self) -> None:
        """Waits for all submitted requests, ends the lanes, closes the files. Idempotent; no-op in a forked child.

        Raises:
            RuntimeError: called from a callback of one of its requests.
            StorageTimeoutError: the device still had requests after ``close_timeout_s``. Their tickets have ended with
                an error, their buffers are kept for the life of the process.
        """
        if os.getpid() != self._pid:
            return
        if threading.current_thread() in self._finishers:
            raise RuntimeError("a storage backend cannot be closed from a callback of one of its requests")
        self._stop(self._close_timeout_s, drop_waiting=False)
        atexit.unregister(self._at_exit)
        stuck, self._stuck = self._stuck, []
        if stuck:
            raise never_finished(stuck, self._close_timeout_s)

    def abandon(self, grace_s: float) -> None:
        """At interpreter exit: fails requests that have not started, waits up to ``grace_s`` seconds for the others."""
        if os.getpid() == self._pid:
            self._exiting = True
            self._stop(grace_s, drop_waiting=True)

    def _stop(self, timeout_s: float, *, drop_waiting: bool) -> None:
        self._queue.close(timeout_s, drop_waiting)
        for thread in self._finishers:
            thread.join()
        self._files.close()

    # Submission

    def _submit(self, request: _Request, priority: Priority) -> None:
        ticket = request.ticket
        request_id = next(self._ids)
        try:
            request.descriptor = self._files.acquire(ticket.operation, ticket.path)
        except OSError as error:
            # Ends in a finisher like any other: a caller may hold locks that its callbacks need.
            request.error = storage_error(
                ticket.operation, ticket.path, ticket.offset, ticket.nbytes, error, ticket.tag
            )
        ticket.bind(
            promote=lambda: self._queue.promote(request_id), cancel=lambda: bool(self._queue.cancel(request_id))
        )
        with self._lock:
            self._requests[request_id] = request
        if request.descriptor is None:
            accepted = self._queue.submit_failed(request_id, errno.EIO)
        else:
            accepted = self._queue.submit(
                id=request_id,
                write=ticket.operation is Operation.WRITE,
                fd=request.descriptor.fd,
                offset=ticket.offset,
                address=request.buffer.data_ptr(),
                nbytes=ticket.nbytes,
                urgent=priority is Priority.URGENT,
            )
        if not accepted:
            with self._lock:
                del self._requests[request_id]
            if request.descriptor is not None:
                self._files.release(request.descriptor)
            raise refusal(ticket, "the backend is closed")

    # The end of requests, in finishers

    def _run(self) -> None:
        while True:
            completions = self._queue.collect(_N_COLLECTED_AT_ONCE, _FOR_EVER_S)
            if not completions:
                return
            for completion in completions:
                with self._lock:
                    request = self._requests.pop(completion.id)
                self._end(request, completion)
            del completions, completion, request  # an idle finisher must not keep a buffer alive

    def _end(self, request: _Request, completion: Any) -> None:
        error: BaseException | None
        try:
            error = self._settle(request, completion)
            if self._goes_on_buffered(request, completion):
                return
            if error is None and request.finish is not None:
                request.finish()
        except BaseException as raised:  # verification failed, for one: the waiter raises it
            error = raised
        if error is None:
            self.counters.request_succeeded(request.ticket.operation)
        request.ticket.complete(error)

    def _settle(self, request: _Request, completion: Any) -> StorageError | None:
        """Gives the descriptor back; returns what went wrong."""
        ticket, descriptor = request.ticket, request.descriptor
        if descriptor is None:
            return request.error
        try:
            error = self._error(request, descriptor, completion)
            if error is None and not descriptor.direct:
                give_back_pages(ticket.operation, descriptor, ticket.offset, ticket.nbytes)
            return error
        finally:
            if not completion.in_flight:  # else the kernel may still need it
                self._files.release(descriptor)

    def _goes_on_buffered(self, request: _Request, completion: Any) -> bool:
        """Some file systems accept O_DIRECT at open() and refuse the transfer: then it is repeated without, once."""
        ticket, descriptor = request.ticket, request.descriptor
        if completion.error != errno.EINVAL or descriptor is None or not descriptor.direct:
            return False
        self._files.fall_back(ticket.path)
        try:
            self._submit(_Request(ticket, request.buffer, request.finish), Priority.URGENT)
        except StorageError:  # closed meanwhile: the first error stands
            return False
        return True

    def _error(self, request: _Request, descriptor: Descriptor, completion: Any) -> StorageError | None:
        ticket = request.ticket
        if completion.end_of_file:
            size_nbytes = os.fstat(descriptor.fd).st_size
            return StorageError(
                ticket.operation.value,
                ticket.path,
                completion.error_offset,
                completion.error_nbytes,
                f"file ends after {size_nbytes} bytes",
                tag=ticket.tag,
            )
        if completion.error == 0:
            return None
        if completion.in_flight:
            keep_for_the_device(request.buffer)
            self._stuck.append(ticket)
            return given_up(ticket)
        if completion.error == errno.ECANCELED:
            return refusal(ticket, "dropped, the interpreter exits") if self._exiting else cancelled(ticket)
        return storage_error(
            ticket.operation,
            ticket.path,
            completion.error_offset,
            completion.error_nbytes,
            OSError(completion.error, os.strerror(completion.error)),
            ticket.tag,
        )


def _explained(error: OSError, n_lanes: int, queue_depth: int) -> ConfigError | ProcessLimitError:
    """The reason why the op cannot start, and the remedy."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ProcessLimitError(f"the native backend cannot open its {n_lanes} lanes{remedy(error.errno)}")
    # The op names the call that failed; a thread that cannot be created has no call's name.
    if error.errno == errno.EAGAIN and "io_setup" not in str(error.strerror):
        return too_few_threads(f"some of the {n_lanes} native I/O lanes", error)
    n_events = n_lanes * queue_depth
    if error.errno == errno.EAGAIN:
        numbers = ""
        try:
            n_used = int(Path("/proc/sys/fs/aio-nr").read_text())
            n_allowed = int(Path("/proc/sys/fs/aio-max-nr").read_text())
        except OSError:  # /proc hidden by a sandbox
            raised = 1 << 20
        else:
            numbers = f", {n_used} of {n_allowed} are in use"
            raised = max(1 << 20, 2 * n_allowed, n_used + 2 * n_events)
        return ConfigError(
            f"the kernel's limit on AIO requests, /proc/sys/fs/aio-max-nr, is too low: the native backend needs "
            f"{n_events} (lanes x aio.queue_depth){numbers}. Raise it with `sysctl -w fs.aio-max-nr={raised}`, lower "
            'aio.queue_depth or "io_lanes", or set "io_backend": "posix"'
        )
    return ConfigError(
        f"the native backend cannot start: {error.strerror}. The kernel or a sandbox around this process may lack "
        'Linux AIO (io_setup); set "io_backend": "posix"'
    )
