# SPDX-License-Identifier: Apache-2.0
"""Samples cumulative counts during training, for plots over time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..record import Sample
from .instruments import rss_nbytes
from .storage_meter import StorageMeter

_NOTHING = Sample(t_s=0.0, nvme_read_nbytes=0, nvme_write_nbytes=0, rss_nbytes=0)


class Timeline:
    """A thread that reads the storage meter and the resident memory at a fixed rate, between :meth:`start` and
    :meth:`stop`.

    A sample takes some ten microseconds. Bytes count from the start. Restarted, it continues where it stopped: the time
    between, and the bytes moved in it, are left out.

    Args:
        meter: the process's storage meter.
        hz: samples per second; 0 takes none.
        further_rss_nbytes: memory of other processes to add to each sample, as last measured.
    """

    def __init__(self, meter: StorageMeter, hz: float, further_rss_nbytes: Callable[[], int] = lambda: 0) -> None:
        self._meter = meter
        self._period_s = 1 / hz if hz > 0 else 0.0
        self._further_rss_nbytes = further_rss_nbytes
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.samples: list[Sample] = []

    def start(self) -> None:
        """Takes the first sample, and more until :meth:`stop`."""
        if not self._period_s:
            return
        # Origins such that the first sample repeats the last one of the span before.
        last, counts = self.samples[-1] if self.samples else _NOTHING, self._meter.counts()
        self._t_origin = time.perf_counter() - last.t_s
        self._read_origin = counts.read_nbytes - last.nvme_read_nbytes
        self._write_origin = counts.write_nbytes - last.nvme_write_nbytes
        self._stopping.clear()
        self._sample()
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)
        self._thread.start()

    def stop(self) -> list[Sample]:
        """Takes the last sample and returns them all. Idempotent."""
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None
            self._sample()
        return self.samples

    def _run(self) -> None:
        while not self._stopping.wait(self._period_s):
            self._sample()

    def _sample(self) -> None:
        counts = self._meter.counts()
        self.samples.append(
            Sample(
                t_s=time.perf_counter() - self._t_origin,
                nvme_read_nbytes=counts.read_nbytes - self._read_origin,
                nvme_write_nbytes=counts.write_nbytes - self._write_origin,
                rss_nbytes=rss_nbytes() + self._further_rss_nbytes(),
            )
        )
