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


class Rig:
    """A recorder with both clocks."""

    def __init__(self) -> None:
        self.device, self.host = Clock(), Clock()
        self.recorder = FetchRecorder(self.device, self.host)

    def fetch(self, seconds: float, host_seconds: float, fetched: dict[int, int]) -> None:
        self.recorder.before_fetch()
        self.device.now += seconds
        self.host.now += host_seconds
        self.recorder.after_fetch(fetched)
        self.device.now += 1.0
        self.host.now += 2.0


def test_waits_add_up_over_passes_and_are_divided_by_bytes():
    rig = Rig()
    rig.fetch(0.3, 0.03, {1: 100, 2: 200})
    rig.fetch(0.5, 0.05, {})
    rig.fetch(0.2, 0.02, {2: 50})
    assert rig.recorder.waits() == {
        1: FetchWait(1, pytest.approx(0.1), pytest.approx(0.01)),
        2: FetchWait(2, pytest.approx(0.4), pytest.approx(0.04)),
    }


def test_a_fetch_that_was_not_begun_counts_nothing():
    recorder = FetchRecorder(Clock())
    recorder.after_fetch({1: 100})
    assert recorder.waits() == {}


def test_weights_of_no_bytes_wait_for_nothing():
    rig = Rig()
    rig.fetch(0.3, 0.03, {1: 0})
    assert rig.recorder.waits() == {1: FetchWait(1, 0.0)}


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
