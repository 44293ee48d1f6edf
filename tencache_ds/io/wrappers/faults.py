# SPDX-License-Identifier: Apache-2.0
"""Storage that fails on purpose: a wrapper around any backend, for tests and for fault injection by users.

``TENCACHE_FAULTS="op=write,kind=eio,after=100;op=read,kind=bitflip,match=optimizer"`` is a list of rules, separated by
semicolons, each a list of ``key=value``, separated by commas. The first rule that fires takes the request.

- ``kind`` (required): ``eio``, ``enospc``, ``eacces``, ``erofs``: fails with that errno, nothing is transferred;
  ``short``: only the first half is transferred, which is reported as an error; ``torn`` (writes): only the first half
  is transferred, success is reported; ``bitflip``: one bit of the data changes, success is reported; ``delay``: starts
  ``seconds`` later; ``lost``: this and every later request to the same folder fails with ENODEV; ``hang``: never ends,
  or with ``seconds`` completes after that time, and then writes to its buffer even if the backend was closed meanwhile.
- ``op``: ``read``, ``write`` or ``any`` (the default).
- ``match``: substring of the tag or the path, such as ``optimizer`` or a weight's name.
- ``rank``: only on this global rank.
- ``after``: number of matching requests to skip first (0); ``every``: then inject into every Nth matching request (1);
  ``times``: maximum number of injections (no limit).
- ``seconds``: duration of ``delay``, or of a ``hang`` that ends. ``seed``: selects the bit to flip (0).

The single word ``none`` installs the wrapper without a rule, for :meth:`.faults.FaultBackend.inject`. Halves are whole
4 KiB pages, rounded down: of a single page nothing is transferred.
"""

from __future__ import annotations

import atexit
import errno
import heapq
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tencache_ds.errors import ConfigError, StorageError
from tencache_ds.io.backends.lanes import stop_at_exit
from tencache_ds.io.backends.protocol import (
    Operation,
    PassThroughBackend,
    Priority,
    StorageBackend,
    StorageCancelledError,
    StorageGivenUpError,
    Submission,
    Ticket,
    cancelled,
    check_request,
    refusal,
    storage_error,
)
from tencache_ds.layout import PAGE_NBYTES
from tencache_ds.limits import start_threads
from tencache_ds.memory.arena import wait_for_device
from tencache_ds.names import FAULTS_VARIABLE, StrEnum
from tencache_ds.tensors import empty

VARIABLE = FAULTS_VARIABLE


class Kind(StrEnum):
    """The fault of a request; see the module's table."""

    eio = "eio"
    enospc = "enospc"
    eacces = "eacces"
    erofs = "erofs"
    short = "short"
    torn = "torn"
    bitflip = "bitflip"
    delay = "delay"
    lost = "lost"
    hang = "hang"


