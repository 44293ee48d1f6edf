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
        seconds: upper bound of the device's idle time for it, including the Python time of a fetch.
    """

    fetches: int
    seconds: float


class FetchRecorder:
    """Records one step. Called by whichever thread computes, one at a time."""

    def __init__(self, clock: StreamClock) -> None:
        self._clock = clock
        self._before: Any = None
        self._fetches: list[tuple[Any, Any, Mapping[int, int]]] = []

    def before_fetch(self) -> None:
        """A module's weights are fetched next."""
        self._before = self._clock.mark()

    def after_fetch(self, fetched: Mapping[int, int]) -> None:
        """The following work needs them.

        Args:
            fetched: of each weight that was not there, its bytes.
        """
        if fetched and self._before is not None:
            self._fetches.append((self._before, self._clock.mark(), dict(fetched)))
        self._before = None

    def waits(self) -> dict[int, FetchWait]:
        """Of each weight. After the device was waited for. A wait for several is divided by their bytes."""
        fetches: dict[int, int] = {}
        seconds: dict[int, float] = {}
        for before, after, fetched in self._fetches:
            waited = max(self._clock.seconds_between(before, after), 0.0)
            nbytes = sum(fetched.values())
            for key, part in fetched.items():
                fetches[key] = fetches.get(key, 0) + 1
                seconds[key] = seconds.get(key, 0.0) + waited * part / max(nbytes, 1)
        return {key: FetchWait(fetches[key], seconds[key]) for key in fetches}
