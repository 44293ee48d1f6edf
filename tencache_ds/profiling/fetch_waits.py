# SPDX-License-Identifier: Apache-2.0
"""The weights for which the compute device waits in a step, and how long."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class StreamClock(Protocol):
    """Tells when the device's stream of arithmetic gets to a place in it."""

    def mark(self) -> Any:
        """A place: behind everything issued so far."""

    def seconds_between(self, first: Any, second: Any) -> float:
        """From one place to a later one. Only after the device was waited for."""


class CudaStreamClock:
    """Events on the current CUDA stream, some microseconds each."""

    def mark(self) -> torch.cuda.Event:
        """See :meth:`StreamClock.mark`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """See :meth:`StreamClock.seconds_between`."""
        return first.elapsed_time(second) / 1e3


class HostClock:
    """For a synchronous device."""

    def mark(self) -> float:
        """See :meth:`StreamClock.mark`."""
        return time.perf_counter()

    def seconds_between(self, first: float, second: float) -> float:
        """See :meth:`StreamClock.seconds_between`."""
        return second - first


@dataclass(frozen=True, slots=True)
class FetchWait:
    """One weight in a step.

    Attributes:
        fetches: how often it was fetched.
        seconds: upper bound of the device's idle time for it, including the host's time for the fetch.
        host_seconds: the latter.
    """

    fetches: int
    seconds: float
    host_seconds: float = 0.0


class FetchRecorder:
    """Records one step. Called by whichever thread computes, one at a time.

    Args:
        clock: of the device.
        host: the host's.
    """

    def __init__(self, clock: StreamClock, host: StreamClock | None = None) -> None:
        self._clock = clock
        self._host: StreamClock = HostClock() if host is None else host
        self._before: tuple[Any, Any] | None = None
        self._fetches: list[tuple[Any, Any, float, Mapping[int, int]]] = []

    def before_fetch(self) -> None:
        """A module's weights are fetched next."""
        self._before = self._clock.mark(), self._host.mark()

    def after_fetch(self, fetched: Mapping[int, int]) -> None:
        """The following work needs them.

        Args:
            fetched: of each weight that was not there, its bytes.
        """
        if fetched and self._before is not None:
            before, began = self._before
            host_seconds = self._host.seconds_between(began, self._host.mark())
            self._fetches.append((before, self._clock.mark(), host_seconds, dict(fetched)))
        self._before = None

    def waits(self) -> dict[int, FetchWait]:
        """Of each weight. After the device was waited for. A fetch of several is divided by their bytes."""
        waits: dict[int, FetchWait] = {}
        for before, after, host_seconds, fetched in self._fetches:
            waited = max(self._clock.seconds_between(before, after), 0.0)
            nbytes = max(sum(fetched.values()), 1)
            for key, part in fetched.items():
                known, share = waits.get(key, FetchWait(0, 0.0)), part / nbytes
                waits[key] = FetchWait(
                    known.fetches + 1, known.seconds + waited * share, known.host_seconds + host_seconds * share
                )
        return waits
