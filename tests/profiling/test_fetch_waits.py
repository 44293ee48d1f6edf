# SPDX-License-Identifier: Apache-2.0
"""Records of fetches, with a clock that a test sets, and with the real ones."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterable

import pytest
import torch

from tencache_ds.profiling.waits import _NEIGHBOURS, CudaStreamClock, FetchRecorder, FetchWait, HostClock

pytestmark = pytest.mark.timeout(60)


class Clock:
    now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds_between(self, first: float, second: float) -> float:
        return second - first


class Idle:
    """A device that was idle between these times of the host, each of which is given by its start and end."""

    def __init__(self) -> None:
        self.intervals: list[tuple[float, float]] = []
        self.n_closed = 0

    def seconds(self, start_s: float, end_s: float) -> float:
        return sum(max(min(end, end_s) - max(start, start_s), 0.0) for start, end in self.intervals)

    def close(self) -> None:
        self.n_closed += 1


class Rig:
    """A recorder with both clocks."""

    def __init__(self) -> None:
        self.device, self.host, self.idle = Clock(), Clock(), Idle()
        self.waited_seconds = 0.0
        self.recorder = FetchRecorder(self.device, self.idle, self.host, update_waits=lambda: self.waited_seconds)

    def wait_for_update(self, seconds: float) -> None:
        """In which the device has nothing to do."""
        self.idle.intervals.append((self.host.now, self.host.now + seconds))
        self.passes(seconds, seconds)
        self.waited_seconds += seconds

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

    def release(self, seconds: float, host_seconds: float, weights: dict[int, int]) -> None:
        self.recorder.begin_hook()
        self.passes(seconds, host_seconds)
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


def test_waits_for_an_update_are_left_out():
    rig = Rig()
    rig.wait_for_update(5.0)  # of somebody else
    rig.recorder.before_fetch(waits=True)
    rig.wait_for_update(7.0)
    rig.recorder.before_gather()
    rig.wait_for_update(0.5)
    rig.host.now += 0.04
    rig.recorder.after_gather({1: 100, 2: 300})
    rig.passes(0.5, 0.1)
    rig.recorder.after_fetch({1: 100}, [1])
    rig.recorder.before_fetch(waits=False)
    rig.wait_for_update(3.0)
    rig.host.now += 0.02  # while the device has work
    rig.recorder.after_fetch({2: 300}, [])
    assert rig.recorder.waits() == {
        1: same(FetchWait(1, 0.46 / 4, 0.1 / 4, 0.02)),
        2: same(FetchWait(1, 3 * 0.46 / 4, 3 * 0.1 / 4, 0.02)),
    }


def test_a_weight_that_is_there_costs_its_modules_hooks_while_the_device_is_idle():
    rig = Rig()
    rig.fetch(0.0, 0.06, {1: 100, 2: 300})
    rig.release(0.0, 0.04, {1: 100, 2: 300})
    rig.idle.intervals = [(1.0, 1.05)]
    assert rig.recorder.waits() == {
        1: same(FetchWait(overhead_seconds=0.0125)),
        2: same(FetchWait(overhead_seconds=0.0375)),
    }


def test_hooks_cost_no_more_than_they_take():
    rig = Rig()
    rig.fetch(0.0, 0.06, {1: 100})
    rig.release(0.0, 0.04, {1: 100})
    rig.idle.intervals = [(0.0, 100.0)]
    assert rig.recorder.waits() == {1: same(FetchWait(overhead_seconds=0.1))}


def test_a_device_that_is_idle_later_in_the_step_does_not_make_hooks_count_before():
    rig = Rig()
    for key in range(2 * _NEIGHBOURS):
        rig.fetch(0.0, 0.01, {key: 100})
    rig.idle.intervals = [(rig.host.now / 2, rig.host.now)]
    costs = [wait.overhead_seconds for wait in rig.recorder.waits().values()]
    assert costs == pytest.approx([0.0] * _NEIGHBOURS + [0.01] * _NEIGHBOURS)


def test_a_gather_partly_behind_device_work_costs_the_rest():
    rig = Rig()
    rig.recorder.before_fetch(waits=True)
    rig.gather(0.03, {1: 100})
    rig.passes(0.01, 0.01)
    rig.recorder.after_fetch({1: 100}, [1])
    rig.release(0.0, 0.02, {1: 100})
    # All of the release, beside what the device was idle in the fetch.
    rig.idle.intervals = [(0.03, 0.06)]
    assert rig.recorder.waits() == {1: same(FetchWait(1, 0.0025, 0.01, 0.0075 + 0.02))}


def test_the_idle_time_of_fetches_that_wait_is_no_reason_for_others_to_count():
    rig = Rig()
    rig.fetch(0.01, 0.02, {1: 100}, [1])
    rig.fetch(0.0, 0.02, {2: 100})
    rig.idle.intervals = [(0.0, 0.01)]
    assert rig.recorder.waits() == {1: same(FetchWait(0, 0.01, 0.02)), 2: FetchWait()}


def test_the_recording_ends_once_it_is_read_or_closed():
    rig = Rig()
    rig.recorder.close()
    assert rig.idle.n_closed == 1
    assert rig.recorder.waits() == {}
    assert rig.idle.n_closed == 2, "which may be closed again"


class Queue:
    """A device that works through what the host issues: both clocks of a step, in microseconds."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.host = self.device = 0.0
        self.idle = Idle()

    def work(self, usual: float) -> None:
        """Keeps the host busy for about as long as usual."""
        self.host += self._vary(usual)

    def launch(self, host: float, device: float) -> None:
        self.work(host)
        if self.host > self.device:
            self.idle.intervals.append((self.device, self.host))
        self.device = max(self.device, self.host) + self._vary(device)

    def _vary(self, usual: float) -> float:
        return usual * self._random.uniform(0.7, 1.3)

    @property
    def now(self) -> float:
        return max(self.host, self.device)


