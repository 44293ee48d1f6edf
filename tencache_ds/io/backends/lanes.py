# SPDX-License-Identifier: Apache-2.0
"""Backends whose lanes are Python threads.

Files stay open from one transfer to the next, one per path and direction. Scratch files have no names: the path
identifies a file in messages, the descriptor locates it.

Lanes are a few threads that share one queue of requests. One blocking request at a time leaves a fast device idle; four
to eight lanes reach its limit. A large request is cut into pieces so that several lanes work on it at the same time,
and a small urgent one never waits behind a whole chunk. All policy is elsewhere.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from tencache_ds.errors import ProcessLimitError
from tencache_ds.io.backends.protocol import (
    IoCounters,
    Operation,
    Priority,
    StorageTimeoutError,
    Submission,
    Ticket,
    admit,
    cancelled,
    given_up,
    never_finished,
    refusal,
)
from tencache_ds.io.scratch import openable
from tencache_ds.layout import PAGE_NBYTES
from tencache_ds.limits import start_threads
from tencache_ds.observability.spans import Category, span

# The end of a process


_EXIT_GRACE_S = 10.0
"""Longest time the interpreter's exit waits for running transfers; a device that hangs must not hang it too."""

_in_use_by_device: list[torch.Tensor] = []


def keep_for_the_device(buffer: torch.Tensor) -> None:
    """Never frees this buffer: a device that hangs may still write to it."""
    _in_use_by_device.append(buffer)


def stop_at_exit(abandon: Callable[[float], None]) -> Callable[[], None]:
    """Calls a method at the interpreter's exit, if its object is alive then, for threads that must not outlive it.

    Args:
        abandon: fails requests that have not started, and waits up to this number of seconds for the others.

    Returns:
        What ``atexit.unregister`` takes.
    """
    reference = weakref.WeakMethod(abandon)

    def stop() -> None:
        alive = reference()
        if alive is not None:
            alive(_EXIT_GRACE_S)

    return atexit.register(stop)


class _AwaitedAtExit(threading.Thread):
    """A thread that the interpreter's exit waits for, for a limited time."""


def run_before_exit(task: Callable[[], None], name: str) -> None:
    """Runs ``task`` on its own thread. The interpreter's exit waits for it, though not for a device that hangs. Without
    that, a daemon thread that returns from native code while the interpreter is torn down can abort the process.

    Args:
        task: what to run.
        name: of the thread.
    """
    _AwaitedAtExit(target=task, name=name, daemon=True).start()


@atexit.register
def _wait_for_threads() -> None:
    t_end_s = time.monotonic() + _EXIT_GRACE_S
    for thread in threading.enumerate():
        if isinstance(thread, _AwaitedAtExit) and thread.is_alive():
            thread.join(max(t_end_s - time.monotonic(), 0.0))


# Lanes


@dataclass(slots=True)
class OpenFile(abc.ABC):
    """An open file and how many transfers use it right now; a retired one is closed by the last of them."""

    n_users: int = field(default=0, init=False)
    retired: bool = field(default=False, init=False)

    @abc.abstractmethod
    def close(self) -> None:
        """Closes it. Called once."""


File = TypeVar("File", bound=OpenFile)


