# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tencache_ds.io.wrappers.routed import BandwidthMeter


class Clock:
    def __init__(self):
        self.now_ns = 10**15

    def __call__(self):
        return self.now_ns

    def pass_s(self, seconds):
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def meter(clock):
    return BandwidthMeter(clock)


def move(meter, clock, nbytes, seconds):
    meter.started()
    clock.pass_s(seconds)
    meter.ended(nbytes)


def test_nothing_is_known_before_the_first_interval_with_traffic(meter, clock):
    assert meter.bytes_per_s is None
    clock.pass_s(1)
    meter.end_interval()
    assert meter.bytes_per_s is None
    move(meter, clock, 500, 0.5)
    assert meter.bytes_per_s is None
    meter.end_interval()
    assert meter.bytes_per_s == 1000


def test_idle_time_and_overlap_do_not_count(meter, clock):
    meter.started()
    clock.pass_s(1)
    meter.started()
    clock.pass_s(1)
    meter.ended(1000)
    clock.pass_s(1)
    meter.ended(2000)
    clock.pass_s(100)
    move(meter, clock, 3000, 1)
    meter.end_interval()
    assert meter.bytes_per_s == 6000 / 4


def test_a_request_over_the_end_of_an_interval_counts_in_both(meter, clock):
    move(meter, clock, 1000, 1)
    meter.started()
    clock.pass_s(1)
    meter.end_interval()
    assert meter.bytes_per_s == 500
    clock.pass_s(2)
    meter.ended(4000)
    meter.end_interval()
    assert meter.bytes_per_s == (1000 / 2 + 4000) / (2 / 2 + 2)


def test_time_without_any_result_is_kept_for_the_next_interval(meter, clock):
    move(meter, clock, 1000, 1)
    meter.end_interval()
    meter.started()
    clock.pass_s(3)
    meter.end_interval()
    assert meter.bytes_per_s == 1000
    meter.ended(1000)
    meter.end_interval()
    assert meter.bytes_per_s == (500 + 1000) / (0.5 + 3)


def test_old_intervals_fade(meter, clock):
    move(meter, clock, 1000, 1)
    meter.end_interval()
    rates = []
    for _ in range(4):
        move(meter, clock, 3000, 1)
        meter.end_interval()
        rates.append(meter.bytes_per_s)
    assert rates == sorted(rates)
    assert 2300 < rates[0] < 2400
    assert rates[-1] > 2900


def test_a_failed_request_takes_time_and_moves_nothing(meter, clock):
    move(meter, clock, 1000, 1)
    move(meter, clock, 0, 1)
    meter.end_interval()
    assert meter.bytes_per_s == 500