class Side(Clock):
    """One of its clocks."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    def mark(self) -> float:
        return self._read()


def step_of(kernels: int, launch: float, kernel: float, hook: float, *, hooks: bool) -> tuple[float, float]:
    """One of 288 modules, nine to a layer: its length, and what the recorder says that hooks take of it."""
    queue = Queue(0)
    recorder = FetchRecorder(Side(lambda: queue.now), queue.idle, Side(lambda: queue.host))
    for module in range(288):
        if hooks:
            recorder.before_fetch(waits=False)
            queue.work(hook)
            recorder.after_fetch({module: 1}, [])
        for _ in range(kernels * (2 if module % 9 == 4 else 1)):
            queue.launch(launch, kernel)
        if hooks:
            recorder.begin_hook()
            queue.work(hook / 2)
            recorder.after_release({module: 1})
    return queue.now, sum(wait.overhead_seconds for wait in recorder.waits().values())


@pytest.mark.parametrize("kernels", [2, 4, 8])
@pytest.mark.parametrize("kernel", [5.0, 15.0, 20.0, 30.0, 40.0, 100.0])
@pytest.mark.parametrize("hook", [20.0, 60.0])
def test_hooks_take_what_a_step_without_them_is_shorter(kernels: int, kernel: float, hook: float) -> None:
    launch = 10.0
    length, said = step_of(kernels, launch, kernel, hook, hooks=True)
    without, _ = step_of(kernels, launch, kernel, hook, hooks=False)
    assert said == pytest.approx(length - without, abs=0.02 * length)


def test_gathers_ahead_count_for_the_weights_gathered():
    rig = Rig()
    rig.recorder.before_fetch(waits=False)
    rig.gather(0.06, {2: 1, 3: 999})
    rig.passes(0.1, 0.04)
    rig.recorder.after_fetch({1: 8}, [])
    rig.idle.intervals = [(0.0, 0.1)]
    assert rig.recorder.waits() == {
        1: same(FetchWait(overhead_seconds=0.04)),
        2: same(FetchWait(1, overhead_seconds=0.03)),
        3: same(FetchWait(1, overhead_seconds=0.03)),
    }


def test_what_was_not_begun_counts_nothing():
    recorder = FetchRecorder(Clock(), Idle())
    recorder.after_fetch({1: 100}, [1])
    recorder.before_gather()
    recorder.after_gather({1: 100})
    recorder.begin_hook()
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
    first = clock.mark()
    for _ in range(20):
        matrix @ matrix
    second = clock.mark()
    t_start_s = time.perf_counter()
    torch.cuda.synchronize()
    assert clock.seconds_between(first, second) == pytest.approx(time.perf_counter() - t_start_s, rel=0.5)
