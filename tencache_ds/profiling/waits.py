# SPDX-License-Identifier: Apache-2.0
"""What the compute device waits for in a step, and how long: fetches of weights, and copies of saved tensors. Waits for
the update that goes on behind the forward pass are left out: they are no reason to move anything.
"""

from __future__ import annotations

import ctypes
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tencache_ds.placement.places import Place

# Idle time of the device


logger = logging.getLogger("DeepSpeed.tencache")

_PERIOD_NS = 500_000
"""Between two samples: some 400 in the passes of a short step, so that the share of a quarter of them is known to a few
per cent. A thread that launches work meanwhile may have to wait for the driver."""

_CAPACITY = 2**16
"""33 seconds at this period. In a longer step it doubles."""

_LEAST_SAMPLES = 8
"""With fewer in an interval, those of all the time stand for it."""

_RELAXED_CAPTURE = 2
"""``CU_STREAM_CAPTURE_MODE_RELAXED``: a query is no mistake while another thread captures a CUDA graph."""


class SynchronousIdle:
    """For a device that works only while it is called: whatever else the host does, it waits for it."""

    def seconds(self, start_s: float, end_s: float) -> float:
        """Between two times of ``time.perf_counter()``. Ends the observation."""
        return end_s - start_s

    def close(self) -> None:
        """Ends the observation. Idempotent."""


class CudaIdle:
    """Idle time of the current CUDA stream. A thread outside Python asks the driver at even intervals whether its work
    is done: one that needed the interpreter would ask when the training thread has just launched something.

    It stops with this object, and before the interpreter exits: a script may end in a step that is observed, and the
    driver must not be asked while it is unloaded. And after a time: where a step fails and its engine is dropped, hooks
    of the model still refer to all of this.

    Args:
        lifetime_s: after so many seconds nothing more is observed.
    """

    def __init__(self, lifetime_s: float) -> None:
        self._samples: IdleSamples | None = None
        self._sampler: Any = None
        try:
            self._sampler = self._begin(lifetime_s)
        except (OSError, RuntimeError) as error:  # no driver of this name, or no thread
            logger.debug("it is not observed how long the device is idle: %s", error)

    def _begin(self, lifetime_s: float) -> Any:
        from tencache_ds.ops.tencache_update import load_tencache_update  # which imports DeepSpeed

        driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        driver.cuCtxGetCurrent(ctypes.byref(context))
        mode = ctypes.c_int(_RELAXED_CAPTURE)  # which the thread's first calls replace by the one before
        sampler = load_tencache_update().Sampler(
            preparations=[
                (_address(driver.cuCtxSetCurrent), context.value or 0),
                (_address(driver.cuThreadExchangeStreamCaptureMode), ctypes.addressof(mode)),
            ],
            call=(_address(driver.cuStreamQuery), torch.cuda.current_stream().cuda_stream),
            period_ns=_PERIOD_NS,
            lifetime_ns=int(lifetime_s * 1e9),
            capacity=_CAPACITY,
        )
        weakref.finalize(self, _end, sampler, mode)
        return sampler

    def seconds(self, start_s: float, end_s: float) -> float:
        """Between two times of ``time.perf_counter()``. Ends the observation."""
        if self._samples is None:
            self._samples = self._read()
        return self._samples.seconds(start_s, end_s)

    def _read(self) -> IdleSamples:
        if self._sampler is None:
            return IdleSamples([], [])
        if error := self._sampler.error:
            logger.debug("the CUDA driver does not tell whether the device is idle: error %d", error)
        return IdleSamples(self._sampler.times_ns, self._sampler.results)

    def close(self) -> None:
        """Ends the observation. Idempotent."""
        if self._sampler is not None:
            self._sampler.close()


class IdleSamples:
    """Results of queries, evenly spaced.

    Args:
        times_ns: of ``time.perf_counter_ns()``, ascending.
        results: 0 where all work was done, as ``cuStreamQuery`` returns it.
    """

    def __init__(self, times_ns: list[int], results: list[int]) -> None:
        self._times_s = np.asarray(times_ns, np.float64) / 1e9
        self._n_idle = np.concatenate([[0], np.cumsum(np.asarray(results, np.int64) == 0)])

    def seconds(self, start_s: float, end_s: float) -> float:
        """Idle between two times; 0 where nothing is known."""
        first, last = np.searchsorted(self._times_s, [start_s, end_s])
        if last - first < _LEAST_SAMPLES:
            first, last = 0, len(self._times_s)
        if first == last:
            return 0.0
        return float((self._n_idle[last] - self._n_idle[first]) / (last - first)) * (end_s - start_s)


def _end(sampler: Any, mode: ctypes.c_int) -> None:
    """Ends the thread, which until then may write to ``mode``."""
    sampler.close()


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


# Waits


