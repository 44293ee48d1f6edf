# SPDX-License-Identifier: Apache-2.0
"""The weights for which the compute device waits in a step, and how long."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class StreamClock(Protocol):
    """Tells when the device's stream of arithmetic gets to a place in it."""

    def mark(self) -> Any:
        """A place: behind everything issued so far."""

    def seconds_between(self, first: Any, second: Any) -> float:
        """From one place to a later one. Only after the device was waited for."""


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


class HostClock:
    """For a synchronous device."""

    def mark(self) -> float:
        """See :meth:`StreamClock.mark`."""
        return time.perf_counter()

    def seconds_between(self, first: float, second: float) -> float:
        """See :meth:`StreamClock.seconds_between`."""
        return second - first


_SAMPLED_EVERY = 7
"""Of so many successive fetches one is timed by the device's clock, with the releases that follow it. No divisor of the
number of modules in usual layers, so that the samples come from all of them."""

_NEIGHBOURS = 9 * _SAMPLED_EVERY
"""Successive fetches that are judged by the same samples: in a step the device may wait for the host at first, and the
host for it later."""


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
class _Hook:
    """Work of the host between two pieces of the device's work.

    Attributes:
        weights: of each of the module's weights, its bytes.
        seconds: of the host.
        before, after: by the device's clock; None where it was not asked.
    """

    weights: Mapping[int, int]
    seconds: float
    before: Any = None
    after: Any = None

    def idle_seconds(self, clock: StreamClock) -> float:
        """Of the device, if its clock was asked."""
        return max(clock.seconds_between(self.before, self.after), 0.0)


@dataclass(slots=True)
class _Fetch:
    """Of one module's weights.

    Attributes:
        hook: all of it.
        awaited: of each weight that the device waits for, its bytes.
        gathers: of each gather, the host's time, and the weights.
        releases: those that follow until the next fetch.
    """

    hook: _Hook
    awaited: dict[int, int] = field(default_factory=dict)
    gathers: list[tuple[float, Mapping[int, int]]] = field(default_factory=list)
    releases: list[_Hook] = field(default_factory=list)


class FetchRecorder:
    """Records one step. Called by whichever thread computes, one at a time.

    Weights are gathered in buckets, ahead of their modules. The first module that needs one of a bucket waits for all
    of them: there the device's clock tells how long. A place on it takes the host longer than most other fetches do, so
    of these it times a sample: the host's time for fetches and releases lengthens the passes as far as the device is
    idle meanwhile, and is saved where they end.

    Args:
        clock: of the device.
        host: the host's.
    """

    def __init__(self, clock: StreamClock, host: StreamClock | None = None) -> None:
        self._clock = clock
        self._host: StreamClock = HostClock() if host is None else host
        self._fetches: list[_Fetch] = []
        self._fetch: _Fetch | None = None  # under way
        self._t_fetch: Any = None  # its start, by the host's clock
        self._t_within: Any = None  # of a gather or release, the same
        self._before_release: Any = None  # by the device's clock
        self._bucket_of: dict[int, Mapping[int, int]] = {}  # gathered, not waited for

    def before_fetch(self, *, waits: bool) -> None:
        """A module's weights are fetched next.

        Args:
            waits: whether some of them are not there.
        """
        self._t_fetch = self._host.mark()
        is_sample = len(self._fetches) % _SAMPLED_EVERY == 0
        self._fetch = _Fetch(_Hook({}, 0.0, self._clock.mark() if waits or is_sample else None))

    def before_gather(self) -> None:
        """Within a fetch, weights are gathered next: the module's own or later ones."""
        self._t_within = self._host.mark()

    def after_gather(self, weights: Mapping[int, int]) -> None:
        """That was issued.

        Args:
            weights: of each that was gathered, its bytes.
        """
        if self._fetch is not None and weights:
            bucket = dict(weights)
            self._fetch.gathers.append((self._seconds_since(self._t_within), bucket))
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
        if fetch.hook.before is not None:
            fetch.hook.after = self._clock.mark()
        for key in awaited:
            fetch.awaited |= self._bucket_of.pop(key, {key: weights[key]})
        fetch.hook.weights = dict(weights)
        fetch.hook.seconds = self._seconds_since(self._t_fetch)
        self._fetches.append(fetch)

    def before_release(self) -> None:
        """A module's weights are released next."""
        self._t_within = self._host.mark()
        is_sample = len(self._fetches) % _SAMPLED_EVERY == 1
        self._before_release = self._clock.mark() if is_sample else None

    def after_release(self, weights: Mapping[int, int]) -> None:
        """They are.

        Args:
            weights: of each weight of the module, its bytes.
        """
        before, self._before_release = self._before_release, None
        if self._fetches:
            after = None if before is None else self._clock.mark()
            release = _Hook(dict(weights), self._seconds_since(self._t_within), before, after)
            self._fetches[-1].releases.append(release)

    def _seconds_since(self, start: Any) -> float:
        return self._host.seconds_between(start, self._host.mark())

    def waits(self) -> dict[int, FetchWait]:
        """Of each weight. After the device was waited for. What belongs to several is divided by their bytes, but the
        host's time for a gather equally."""
        waits: dict[int, FetchWait] = {}
        for start in range(0, len(self._fetches), _NEIGHBOURS):
            fetches = self._fetches[start : start + _NEIGHBOURS]
            exposed = self._exposed_share(fetches)
            for fetch in fetches:
                self._add_fetch(waits, fetch, exposed)
        return waits

    def _add_fetch(self, waits: dict[int, FetchWait], fetch: _Fetch, exposed: float) -> None:
        """Adds one with its releases.

        Args:
            waits: to which.
            fetch: which one.
            exposed: of the host's time for hooks that wait for nothing, the part in which the device is idle.
        """
        hook, gathering = fetch.hook, sum(seconds for seconds, _ in fetch.gathers)
        own_seconds = max(hook.seconds - gathering, 0.0)
        modules = [(release.seconds, release.weights) for release in fetch.releases]
        exposed_here = exposed
        if fetch.awaited:
            waited = hook.idle_seconds(self._clock)
            exposed_here = min(waited / max(hook.seconds, 1e-9), 1.0)
            waited = max(waited - exposed_here * gathering, 0.0)
            for key, share in _shares(fetch.awaited):
                _add(waits, key, FetchWait(seconds=waited * share, host_seconds=own_seconds * share))
        else:
            modules.append((own_seconds, hook.weights))
        for seconds, weights in fetch.gathers:
            each = FetchWait(1, overhead_seconds=exposed_here * seconds / len(weights))
            for key in weights:
                _add(waits, key, each)
        for seconds, weights in modules:
            for key, share in _shares(weights):
                _add(waits, key, FetchWait(overhead_seconds=exposed * seconds * share))

    def _exposed_share(self, fetches: Sequence[_Fetch]) -> float:
        """Of the host's time for hooks that wait for nothing, the part in which the device is idle: as in those that
        were timed, or where none was, in those that wait."""
        waiting = [fetch.hook for fetch in fetches if fetch.awaited]
        others = [fetch.hook for fetch in fetches if not fetch.awaited]
        others += [release for fetch in fetches for release in fetch.releases]
        hooks = [hook for hook in others if hook.before is not None] or waiting
        idle_seconds = sum(min(hook.idle_seconds(self._clock), hook.seconds) for hook in hooks)
        return idle_seconds / max(sum(hook.seconds for hook in hooks), 1e-9)


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
