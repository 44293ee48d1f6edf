# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's hooks on the modules of a model, where they have nothing to do.

Four hooks on every module gather its weights, release them, and prepare the backward pass. In generation, where the
arithmetic of a module may take ten microseconds, they take several times as long as everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR, ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import z3_leaf_module

Hooks = MutableMapping[int, Callable[..., Any]]

BEFORE_RELEASE = "tencache_before_release"
"""Attribute of a parameter: called with it before DeepSpeed releases its gathered value."""


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


class SuspendedHooks:
    """DeepSpeed's hooks of modules whose weights stay gathered, taken off until one of these weights is released.

    Used by the thread that computes. Hooks are taken off between passes. They may be put back within a pass, on modules
    that are not being executed: only modules without weights or without submodules are suspended, and none with weights
    is being executed while another one begins.

    Args:
        offload: a ``DeepSpeedZeRoOffload``, whose hooks.
        relieve: called at the start of each block (child of a ``ModuleList``) within a pass, to which DeepSpeed's hooks
            no longer lead.
    """

    def __init__(self, offload: Any, relieve: Callable[[], None]) -> None:
        self._offload = offload
        self._suspended: dict[torch.nn.Module, list[_Taken]] = {}
        self._params: dict[int, tuple[Any, list[torch.nn.Module]]] = {}  # by id; with the modules that use them
        self._registered: list[Any] = []  # the handles that were looked at last
        self._resumed = False
        self._relief = [
            block.register_forward_pre_hook(lambda *_: relieve())
            for blocks in offload.module.modules()
            if isinstance(blocks, torch.nn.ModuleList)
            for block in blocks
        ]

    @property
    def up_to_date(self) -> bool:
        """Whether nothing has changed since :meth:`suspend`: some libraries remove DeepSpeed's hooks for a generation
        and register new ones, and whoever releases a weight puts its hooks back."""
        return not self._resumed and self._registered == self._offload.forward_hooks

    def suspend(self) -> None:
        """Takes the hooks off all modules whose weights DeepSpeed keeps gathered, and gathers those. Between passes."""
        offload = self._offload
        self._put_back(list(self._suspended))
        self._resumed = False
        self._registered = list(offload.forward_hooks)
        modules = {module: None for module in offload.module.modules() if self._may_be_suspended(module)}
        by_hooks = {id(hooks): module for module in modules for hooks in _hook_dicts(module)}
        orders = {key: list(hooks) for module in modules for hooks in _hook_dicts(module) for key in [id(hooks)]}
        for handle in (*offload.forward_hooks, *offload.backward_hooks):
            hooks: Hooks | None = handle.hooks_dict_ref()
            module = by_hooks.get(id(hooks))
            if hooks is not None and module is not None and handle.id in hooks:
                taken = _Taken(hooks, handle.id, hooks.pop(handle.id), orders[id(hooks)])
                self._suspended.setdefault(module, []).append(taken)
        for module in self._suspended:
            for param in _params_of(module):
                self._params.setdefault(param.ds_id, (param, []))[1].append(module)
        missing = [param for param, _ in self._params.values() if param.ds_status is ZeroParamStatus.NOT_AVAILABLE]
        if missing:
            missing[0].all_gather(param_list=missing)
        for param, _ in self._params.values():
            setattr(param, BEFORE_RELEASE, self._resume)
        self._forget_order()

    def close(self) -> None:
        """Puts all hooks back. Idempotent."""
        for handle in self._relief:
            handle.remove()
        self._put_back(list(self._suspended))

    def _may_be_suspended(self, module: torch.nn.Module) -> bool:
        if module is self._offload.module:
            return False
        params = _params_of(module)
        if params and any(True for _ in module.children()):
            return False
        return all(param.ds_persist and is_free(param) for param in params)

    def _resume(self, param: Any) -> None:
        """A weight is about to be released."""
        _, modules = self._params.get(param.ds_id, (param, []))
        self._put_back(modules)

    def _put_back(self, modules: Iterable[torch.nn.Module]) -> None:
        current = {handle.id for handle in (*self._offload.forward_hooks, *self._offload.backward_hooks)}
        for module in modules:
            for taken in self._suspended.pop(module, ()):
                if taken.number in current:  # else it was removed meanwhile
                    taken.put_back()
                    self._resumed = True
            for param in _params_of(module):
                if param.ds_id in self._params:
                    del self._params[param.ds_id]
                    delattr(param, BEFORE_RELEASE)
        if self._resumed:
            self._forget_order()

    def _forget_order(self) -> None:
        """DeepSpeed's order of modules is another one now: it records it anew."""
        coordinator = self._offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()


@dataclass(frozen=True, slots=True)
class _Taken:
    """A hook that was taken off.

    Attributes:
        hooks: the module's, of this kind.
        number: of the hook among them.
        hook: what is called.
        order: the numbers of all of them, before any was taken off.
    """

    hooks: Hooks
    number: int
    hook: Callable[..., Any]
    order: Sequence[int]

    def put_back(self) -> None:
        """Where it was among the others; those that came later stay behind it."""
        present = dict(self.hooks) | {self.number: self.hook}
        ordered = [number for number in self.order if number in present]
        ordered += [number for number in present if number not in set(self.order)]
        self.hooks.clear()
        self.hooks.update((number, present[number]) for number in ordered)


def _hook_dicts(module: torch.nn.Module) -> tuple[Hooks, Hooks]:
    return module._forward_pre_hooks, module._forward_hooks


def _params_of(module: torch.nn.Module) -> list[Any]:
    """The parameters that DeepSpeed's hooks on a module gather."""
    return list(iter_params(module, recurse=z3_leaf_module(module)))


def is_free(param: Any) -> bool:
    """Whether no module, gather or user has a parameter now."""
    held = getattr(param, DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR, 0) or param.ds_active_sub_modules
    return not held and param.ds_status is not ZeroParamStatus.INFLIGHT