class CudaStreamClock:
    """Tells when the current CUDA stream gets to a place in it, by events. On virtual machines one takes up to 30
    microseconds."""

    def mark(self) -> torch.cuda.Event:
        """A place: behind everything issued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """From one place to a later one. Only after the device was waited for."""
        return first.elapsed_time(second) / 1e3


class HostClock:
    """A :class:`CudaStreamClock` for a synchronous device."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds_between(self, first: float, second: float) -> float:
        """From one time to a later one."""
        return second - first


StreamClock = CudaStreamClock | HostClock
"""Tells when the device's stream of arithmetic gets to a place in it."""


_NEIGHBOURS = 64
"""Successive fetches that are judged together: in a step the device may wait for the host at first, and the host for it
later."""


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
    """Fetch of one module's weights. Times are those of the host, in seconds, without waits for an update.

    Attributes:
        t_start: when it began.
        weights: of each of the module's weights, its bytes.
        seconds: all of it.
        update_seconds: what it has waited for an update.
        awaited: of each weight that the device waits for, its bytes.
        before, after: by the device's clock, where it waits.
        gathers: of each gather, its time, and the weights.
        releases: of each that follows until the next fetch, its time, and the module's weights.
    """

    t_start: Any
    weights: Mapping[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    update_seconds: float = 0.0
    awaited: dict[int, int] = field(default_factory=dict)
    before: Any = None
    after: Any = None
    gathers: list[tuple[float, Mapping[int, int]]] = field(default_factory=list)
    releases: list[tuple[float, Mapping[int, int]]] = field(default_factory=list)

    @property
    def gather_seconds(self) -> float:
        """Seconds of all gathers."""
        return sum(seconds for seconds, _ in self.gathers)

    @property
    def release_seconds(self) -> float:
        """Seconds of all releases."""
        return sum(seconds for seconds, _ in self.releases)


class FetchRecorder:
    """Records one step. Called by whichever thread computes, one at a time.

    Weights are gathered in buckets, ahead of their modules. The first module that needs one of a bucket waits for all
    of them: there the device's clock tells how long. The host's time for all other fetches and for releases lengthens
    the passes as far as the device has nothing to do: with less work for the host they end earlier until the device
    is never idle. So it is the device's idle time that says what hooks cost, and not only that within them: where a
    kernel still runs when a hook begins, the device may be idle behind it.

    Args:
        clock: of the device.
        idle: of the device, from now on.
        host: the host's clock.
        update_waits: seconds that this process has waited for updates so far.
    """

    def __init__(
        self,
        clock: StreamClock,
        idle: CudaIdle | SynchronousIdle,
        host: StreamClock | None = None,
        *,
        update_waits: Callable[[], float] = float,
    ) -> None:
        self._clock = clock
        self._idle = idle
        self._host: StreamClock = HostClock() if host is None else host
        self._fetches: list[_Fetch] = []
        self._fetch: _Fetch | None = None  # under way
        self._update_waits = update_waits
        self._t_hook: Any = None  # start of the hook under way, by the host's clock
        self._t_gather: Any = None  # of the gather, the same
        self._waited_fetch_s = self._waited_gather_s = 0.0  # for updates, before the fetch and the gather under way
        self._t_end: Any = None  # of the last fetch or release
        self._bucket_of: dict[int, Mapping[int, int]] = {}  # gathered, not waited for

    def begin_hook(self) -> None:
        """A hook on a module begins, which fetches or releases its weights."""
        self._t_hook = self._host.mark()

    def before_fetch(self, *, waits: bool) -> None:
        """A module's weights are fetched next.

        Args:
            waits: whether some of them are not there.
        """
        start, self._t_hook = self._t_hook, None
        if start is None:
            start = self._host.mark()
        self._waited_fetch_s = self._update_waits()
        self._fetch = _Fetch(start, before=self._clock.mark() if waits else None)

    def before_gather(self) -> None:
        """Within a fetch, weights are gathered next: the module's own or later ones."""
        self._t_gather, self._waited_gather_s = self._host.mark(), self._update_waits()

    def after_gather(self, weights: Mapping[int, int]) -> None:
        """That was issued.

        Args:
            weights: of each that was gathered, its bytes.
        """
        if self._fetch is not None and weights:
            bucket = dict(weights)
            seconds = self._seconds_since(self._t_gather) - (self._update_waits() - self._waited_gather_s)
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
        fetch.update_seconds = self._update_waits() - self._waited_fetch_s
        fetch.seconds = self._seconds_since(fetch.t_start) - fetch.update_seconds
        self._fetches.append(fetch)

    def after_release(self, weights: Mapping[int, int]) -> None:
        """The weights of the hook's module are released.

        Args:
            weights: of each of them, its bytes.
        """
        start, self._t_hook = self._t_hook, None
        if self._fetches and start is not None:
            self._fetches[-1].releases.append((self._seconds_since(start), dict(weights)))

    def _seconds_since(self, start: Any) -> float:
        self._t_end = self._host.mark()
        return self._host.seconds_between(start, self._t_end)

    def waits(self) -> dict[int, FetchWait]:
        """Wait for each weight. After the device was waited for; ends the recording. What belongs to several is divided
        by their bytes, but the host's time for a gather equally."""
        self.close()
        waits: dict[int, FetchWait] = {}
        for start in range(0, len(self._fetches), _NEIGHBOURS):
            fetches = self._fetches[start : start + _NEIGHBOURS]
            following = self._fetches[start + _NEIGHBOURS : start + _NEIGHBOURS + 1]
            exposed = self._exposed_share(fetches, following[0].t_start if following else self._t_end)
            for fetch in fetches:
                self._add_fetch(waits, fetch, exposed)
        return waits

    def close(self) -> None:
        """Nothing is recorded any more. Idempotent."""
        self._idle.close()

    def _add_fetch(self, waits: dict[int, FetchWait], fetch: _Fetch, exposed: float) -> None:
        """Adds one with its releases.

        Args:
            waits: to which.
            fetch: which one.
            exposed: of the host's time for hooks that wait for nothing, the part that lengthens the passes.
        """
        own_seconds = max(fetch.seconds - fetch.gather_seconds, 0.0)
        modules = list(fetch.releases)
        exposed_here = exposed
        if fetch.awaited:
            waited = self._waited_seconds(fetch)
            exposed_here = min(waited / max(fetch.seconds, 1e-9), 1.0)
            waited = max(waited - exposed_here * fetch.gather_seconds, 0.0)
            for key, share in _shares(fetch.awaited):
                _add(waits, key, FetchWait(seconds=waited * share, host_seconds=own_seconds * share))
        else:
            modules.append((own_seconds, fetch.weights))
        for seconds, weights in fetch.gathers:
            each = FetchWait(1, overhead_seconds=exposed_here * seconds / len(weights))
            for key in weights:
                _add(waits, key, each)
        for seconds, weights in modules:
            for key, share in _shares(weights):
                _add(waits, key, FetchWait(overhead_seconds=exposed * seconds * share))

    def _exposed_share(self, fetches: Sequence[_Fetch], end: Any) -> float:
        """Share of the host's time for hooks that wait for nothing by which the passes get longer.

        Args:
            fetches: successive ones.
            end: of what follows the last of them, by the host's clock.
        """
        seconds = sum(fetch.release_seconds for fetch in fetches)
        seconds += sum(fetch.seconds for fetch in fetches if not fetch.awaited)
        idle_seconds = self._idle.seconds(fetches[0].t_start, end)
        # In those that wait, the device is idle while the host prepares what it waits for.
        idle_seconds -= sum(min(self._waited_seconds(fetch), fetch.seconds) for fetch in fetches if fetch.awaited)
        idle_seconds -= sum(fetch.update_seconds for fetch in fetches)
        return min(max(idle_seconds, 0.0) / max(seconds, 1e-9), 1.0)

    def _waited_seconds(self, fetch: _Fetch) -> float:
        """Seconds that the device waits for a fetch that makes it wait; at least, where that waits for an update with
        work left on the device."""
        return max(self._clock.seconds_between(fetch.before, fetch.after) - fetch.update_seconds, 0.0)


def _shares(weights: Mapping[int, int]) -> list[tuple[int, float]]:
    """Share of each weight in their bytes."""
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


@dataclass(frozen=True, slots=True)
class MoveCost:
    """One block in a step.

    Attributes:
        nbytes: of the block.
        moved_nbytes: by all micro-steps together, in each direction.
        seconds: upper bound of the device's idle time for it.
        in_host: whether it was in host memory between its uses; else on NVMe.
    """

    nbytes: int
    moved_nbytes: int
    seconds: float
    in_host: bool


class MoveWaits:
    """Records one step, of all its micro-steps together. Used by one thread at a time."""

    def __init__(self, clock: StreamClock) -> None:
        self._clock = clock
        self._waits: list[tuple[int, Any, Any]] = []
        self._nbytes: dict[int, int] = {}  # of the block at a position
        self._moved_nbytes: dict[int, int] = {}  # by all passes together
        self._in_host: dict[int, bool] = {}

    def mark(self) -> Any:
        """The device may have to wait from here on, for :meth:`waited`."""
        return self._clock.mark()

    def waited(self, position: int, before: Any) -> None:
        """What follows needs a block, or its memory."""
        self._waits.append((position, before, self._clock.mark()))

    def moved(self, position: int, nbytes: int, place: Place) -> None:
        """A block is copied to host memory, from where it may go on to NVMe."""
        self._nbytes[position] = nbytes
        self._moved_nbytes[position] = self._moved_nbytes.get(position, 0) + nbytes
        self._in_host[position] = place is Place.HOST

    def costs(self) -> dict[int, MoveCost]:
        """Cost of each block that was moved, by its position. After the device was waited for."""
        waits: dict[int, float] = {}
        for position, before, after in self._waits:
            seconds = max(self._clock.seconds_between(before, after), 0.0)
            waits[position] = waits.get(position, 0.0) + seconds
        return {
            position: MoveCost(nbytes, self._moved_nbytes[position], waits.get(position, 0.0), self._in_host[position])
            for position, nbytes in self._nbytes.items()
        }