@dataclass(frozen=True, slots=True)
class Fault:
    """One rule: the requests it selects, and their fault. The fields are the keys of the module's table.

    Attributes:
        operation: None for both.
        rank: None for all.
        times: None for no limit.
    """

    kind: Kind
    operation: Operation | None = None
    match: str = ""
    rank: int | None = None
    after: int = 0
    every: int = 1
    times: int | None = None
    seconds: float = 0.0
    seed: int = 0


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The rules of a value of ``TENCACHE_FAULTS``.

    Raises:
        ConfigError: names the rule, its faulty part and the allowed values.
    """
    if text.strip() == "none":
        return ()
    return tuple(_parse_rule(rule.strip(), index) for index, rule in enumerate(text.split(";"), 1))


def _parse_rule(rule: str, index: int) -> Fault:
    where = f"{VARIABLE}, rule {index} ({rule!r})"
    given: dict[str, str] = {}
    for part in rule.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ConfigError(f"{where}: {part.strip()!r} is not key=value")
        if key not in _KEYS:
            raise ConfigError(f"{where}: unknown key {key!r}. Allowed: {', '.join(_KEYS)}")
        if key in given:
            raise ConfigError(f"{where}: {key!r} is given twice")
        given[key] = value
    if "kind" not in given:
        raise ConfigError(f'{where}: "kind" is missing. Allowed: {", ".join(Kind)}')
    if given["kind"] not in list(Kind):
        raise ConfigError(f"{where}: kind cannot be {given['kind']!r}. Allowed: {', '.join(Kind)}")
    kind = Kind(given["kind"])
    operation = given.get("op", "any")
    if operation not in ("any", *(o.value for o in Operation)):
        raise ConfigError(f"{where}: op cannot be {operation!r}. Allowed: read, write, any")
    if kind is Kind.torn and operation != "write":
        raise ConfigError(f'{where}: only a write can be torn: add "op=write"')
    if (kind is Kind.delay) != ("seconds" in given) and not (kind is Kind.hang and "seconds" in given):
        raise ConfigError(f'{where}: "seconds" belongs to kind=delay, which needs it, and to kind=hang')
    return Fault(
        kind,
        None if operation == "any" else Operation(operation),
        given.get("match", ""),
        _whole(where, given, "rank", 0),
        _whole(where, given, "after", 0) or 0,
        _whole(where, given, "every", 1) or 1,
        _whole(where, given, "times", 1),
        _seconds(where, given),
        _whole(where, given, "seed", 0) or 0,
    )


_KEYS = ("kind", "op", "match", "rank", "after", "every", "times", "seconds", "seed")


def _whole(where: str, given: dict[str, str], key: str, least: int) -> int | None:
    if key not in given:
        return None
    value = given[key]
    if not (value.isascii() and value.isdigit() and int(value) >= least):
        raise ConfigError(f"{where}: {key} must be a whole number of at least {least}, not {value!r}")
    return int(value)


def _seconds(where: str, given: dict[str, str]) -> float:
    value = given.get("seconds", "0")
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise ConfigError(f"{where}: seconds must be a number from 0 to 1000000, not {value!r}")
    return seconds


LATE_BYTE = 0xEE
"""The contents that a hung read puts into its buffer when it completes after the backend was closed."""

_NOTE = f"injected by {VARIABLE}"


_ERRNO = {
    Kind.eio: errno.EIO,
    Kind.enospc: errno.ENOSPC,
    Kind.eacces: errno.EACCES,
    Kind.erofs: errno.EROFS,
    Kind.lost: errno.ENODEV,
}


@dataclass(slots=True, eq=False)
class _Held:
    """A request that the wrapper answers itself, wholly or in part. Guarded by the backend's lock."""

    fault: Fault
    ticket: Ticket
    request: Submission
    inner: Ticket | None = None
    starts_later: bool = False  # a delay that is not over

    def begin(self) -> bool:
        """Ends the time in which it can be dropped; False if it was."""
        was_waiting, self.starts_later = self.starts_later, False
        return was_waiting


