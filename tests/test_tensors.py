# SPDX-License-Identifier: Apache-2.0
"""Tensors are what the caller asked for, whatever a script does to torch's constructors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tencache_ds.tensors import empty, filled, zeros

CREATED: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: empty(5, torch.float32),
    "zeros": lambda: zeros(5, torch.float32),
    "filled": lambda: filled(5, 2.5, torch.float32),
}
REPLACED = ("arange", "empty", "eye", "full", "ones", "randn", "tensor", "zeros")
"""By ``deepspeed.zero.Init``."""


@pytest.fixture(params=["replaced", "default_device", "default_dtype"])
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a script may be doing meanwhile."""
    if request.param == "default_device":
        with torch.device("meta"):
            yield
        return
    if request.param == "default_dtype":
        torch.set_default_dtype(torch.bfloat16)
        yield
        torch.set_default_dtype(torch.float32)
        return
    for name in REPLACED:
        constructor = getattr(torch, name)

        def elsewhere(
            *args: object, constructor: Callable[..., torch.Tensor] = constructor, **options: object
        ) -> object:
            return constructor(*args, **options | {"device": "meta"}).to(torch.bfloat16)

        monkeypatch.setattr(torch, name, elsewhere)
    yield


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("name", CREATED)
def test_scripts_do_not_change_what_is_created(name: str) -> None:
    tensor = CREATED[name]()
    assert (tensor.device.type, tensor.dtype, tensor.shape) == ("cpu", torch.float32, (5,))
    assert tensor.data_ptr() != 0
    assert not tensor.requires_grad


def test_values() -> None:
    assert zeros(3, torch.int16).tolist() == [0, 0, 0]
    assert filled(3, 2.5, torch.bfloat16).tolist() == [2.5, 2.5, 2.5]
    assert empty(3, torch.uint8, "meta").device.type == "meta"
