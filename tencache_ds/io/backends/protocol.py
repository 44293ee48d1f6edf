# SPDX-License-Identifier: Apache-2.0
"""The protocol of storage backends: requests and their checks, tickets, traffic; and the base of those that wrap one.

A backend moves bytes between a buffer and a file. It has no notion of weights or chunks; the extent store
(:mod:`tencache_ds.io.store`) decides their places and checks that they are read back unchanged.
"""

from __future__ import annotations

import enum
import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from tencache_ds.errors import SpaceError, StorageError
from tencache_ds.limits import remedy


@dataclass(frozen=True, slots=True)
class IoTotals:
    """A consistent snapshot of :class:`IoCounters`: bytes, requests, and nanoseconds with work in flight."""

    bytes_read: int
    bytes_written: int
    n_reads: int
    n_writes: int
    read_ns: int
    write_ns: int


class IoCounters:
    """Thread-safe totals of a backend since it was opened.

    Bytes and requests count what succeeded. ``read_ns`` and ``write_ns`` are the times during which at least one
    transfer of that direction was running, however many lanes took part: ``bytes_read / read_ns`` is the rate in GB/s
    that the device gave.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nbytes = dict.fromkeys(Operation, 0)
        self._n_requests = dict.fromkeys(Operation, 0)
        self._busy_ns = dict.fromkeys(Operation, 0)
        self._n_running = dict.fromkeys(Operation, 0)
        self._t_busy_since_ns = dict.fromkeys(Operation, 0)

    def transfer_started(self, operation: Operation) -> None:
        """Notes that a lane begins to move bytes."""
        with self._lock:
            if self._n_running[operation] == 0:
                self._t_busy_since_ns[operation] = time.perf_counter_ns()
            self._n_running[operation] += 1

    def transfer_ended(self, operation: Operation, nbytes_moved: int) -> None:
        """Notes that a lane has moved ``nbytes_moved`` bytes (0 if it failed)."""
        with self._lock:
            self._nbytes[operation] += nbytes_moved
            self._n_running[operation] -= 1
            if self._n_running[operation] == 0:
                self._busy_ns[operation] += time.perf_counter_ns() - self._t_busy_since_ns[operation]

    def request_succeeded(self, operation: Operation) -> None:
        """Notes that a whole request has ended well."""
        with self._lock:
            self._n_requests[operation] += 1

    def snapshot(self) -> IoTotals:
        """All totals at one moment."""
        with self._lock:
            busy_ns = dict(self._busy_ns)
            for operation, n_running in self._n_running.items():
                if n_running:
                    busy_ns[operation] += time.perf_counter_ns() - self._t_busy_since_ns[operation]
            return IoTotals(
                bytes_read=self._nbytes[Operation.READ],
                bytes_written=self._nbytes[Operation.WRITE],
                n_reads=self._n_requests[Operation.READ],
                n_writes=self._n_requests[Operation.WRITE],
                read_ns=busy_ns[Operation.READ],
                write_ns=busy_ns[Operation.WRITE],
            )

    @property
    def bytes_read(self) -> int:
        """Bytes read from storage."""
        return self.snapshot().bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes written to storage."""
        return self.snapshot().bytes_written

    @property
    def n_reads(self) -> int:
        """Read requests that succeeded."""
        return self.snapshot().n_reads

    @property
    def n_writes(self) -> int:
        """Write requests that succeeded."""
        return self.snapshot().n_writes

    @property
    def read_ns(self) -> int:
        """Nanoseconds with a read running."""
        return self.snapshot().read_ns

    @property
    def write_ns(self) -> int:
        """Nanoseconds with a write running."""
        return self.snapshot().write_ns


