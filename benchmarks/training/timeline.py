# SPDX-License-Identifier: Apache-2.0
"""Samples cumulative counts during training, for plots over time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..record import Sample
from .instruments import rss_nbytes
from .storage_meter import StorageMeter

_NOTHING = Sample(t_s=0.0, nvme_read_nbytes=0, nvme_write_nbytes=0, rss_nbytes=0)


class Timeline:
    """A thread that reads the storage meter and the resident memory at a fixed rate, within spans.

    A sample takes some ten microseconds. Bytes count from the start. The time between spans, and the bytes moved in it,
    are left out.

    Args:
        meter: the process's storage meter.
        hz: samples per second; 0 takes none.
        further_rss_nbytes: memory of other processes to add to each sample, as last measured.
    """

    def __init__(self, meter: StorageMeter, hz: float, further_rss_nbytes: Callable[[], int] = lambda: 0) -> None:
        self._meter = meter
        self._hz = hz
        self._further_rss_nbytes = further_rss_nbytes
        self.samples: list[Sample] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        """Takes a sample at its start and at its end, and more between them."""
        if not self._hz:
            yield
            return
        # Origins such that the first sample repeats the last one of the span before.
        t_s, read_nbytes, write_nbytes = self._now()
        last = (
            self.samples[-1] if self.samples else Sample(t_s=0, nvme_read_nbytes=0, nvme_write_nbytes=0, rss_nbytes=0)
        )
        self._origin = t_s - last.t_s, read_nbytes - last.nvme_read_nbytes, write_nbytes - last.nvme_write_nbytes
        self._sample()
        stopping = threading.Event()
        thread = threading.Thread(target=self._run, args=(stopping,), name="timeline", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()
            self._sample()

    def _run(self, stopping: threading.Event) -> None:
        while not stopping.wait(1 / self._hz):
            self._sample()

    def _now(self) -> tuple[float, int, int]:
        counts = self._meter.counts()
        return time.perf_counter(), counts.read_nbytes, counts.write_nbytes

    def _sample(self) -> None:
        t_s, read_nbytes, write_nbytes = (now - origin for now, origin in zip(self._now(), self._origin, strict=True))
        rss = rss_nbytes() + self._further_rss_nbytes()
        self.samples.append(
            Sample(t_s=t_s, nvme_read_nbytes=read_nbytes, nvme_write_nbytes=write_nbytes, rss_nbytes=rss)
        )
