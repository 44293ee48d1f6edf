# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients that are completed together are DeepSpeed's, bit for bit, and in host memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from tencache_ds.host_path import gradients
from tencache_ds.integration import stage3

DEVICE = get_accelerator().current_device_name()
NUMELS = (1, 7, 100, 4096, 100_003)


def gradient(key: int) -> torch.Tensor:
    values = torch.randn(NUMELS[key % len(NUMELS)], generator=torch.Generator().manual_seed(key))
    return (values * 10.0 ** (key % 9 - 6)).to(torch.bfloat16).to(DEVICE)


def optimizer(n_params: int, live: list[int], *, quick: bool = True) -> Any:
    made = object.__new__(stage3.TenCacheZeroOptimizer_Stage3)
    made._gradients = SimpleNamespace(live=lambda: live, segment=lambda key: gradient(key).cpu())
    made.fp16_groups = [[SimpleNamespace(ds_id=key) for key in range(n_params)]]
    made.norm_for_param_grads = {}
    made._quick_norms = gradients.GradientNorms() if quick else None
    return made


def expected(made: Any, key: int) -> torch.Tensor:
    return DeepSpeedZeroOptimizer_Stage3._constant_buffered_norm2(made, gradient(key)).cpu()


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("part_numel", [gradients.NORM_PART_NUMEL, 1000])
def test_the_norms_are_deepspeeds_and_in_host_memory(part_numel: int, quick: bool) -> None:
    n_params = 30
    made = optimizer(n_params, live=list(range(n_params)), quick=quick)
    with mock.patch.object(gradients, "NORM_PART_NUMEL", part_numel):
        for key in range(2, n_params):  # the first two came in an earlier micro-step only
            made._offload_grad_partition_at_boundary(made.fp16_groups[0][key], gradient(key), {}, {})
    made._complete_norms()
    assert sorted(made.norm_for_param_grads) == list(range(n_params))
    for key, norm in made.norm_for_param_grads.items():
        assert norm.device.type == "cpu"
        assert torch.equal(norm, expected(made, key))
    assert not quick or made._quick_norms.complete() == {}


def test_norms_are_complete_before_the_step_too() -> None:
    made = optimizer(3, live=[0, 1, 2])
    made.offload_optimizer = True
    made.complete_grad_norm_calculation_for_cpu_offload = lambda params: [
        made.norm_for_param_grads[param.ds_id] for param in params
    ]
    for key in (1, 2):
        made._offload_grad_partition_at_boundary(made.fp16_groups[0][key], gradient(key), {}, {})
    assert made._get_norm_groups() == [[expected(made, key) for key in range(3)]]


def test_a_norm_that_was_set_since_stays() -> None:
    made = optimizer(1, live=[0])
    made._offload_grad_partition_at_boundary(made.fp16_groups[0][0], gradient(0), {}, {})
    made.norm_for_param_grads[0] = torch.tensor(5.0, dtype=torch.float64, device=DEVICE)
    made._complete_norms()
    assert made.norm_for_param_grads[0] == 5.0
    made._offload_grad_partition_at_boundary(made.fp16_groups[0][0], gradient(0), {}, {})  # the next gradient counts
    made._complete_norms()
    assert torch.equal(made.norm_for_param_grads[0], expected(made, 0))
