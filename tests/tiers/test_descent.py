# SPDX-License-Identifier: Apache-2.0
"""A step along the gradient in one pass against torch's passes, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tencache_ds.planning.adam_scalars import DescentScalars
from tencache_ds.tiers.fused_adam import AdamAndDescent
from tencache_ds.tiers.sub_group import EXP_AVG, EXP_AVG_SQ, MASTER

pytestmark = pytest.mark.timeout(300)  # the first run builds the op

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def adam() -> Iterator[AdamAndDescent]:
    adam = AdamAndDescent(2)
    yield adam
    adam.close()


@settings(max_examples=150, deadline=None)
@given(
    numel=st.one_of(st.integers(1, 200), st.sampled_from([32 * 1024 - 1, 32 * 1024, 32 * 1024 + 1, 100_003])),
    gradient_dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from(DTYPES),
    variant=st.sampled_from(["", "avx2"]),
    scale=st.sampled_from([1.0, 1 / 256, 0.37]),
    lr=st.floats(0.0, 1.0),
    weight_decay=st.sampled_from([0.0, 0.1, 1.0]),
    cut=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**31),
)
def test_it_is_what_torch_does(
    adam: AdamAndDescent,
    numel: int,
    gradient_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    variant: str,
    scale: float,
    lr: float,
    weight_decay: float,
    cut: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ours = torch.randn(numel, generator=generator) * 10 ** (torch.rand(numel, generator=generator) * 8 - 6)
    gradient = torch.randn(numel, generator=generator).to(gradient_dtype)
    gradient[::31], gradient[5::97] = float("nan"), float("inf")
    theirs, first = ours.clone(), int(cut * numel)
    weights = [torch.empty(first, dtype=weight_dtype), torch.empty(numel - first, dtype=weight_dtype)]
    pieces = [(start, weight) for start, weight in zip((0, first), weights, strict=True) if weight.numel()]
    scalars = DescentScalars(scale, 1 - lr * weight_decay, -lr)
    assert adam.takes({MASTER: ours}, gradient, weights)
    assert adam.start({MASTER: ours}, gradient, pieces, scalars, variant=variant).wait(60)
    unscaled = gradient.float()
    if scale != 1.0:
        unscaled.mul_(scale)
    theirs.mul_(1 - lr * weight_decay).add_(unscaled, alpha=-lr)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(torch.cat(weights), theirs.to(weight_dtype), rtol=0, atol=0, equal_nan=True)


def test_state_of_other_dtypes_is_not_taken(adam: AdamAndDescent) -> None:
    gradient, weight = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)
    assert not adam.takes({MASTER: torch.zeros(8, dtype=torch.bfloat16)}, gradient, [weight])
    assert not adam.takes({MASTER: torch.zeros(8)}, gradient, [weight, weight.float()])
    assert not adam.takes({MASTER: torch.zeros(8), EXP_AVG: torch.zeros(8)}, gradient, [weight])
    assert adam.takes({kind: torch.zeros(8) for kind in (MASTER, EXP_AVG, EXP_AVG_SQ)}, gradient, [weight])
