# SPDX-License-Identifier: Apache-2.0
"""Predicted steps: limits that hold for any figures, and steps that were measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.planning.step_prediction import FixedPart, nvme_bytes_per_s, predicted_seconds

GB = 10**9
SECONDS = st.floats(0, 100)
STEPS = st.builds(FixedPart, SECONDS, SECONDS, st.floats(0, 1), st.integers(0, 10 * GB))
RATES = st.none() | st.floats(1e6, 1e11)


def predict(step: FixedPart, update: float, arithmetic: float, rate: float | None) -> float:
    return predicted_seconds(
        step, waits_seconds=0.1, arithmetic_seconds=arithmetic, update_seconds=update, nvme_bytes_per_s=rate
    )


@given(STEPS, SECONDS, SECONDS, RATES)
def test_a_step_is_between_its_longest_part_and_their_sum(step, update, arithmetic, rate):
    update = max(update, arithmetic)
    seconds = predict(step, update, arithmetic, rate)
    assert seconds >= update
    assert seconds >= step.passes_seconds - min(step.forward_seconds, step.passes_seconds)
    assert seconds <= step.passes_seconds + 0.1 + update + 1e-9


@given(STEPS, SECONDS, SECONDS, SECONDS, RATES)
def test_a_longer_update_makes_no_step_shorter(step, update, longer, arithmetic, rate):
    update = max(update, arithmetic)
    seconds = predict(step, update, arithmetic, rate)
    assert predict(step, update + longer, arithmetic, rate) >= seconds - 1e-9


@given(st.integers(1, 100 * GB), st.floats(0.01, 100), SECONDS, st.integers(0, 10 * GB))
def test_the_recorded_step_is_predicted_for_the_bytes_it_had(stored, update, passes, staging):
    rate = nvme_bytes_per_s(stored, update, passes, staging)
    assert rate is not None
    step = FixedPart(passes, 0.0, 0.0, min(staging, stored))
    seconds = predicted_seconds(
        step, waits_seconds=0.0, arithmetic_seconds=0.0, update_seconds=2 * stored / rate, nvme_bytes_per_s=rate
    )
    assert seconds == pytest.approx(passes + update, rel=1e-6)


def test_without_state_on_nvme_there_is_no_rate():
    assert nvme_bytes_per_s(0, 1.0, 1.0, GB) is None


@pytest.mark.parametrize(
    ("stored", "update", "passes", "left", "measured"),
    [
        (3.99, 3.20, 0.26, 0.528, 0.404),
        (1.90, 1.55, 0.25, 0.523, 0.531),
        (3.99, 2.71, 0.24, 2.710, 1.85),
    ],
)
def test_steps_of_364_m_parameters_on_an_h100(stored, update, passes, left, measured):
    """GB on NVMe and seconds before the plan, GB on NVMe after it; buffers of 0.4 GB."""
    rate = nvme_bytes_per_s(int(stored * GB), update, passes, int(0.4 * GB))
    assert rate is not None
    step = FixedPart(passes, 0.1, 0.0, int(0.4 * GB))
    seconds = predicted_seconds(
        step,
        waits_seconds=0.0,
        arithmetic_seconds=0.03,
        update_seconds=2 * left * GB / rate,
        nvme_bytes_per_s=rate,
    )
    assert seconds == pytest.approx(measured, rel=0.15)
