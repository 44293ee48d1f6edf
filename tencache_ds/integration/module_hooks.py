# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's hooks that prepare a backward pass, in evaluation without gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

Hooks = MutableMapping[int, Callable[..., Any]]


def skip_backward_hooks_without_gradients(offload: Any) -> None:
    """In evaluation without gradients no backward pass will follow: the hooks that prepare one return at once.

    Args:
        offload: a ``DeepSpeedZeRoOffload`` with its hooks; those that it registers later are treated alike.
    """
    _wrap_backward_hooks(offload)
    register = offload._register_deepspeed_module

    @functools.wraps(register)
    def registered(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        register(module, *args, **kwargs)
        if module is offload.module:  # it calls itself for submodules
            _wrap_backward_hooks(offload)

    offload._register_deepspeed_module = registered


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