def check_request(offset: int, buffer: torch.Tensor, alignment_nbytes: int, device_type: str | None = "cpu") -> None:
    """Checks the requirements of O_DIRECT, with a message that gives the offending values.

    Args:
        offset, buffer, alignment_nbytes: the request, and its required alignment.
        device_type: required device of the buffer; None for no check.

    Raises:
        ValueError: the buffer is not a non-empty, aligned, 1-D contiguous uint8 tensor on that device, or the offset is
            negative or unaligned.
    """
    if not isinstance(buffer, torch.Tensor):
        raise ValueError(f"buffer must be a torch.Tensor, not {type(buffer).__name__}")
    if buffer.dtype is not torch.uint8 or device_type not in (None, buffer.device.type) or buffer.dim() != 1:
        where = "" if device_type is None else f" on the {device_type.upper()}"
        raise ValueError(
            f"buffer must be a 1-D uint8 tensor{where}, not {buffer.dim()}-D {buffer.dtype} on {buffer.device}"
        )
    if not buffer.is_contiguous():
        raise ValueError(f"buffer must be contiguous, not of stride {buffer.stride()}")
    nbytes = buffer.numel()
    if nbytes == 0 or nbytes % alignment_nbytes:
        raise ValueError(f"buffer length must be a positive multiple of {alignment_nbytes} bytes, not {nbytes}")
    if buffer.data_ptr() % alignment_nbytes:
        raise ValueError(f"buffer address must be a multiple of {alignment_nbytes}, not {buffer.data_ptr():#x}")
    if offset < 0 or offset % alignment_nbytes:
        raise ValueError(f"file offset must be a non-negative multiple of {alignment_nbytes}, not {offset}")


def admit(request: Submission, *, pid: int, alignment_nbytes: int, device_type: str = "cpu") -> Ticket:
    """The ticket of a request to a backend that process ``pid`` opened. Takes no lock: in a forked child a lock may be
    held indefinitely by a thread that does not exist there.

    Raises:
        ValueError: see :func:`check_request`.
        StorageError: this is a forked child of that process.
    """
    check_request(request.offset, request.buffer, alignment_nbytes, device_type)
    ticket = Ticket(request.operation, request.path, request.offset, request.buffer.numel(), request.tag)
    if os.getpid() != pid:
        cause = f"opened by process {pid}, used in its forked child {os.getpid()}; open a new one there"
        raise refusal(ticket, cause)
    return ticket


def refusal(ticket: Ticket, cause: str) -> StorageError:
    """The error of a request that no device has seen."""
    return ticket.failure(cause, StorageError)


def cancelled(ticket: Ticket) -> StorageCancelledError:
    """The error of a request that was cancelled."""
    return ticket.failure("cancelled", StorageCancelledError, errno.ECANCELED)


def given_up(ticket: Ticket) -> StorageGivenUpError:
    """The error of a request that the device had not finished when its backend had to close."""
    cause = "given up: the device had not finished it when the backend had to close"
    return ticket.failure(cause, StorageGivenUpError, errno.ETIMEDOUT)


def never_finished(stuck: Sequence[Ticket], timeout_s: float) -> StorageTimeoutError:
    """The error of a backend that closed without these."""
    cause = (
        f"the device had not finished it and {len(stuck) - 1} other requests {timeout_s} s after the backend was "
        "closed; the device hangs or is lost (see dmesg)"
    )
    return stuck[0].failure(cause, StorageTimeoutError, errno.ETIMEDOUT)


def storage_error(operation: Operation, path: str, offset: int, nbytes: int, error: OSError, tag: str) -> StorageError:
    """The typed error for an error of the operating system."""
    kind = SpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
    cause = f"{error.strerror or error}{remedy(error.errno)}"
    return kind(operation.value, path, offset, nbytes, cause, errno=error.errno, tag=tag)


_Error = TypeVar("_Error", bound=StorageError)


class Operation(enum.Enum):
    """Direction of a request."""

    READ = "read"
    WRITE = "write"


class Priority(enum.IntEnum):
    """Order in which lanes pick requests."""

    URGENT = 0
    """A compute thread is waiting for this request."""
    BACKGROUND = 1
    """Nothing waits for it yet: read-ahead and write-back."""


class StorageTimeoutError(StorageError, TimeoutError):
    """A request did not finish in the time its waiter allowed. The request itself continues."""


class StorageGivenUpError(StorageTimeoutError):
    """A request ended because its backend closed. The device never answered, and may still touch the buffer."""


class StorageCancelledError(StorageError):
    """A request was cancelled before all of it had been handed to the device."""


@dataclass(frozen=True, slots=True, eq=False)
class Submission:
    """One transfer of a whole buffer, as :meth:`StorageBackend.submit` takes it.

    Attributes:
        operation: direction.
        path: the file, which was added or exists: a write to one that does not fails with ENOENT, as a read does.
        offset: first byte in the file, a multiple of the alignment.
        buffer: 1-D contiguous uint8 tensor; the caller keeps its bytes untouched until the ticket is done.
        tag: name of the data, for messages.
        priority: URGENT goes first, but does not starve BACKGROUND.
        finish: runs in a lane thread after the last byte has moved and before the ticket is done; its exception becomes
            the ticket's error. Not called when the transfer failed.
    """

    operation: Operation
    path: str
    offset: int
    buffer: torch.Tensor
    tag: str = ""
    priority: Priority = Priority.BACKGROUND
    finish: Callable[[], None] | None = None


