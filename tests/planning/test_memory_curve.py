# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.planning.memory_curve import MemoryCurve

FORWARD_AND_BACKWARD = [0, 100, 200, 300, 400, 380, 260, 140, 20]
PEAK = 600
"""The loss, between the last layer of forward and the first of backward."""


def recorded(taken: list[int] = FORWARD_AND_BACKWARD, peak: int = PEAK) -> MemoryCurve:
    curve = MemoryCurve()
    for passes in (1, 2):  # the larger one counts
        curve.begin()
        for nbytes in taken:
            curve.record(nbytes * passes // 2)
    curve.complete(peak)
    return curve


def test_the_same_pass_takes_what_is_left_to_the_peak():
    curve = recorded()
    assert [curve.more_nbytes(place, nbytes) for place, nbytes in enumerate(FORWARD_AND_BACKWARD[:5])] == [
        600, 500, 400, 300, 200,
    ]  # fmt: skip


def test_twice_the_tokens_take_twice_the_peak():
    curve = recorded()
    for place in range(1, 5):
        assert curve.more_nbytes(place, 2 * FORWARD_AND_BACKWARD[place]) == 1200 - 2 * FORWARD_AND_BACKWARD[place]


def test_behind_the_peak_little_is_to_come():
    curve = recorded()
    assert curve.more_nbytes(5, 380) == 190  # what went on between two places then may again
    assert curve.more_nbytes(8, 20) == 10
    assert curve.more_nbytes(8, 200) < 0, "what little was taken there says nothing"


def test_what_is_not_known_is_not_asked_for():
    assert MemoryCurve().more_nbytes(0, 5) == 0
    assert recorded().more_nbytes(len(FORWARD_AND_BACKWARD), 5) == 0
    assert recorded(peak=0).more_nbytes(1, 5) == 0
    # Before anything was taken nothing can be said about growth.
    assert recorded().more_nbytes(0, 10**6) == 600 - 10**6


@given(st.lists(st.integers(-50, 1000), max_size=20), st.integers(0, 2000), st.data())
def test_a_larger_pass_never_needs_less(taken, peak, data):
    curve = recorded(taken, peak)
    if taken:
        place = data.draw(st.integers(0, len(taken) - 1))
        small, large = sorted(data.draw(st.tuples(st.integers(0, 3000), st.integers(0, 3000))))
        assert curve.more_nbytes(place, small) + small <= curve.more_nbytes(place, large) + large
