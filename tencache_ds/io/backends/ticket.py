# SPDX-License-Identifier: Apache-2.0
"""One request, one ticket, one error."""

from __future__ import annotations

import enum
import errno
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from tencache_ds.errors import StorageError

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
