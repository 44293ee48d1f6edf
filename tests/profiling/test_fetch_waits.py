# SPDX-License-Identifier: Apache-2.0
"""Records of fetches, with a clock that a test sets, and with the real ones."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable

import pytest
import torch

from tencache_ds.profiling.fetch_waits import CudaStreamClock, FetchRecorder, FetchWait, HostClock

pytestmark = pytest.mark.timeout(60)


class Clock:
    now = 0.0
    is_idle = True

    def mark(self) -> float:
        return self.now

    def seconds_between(self, first: float, second: float) -> float:
        return second - first

    def idle(self) -> bool:
        return self.is_idle


class Rig:
    """A recorder with both clocks."""

    def __init__(self) -> None:
        self.device, self.host = Clock(), Clock()
        self.recorder = FetchRecorder(self.device, self.host)

    def passes(self, seconds: float, host_seconds: float) -> None:
        self.device.now += seconds
        self.host.now += host_seconds

    def fetch(self, seconds: float, host_seconds: float, weights: dict[int, int], awaited: Iterable[int] = ()) -> None:
        self.recorder.before_fetch(waits=bool(awaited))
        self.passes(seconds, host_seconds)
        self.recorder.after_fetch(weights, awaited)
        self.passes(1.0, 2.0)

    def gather(self, host_seconds: float, weights: dict[int, int]) -> None:
        self.recorder.before_gather()
        self.host.now += host_seconds
        self.recorder.after_gather(weights)

    def release(self, host_seconds: float, weights: dict[int, int]) -> None:
        self.recorder.before_release()
        self.host.now += host_seconds
        self.recorder.after_release(weights)


def same(wait: FetchWait) -> object:
    """Equal to one up to rounding."""
    fields = {name: pytest.approx(value) for name, value in dataclasses.asdict(wait).items()}
    return FetchWait(**fields)


def test_waits_add_up_over_passes_and_are_divided_by_bytes():
    rig = Rig()
    rig.fetch(0.3, 0.03, {1: 100, 2: 200}, [1, 2])
    rig.fetch(0.2, 0.02, {2: 50}, [2])
    assert rig.recorder.waits() == {1: same(FetchWait(0, 0.1, 0.01)), 2: same(FetchWait(0, 0.4, 0.04))}


def test_the_module_that_waits_for_a_bucket_waits_for_all_its_weights():
    rig = Rig()
    rig.recorder.before_fetch(waits=True)
    rig.gather(0.04, {1: 100, 2: 300})
    rig.passes(0.5, 0.1)  # 0.1 s are the host's own, and 0.36 s of waiting remain
    rig.recorder.after_fetch({1: 100}, [1])
    rig.fetch(0.0, 0.0, {2: 300})  # gathered with the first one
    assert rig.recorder.waits() == {
        1: same(FetchWait(1, 0.46 / 4, 0.1 / 4, 0.02)),
        2: same(FetchWait(1, 3 * 0.46 / 4, 3 * 0.1 / 4, 0.02)),
    }


def test_a_weight_that_is_there_costs_its_modules_hooks():
    rig = Rig()
    rig.fetch(0.06, 0.06, {1: 100, 2: 300})
    rig.release(0.02, {1: 100, 2: 300})
    assert rig.recorder.waits() == {
        1: same(FetchWait(overhead_seconds=0.02)),
        2: same(FetchWait(overhead_seconds=0.06)),
    }


@pytest.mark.parametrize(("between", "share"), [(0.0, 0.25), (0.06, 0.625), (0.2, 1.0)])
def test_hooks_cost_no_more_than_the_device_is_idle(between, share):
    """It is so in one fetch of four, over all of the step; host and device work between fetches count for that."""
    rig = Rig()
    for key in range(4):
        rig.device.is_idle = key == 2
        rig.recorder.before_fetch(waits=False)
        rig.host.now += 0.03
        rig.recorder.after_fetch({key: 100}, [])
        rig.release(0.01, {key: 100})
        if key < 3:
            rig.host.now += between * 4 / 3
    waits = rig.recorder.waits()
    assert list(waits.values()) == [same(FetchWait(overhead_seconds=share * 0.04))] * 4


def test_where_the_device_is_busy_hooks_cost_nothing_however_long_it_is_idle_elsewhere():
    rig = Rig()
    for key in range(48):
        rig.device.is_idle = key < 16
        rig.fetch(0.01, 0.01, {key: 100})
    costs = [wait.overhead_seconds for wait in rig.recorder.waits().values()]
    assert costs == [pytest.approx(0.01)] * 16 + [0.0] * 32


def test_a_busy_device_is_not_lengthened_by_hooks():
    rig = Rig()
    rig.device.is_idle = False
    rig.fetch(0.06, 0.06, {1: 100})
    rig.release(0.02, {1: 100})
    assert rig.recorder.waits() == {1: FetchWait()}


def test_a_gather_partly_behind_device_work_costs_the_rest():
    rig = Rig()
    rig.device.is_idle = False
    rig.recorder.before_fetch(waits=True)
    rig.gather(0.03, {1: 100})
    rig.passes(0.01, 0.01)
    rig.recorder.after_fetch({1: 100}, [1])
    rig.release(0.04, {1: 100})
    assert rig.recorder.waits() == {1: same(FetchWait(1, 0.0025, 0.01, 0.0075))}


def test_a_wait_on_a_device_that_follows_the_host_is_the_host_s_time():
    rig = Rig()
    rig.recorder.before_fetch(waits=True)
    rig.gather(0.03, {1: 100})
    rig.passes(0.01, 0.01)
    rig.recorder.after_fetch({1: 100}, [1])
    assert rig.recorder.waits() == {1: same(FetchWait(1, 0.01, 0.01, 0.03))}


def test_gathers_ahead_count_for_the_weights_gathered():
    rig = Rig()
    rig.recorder.before_fetch(waits=False)
    rig.gather(0.06, {2: 1, 3: 999})
    rig.passes(0.1, 0.04)
    rig.recorder.after_fetch({1: 8}, [])
    assert rig.recorder.waits() == {
        1: same(FetchWait(overhead_seconds=0.04)),
        2: same(FetchWait(1, overhead_seconds=0.03)),
        3: same(FetchWait(1, overhead_seconds=0.03)),
    }


def test_what_was_not_begun_counts_nothing():
    recorder = FetchRecorder(Clock())
    recorder.after_fetch({1: 100}, [1])
    recorder.before_gather()
    recorder.after_gather({1: 100})
    recorder.before_release()
    recorder.after_release({1: 100})
    assert recorder.waits() == {}


def test_weights_of_no_bytes_wait_for_nothing():
    rig = Rig()
    rig.fetch(0.3, 0.03, {1: 0}, [1])
    assert rig.recorder.waits() == {1: FetchWait()}


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
    assert clock.idle()
    first = clock.mark()
    for _ in range(20):
        matrix @ matrix
    second = clock.mark()
    assert not clock.idle()
    t_start_s = time.perf_counter()
    torch.cuda.synchronize()
    assert clock.seconds_between(first, second) == pytest.approx(time.perf_counter() - t_start_s, rel=0.5)