class OpenFiles(abc.ABC, Generic[File]):
    """Opens files when they are first used. Thread-safe. A subclass says how."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[tuple[str, Operation], File] = {}
        self._locations: dict[str, str] = {}

    @abc.abstractmethod
    def _open(self, operation: Operation, path: str, location: str) -> File:
        """Opens an existing file for one direction: named ``path``, opened through ``location``. Called with the lock
        held; never creates a file: one that has vanished must not reappear empty.
        """

    def add(self, path: str, fd: int) -> None:
        """From now on, and until :meth:`forget`, ``path`` means the file of ``fd``, which stays open. Others are opened
        by their names.
        """
        with self._lock:
            self._locations[path] = openable(fd)

    def acquire(self, operation: Operation, path: str) -> File:
        """The file, opened if it is not open yet; :meth:`release` has to follow.

        Raises:
            OSError: the file cannot be opened.
        """
        with self._lock:
            file = self._files.get((path, operation))
            if file is None:
                file = self._files[path, operation] = self._open(operation, path, self._locations.get(path, path))
            file.n_users += 1
            return file

    def release(self, file: File) -> None:
        """Ends a use of a file."""
        with self._lock:
            file.n_users -= 1
            self._close_unused(file)

    @contextlib.contextmanager
    def using(self, operation: Operation, path: str) -> Iterator[File]:
        """The file, for one transfer; see :meth:`acquire`."""
        file = self.acquire(operation, path)
        try:
            yield file
        finally:
            self.release(file)

    def forget(self, path: str) -> None:
        """Closes the descriptors of a path as soon as no transfer uses them."""
        with self._lock:
            self._locations.pop(path, None)
            for operation in Operation:
                self._retire(path, operation)

    def close(self) -> None:
        """Closes every file, as soon as no transfer uses it. Idempotent."""
        with self._lock:
            for path, operation in list(self._files):
                self._retire(path, operation)

    def _retire(self, path: str, operation: Operation) -> None:
        """With the lock held: the next use opens the file anew."""
        file = self._files.pop((path, operation), None)
        if file is not None:
            file.retired = True
            self._close_unused(file)

    @staticmethod
    def _close_unused(file: OpenFile) -> None:
        if file.retired and file.n_users == 0:
            file.close()


Transfer = Callable[[int, Operation, str, int, torch.Tensor, str], None]
"""``transfer(lane, operation, path, offset, piece, tag)``: moves one piece, blocking, and raises what went wrong."""

_BACKGROUND_EVERY = 4
"""With both kinds waiting, every fourth pick is BACKGROUND: read-ahead slows down under urgent load, never stops."""


class _Request:
    """A submitted request. Its priority, error and progress are guarded by the pool's lock."""

    __slots__ = ("buffer", "error", "finish", "given_up", "n_running", "next_offset", "priority", "ticket")

    def __init__(
        self, ticket: Ticket, buffer: torch.Tensor, priority: Priority, finish: Callable[[], None] | None
    ) -> None:
        self.ticket = ticket
        self.buffer = buffer
        self.finish = finish
        self.priority = priority
        self.next_offset = 0  # first byte of the buffer not handed to a lane yet
        self.n_running = 0
        self.given_up = False  # its ticket has ended although the device has a part of it
        self.error: BaseException | None = None

    @property
    def nbytes(self) -> int:
        return self.ticket.nbytes


