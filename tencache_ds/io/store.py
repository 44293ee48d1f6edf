# SPDX-License-Identifier: Apache-2.0
"""Scratch files full of extents: allocation, ordering, verification.

Per extent, requests keep their order: a read sees the write before it, a write waits for the reads before it. The order
is kept by callbacks without blocking a thread. Every write leaves a fingerprint in RAM and every read is compared with
it, because neither the page cache nor DeepSpeed's aio op reports every loss.

One lock guards the extents' queues and results. No request is submitted or completed under it: both may call back.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from tencache_ds.errors import StorageError
from tencache_ds.io.backends.protocol import (
    Operation,
    Priority,
    StorageBackend,
    Submission,
    Ticket,
    cancelled,
    check_request,
    refusal,
)
from tencache_ds.io.extents import Extent
from tencache_ds.io.integrity import Fingerprint, Witness, sampled_fingerprint, verify_read
from tencache_ds.io.scratch import SpaceFiles, openable
from tencache_ds.io.stripes import StripedSpace, Striping
from tencache_ds.layout import round_up
from tencache_ds.observability import spans

# The requests of one extent


class ExtentTicket(Ticket):
    """A store's ticket: ``explain`` sees each error before a waiter does, and may add a note to it."""

    __slots__ = ("_explain",)

    def __init__(
        self,
        operation: Operation,
        extent: Extent,
        nbytes: int,
        default_timeout_s: float,
        explain: Callable[[StorageError], None] | None,
    ) -> None:
        super().__init__(operation, extent.file, extent.offset, nbytes, extent.tag, default_timeout_s=default_timeout_s)
        self._explain = explain

    def wait(self, timeout_s: float | None = None) -> None:
        """See :meth:`tencache_ds.io.Ticket.wait`."""
        try:
            super().wait(timeout_s)
        except StorageError as error:
            if self._explain is not None:
                self._explain(error)
            raise


@dataclass(slots=True, eq=False)
class Request:
    """One read or write of an extent, before and while the backend has it."""

    operation: Operation
    buffer: torch.Tensor
    priority: Priority
    ticket: Ticket
    witness: Witness | None = None  # of this write, or of the one that is read; None: nothing is compared
    inner: Ticket | None = None


@dataclass(slots=True, eq=False)
class ExtentQueue:
    """Everything the store knows about an extent."""

    extent: Extent
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    n_writes: int = 0  # accepted so far, the next write's generation
    written_nbytes: int = 0  # by the last one that was accepted
    witness: Witness | None = None  # of the last write that started
    poison: BaseException | None = None  # why that write failed
    freed: bool = False

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self.running and not self.waiting

    def take_ready(self) -> list[Request]:
        """Moves what may start now from waiting to running: one write alone, or reads together."""
        ready: list[Request] = []
        while self.waiting:
            request = self.waiting[0]
            if request.operation is Operation.WRITE:
                if self.running:
                    break
                self.witness = request.witness
                self.poison = None
            else:
                if self.running and self.running[0].operation is Operation.WRITE:
                    break
                request.witness = self.witness
            self.running.append(self.waiting.popleft())
            ready.append(request)
        return ready


def record(recorder: spans.Recorder, request: Request, inner: Ticket) -> None:
    """Adds a request to a trace, with the time for which it had to wait for others of its extent."""
    operation = inner.operation.value
    arguments = {
        "path": inner.path,
        "offset": inner.offset,
        "priority": request.priority.name.lower(),
        "waited_for_extent_us": (inner.t_submit_ns - request.ticket.t_submit_ns) // 1000,
    }
    if inner.error is not None:
        arguments["error"] = str(inner.error)
    recorder.add(
        spans.Category.NVME,
        f"tencache::nvme::{operation}",
        f"NVMe {operation}",
        inner.t_submit_ns,
        inner.t_done_ns,
        inner.tag,
        inner.nbytes,
        arguments,
    )


# Stores


