# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.planning.step_prediction import ObservedStep, outlook

pytestmark = pytest.mark.timeout(60)

GB = 10**9
seconds = st.floats(0, 100)
shares = st.floats(0, 1)


@st.composite
def steps(draw: st.DrawFn) -> ObservedStep:
    weights, state = draw(st.integers(0, 2**40)), draw(st.integers(0, 2**40))
    update, passes, weight_wait = draw(seconds), draw(seconds), draw(seconds) if weights else 0.0
    behind = update * draw(shares)
    behind_wait = behind * draw(shares)
    return ObservedStep(
        seconds=passes + weight_wait + update - behind + behind_wait,
        weight_wait_seconds=weight_wait,
        update_seconds=update,
        update_wait_seconds=update * draw(shares) if weights + state else 0.0,
        behind_seconds=behind,
        behind_wait_seconds=behind_wait,
        nvme_nbytes=3 * weights + 2 * state,
        stored_weight_nbytes=weights,
        stored_state_nbytes=state,
        state_in_memory_nbytes=draw(st.integers(state, 2 * state)),
        staging_nbytes=draw(st.integers(0, 2**36)),
    )


@given(steps())
def test_no_more_memory_gives_the_step_as_it_was(step: ObservedStep) -> None:
    same = outlook(step, 0)
    assert same.seconds == pytest.approx(step.seconds, abs=1e-9)
    assert same.nvme_nbytes == pytest.approx(step.nvme_nbytes)


@given(steps(), st.lists(st.integers(0, 2**41), min_size=2, max_size=6))
def test_more_memory_never_makes_a_step_longer(step: ObservedStep, memory: list[int]) -> None:
    found = [outlook(step, more) for more in sorted(memory)]
    for less, more in pairwise(found):
        assert less.seconds >= more.seconds - 1e-9
        assert less.nvme_nbytes >= more.nvme_nbytes - 1e-3


@given(steps(), st.integers(0, 2**41))
def test_its_parts_add_up(step: ObservedStep, more: int) -> None:
    found = outlook(step, more)
    parts = (found.passes_seconds, found.nvme_seconds, found.arithmetic_seconds)
    assert min(parts) >= -1e-9
    assert found.seconds == pytest.approx(sum(parts))


@given(steps())
def test_with_everything_in_memory_nothing_waits_for_nvme(step: ObservedStep) -> None:
    found = outlook(step, step.stored_nbytes)
    assert found.nvme_seconds == pytest.approx(0, abs=1e-9)
    assert found.nvme_nbytes == pytest.approx(0, abs=1e-3)


DISK = ObservedStep(
    seconds=9.0, update_seconds=8.5, update_wait_seconds=8.0, behind_seconds=8.0, behind_wait_seconds=7.7,
    nvme_nbytes=20 * GB, stored_state_nbytes=10 * GB, state_in_memory_nbytes=12 * GB,
)  # fmt: skip
"""One that waits for state from a disk of 20 / 8.5 GB/s; 0.3 s of it behind 0.8 s of passes."""


@pytest.mark.parametrize(
    ("more_gb", "update_s", "nvme_gb"), [(0, 8.5, 20), (6, 4.25, 10), (9, 2.125, 5), (12, 0.5, 0), (100, 0.5, 0)]
)
def test_state_leaves_the_disk_in_proportion(more_gb: int, update_s: float, nvme_gb: float) -> None:
    found = outlook(DISK, more_gb * GB)
    assert found.passes_seconds == pytest.approx(0.8)
    assert found.nvme_nbytes == pytest.approx(nvme_gb * GB)
    assert found.seconds == pytest.approx(0.8 + update_s - 0.3)
    assert found.arithmetic_seconds == pytest.approx(0.2)


H100 = ObservedStep(
    seconds=2.967, update_seconds=2.671, update_wait_seconds=2.556, behind_seconds=2.276, behind_wait_seconds=2.276,
    nvme_nbytes=7.978 * GB, stored_state_nbytes=int(3.989 * GB), state_in_memory_nbytes=int(3.989 * GB),
    staging_nbytes=int(0.402 * GB),
)  # fmt: skip
"""Steps of 364 M parameters, with all of the state on a disk (docs/benchmarks/frontier_h100_2026-11-26.md)."""


@pytest.mark.parametrize(("stored_gb", "measured_s"), [(2.938, 2.179), (1.899, 1.400), (0.859, 0.613)])
def test_what_moves_beside_the_passes_counts(stored_gb: float, measured_s: float) -> None:
    found = outlook(H100, H100.state_in_memory_nbytes - int(stored_gb * GB))
    assert found.seconds == pytest.approx(measured_s, rel=0.08)


def test_weights_leave_first_with_the_reads_of_both_passes_and_the_write() -> None:
    step = ObservedStep(
        seconds=10.0, weight_wait_seconds=4.0, update_seconds=5.0, update_wait_seconds=4.5, nvme_nbytes=26 * GB,
        stored_weight_nbytes=2 * GB, stored_state_nbytes=9 * GB, state_in_memory_nbytes=9 * GB,
    )  # fmt: skip
    found = outlook(step, 2 * GB)
    assert found.nvme_nbytes == pytest.approx(18 * GB)
    assert found.seconds == pytest.approx(1.0 + 5.0 * 18 / 20)


def test_an_update_that_its_arithmetic_limits_gains_little_from_memory() -> None:
    step = ObservedStep(
        seconds=3.0, update_seconds=2.0, update_wait_seconds=0.1, nvme_nbytes=20 * GB, stored_state_nbytes=10 * GB,
        state_in_memory_nbytes=10 * GB,
    )  # fmt: skip
    assert outlook(step, 5 * GB).seconds == pytest.approx(2.95)
    assert outlook(step, 10 * GB).seconds == pytest.approx(2.9)
