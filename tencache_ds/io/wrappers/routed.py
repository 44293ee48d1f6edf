# SPDX-License-Identifier: Apache-2.0
"""One NVMe path with several backends, one for host memory and one per reader for GPU memory; and its bandwidth, from
the training traffic itself: bytes over the time in which it was busy. Both directions count together, because an update
reads and writes each extent about once, at the same time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import torch

from tencache_ds.io.backends.protocol import (
    IoCounters,
    IoTotals,
    PassThroughBackend,
    StorageBackend,
    Submission,
    Ticket,
)


class RoutedBackend(PassThroughBackend):
    """Passes each request to the backend for the memory that its buffer is in. The extent store decides which requests
    of an extent may run concurrently, regardless of their backends.

    Args:
        host: for host memory; owned, closed by :meth:`close`.
    """

    def __init__(self, host: StorageBackend) -> None:
        super().__init__(host)
        self.counters = self._totals = _Sum(host.counters)
        self._files: dict[str, int] = {}  # for a device that comes later
        self._devices: tuple[tuple[StorageBackend, Callable[[torch.Tensor], bool]], ...] = ()

    def add_device(self, device: StorageBackend, owns: Callable[[torch.Tensor], bool]) -> None:
        """From now on ``device`` moves what ``owns(buffer)`` accepts; owned too. Before the first such request."""
        self._totals.parts.append(device.counters)
        for path, fd in self._files.items():
            device.add(path, fd)
        self._devices = (*self._devices, (device, owns))

    def remove_device(self, owns: Callable[[torch.Tensor], bool]) -> None:
        """Closes what :meth:`add_device` was given with ``owns``, after the last request for that memory; nothing
        happens when it is not there (any more).
        """
        for device, its in self._devices:
            if its == owns:
                self._devices = tuple(pair for pair in self._devices if pair[0] is not device)
                device.close()

    def add(self, path: str, fd: int) -> None:
        """See :meth:`tencache_ds.io.StorageBackend.add`."""
        self._files[path] = fd
        super().add(path, fd)
        for device, _ in self._devices:
            device.add(path, fd)

    def forget(self, path: str) -> None:
        """See :meth:`tencache_ds.io.StorageBackend.forget`."""
        self._files.pop(path, None)
        super().forget(path)
        for device, _ in self._devices:
            device.forget(path)

    def close(self) -> None:
        """Closes all, even if one raises; see :meth:`tencache_ds.io.StorageBackend.close`."""
        with contextlib.ExitStack() as stack:
            stack.callback(super().close)
            for device, _ in self._devices:
                stack.callback(device.close)

    def submit(self, request: Submission) -> Ticket:
        """See :meth:`tencache_ds.io.StorageBackend.submit`."""
        return next((device for device, owns in self._devices if owns(request.buffer)), self._inner).submit(request)


class _Sum(IoCounters):
    """Totals of several backends. Times add up: while two are busy, a second counts twice."""

    def __init__(self, first: IoCounters) -> None:
        super().__init__()
        self.parts = [first]

    def snapshot(self) -> IoTotals:
        """All totals, of each part at one moment."""
        totals = [part.snapshot() for part in self.parts]
        return IoTotals(**{name: sum(getattr(part, name) for part in totals) for name in IoTotals.__dataclass_fields__})


# Bandwidth


_MEMORY = 0.5
"""Weight of everything before the interval that has just ended. A change shows at once, an odd interval is forgotten
after a few."""


class BandwidthMeter:
    """Bytes per second of one path. Any thread may call every method.

    Args:
        clock_ns: a monotonic clock in nanoseconds.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._n_running = 0
        self._t_busy_since_ns = 0
        self._nbytes = 0  # of this interval
        self._busy_ns = 0
        self._known_nbytes = 0.0  # of all intervals, the older the less
        self._known_ns = 0.0

    def started(self) -> None:
        """Notes that the path was given a request."""
        with self._lock:
            if self._n_running == 0:
                self._t_busy_since_ns = self._clock_ns()
            self._n_running += 1

    def ended(self, nbytes: int) -> None:
        """Notes that a request has ended and has moved ``nbytes`` (0 if it failed)."""
        with self._lock:
            self._n_running -= 1
            self._nbytes += nbytes
            if self._n_running == 0:
                self._busy_ns += self._clock_ns() - self._t_busy_since_ns

    def end_interval(self) -> None:
        """Accounts for the traffic since the last call. Without any traffic the old figure stays."""
        with self._lock:
            if self._n_running:
                now_ns = self._clock_ns()
                self._busy_ns += now_ns - self._t_busy_since_ns
                self._t_busy_since_ns = now_ns
            if self._nbytes == 0:
                return  # nothing has come back: a long request may be under way, and its time still counts
            self._known_nbytes = _MEMORY * self._known_nbytes + self._nbytes
            self._known_ns = _MEMORY * self._known_ns + self._busy_ns
            self._nbytes = self._busy_ns = 0

    @property
    def bytes_per_s(self) -> float | None:
        """As known at the end of the last interval; None before there was any traffic."""
        with self._lock:
            return self._known_nbytes / self._known_ns * 1e9 if self._known_nbytes and self._known_ns else None


class MeteredBackend(PassThroughBackend):
    """Tells ``meter`` about every request. Owns nothing: the wrapped backend is closed by its opener."""

    def __init__(self, inner: StorageBackend, meter: BandwidthMeter) -> None:
        super().__init__(inner)
        self._meter = meter

    def close(self) -> None:
        """Does nothing."""

    def submit(self, request: Submission) -> Ticket:
        """See :meth:`tencache_ds.io.StorageBackend.submit`."""
        self._meter.started()
        try:
            ticket = super().submit(request)
        except BaseException:
            self._meter.ended(0)
            raise
        ticket.add_done_callback(self._on_done)
        return ticket

    def _on_done(self, ticket: Ticket) -> None:
        self._meter.ended(ticket.nbytes if ticket.error is None else 0)