class Ticket:
    """One request, from submission to its end. Every method may be called from any thread.

    Callbacks run *before* waiters wake up, so that an exception of a callback can still reach them; a callback must
    therefore neither block nor take a lock that is held while waiting for a ticket.

    Attributes:
        operation: direction.
        path: the file.
        offset: first byte in the file.
        nbytes: length in bytes.
        tag: name of the data, for messages.
        t_submit_ns: ``time.perf_counter_ns()`` at submission.
        t_done_ns: the same clock at the end of the transfer and its verification, 0 before.
    """

    __slots__ = (
        "_callbacks",
        "_cancel",
        "_completing_thread_id",
        "_default_timeout_s",
        "_ended",
        "_error",
        "_error_seen",
        "_lock",
        "_pid",
        "_promote",
        "_running",
        "nbytes",
        "offset",
        "operation",
        "path",
        "t_done_ns",
        "t_submit_ns",
        "tag",
    )

    def __init__(
        self,
        operation: Operation,
        path: str,
        offset: int,
        nbytes: int,
        tag: str = "",
        *,
        default_timeout_s: float | None = None,
    ) -> None:
        self.operation = operation
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.tag = tag
        self.t_submit_ns = time.perf_counter_ns()
        self.t_done_ns = 0
        self._default_timeout_s = default_timeout_s
        self._promote: Callable[[], None] | None = None
        self._cancel: Callable[[], bool] | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # Held until the request has ended: a lock is a tenth of an event's work, and there are four tickets a chunk.
        self._running = threading.Lock()
        self._running.acquire()
        self._ended = False
        self._completing_thread_id: int | None = None
        self._callbacks: list[Callable[[Ticket], None]] = []
        self._error: BaseException | None = None
        self._error_seen = False

    @property
    def done(self) -> bool:
        """True when the request has ended, either way (for a callback, already while it runs)."""
        return self._ended or self._completing_thread_id == threading.get_ident()

    @property
    def error(self) -> BaseException | None:
        """The error, or None. Final once :attr:`done` is true."""
        return self._error

    @property
    def given_up(self) -> bool:
        """True when it ended without an answer of the device, which may still read or write the buffer."""
        return isinstance(self._error, StorageGivenUpError)

    @property
    def error_seen(self) -> bool:
        """True when a :meth:`wait` has raised this ticket's error."""
        return self._error_seen

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks, without the GIL, until the request has ended.

        Args:
            timeout_s: longest time to wait in seconds; None takes the default of the ticket's creator (the extent
                store's ``timeout_s``; a bare backend has none and waits indefinitely).

        Raises:
            StorageError: the request failed; also :class:`StorageTimeoutError` when the time passed, and when called
                in a forked child for a request of its parent.
        """
        self.wait_ended(timeout_s)
        if self._error is not None:
            self._error_seen = True
            raise self._error.copied() if isinstance(self._error, StorageError) else self._error

    def wait_ended(self, timeout_s: float | None = None) -> None:
        """Like :meth:`wait`, but leaves the request's own error to others: raises only for time and fork."""
        if not self.done:
            limit_s = self._default_timeout_s if timeout_s is None else timeout_s
            if os.getpid() != self._pid:
                raise self.failure(
                    "submitted by the parent process: its lanes do not exist in a forked child", StorageError
                )
            if self._running.acquire(timeout=-1 if limit_s is None else max(limit_s, 0.0)):
                self._running.release()  # for the next waiter
            elif not self._ended and limit_s is not None:  # else another waiter had the lock just now
                raise self.overdue(limit_s)

    def overdue(self, limit_s: float | None) -> StorageTimeoutError:
        """The error of a request that has not ended within ``limit_s`` seconds."""
        cause = f"not finished after {limit_s} s; the device may hang or be overloaded"
        return self.failure(cause, StorageTimeoutError, errno.ETIMEDOUT)

    def failure(self, cause: str, kind: type[_Error], number: int | None = None) -> _Error:
        """An error of this request, whole; ``number`` is an errno."""
        return kind(self.operation.value, self.path, self.offset, self.nbytes, cause, errno=number, tag=self.tag)

    def add_done_callback(self, callback: Callable[[Ticket], None]) -> None:
        """Calls ``callback(ticket)`` once when the request ends: in the lane thread, or here and now if it has ended.

        An exception of the callback becomes the ticket's error (unless it has one already, which is then the
        exception's context).
        """
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def promote(self) -> None:
        """Makes the request URGENT if it has not started; otherwise does nothing."""
        promote = self._promote  # a lane may end the request, and clear this, at any moment
        if promote is not None:
            promote()

    def cancel(self) -> bool:
        """Drops the parts that were not submitted to the device yet. The ticket then ends with
        :class:`StorageCancelledError`, once the rest has ended: only then may the buffer be used again.

        Returns:
            False when the device has all of it, or it has ended: the request continues unaffected.
        """
        cancel = self._cancel
        return cancel() if cancel is not None else False

    def bind(self, *, promote: Callable[[], None], cancel: Callable[[], bool]) -> None:
        """Says how :meth:`promote` and :meth:`cancel` reach the queue. For backends and stores only."""
        self._promote = promote
        self._cancel = cancel

    def complete(self, error: BaseException | None) -> None:
        """Ends the request. For backends and stores only; called exactly once."""
        self.t_done_ns = time.perf_counter_ns()
        self._error = error
        self._completing_thread_id = threading.get_ident()
        while True:
            with self._lock:
                callbacks, self._callbacks = self._callbacks, []
                if not callbacks:
                    self._ended = True
                    self._completing_thread_id = None
                    self._promote = self._cancel = None
                    self._running.release()
                    return
            for callback in callbacks:
                self._call(callback)

    def _call(self, callback: Callable[[Ticket], None]) -> None:
        try:
            callback(self)
        except BaseException as raised:  # kept on the ticket: a lane thread has no caller to raise to
            if self._error is None:
                self._error = raised
            elif raised is not self._error:
                raised.__context__ = self._error.__context__
                self._error.__context__ = raised

    def __repr__(self) -> str:
        state = "running" if not self._ended else "failed" if self._error is not None else "done"
        return f"<Ticket {self.operation.value} {self.tag or self.path}@{self.offset}+{self.nbytes} {state}>"


