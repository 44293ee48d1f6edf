# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's linear layers, with and without its autograd function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from deepspeed.runtime.zero.partition_parameters import zero3_linear_wrap

from tencache_ds.host_path import launches

DEVICE = get_accelerator().current_device_name()


@pytest.fixture(autouse=True)
def deepspeeds_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The inputs of each application of the autograd function."""
    inputs: list[Any] = []
    apply = LinearFunctionForZeroStage3.apply

    def counted(*args: Any) -> Any:
        inputs.append(args)
        return apply(*args)

    monkeypatch.setattr(LinearFunctionForZeroStage3, "apply", counted)
    return inputs


@contextlib.contextmanager
def skipping() -> Iterator[None]:
    end = launches.skip_autograd_without_gradients()
    try:
        yield
    finally:
        end()


def layer(bias: bool, dtype: torch.dtype) -> torch.nn.Linear:
    torch.manual_seed(3)
    return torch.nn.Linear(33, 17, bias=bias, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shape", [(33,), (5, 33), (2, 5, 33), (2, 3, 5, 33)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_values_without_the_autograd_function(
    dtype: torch.dtype, bias: bool, shape: tuple[int, ...], autocast: bool, applied: list[Any]
) -> None:
    module = layer(bias, dtype)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    for without_gradients in (torch.no_grad, torch.inference_mode):
        with (
            without_gradients(),
            torch.autocast(torch.device(DEVICE).type, torch.bfloat16, enabled=autocast),
        ):
            expected = module(values)
            n_applied = len(applied)
            with skipping():
                found = module(values)
        assert len(applied) == n_applied > 0
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)
        assert not found.requires_grad


def test_gradients_are_computed_by_deepspeed(applied: list[Any]) -> None:
    module, values = layer(True, torch.float32), torch.randn(5, 33, device=DEVICE, requires_grad=True)
    module(values).sum().backward()
    expected = values.grad, module.weight.grad
    values.grad = module.weight.grad = None
    with skipping():
        found = module(values)
        assert len(applied) == 2
        found.sum().backward()
    assert torch.equal(values.grad, expected[0])
    assert torch.equal(module.weight.grad, expected[1])


@torch.no_grad()
def test_function_transforms_see_the_autograd_function(applied: list[Any]) -> None:
    module, values = layer(True, torch.float32), torch.randn(4, 5, 33, device=DEVICE)
    expected = torch.vmap(module)(values)
    with skipping():
        assert torch.equal(torch.vmap(module)(values), expected)
    assert len(applied) == 2


def test_deepspeeds_function_is_back_after_the_last_engine() -> None:
    first, second = (launches.skip_autograd_without_gradients() for _ in range(2))
    first()
    first()
    assert torch.nn.functional.linear is launches.linear
    second()
    assert torch.nn.functional.linear is zero3_linear_wrap


def test_a_function_of_somebody_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*args: Any) -> Any: ...

    monkeypatch.setattr(torch.nn.functional, "linear", other)
    with skipping():
        assert torch.nn.functional.linear is other
    assert torch.nn.functional.linear is other
    monkeypatch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)
    with skipping():
        torch.nn.functional.linear = other
    assert torch.nn.functional.linear is other