class FaultBackend(PassThroughBackend):
    """Makes selected requests fail. Requests that match no rule pass through.

    Errors that are injected end their tickets in a thread of the wrapper, as those of a device end in a lane.

    Args:
        inner: moves the bytes; owned, closed by :meth:`close`.
        faults: rules; those of other ranks are ignored.
        rank: global rank of this process.

    Attributes:
        n_injected: requests that were hit.
    """

    def __init__(self, inner: StorageBackend, faults: Sequence[Fault], rank: int = 0) -> None:
        super().__init__(inner)
        self.n_injected = 0
        self._rank = rank
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._lost_folders: set[str] = set()
        self._due: list[tuple[float, int, _Held]] = []
        self._hung: list[_Held] = []
        self._order = itertools.count()
        self._closing = False
        self.inject(faults)
        self._thread = threading.Thread(target=self._run, name="tencache-faults", daemon=True)
        start_threads([self._thread], "thread that injects faults")
        self._at_exit = stop_at_exit(self.abandon)

    def inject(self, faults: Sequence[Fault]) -> None:
        """Replaces the rules from now on, with counts at zero and lost folders restored. Any thread."""
        with self._changed:
            self._faults = [fault for fault in faults if fault.rank in (None, self._rank)]
            self._n_matched = [0] * len(self._faults)
            self._n_fired = [0] * len(self._faults)
            self._lost_folders.clear()

    def close(self) -> None:
        """Ends delays, gives up hung requests, then closes the wrapped backend. Idempotent; no-op in a forked child.

        Raises:
            RuntimeError: called from a callback of one of its requests.
            StorageTimeoutError: a request hung, by injection or in the wrapped backend.
        """
        if os.getpid() != self._pid:
            return
        if threading.current_thread() is self._thread:
            raise RuntimeError("a storage backend cannot be closed from a callback of one of its requests")
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            hung, self._hung = self._hung, []
        for held in hung:
            held.ticket.complete(_given_up(held.ticket))
        atexit.unregister(self._at_exit)
        super().close()
        if hung:
            raise _given_up(hung[0].ticket)

    def abandon(self, grace_s: float) -> None:
        """At interpreter exit: fails the requests that the wrapper holds. The wrapped backend shuts down itself."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closing = True
            dropped = [held for _, _, held in self._due] + self._hung
            self._due, self._hung = [], []
            self._changed.notify_all()
        for held in dropped:
            held.ticket.complete(refusal(held.ticket, "dropped, the interpreter exits"))
        self._thread.join(grace_s)

    # Choosing

    def submit(self, request: Submission) -> Ticket:
        """See :meth:`tencache_ds.io.StorageBackend.submit`."""
        check_request(request.offset, request.buffer, self.alignment_nbytes, device_type=None)
        if os.getpid() != self._pid:  # a forked child: the inner backend refuses, before any lock
            return super().submit(request)
        chosen = self._choose(request.operation, request.path, request.tag)
        if chosen is None:
            return super().submit(request)
        fault, n_fired = chosen
        if fault.kind is Kind.bitflip:
            flip = _Flip(request.buffer, fault.seed, self._rank, n_fired)
            if request.operation is Operation.READ:
                return super().submit(replace(request, finish=flip.then(request.finish)))
            return super().submit(replace(request, buffer=flip.changed_copy()))
        ticket = Ticket(request.operation, request.path, request.offset, request.buffer.numel(), request.tag)
        self._answer(_Held(fault, ticket, request))
        return ticket

    def _choose(self, operation: Operation, path: str, tag: str) -> tuple[Fault, int] | None:
        """The rule that takes this request, and how often it has fired with this one."""
        with self._changed:
            if os.path.dirname(path) in self._lost_folders:
                self.n_injected += 1
                return Fault(Kind.lost), 1
            for index, fault in enumerate(self._faults):
                if fault.operation not in (None, operation) or (fault.match not in tag and fault.match not in path):
                    continue
                n_before = self._n_matched[index]
                self._n_matched[index] += 1
                if n_before < fault.after or (n_before - fault.after) % fault.every:
                    continue
                if fault.times is not None and self._n_fired[index] >= fault.times:
                    continue
                if fault.kind is Kind.torn and operation is not Operation.WRITE:
                    continue
                self._n_fired[index] += 1
                self.n_injected += 1
                if fault.kind is Kind.lost:
                    self._lost_folders.add(os.path.dirname(path))
                return fault, self._n_fired[index]
        return None

    # Answering

    def _answer(self, held: _Held) -> None:
        kind, ticket = held.fault.kind, held.ticket
        held.starts_later = kind is Kind.delay
        ticket.bind(promote=lambda: self._promote(held), cancel=lambda: self._cancel(held))
        if kind in (Kind.short, Kind.torn) and _half_nbytes(ticket):
            self._pass_on(held, _half_nbytes(ticket))
            return
        with self._changed:
            if self._closing:
                raise refusal(ticket, "the backend is closed")
            if kind is Kind.hang:
                self._hung.append(held)
                if held.fault.seconds:
                    late = threading.Timer(held.fault.seconds, self._answer_late, (held,))
                    late.daemon = True
                    late.start()
            else:
                heapq.heappush(self._due, (time.monotonic() + held.fault.seconds, next(self._order), held))
                self._changed.notify_all()

    def _answer_late(self, held: _Held) -> None:
        """The device completes the hung request; its buffer must not have been freed meanwhile."""
        with self._changed:
            waited_for = held in self._hung
            if waited_for:
                self._hung.remove(held)
        if waited_for:
            self._pass_on_or_fail(held)
        elif held.ticket.operation is Operation.READ:
            held.request.buffer.fill_(LATE_BYTE)
        else:
            held.request.buffer.sum()

    def _pass_on(self, held: _Held, nbytes: int) -> None:
        """Hands the first ``nbytes`` to the wrapped backend; the ticket ends when they have moved."""
        ticket, request = held.ticket, held.request
        finish = request.finish if held.fault.kind is not Kind.short else None
        held.inner = super().submit(replace(request, buffer=request.buffer[:nbytes], finish=finish))
        held.inner.add_done_callback(lambda inner: ticket.complete(self._outcome(held, inner.error)))

    def _outcome(self, held: _Held, error: BaseException | None) -> BaseException | None:
        if isinstance(error, StorageCancelledError):
            return cancelled(held.ticket)
        return _short(held.ticket) if error is None and held.fault.kind is Kind.short else error

    def _promote(self, held: _Held) -> None:
        with self._changed:
            held.request = replace(held.request, priority=Priority.URGENT)
            inner = held.inner
        if inner is not None:
            inner.promote()

    def _cancel(self, held: _Held) -> bool:
        with self._changed:
            dropped, inner = held.begin(), held.inner
            if dropped:
                self._due = [entry for entry in self._due if entry[2] is not held]
                heapq.heapify(self._due)
        if dropped:
            held.ticket.complete(cancelled(held.ticket))
            return True
        return inner is not None and inner.cancel()

    # The thread that ends requests that the wrapped backend does not

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due and not self._closing:
                    self._changed.wait()
                if not self._due:
                    return
                t_due, _, held = self._due[0]
                if not self._closing and t_due > time.monotonic():
                    self._changed.wait(t_due - time.monotonic())
                    continue
                heapq.heappop(self._due)
                held.begin()
            self._end(held)
            del held  # an idle thread must not keep a buffer alive

    def _pass_on_or_fail(self, held: _Held) -> None:
        try:
            self._pass_on(held, held.ticket.nbytes)
        except BaseException as raised:  # refused by the wrapped backend: the waiter raises it
            held.ticket.complete(raised)

    def _end(self, held: _Held) -> None:
        kind, ticket = held.fault.kind, held.ticket
        if kind is Kind.delay:
            self._pass_on_or_fail(held)
            return
        error: BaseException | None = None
        try:
            if kind is Kind.short:
                error = _short(ticket, n_moved=0)
            elif kind is not Kind.torn:
                number = _ERRNO[kind]
                cause = OSError(number, f"{os.strerror(number)}, {_NOTE}")
                error = storage_error(ticket.operation, ticket.path, ticket.offset, ticket.nbytes, cause, ticket.tag)
            elif held.request.finish is not None:
                held.request.finish()
        except BaseException as raised:  # of finish(): the waiter raises it
            error = raised
        ticket.complete(error)


class _Flip:
    """One bit of a buffer, chosen by a seed."""

    def __init__(self, buffer: torch.Tensor, seed: int, rank: int, n_fired: int) -> None:
        self._buffer = buffer
        self._bit = random.Random(f"{seed}/{rank}/{n_fired}").randrange(8 * buffer.numel())

    def _apply(self, buffer: torch.Tensor) -> None:
        buffer[self._bit // 8].bitwise_xor_(1 << self._bit % 8)
        wait_for_device(buffer)

    def then(self, finish: Callable[[], None] | None) -> Callable[[], None]:
        """Flips a bit of the data read, before it is used."""

        def flip_and_finish() -> None:
            self._apply(self._buffer)
            if finish is not None:
                finish()

        return flip_and_finish

    def changed_copy(self) -> torch.Tensor:
        """The buffer with the bit flipped; the caller's own stays as it is."""
        memory = empty(self._buffer.numel() + PAGE_NBYTES, torch.uint8, self._buffer.device)
        start = -memory.data_ptr() % PAGE_NBYTES
        copy = memory[start : start + self._buffer.numel()].copy_(self._buffer)
        self._apply(copy)
        return copy


def _half_nbytes(ticket: Ticket) -> int:
    return ticket.nbytes // (2 * PAGE_NBYTES) * PAGE_NBYTES


def _short(ticket: Ticket, n_moved: int | None = None) -> StorageError:
    """The error of a transfer that stopped half-way."""
    n_moved = _half_nbytes(ticket) if n_moved is None else n_moved
    operation, path, offset, nbytes = ticket.operation, ticket.path, ticket.offset, ticket.nbytes
    if operation is Operation.WRITE:
        refusal = OSError(errno.EIO, f"the device accepted {n_moved} of {nbytes} bytes, {_NOTE}")
        return storage_error(operation, path, offset, nbytes, refusal, ticket.tag)
    cause = f"file ends after {offset + n_moved} bytes, {n_moved} of {nbytes} bytes were read, {_NOTE}"
    return ticket.failure(cause, StorageError)


def _given_up(ticket: Ticket) -> StorageGivenUpError:
    cause = f"given up: the device had not finished it when the backend was closed, {_NOTE}"
    return ticket.failure(cause, StorageGivenUpError, errno.ETIMEDOUT)