class StorageBackend(Protocol):
    """Moves bytes between 1-D buffers and files. Every method may be called from any thread.

    Attributes:
        name: one of the registry, which take host memory, or ``"gds"``, which takes GPU memory.
        alignment_nbytes: buffer address, length and offset must be multiples of this.
        counters: totals since the backend was opened.
    """

    name: str
    alignment_nbytes: int
    counters: IoCounters

    def submit(self, request: Submission) -> Ticket:
        """Queues a transfer and returns at once.

        Raises:
            ValueError: buffer, offset or length not as described.
            StorageError: the backend is closed, or this is a forked child of the process that opened it.
        """
        ...

    def add(self, path: str, fd: int) -> None:
        """From now on, and until :meth:`forget`, ``path`` means the file of ``fd``, which stays open, and no longer the
        one that has that name. The backend opens it anew as it needs.
        """
        ...

    def forget(self, path: str) -> None:
        """Drops the backend's state of a file (descriptors); call it before closing or removing the file."""
        ...

    def close(self) -> None:
        """Waits for all submitted requests, then joins the threads. Idempotent; returns at once in a forked child.

        Raises:
            RuntimeError: called from a callback of one of its requests, which cannot wait for itself.
            StorageTimeoutError: a backend that bounds this wait gave up on a device.
        """
        ...


class PassThroughBackend:
    """Passes every call on to ``inner`` (satisfies :class:`tencache_ds.io.StorageBackend`).

    A wrapper derives from it and overrides the methods in which it has a part.

    Args:
        inner: moves the bytes; owned, closed by :meth:`close`.
    """

    def __init__(self, inner: StorageBackend) -> None:
        self.name = inner.name
        self.alignment_nbytes = inner.alignment_nbytes
        self.counters = inner.counters
        self._inner = inner

    def submit(self, request: Submission) -> Ticket:
        """See :meth:`tencache_ds.io.StorageBackend.submit`."""
        return self._inner.submit(request)

    def add(self, path: str, fd: int) -> None:
        """See :meth:`tencache_ds.io.StorageBackend.add`."""
        self._inner.add(path, fd)

    def forget(self, path: str) -> None:
        """See :meth:`tencache_ds.io.StorageBackend.forget`."""
        self._inner.forget(path)

    def close(self) -> None:
        """See :meth:`tencache_ds.io.StorageBackend.close`."""
        self._inner.close()
