# SPDX-License-Identifier: Apache-2.0
"""The traffic of a backend so far."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from tencache_ds.io.backends.ticket import Operation


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
