# SPDX-License-Identifier: Apache-2.0
"""The bandwidth of a path: bytes over the time in which it was busy, from the training traffic itself.

Both directions count together, because an update reads and writes each extent about once, at the same time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tencache_ds.io.backends.protocol import PassThroughBackend, StorageBackend, Submission, Ticket

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
