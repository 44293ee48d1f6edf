# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's hooks that prepare a backward pass: skipped in evaluation without gradients, and cheaper in training."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

Hooks = MutableMapping[int, Callable[..., Any]]


def lighten_backward_hooks(offload: Any) -> None:
    """In evaluation without gradients no backward pass will follow: the hooks that prepare one return at once. In
    training, the signatures of their autograd functions are looked up once.

    Args:
        offload: a ``DeepSpeedZeRoOffload`` with its hooks; those that it registers later are treated alike.
    """
    _lighten(offload)
    register = offload._register_deepspeed_module

    @functools.wraps(register)
    def registered(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        register(module, *args, **kwargs)
        if module is offload.module:  # it calls itself for submodules
            _lighten(offload)

    offload._register_deepspeed_module = registered


def _lighten(offload: Any) -> None:
    _keep_signature(LinearFunctionForZeroStage3)
    for module in offload.module.modules():
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            if name in module.__dict__:
                _keep_signature(module.__dict__[name])
    _wrap_backward_hooks(offload)


def _keep_signature(function: type[torch.autograd.Function]) -> None:
    """``Function.apply`` inspects the signature of ``forward`` at each call, unless the latter has it as an attribute,
    as PEP 362 has it: 10 microseconds of 20."""
    forward: Any = function.forward
    if "__signature__" not in forward.__dict__:
        forward.__signature__ = inspect.signature(forward)


def _wrap_backward_hooks(offload: Any) -> None:
    for handle in offload.backward_hooks:
        hooks: Hooks | None = handle.hooks_dict_ref()
        hook = None if hooks is None else hooks.get(handle.id)
        if hooks is not None and hook is not None and not isinstance(hook, _WithGradients):
            hooks[handle.id] = _WithGradients(hook)


class _WithGradients:
    """A forward hook, or one before it, that is skipped where no backward pass can follow."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, module: torch.nn.Module, *args: Any) -> Any:
        # Reentrant checkpointing runs without gradients at first, in training mode.
        if not module.training and not torch.is_grad_enabled():
            return None
        return self._hook(module, *args)
