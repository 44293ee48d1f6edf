# SPDX-License-Identifier: Apache-2.0
"""The weights for which the compute device waits in a step, and how long."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class StreamClock(Protocol):
    """Tells when the device's stream of arithmetic gets to a place in it."""

    def mark(self) -> Any:
        """A place: behind everything issued so far."""

    def seconds_between(self, first: Any, second: Any) -> float:
        """From one place to a later one. Only after the device was waited for."""

    def idle(self) -> bool:
        """Whether the device has done everything issued so far."""


class CudaStreamClock:
    """Events on the current CUDA stream. On virtual machines one takes up to 30 microseconds."""

    def mark(self) -> torch.cuda.Event:
        """See :meth:`StreamClock.mark`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """See :meth:`StreamClock.seconds_between`."""
        return first.elapsed_time(second) / 1e3

    def idle(self) -> bool:
        """See :meth:`StreamClock.idle`."""
        return torch.cuda.current_stream().query()


class HostClock:
    """For a synchronous device."""

    def mark(self) -> float:
        """See :meth:`StreamClock.mark`."""
        return time.perf_counter()

    def seconds_between(self, first: float, second: float) -> float:
        """See :meth:`StreamClock.seconds_between`."""
        return second - first

    def idle(self) -> bool:
        """See :meth:`StreamClock.idle`."""
        return True


_NEIGHBOURS = 16
"""Successive fetches, of about two layers, over which it is counted how often the device is idle: in a step it may wait
for the host at first, and the host for it later."""


@dataclass(frozen=True, slots=True)
class FetchWait:
    """One weight in a step.

    Attributes:
        fetches: how often it was gathered.
        seconds: upper bound of the device's idle time for it, including the host's time for the fetches in which it
            was waited for.
        host_seconds: the latter.
        overhead_seconds: of the host's time for gathers and for modules with this weight, what lengthens the passes
            and is not in ``seconds``.
    """

    fetches: int = 0
    seconds: float = 0.0
    host_seconds: float = 0.0
    overhead_seconds: float = 0.0


@dataclass(slots=True)
class _Fetch:
    """Of one module's weights.

    Attributes:
        began: by the host's clock.
        device_was_idle: when it began.
        before, after: by the device's clock, where it waits for weights.
        host_seconds: of all of it.
        weights: of each of the module's weights, its bytes.
        awaited: the same of those that it waits for.
        gathers: of each gather, the host's time, and the weights.
        releases: of those that follow until the next fetch, the same.
    """

    began: Any
    device_was_idle: bool
    before: Any
    after: Any = None
    host_seconds: float = 0.0
    weights: Mapping[int, int] = field(default_factory=dict)
    awaited: dict[int, int] = field(default_factory=dict)
    gathers: list[tuple[float, Mapping[int, int]]] = field(default_factory=list)
    releases: list[tuple[float, Mapping[int, int]]] = field(default_factory=list)


class FetchRecorder:
    """Records one step. Called by whichever thread computes, one at a time.

    Weights are gathered in buckets, ahead of their modules. The first module that needs one of a bucket waits for all
    of them: there the device's clock tells how long. Elsewhere a place on the device's clock would take the host longer
    than what it is to measure.

    The host's time for fetches and releases lengthens the passes as far as the device is idle. How long that is, over
    several fetches, follows from how many of them find it so. Where the device waits for the host, it ends its work
    during most fetches and has some when they begin: all of their time would be saved, and not only that of the fetches
    which found it idle.

    Args:
        clock: of the device.
        host: the host's.
    """

    def __init__(self, clock: StreamClock, host: StreamClock | None = None) -> None:
        self._clock = clock
        self._host: StreamClock = HostClock() if host is None else host
        self._fetches: list[_Fetch] = []
        self._fetch: _Fetch | None = None  # under way
        self._began: Any = None  # gather or release
        self._ended: Any = None  # the last fetch or release
        self._bucket_of: dict[int, Mapping[int, int]] = {}  # gathered, not waited for

    def before_fetch(self, *, waits: bool) -> None:
        """A module's weights are fetched next.

        Args:
            waits: whether some of them are not there.
        """
        began = self._host.mark()
        self._fetch = _Fetch(began, self._clock.idle(), self._clock.mark() if waits else None)

    def before_gather(self) -> None:
        """Within a fetch, weights are gathered next: the module's own or later ones."""
        self._began = self._host.mark()

    def after_gather(self, weights: Mapping[int, int]) -> None:
        """That was issued.

        Args:
            weights: of each that was gathered, its bytes.
        """
        if self._fetch is not None and weights:
            seconds, bucket = self._host.seconds_between(self._began, self._host.mark()), dict(weights)
            self._fetch.gathers.append((seconds, bucket))
            self._bucket_of |= dict.fromkeys(bucket, bucket)

    def after_fetch(self, weights: Mapping[int, int], awaited: Iterable[int]) -> None:
        """The following work needs them.

        Args:
            weights: of each weight of the module, its bytes.
            awaited: those that were not there.
        """
        fetch, self._fetch = self._fetch, None
        if fetch is None:
            return
        if fetch.before is not None:
            fetch.after = self._clock.mark()
            for key in awaited:
                fetch.awaited |= self._bucket_of.pop(key, {key: weights[key]})
        fetch.weights = dict(weights)
        self._ended = self._host.mark()
        fetch.host_seconds = self._host.seconds_between(fetch.began, self._ended)
        self._fetches.append(fetch)

    def before_release(self) -> None:
        """A module's weights are released next."""
        self._began = self._host.mark()

    def after_release(self, weights: Mapping[int, int]) -> None:
        """They are.

        Args:
            weights: of each weight of the module, its bytes.
        """
        if self._fetches:
            self._ended = self._host.mark()
            seconds = self._host.seconds_between(self._began, self._ended)
            self._fetches[-1].releases.append((seconds, dict(weights)))

    def waits(self) -> dict[int, FetchWait]:
        """Of each weight. After the device was waited for. What belongs to several is divided by their bytes, but the
        host's time for a gather equally."""
        waits: dict[int, FetchWait] = {}
        for fetch, exposed in zip(self._fetches, self._exposed_shares(), strict=True):
            gathering = sum(seconds for seconds, _ in fetch.gathers)
            own_seconds = max(fetch.host_seconds - gathering, 0.0)
            exposed_here, modules = exposed, list(fetch.releases)
            if fetch.before is None:
                modules.append((own_seconds, fetch.weights))
            else:
                waited = max(self._clock.seconds_between(fetch.before, fetch.after), exposed * fetch.host_seconds)
                exposed_here = min(waited / max(fetch.host_seconds, 1e-9), 1.0)
                waited = max(waited - exposed_here * gathering, 0.0)
                for key, share in _shares(fetch.awaited):
                    _add(waits, key, FetchWait(seconds=waited * share, host_seconds=own_seconds * share))
            for seconds, weights in fetch.gathers:
                each = FetchWait(1, overhead_seconds=exposed_here * seconds / len(weights))
                for key in weights:
                    _add(waits, key, each)
            for seconds, weights in modules:
                for key, share in _shares(weights):
                    _add(waits, key, FetchWait(overhead_seconds=exposed * seconds * share))
        return waits

    def _exposed_shares(self) -> list[float]:
        """Of each fetch: of the host's time for it and the releases that follow, what lengthens the passes."""
        shares = []
        for start in range(0, len(self._fetches), _NEIGHBOURS):
            fetches = self._fetches[start : start + _NEIGHBOURS]
            following = self._fetches[start + _NEIGHBOURS : start + _NEIGHBOURS + 1]
            ended = following[0].began if following else self._ended
            host_seconds = sum(fetch.host_seconds + sum(seconds for seconds, _ in fetch.releases) for fetch in fetches)
            idle_share = sum(fetch.device_was_idle for fetch in fetches) / len(fetches)
            idle_seconds = idle_share * self._host.seconds_between(fetches[0].began, ended)
            shares += [min(idle_seconds / max(host_seconds, 1e-9), 1.0)] * len(fetches)
        return shares


def _shares(weights: Mapping[int, int]) -> list[tuple[int, float]]:
    """Of each weight its share of their bytes."""
    nbytes = max(sum(weights.values()), 1)
    return [(key, part / nbytes) for key, part in weights.items()]


def _add(waits: dict[int, FetchWait], key: int, more: FetchWait) -> None:
    known = waits.get(key, FetchWait())
    waits[key] = FetchWait(
        known.fetches + more.fetches,
        known.seconds + more.seconds,
        known.host_seconds + more.host_seconds,
        known.overhead_seconds + more.overhead_seconds,
    )
