# SPDX-License-Identifier: Apache-2.0
"""Scalars of Adam in single precision; that updates with them equal DeepSpeed's is tested with the op."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tencache_ds.planning.adam_scalars import BetaPowers, WeightDecay, adam_scalars

BETAS = (0.9, 0.999)


def straight(steps: int) -> BetaPowers:
    powers = BetaPowers(BETAS)
    for step in range(1, steps + 1):
        powers.at(step, BETAS)
    return powers


@pytest.mark.parametrize("betas", [BETAS, (0.8, 0.99), (0.95, 0.9999)])
def test_powers_of_a_million_steps_are_there_at_once(betas: tuple[float, float]) -> None:
    """Before 2026-11-27 the first step after a resume counted all steps in Python, in 13 seconds."""
    straight, last = BetaPowers(betas), 300_000
    for step in range(1, last + 1):
        powers = straight.at(step, betas)
    t_start = time.perf_counter()
    resumed = BetaPowers(betas, last, 0).at(last, betas)
    BetaPowers(betas, 10**6, 0)
    assert time.perf_counter() - t_start < 0.5
    for actual, expected in zip(resumed, powers, strict=True):
        assert np.float32(1) - actual == np.float32(1) - expected


def test_powers_are_multiplied_up_in_single_precision() -> None:
    power = np.float32(1)
    for _ in range(100):
        power = power * np.float32(0.999)
    assert straight(100).at(100, BETAS)[1] == power
    assert power != np.float32(np.float32(0.999) ** np.float64(100)), "which is what a power function gives"


def test_a_jump_takes_the_power_function_as_in_deepspeed() -> None:
    powers = straight(5)
    assert powers.at(100, BETAS) == tuple(np.float32(float(np.float32(beta)) ** 100) for beta in BETAS)
    assert powers.state_dict() == {"betas": tuple(map(float, map(np.float32, BETAS))), "step": 100, "pow_step": 100}


def test_all_sub_groups_of_a_step_have_the_same_powers() -> None:
    powers = straight(9)
    assert powers.at(10, BETAS) == powers.at(10, BETAS) == straight(10).at(10, BETAS)


def test_of_a_repeated_step_the_first_is_multiplied_and_the_others_are_not() -> None:
    """What DeepSpeed's op did before 0.19, which took a step for a jump when the second sub-group came with it."""
    powers = BetaPowers(BETAS, pow_when_repeated=True)
    singles = [np.float32(beta) for beta in BETAS]
    raised = [tuple(np.float32(float(beta) ** step) for beta in singles) for step in range(40)]
    for step in range(1, 40):
        multiplied = tuple(power * beta for power, beta in zip(raised[step - 1], singles, strict=True))
        assert [powers.at(step, BETAS) for _ in range(3)] == [multiplied, raised[step], raised[step]]
    assert any(raised[step][1] != raised[step - 1][1] * singles[1] for step in range(1, 40)), "they never differ"
    resumed = BetaPowers(**powers.state_dict(), pow_when_repeated=True)
    assert resumed.at(40, BETAS) == powers.at(40, BETAS)


def test_other_betas_take_the_power_function_as_in_deepspeed() -> None:
    powers, other = straight(7), (0.8, 0.99)
    expected = tuple(np.float32(float(np.float32(beta)) ** 7) for beta in other)
    assert powers.at(7, other) == expected
    assert powers.at(8, other) == tuple(power * np.float32(beta) for power, beta in zip(expected, other, strict=True))


@pytest.mark.parametrize(
    ("weight_decay", "decoupled", "kind"),
    [(0.0, True, WeightDecay.NONE), (0.1, True, WeightDecay.DECOUPLED), (0.1, False, WeightDecay.L2)],
)
def test_weight_decay(weight_decay: float, decoupled: bool, kind: WeightDecay) -> None:
    scalars = adam_scalars(
        lr=1e-3, betas=BETAS, powers=BetaPowers(BETAS).at(1, BETAS), eps=1e-8, weight_decay=weight_decay,
        decoupled=decoupled, bias_correction=True, scale=0.5,
    )  # fmt: skip
    assert scalars.weight_decay is kind
    if kind is WeightDecay.DECOUPLED:
        assert scalars.decay == float(-np.float32(1e-3) * np.float32(0.1))
    assert scalars.one_minus_beta1 == float(np.float32(1) - np.float32(0.9)) != 1 - 0.9
