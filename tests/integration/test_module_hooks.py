# SPDX-License-Identifier: Apache-2.0
"""Hooks taken off a module come back where they were; those that stay cost less."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from deepspeed.runtime.zero.partition_parameters import _init_external_params
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import set_z3_leaf_modules

from tencache_ds.integration.coordinator import _params_of
from tencache_ds.integration.module_hooks import _WithGradients, lighten_backward_hooks
from tencache_ds.integration.suspended_hooks import _Taken


def test_hooks_come_back_in_their_order() -> None:
    module = torch.nn.Identity()
    calls: list[str] = []

    def named(name: str) -> Any:
        return lambda *_: calls.append(name)

    module.register_forward_pre_hook(named("before"))
    handles = [module.register_forward_pre_hook(named(name)) for name in ("gather", "backward")]
    module.register_forward_pre_hook(named("after"))
    module.register_forward_pre_hook(named("first"), prepend=True)
    hooks = module._forward_pre_hooks
    order = list(hooks)
    taken = [_Taken(hooks, handle.id, hooks.pop(handle.id), order) for handle in handles]
    module.register_forward_pre_hook(named("later"))
    module(torch.zeros(1))
    assert calls == ["first", "before", "after", "later"]
    calls.clear()
    for each in taken:
        each.put_back()
    module(torch.zeros(1))
    assert calls == ["first", "before", "gather", "backward", "after", "later"]
    handles[0].remove()
    calls.clear()
    module(torch.zeros(1))
    assert calls == ["first", "before", "backward", "after", "later"]


def test_hooks_for_a_backward_pass_are_skipped_in_evaluation_without_gradients_only() -> None:
    module = torch.nn.Identity()
    calls: list[bool] = []
    module.register_forward_hook(_WithGradients(lambda *_: calls.append(True)))
    for training, gradients in ((True, True), (True, False), (False, True)):
        module.train(training)
        with torch.set_grad_enabled(gradients):
            module(torch.zeros(1))
    assert len(calls) == 3
    module.eval()
    with torch.no_grad():
        module(torch.zeros(1))
    assert len(calls) == 3


class Doubled(torch.autograd.Function):
    """With a context that is set up separately, like DeepSpeed's."""

    @staticmethod
    def forward(value: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return value * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None


def test_signatures_of_autograd_functions_are_looked_up_once() -> None:
    module = torch.nn.Identity()
    module.post_bwd_fn = Doubled
    offload = SimpleNamespace(module=module, backward_hooks=[], _register_deepspeed_module=lambda *_: None)
    value = torch.ones(2, requires_grad=True)
    expected = Doubled.apply(value)
    lighten_backward_hooks(offload)
    assert "__signature__" in LinearFunctionForZeroStage3.forward.__dict__
    with mock.patch.object(inspect, "_signature_from_function", side_effect=AssertionError("looked up again")):
        result = Doubled.apply(value)  # takes the default of the factor from the signature
    assert torch.equal(result, expected)
    result.sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("leaf", [False, True])
def test_the_parameters_of_a_fetch_are_deepspeeds(leaf: bool) -> None:
    shared = torch.nn.Linear(2, 2)
    block = torch.nn.Sequential(shared, torch.nn.Linear(2, 2, bias=False), torch.nn.SiLU(), shared)
    block.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    block.register_parameter("none", None)
    for key, param in enumerate(block.parameters()):
        param.ds_id = key
    for module in block.modules():
        _init_external_params(module)
    external = torch.nn.Parameter(torch.ones(3))
    external.ds_id = 17
    block._external_params[id(external)] = external
    if leaf:
        set_z3_leaf_modules(block, [torch.nn.Sequential])
    for module in block.modules():
        expected = {param.ds_id: param for param in iter_params(module, recurse=leaf and module is block)}
        found = _params_of(module)
        assert found.keys() == expected.keys()
        assert all(found[key] is expected[key] for key in found)
