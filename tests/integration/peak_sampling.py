# SPDX-License-Identifier: Apache-2.0
"""The most memory that a part of a program takes, without that which stands in for a device's."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

M_MMAP_THRESHOLD, THRESHOLD_NBYTES = -3, 2**18
PAUSE_S = 0.001


class HostPeak:
    """Samples the resident memory between ``with`` and its end, beyond what the process had before.

    On the CPU accelerator gathered weights and gradients come from the C library's heap, which keeps what was freed
    for later, several times as much as is in use; on a GPU they are not in host memory at all. So from then on the
    heap hands out larger pieces as pages of their own, which go back at once.

    Args:
        device_nbytes: memory in this process that stands in for a device's.

    Attributes:
        nbytes: the most.
        device_peak_nbytes: of what stands in for a device's.
    """

    def __init__(self, device_nbytes: Callable[[], int]) -> None:
        self._device_nbytes = device_nbytes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak", daemon=True)
        self._base_nbytes = self._device_base_nbytes = 0
        self.nbytes = self.device_peak_nbytes = 0

    def __enter__(self) -> HostPeak:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, THRESHOLD_NBYTES)
        gc.collect()
        libc.malloc_trim(0)
        self._base_nbytes, self._device_base_nbytes = _resident_nbytes(), self._device_nbytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.is_set():
            # The device's first: what it gets meanwhile counts as the host's, never the other way round.
            device = self._device_nbytes() - self._device_base_nbytes
            self.nbytes = max(self.nbytes, _resident_nbytes() - self._base_nbytes - device)
            self.device_peak_nbytes = max(self.device_peak_nbytes, device)
            time.sleep(PAUSE_S)


def _resident_nbytes() -> int:
    """Without pages of files: code that is loaded meanwhile."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
