# SPDX-License-Identifier: Apache-2.0
"""The thread that makes the same call again and again."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tencache_ds.ops.tencache_update import load_tencache_update

pytestmark = pytest.mark.timeout(60)

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Calls:
    """Keeps functions of Python callable from C: as long as this object lives, which must be longer than a sampler."""

    def __init__(self) -> None:
        self._functions: list[Any] = []
        self.arguments: list[int | None] = []
        self.threads: set[int] = set()

    def add(self, result: Callable[[], int], argument: int = 0) -> tuple[int, int]:
        def call(given: int | None) -> int:
            self.arguments.append(given)
            self.threads.add(threading.get_native_id())
            return result()

        self._functions.append(FUNCTION(call))
        return ctypes.cast(self._functions[-1], ctypes.c_void_p).value or 0, argument


@pytest.fixture
def calls() -> Calls:
    """Outlives the variables of the test, of which one may be a sampler with a running thread."""
    return Calls()


def sampler(
    call: tuple[int, int],
    *preparations: tuple[int, int],
    period_ns: int = 100_000,
    lifetime_ns: int = 10**12,
    capacity: int = 1000,
) -> Any:
    return load_tencache_update().Sampler(
        preparations=list(preparations), call=call, period_ns=period_ns, lifetime_ns=lifetime_ns, capacity=capacity
    )


def test_results_are_kept_with_their_times(calls: Calls):
    values = iter(range(10**6))
    t_start_ns = time.perf_counter_ns()
    sampling = sampler(calls.add(lambda: next(values), 7))
    time.sleep(0.05)
    sampling.close()
    results, times_ns = sampling.results, sampling.times_ns
    assert results == list(range(len(results)))
    assert len(results) > 10
    assert times_ns == sorted(times_ns)
    assert t_start_ns <= times_ns[0] <= times_ns[-1] <= time.perf_counter_ns()
    assert set(calls.arguments) == {7}
    assert threading.get_native_id() not in calls.threads
    assert sampling.error == 0


def test_samples_are_evenly_spaced(calls: Calls):
    sampling = sampler(calls.add(lambda: 0), period_ns=2_000_000)
    time.sleep(0.2)
    times_ns = sampling.times_ns
    assert 20 <= len(times_ns) <= 110, "a hundred, unless the machine is busy"


def test_where_there_are_too_many_the_period_is_doubled(calls: Calls):
    values = iter(range(10**6))
    sampling = sampler(calls.add(lambda: next(values)), period_ns=20_000, capacity=16)
    deadline = time.monotonic() + 30
    while len(calls.arguments) < 60 and time.monotonic() < deadline:
        time.sleep(0.01)
    results = sampling.results
    assert 8 <= len(results) < 16
    assert results[-1] >= 40
    assert results[0] == 0
    assert results == sorted(results)
    assert results[1] - results[0] > results[-1] - results[-2], "of the first ones most were dropped"


def test_preparations_come_first_in_the_same_thread(calls: Calls):
    order = []
    sampling = sampler(
        calls.add(lambda: order.append("call") or 0, 3),
        calls.add(lambda: order.append("first") or 0, 1),
        calls.add(lambda: order.append("second") or 0, 2),
    )
    time.sleep(0.02)
    sampling.close()
    assert order[:3] == ["first", "second", "call"]
    assert calls.arguments[:3] == [1, 2, 3]
    assert len(calls.threads) == 1


def test_a_preparation_that_fails_ends_it(calls: Calls):
    sampling = sampler(calls.add(lambda: 0), calls.add(lambda: 201))
    time.sleep(0.02)
    assert (sampling.error, sampling.results, sampling.times_ns) == (201, [], [])


def test_nothing_is_called_once_it_is_closed(calls: Calls):
    sampling = sampler(calls.add(lambda: 0))
    time.sleep(0.01)
    sampling.close()
    n_calls = len(calls.arguments)
    time.sleep(0.02)
    sampling.close()
    assert len(calls.arguments) == n_calls


def test_it_ends_by_itself_and_keeps_its_samples(calls: Calls):
    sampling = sampler(calls.add(lambda: 0), lifetime_ns=20_000_000)
    time.sleep(0.1)
    n_calls = len(calls.arguments)
    time.sleep(0.05)
    assert len(calls.arguments) == n_calls
    results, times_ns = sampling.results, sampling.times_ns
    assert len(results) == n_calls > 0
    assert times_ns[-1] - times_ns[0] < 100_000_000, "where this thread gets a core when it wakes up"


def test_a_forked_child_ends_without_its_thread(calls: Calls):
    sampling = sampler(calls.add(lambda: 0), period_ns=1_000)
    time.sleep(0.01)
    child = os.fork()
    if child == 0:
        del sampling
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    sampling.close()
    assert sampling.results


@pytest.mark.parametrize(
    "wrong",
    [{"period_ns": 0}, {"lifetime_ns": 0}, {"capacity": 1}, {"call": (0, 0)}, {"preparations": [(0, 1)]}],
)
def test_what_cannot_be_is_refused(calls: Calls, wrong: dict[str, Any]):
    arguments = {
        "preparations": [],
        "call": calls.add(lambda: 0),
        "period_ns": 1000,
        "lifetime_ns": 10**9,
        "capacity": 8,
    }
    with pytest.raises(ValueError, match=r"period_ns|lifetime_ns|capacity|address"):
        load_tencache_update().Sampler(**arguments | wrong)
    assert not calls.arguments
