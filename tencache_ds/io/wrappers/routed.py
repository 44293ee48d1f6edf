# SPDX-License-Identifier: Apache-2.0
"""One NVMe path with several backends: one for host memory, and one per reader for GPU memory."""

from __future__ import annotations

import contextlib
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