class LanePool:
    """``n_lanes`` daemon threads that carry out transfers in order of priority.

    Args:
        n_lanes: number of threads.
        transfer: moves one piece; called in lane threads, at most ``n_lanes`` at a time and one at a time per lane.
        request_nbytes: longest piece in bytes, a multiple of the alignment.
        alignment_nbytes: what buffer addresses, lengths and offsets must be multiples of.
        device_type: where buffers are.
        close_timeout_s: longest time in seconds that :meth:`close` waits for a device.

    Raises:
        ValueError: a size that makes no sense.
        ProcessLimitError: the lanes cannot be started.
    """

    def __init__(
        self,
        n_lanes: int,
        transfer: Transfer,
        request_nbytes: int = 8 << 20,
        *,
        alignment_nbytes: int = PAGE_NBYTES,
        device_type: str = "cpu",
        close_timeout_s: float = 600.0,
    ) -> None:
        if n_lanes < 1:
            raise ValueError(f"n_lanes must be at least 1, not {n_lanes}")
        if request_nbytes < alignment_nbytes or request_nbytes % alignment_nbytes:
            raise ValueError(f"request_nbytes must be a positive multiple of {alignment_nbytes}, not {request_nbytes}")
        self.counters = IoCounters()
        self._transfer = transfer
        self._request_nbytes = request_nbytes
        self._alignment_nbytes = alignment_nbytes
        self._device_type = device_type
        self._close_timeout_s = close_timeout_s
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.Lock())
        self._queues: dict[Priority, deque[_Request]] = {priority: deque() for priority in Priority}
        self._running: set[_Request] = set()
        self._n_urgent_in_a_row = 0
        self._closing = False
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"tencache-lane-{lane}", daemon=True)
            for lane in range(n_lanes)
        ]
        try:
            start_threads(self._threads, "I/O lanes")
        except ProcessLimitError:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._end_lanes()
            raise
        # A daemon thread that returns from native code while the interpreter is torn down can abort the process.
        self._at_exit = stop_at_exit(self.abandon)

    def submit(self, request: Submission) -> Ticket:
        """Queues one request; see :meth:`tencache_ds.io.StorageBackend.submit`."""
        ticket = admit(request, pid=self._pid, alignment_nbytes=self._alignment_nbytes, device_type=self._device_type)
        queued = _Request(ticket, request.buffer, request.priority, request.finish)
        ticket.bind(promote=lambda: self._promote(queued), cancel=lambda: self._cancel(queued))
        with self._changed:
            if self._closing:
                raise refusal(ticket, "the backend is closed")
            self._queues[queued.priority].append(queued)
            self._changed.notify(-(-queued.nbytes // self._request_nbytes))
        return ticket

    def close(self) -> None:
        """Waits for all submitted requests and joins the lanes. Idempotent; returns at once in a forked child.

        Raises:
            RuntimeError: called in a lane thread (from a callback), which cannot wait for itself.
            StorageTimeoutError: the device still had requests after ``close_timeout_s``. Their tickets have ended with
                an error, their buffers are kept for the life of the process.
        """
        if os.getpid() != self._pid or self._closed:
            return
        if threading.current_thread() in self._threads:
            raise RuntimeError("a storage backend cannot be closed from a callback of one of its requests")
        self._end_lanes()
        self._closed = True
        atexit.unregister(self._at_exit)
        stuck = self._give_up()
        if stuck:
            raise never_finished(stuck, self._close_timeout_s)

    def _end_lanes(self) -> None:
        """Waits until the lanes have finished all submitted requests."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        t_end_s = time.monotonic() + self._close_timeout_s
        for thread in self._threads:
            thread.join(max(0.0, t_end_s - time.monotonic()))

    def _give_up(self) -> list[Ticket]:
        """Ends all unfinished requests; returns those that the device still holds."""
        with self._changed:
            waiting = [request for queue in self._queues.values() for request in queue if not request.n_running]
            stuck = list(self._running)
            for queue in self._queues.values():
                queue.clear()
            for request in (*waiting, *stuck):
                request.next_offset = request.nbytes
            for request in stuck:
                request.given_up = True
                keep_for_the_device(request.buffer)
        for request in waiting:
            self._end(request, cancelled(request.ticket))
        for request in stuck:
            self._end(request, given_up(request.ticket))
        return [request.ticket for request in stuck]

    def _promote(self, request: _Request) -> None:
        with self._changed:
            if request.priority is Priority.BACKGROUND and request in self._queues[Priority.BACKGROUND]:
                self._queues[Priority.BACKGROUND].remove(request)
                request.priority = Priority.URGENT
                self._queues[Priority.URGENT].append(request)

    def _cancel(self, request: _Request) -> bool:
        with self._changed:
            if request.next_offset == request.nbytes:
                return False
            self._queues[request.priority].remove(request)
            request.next_offset = request.nbytes
            request.error = cancelled(request.ticket)
            if request.n_running:
                return True
        self._end(request, request.error)
        return True

    def _run(self, lane: int) -> None:
        while True:
            with self._changed:
                while (request := self._pick()) is None:
                    if self._closing:
                        return
                    self._changed.wait()
                start = request.next_offset
                stop = min(start + self._request_nbytes, request.nbytes)
                request.next_offset = stop
                request.n_running += 1
                self._running.add(request)
                if stop == request.nbytes:
                    self._queues[request.priority].popleft()
            self._move(lane, request, start, stop)
            del request  # an idle lane must not keep a buffer alive

    def _pick(self) -> _Request | None:
        """The request to work on next, by priority without starvation. Called with the lock held."""
        urgent, background = self._queues[Priority.URGENT], self._queues[Priority.BACKGROUND]
        if urgent and not (background and self._n_urgent_in_a_row >= _BACKGROUND_EVERY - 1):
            self._n_urgent_in_a_row += 1
            return urgent[0]
        self._n_urgent_in_a_row = 0
        return background[0] if background else None

    def _move(self, lane: int, request: _Request, start: int, stop: int) -> None:
        ticket = request.ticket
        error: BaseException | None = None
        self.counters.transfer_started(ticket.operation)
        try:
            with span(Category.LANE, f"lane::{ticket.operation.value}", ticket.tag, stop - start):
                self._transfer(
                    lane, ticket.operation, ticket.path, ticket.offset + start, request.buffer[start:stop], ticket.tag
                )
        except BaseException as raised:  # handed to the ticket: its waiter raises it
            error = raised
        self.counters.transfer_ended(ticket.operation, 0 if error is not None else stop - start)
        with self._changed:
            request.n_running -= 1
            if request.given_up:
                return
            if not request.n_running:
                self._running.discard(request)
            if error is not None and request.error is None:
                request.error = error
                if request.next_offset < request.nbytes:  # the pieces not started are dropped
                    self._queues[request.priority].remove(request)
                    request.next_offset = request.nbytes
            if request.n_running or request.next_offset < request.nbytes:
                return
            error = request.error
        self._end(request, error)

    def _end(self, request: _Request, error: BaseException | None) -> None:
        if error is None and request.finish is not None:
            try:
                request.finish()
            except BaseException as raised:  # verification failed: the waiter raises it
                error = raised
        if error is None:
            self.counters.request_succeeded(request.ticket.operation)
        request.ticket.complete(error)

    def abandon(self, grace_s: float) -> None:
        """At interpreter exit: fails requests that have not started, waits a while for the others."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closing = True
            dropped = [request for queue in self._queues.values() for request in queue]
            for queue in self._queues.values():
                queue.clear()
            not_started = []
            for request in dropped:
                request.error = refusal(request.ticket, "dropped, the interpreter exits")
                request.next_offset = request.nbytes
                if not request.n_running:
                    not_started.append(request)
            self._changed.notify_all()
        for request in not_started:
            self._end(request, request.error)
        t_end_s = time.monotonic() + grace_s
        for thread in self._threads:
            thread.join(max(0.0, t_end_s - time.monotonic()))


class LaneBackend(abc.ABC):
    """A :class:`tencache_ds.io.StorageBackend`, but for its name and for how one piece is moved.

    Args:
        files: owned, closed by :meth:`close`.
        n_lanes: threads.
        request_nbytes: longest piece in bytes.
        device_type: where buffers are.
        close_timeout_s: longest time in seconds that :meth:`close` waits for the device.
    """

    name: str
    alignment_nbytes = PAGE_NBYTES

    def __init__(
        self,
        files: OpenFiles[Any],
        n_lanes: int,
        request_nbytes: int,
        *,
        device_type: str = "cpu",
        close_timeout_s: float,
    ) -> None:
        self._files = files
        self._pool = LanePool(
            n_lanes, self._transfer, request_nbytes, device_type=device_type, close_timeout_s=close_timeout_s
        )
        self.counters = self._pool.counters

    def submit(self, request: Submission) -> Ticket:
        """See :meth:`tencache_ds.io.StorageBackend.submit`."""
        return self._pool.submit(request)

    def add(self, path: str, fd: int) -> None:
        """See :meth:`tencache_ds.io.StorageBackend.add`."""
        self._files.add(path, fd)

    def forget(self, path: str) -> None:
        """Closes the descriptors of a file that is about to be, or has been, removed. Any thread."""
        self._files.forget(path)

    def close(self) -> None:
        """Waits for all submitted requests, joins the lanes, closes the files. Idempotent.

        Raises:
            RuntimeError: called from a callback of one of its requests; nothing is closed.
            StorageTimeoutError: the device still had requests after ``close_timeout_s``; they are given up.
        """
        try:
            self._pool.close()
        except StorageTimeoutError:
            self._files.close()
            raise
        self._files.close()

    @abc.abstractmethod
    def _transfer(self, lane: int, operation: Operation, path: str, offset: int, piece: torch.Tensor, tag: str) -> None:
        """Moves one piece, blocking, in a lane's thread; raises what went wrong."""