class ExtentStore:
    """Extents in scratch files. Every method may be called from any thread; tickets end in lane threads.

    Args:
        path: name of the file, which is unlinked at once: see :mod:`tencache_ds.io.scratch`. It must not exist. Of
            several files, each gets a number before its suffix.
        backend: moves the bytes; not owned, close it after the store.
        others: the same, path and backend, on each further device the store lies on.
        placement: with ``others``, chooses which device an extent goes to; used by this store alone.
        preallocate_nbytes: length reserved at once, so that a full disk is detected before training starts.
        growth_nbytes: least growth of a device's files when no free range is long enough.
        n_files: files to spread a device's extents over, so that writes do not wait for each other in the kernel.
        fingerprint: compares every read with the last write; None does not.
        timeout_s: longest time in seconds that a ticket's ``wait()`` without a limit, :meth:`drain` and :meth:`close`
            wait for one request.
        explain: sees each error before the waiter of a ticket does, in the waiter's thread; may add a note.

    Raises:
        SpaceError: the devices cannot hold ``preallocate_nbytes``.
        StorageError: the file exists or cannot be created.
    """

    def __init__(
        self,
        path: str,
        backend: StorageBackend,
        *,
        others: Sequence[tuple[str, StorageBackend]] = (),
        placement: Striping | None = None,
        preallocate_nbytes: int = 0,
        n_files: int = 1,
        growth_nbytes: int = 256 << 20,
        fingerprint: Fingerprint | None = sampled_fingerprint,
        timeout_s: float = 600.0,
        explain: Callable[[StorageError], None] | None = None,
    ) -> None:
        files = [_file_names(name, n_files) for name in (path, *(name for name, _ in others))]
        backends = [backend, *(other for _, other in others)]
        self.paths = [name for names in files for name in names]
        """The files."""
        self.n_healed_reads = 0
        """Reads that differed from the last write, and no longer did when read again."""
        self._backends = {name: b for names, b in zip(files, backends, strict=True) for name in names}
        self._alignment_nbytes = max(b.alignment_nbytes for b in backends)
        self._explain = explain
        self._fingerprint = fingerprint
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._states: dict[tuple[str, int], ExtentQueue] = {}
        self._in_flight: set[Ticket] = set()
        self._failed_writes: list[Ticket] = []
        self._closed = False
        self._given_up = False  # close() waits no more: what has not started must not, its file is being closed
        self._stripes: StripedSpace | None = None
        if placement is not None:
            self._stripes = StripedSpace(
                files, placement, preallocate_nbytes=preallocate_nbytes, growth_nbytes=growth_nbytes
            )
        self._space = self._stripes or SpaceFiles(
            self.paths, preallocate_nbytes=preallocate_nbytes, growth_nbytes=growth_nbytes
        )
        for name, each in self._backends.items():
            each.add(name, self._space.descriptor(name))

    def location(self, file: str) -> str:
        """A path at which this process can open one of the files, until :meth:`close`."""
        return openable(self._space.descriptor(file))

    @property
    def nbytes_allocated(self) -> int:
        """Bytes of the files that belong to extents."""
        return self._space.nbytes_taken

    @property
    def nbytes_files(self) -> int:
        """Length of the files in bytes."""
        return self._space.nbytes

    @property
    def n_relocated(self) -> int:
        """How often an extent was given another device."""
        return self._stripes.n_moved if self._stripes is not None else 0

    def held(self) -> list[tuple[int, int]]:
        """Extents on each device, in the order of the constructor's arguments: how many, and their bytes."""
        return self._space.held()

    def allocate(self, nbytes: int, tag: str) -> Extent:
        """Reserves space, on the device too: later writes cannot fail for lack of it.

        Args:
            nbytes: payload in bytes; rounded up to 4096.
            tag: name of the extent's contents, for messages.

        Raises:
            SpaceError: the device is full; says how much is missing.
            StorageError: the store is closed, or the file cannot grow.
            ValueError: ``nbytes`` is not positive.
        """
        if nbytes <= 0:
            raise ValueError(f"an extent for {tag} needs a positive size, not {nbytes}")
        self._check_open("allocate", self.paths[0], 0, nbytes, tag)
        allocated_nbytes = round_up(nbytes)
        file, offset = self._space.take(allocated_nbytes, tag)
        extent = Extent(file, offset, nbytes, allocated_nbytes, tag)
        with self._lock:
            self._states[file, offset] = ExtentQueue(extent)
        return extent

    def free(self, extent: Extent) -> None:
        """Frees the space once the extent's requests in flight have ended.

        Raises:
            ValueError: the extent is not (or no longer) one of this store.
        """
        with self._lock:
            state = self._state(extent)
            state.freed = True
            idle = state.idle
        if idle:
            self._release(state)

    def relocate(self, extent: Extent) -> Extent:
        """Where the write that is about to replace all of ``extent`` goes best: call it right before that write.

        Returns:
            The extent itself; or, where another device has bandwidth to spare, a new one in its place. The old one is
            then freed, once the reads of it that are in flight have ended, and its bytes are given up.

        Raises:
            ValueError: not an extent of this store.
            StorageError: the store is closed, or a file cannot grow for another reason than a full device.
        """
        if self._stripes is None:
            return extent
        self._check_open("relocate", extent.file, extent.offset, extent.nbytes, extent.tag)
        with self._lock:
            n_writes = self._state(extent).n_writes
        place = self._stripes.take_elsewhere(extent.file, extent.allocated_nbytes, extent.tag)
        if place is None:
            return extent
        moved = Extent(*place, extent.nbytes, extent.allocated_nbytes, extent.tag)
        with self._lock:
            # Writes are numbered on, so that an old page of the new place is as unlikely to pass as one of the old.
            self._states[place] = ExtentQueue(moved, n_writes=n_writes)
        self.free(extent)
        return moved

    def reweigh(self, bytes_per_s: Sequence[float | None]) -> None:
        """Sets the bandwidth of each device (None: unknown), which decides the placement of extents from now on.
        Between steps."""
        if self._stripes is not None:
            self._stripes.reweigh(bytes_per_s)

    def write(self, extent: Extent, buffer: torch.Tensor, *, priority: Priority = Priority.BACKGROUND) -> Ticket:
        """Writes an extent from its start. Bytes behind the last of the buffer are undefined afterwards.

        Args:
            extent: where.
            buffer: 1-D contiguous aligned uint8 tensor of whole pages, at most ``extent.allocated_nbytes`` bytes, in
                memory that the backend takes; untouched until the ticket is done. On a GPU, no work on it may be
                pending.
            priority: of the request, from when it may start.

        Returns:
            A ticket. If it fails, so do reads of the extent until a later write succeeds; if it is never waited for,
            :meth:`check` or :meth:`drain` raises its error.

        Raises:
            ValueError: wrong buffer, or not an extent of this store.
            StorageError: the store is closed.
        """
        self._check_buffer(extent, buffer)
        with self._lock:
            state = self._state(extent)
            witness = None if self._fingerprint is None else Witness(state.n_writes, self._fingerprint)
            state.n_writes += 1
        ticket = self._ticket(Operation.WRITE, extent, buffer)
        return self._enqueue(extent, Request(Operation.WRITE, buffer, priority, ticket, witness))

    def read(self, extent: Extent, buffer: torch.Tensor, *, priority: Priority = Priority.BACKGROUND) -> Ticket:
        """Reads all that the last write has written; arguments as for :meth:`write`.

        Returns:
            A ticket. Its error is the device's, or that of the write that should have filled the extent, or a
            :class:`~tencache_ds.errors.CorruptionError` when the bytes are not those last written.

        Raises:
            ValueError: wrong buffer, not an extent of this store, or the last write has not as many bytes.
            StorageError: the store is closed.
        """
        self._check_buffer(extent, buffer)
        ticket = self._ticket(Operation.READ, extent, buffer)
        return self._enqueue(extent, Request(Operation.READ, buffer, priority, ticket))

    def drain(self) -> None:
        """Waits for all writes submitted so far.

        Raises:
            StorageError: the first error of a write that no waiter has seen, after all have ended.
        """
        for ticket in self._wait_for(Operation.WRITE):
            if ticket.error is not None and not ticket.error_seen:
                ticket.wait()
        self.check()

    def check(self) -> None:
        """Raises the error of a failed write that was never waited for, once. Cheap enough for every step.

        Raises:
            StorageError: that error.
        """
        if not self._failed_writes:
            return
        with self._lock:
            unseen = [ticket for ticket in self._failed_writes if not ticket.error_seen]
            self._failed_writes = unseen
        for ticket in unseen:
            if ticket.done:  # if its callbacks still run, the next check has it
                ticket.wait()

    def raise_overdue(self, age_s: float) -> None:
        """Raises for the oldest request in flight, if submitted at least ``age_s`` seconds ago; else does nothing.

        For a waiter without a buffer, to report the cause: it was waiting for such a request to return one.

        Raises:
            StorageTimeoutError: that request's path, offset and tag.
        """
        with self._lock:
            oldest = min(self._in_flight, key=lambda ticket: ticket.t_submit_ns, default=None)
        if oldest is not None and time.perf_counter_ns() - oldest.t_submit_ns >= age_s * 1e9:
            error = oldest.overdue(age_s)
            if self._explain is not None:
                self._explain(error)
            raise error

    def close(self) -> None:
        """Waits for requests in flight, then closes the files, which deletes them. Idempotent.

        Raises:
            StorageError: an unreported error of a write; the files are closed nevertheless.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._wait_for(None)
            self.drain()
        finally:
            self._given_up = True
            for path, backend in self._backends.items():
                backend.forget(path)
            self._space.close()

    def _check_open(self, operation: str, path: str, offset: int, nbytes: int, tag: str) -> None:
        if self._closed:
            raise StorageError(operation, path, offset, nbytes, "the store is closed", tag=tag)

    def _check_buffer(self, extent: Extent, buffer: torch.Tensor) -> None:
        check_request(extent.offset, buffer, self._alignment_nbytes, device_type=None)
        if buffer.numel() > extent.allocated_nbytes:
            raise ValueError(
                f"{extent.tag} needs a buffer of at most {extent.allocated_nbytes} bytes, not {buffer.numel()}"
            )

    def _state(self, extent: Extent) -> ExtentQueue:
        state = self._states.get((extent.file, extent.offset))
        if state is None or state.freed or state.extent != extent:
            raise ValueError(f"not an extent of {', '.join(self.paths)}, or freed: {extent}")
        return state

    def _ticket(self, operation: Operation, extent: Extent, buffer: torch.Tensor) -> Ticket:
        return ExtentTicket(operation, extent, buffer.numel(), self._timeout_s, self._explain)

    def _wait_for(self, operation: Operation | None) -> list[Ticket]:
        """Waits for the requests in flight, whatever their outcome; returns their tickets.

        Oldest first: of several that hang, the first one names what the others wait for.
        """
        with self._lock:
            tickets = [ticket for ticket in self._in_flight if operation in (None, ticket.operation)]
        tickets.sort(key=lambda ticket: ticket.t_submit_ns)
        for ticket in tickets:
            ticket.wait_ended()
        return tickets

    def _release(self, state: ExtentQueue) -> None:
        with self._lock:
            del self._states[state.extent.file, state.extent.offset]
        self._space.give(state.extent.file, state.extent.offset, state.extent.allocated_nbytes)

    # Order

    def _enqueue(self, extent: Extent, request: Request) -> Ticket:
        request.ticket.bind(
            promote=partial(self._promote, extent, request), cancel=partial(self._cancel, extent, request)
        )
        with self._lock:
            self._check_open(request.operation.value, extent.file, extent.offset, extent.nbytes, extent.tag)
            state = self._state(extent)
            nbytes = request.buffer.numel()
            if request.operation is Operation.WRITE:
                state.written_nbytes = nbytes
            elif nbytes != state.written_nbytes:
                written = f"written with {state.written_nbytes} bytes" if state.written_nbytes else "never written"
                raise ValueError(
                    f"{extent.tag} at offset {extent.offset} of {extent.file} was {written}, {nbytes} were to be read"
                )
            state.waiting.append(request)
            self._in_flight.add(request.ticket)
            ready = state.take_ready()
        self._run(state, ready)
        return request.ticket

    def _run(self, state: ExtentQueue, ready: list[Request]) -> None:
        """Submits requests. Requests that cannot be submitted end here, which may make others ready: a loop, no
        recursion."""
        work = deque(ready)
        while work:
            request = work.popleft()
            is_read = request.operation is Operation.READ
            finish = None if request.witness is None else partial(self._finish, state.extent, request, request.witness)
            error = state.poison if is_read else None
            if error is None and self._given_up:
                error = refusal(request.ticket, "the store was closed before it could start")
            if error is None:
                try:
                    inner = self._backends[state.extent.file].submit(
                        Submission(
                            request.operation,
                            state.extent.file,
                            state.extent.offset,
                            request.buffer,
                            state.extent.tag,
                            request.priority,
                            finish,
                        )
                    )
                except Exception as raised:  # a closed backend, a forked child: the ticket's waiter has to know
                    error = raised
                else:
                    request.inner = inner
                    inner.add_done_callback(partial(self._on_done, state, request))
                    continue
            work.extend(self._end(state, request, error))

    def _on_done(self, state: ExtentQueue, request: Request, inner: Ticket) -> None:
        recorder = spans.recorder()
        if recorder is not None:
            record(recorder, request, inner)
        self._run(state, self._end(state, request, inner.error))

    def _end(self, state: ExtentQueue, request: Request, error: BaseException | None) -> list[Request]:
        """Ends a request; returns those that may start now."""
        is_write = request.operation is Operation.WRITE
        with self._lock:
            state.running.remove(request)
            if is_write:
                state.poison = error
            ready = state.take_ready()
            release = state.freed and state.idle
            if is_write and error is not None:
                self._failed_writes.append(request.ticket)
        if release:
            self._release(state)
        request.ticket.complete(error)
        with self._lock:
            self._in_flight.discard(request.ticket)
            if is_write and error is None and request.ticket.error is not None:  # a callback failed
                self._failed_writes.append(request.ticket)
        return ready

    def _promote(self, extent: Extent, request: Request) -> None:
        with self._lock:
            state = self._states.get((extent.file, extent.offset))
            if state is None:
                return
            if request in state.running:
                inners = [request.inner]
            else:  # it waits for all that is before it
                inners = [running.inner for running in state.running]
                for waiting in state.waiting:
                    waiting.priority = Priority.URGENT
                    if waiting is request:
                        break
        for inner in inners:
            if inner is not None:
                inner.promote()

    def _cancel(self, extent: Extent, request: Request) -> bool:
        if request.operation is Operation.WRITE:
            return False  # the extent would hold neither value
        with self._lock:
            state = self._states.get((extent.file, extent.offset))
            waits = state is not None and request in state.waiting
            if state is not None and waits:
                state.waiting.remove(request)
                state.running.append(request)  # only to be ended
        if state is None or not waits:
            return request.inner is not None and request.inner.cancel()
        self._run(state, self._end(state, request, cancelled(request.ticket)))
        return True

    def _finish(self, extent: Extent, request: Request, witness: Witness) -> None:
        """In a lane thread, before the buffer is released: keeps a write's fingerprint, which a read must have."""
        if request.operation is Operation.WRITE:
            witness.take(request.buffer)
            return
        fd = self._space.descriptor(extent.file)
        if not verify_read(witness, extent, fd, request.buffer):
            with self._lock:
                self.n_healed_reads += 1


def _file_names(path: str, n_files: int) -> list[str]:
    stem, suffix = os.path.splitext(path)
    return [path] if n_files == 1 else [f"{stem}-{index}{suffix}" for index in range(n_files)]
