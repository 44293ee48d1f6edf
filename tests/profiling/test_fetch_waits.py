# SPDX-License-Identifier: Apache-2.0
"""Records of fetches, with a clock that a test sets, and with the real ones."""

from __future__ import annotations

import time

import pytest
import torch

from tencache_ds.profiling.fetch_waits import CudaStreamClock, FetchRecorder, FetchWait, HostClock

pytestmark = pytest.mark.timeout(60)


class Clock:
    now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds_between(self, first: float, second: float) -> float:
        return second - first


def fetch(recorder: FetchRecorder, clock: Clock, seconds: float, fetched: dict[int, int]) -> None:
    recorder.before_fetch()
    clock.now += seconds
    recorder.after_fetch(fetched)
    clock.now += 1.0


def test_waits_add_up_over_passes_and_are_divided_by_bytes():
    clock = Clock()
    recorder = FetchRecorder(clock)
    fetch(recorder, clock, 0.3, {1: 100, 2: 200})
    fetch(recorder, clock, 0.5, {})
    fetch(recorder, clock, 0.2, {2: 50})
    result = recorder.waits()
    assert result == {1: FetchWait(1, pytest.approx(0.1)), 2: FetchWait(2, pytest.approx(0.4))}


def test_a_fetch_that_was_not_begun_counts_nothing():
    recorder = FetchRecorder(Clock())
    recorder.after_fetch({1: 100})
    assert recorder.waits() == {}


def test_weights_of_no_bytes_wait_for_nothing():
    clock = Clock()
    recorder = FetchRecorder(clock)
    fetch(recorder, clock, 0.3, {1: 0})
    assert recorder.waits() == {1: FetchWait(1, 0.0)}


def test_the_time_of_the_host():
    clock = HostClock()
    first = clock.mark()
    time.sleep(0.02)
    assert 0.02 <= clock.seconds_between(first, clock.mark()) < 5.0


@pytest.mark.gpu
def test_the_time_of_a_stream_is_that_of_its_work():
    clock = CudaStreamClock()
    matrix = torch.randn(4096, 4096, device="cuda")
    (matrix @ matrix).sum().item()
    first = clock.mark()
    for _ in range(20):
        matrix @ matrix
    second = clock.mark()
    t_start_s = time.perf_counter()
    torch.cuda.synchronize()
    assert clock.seconds_between(first, second) == pytest.approx(time.perf_counter() - t_start_s, rel=0.5)
