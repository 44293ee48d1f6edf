# SPDX-License-Identifier: Apache-2.0
"""How long the compute device has nothing to do."""

from __future__ import annotations

import ctypes
import logging
import weakref
from typing import Any

import numpy as np
import torch

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
