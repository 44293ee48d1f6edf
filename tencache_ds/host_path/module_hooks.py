# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's hooks on a module do, at a fraction of their time.

Four hooks on every module gather its weights and release them, in the forward and the backward pass. In training with
small batches and in generation they take several times as long as the rest of the Python, and longer than the copies:
most of it are profiler ranges, log messages that are formatted and not printed, inspected signatures and nested
contexts. The functions here take the places of these hooks, call the coordinator as they do, and leave everything out
of the ordinary to them: leaf modules, the compiler, function transforms, weights among a module's outputs, several
inputs or outputs.

Measured on one core of a CPU, 24 layers of hidden size 64: forward and backward take 62 ms, with DeepSpeed's hooks 84.

[Note: modules without weights] There is nothing to gather or release for them, and of a Transformer layer's modules a
third are such. They are left out of DeepSpeed's order of modules, on every rank alike. Only where some weights are
frozen they stay: when a block is recomputed, DeepSpeed gathers its frozen weights again, and releases them when the
block, which may have no weights of its own, is through backward. They stay too where weights are on NVMe: the reads
of those that come next go on at every module.

[Note: the order of sums] Where a tensor is used several times, autograd adds the gradients of its uses in an order that
follows from the graph, and 16-bit sums depend on it. DeepSpeed's hooks add a node for each tensor that enters or leaves
a module. The uses of an input within a module are summed at its node first, and then added to the others, such as that
of a residual connection. So wherever gradients are computed, these nodes stay, also on modules that have nothing to
gather or release.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from deepspeed.runtime.zero.utils import apply_to_tensors_only

from tencache_ds.integration.hooked_modules import is_leaf, uncompiled

Hook = Callable[..., Any]
Hooks = MutableMapping[int, Hook]

_ORIGINAL = "tencache_original"
"""Attribute of a function here: DeepSpeed's hook whose place it has taken."""

_is_compiling = torch.compiler.is_compiling
_no_grad = torch.no_grad
_transforms = torch._C._are_functorch_transforms_active


def lighten_hooks(offload: Any) -> None:
    """Replaces the hooks of a model.

    Args:
        offload: a ``DeepSpeedZeRoOffload`` with its hooks and a coordinator of TenCache's; hooks that it registers
            later are treated alike.
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
    _replace(offload)


def _keep_signature(function: type[torch.autograd.Function]) -> None:
    """``Function.apply`` inspects the signature of ``forward`` at each call, unless the latter has it as an attribute,
    as PEP 362 has it: 10 microseconds of 20."""
    forward: Any = function.forward
    if "__signature__" not in forward.__dict__:
        forward.__signature__ = inspect.signature(forward)


def _replace(offload: Any) -> None:
    modules = list(offload.module.modules())
    before = {id(module._forward_pre_hooks): module for module in modules}
    after = {id(module._forward_hooks): module for module in modules}
    for handles, build_before, build_after in (
        (offload.forward_hooks, _gather_for_forward, _release_after_forward),
        (offload.backward_hooks, _release_after_backward, _gather_for_backward),
    ):
        for handle in handles:
            hooks: Hooks | None = handle.hooks_dict_ref()
            if hooks is None or handle.id not in hooks or hasattr(hooks[handle.id], _ORIGINAL):
                continue
            build = build_before if id(hooks) in before else build_after
            module = before.get(id(hooks)) or after.get(id(hooks))
            if module is None:
                continue
            original = hooks[handle.id]
            hook = build(module, uncompiled(original), offload.get_param_coordinator())
            setattr(hook, _ORIGINAL, original)
            hooks[handle.id] = hook


# The hooks are functions, which copy.deepcopy(model) does not copy: an object would take the coordinator along.


def _gather_for_forward(module: torch.nn.Module, original: Hook, coordinator: Any) -> Hook:
    if is_leaf(module):
        return original
    modules_in_forward = parameter_offload.FWD_MODULE_STACK

    def gather_for_forward(module: torch.nn.Module, *args: Any) -> Any:
        if _is_compiling():
            return original(module, *args)
        modules_in_forward.append(module)
        if not coordinator.passes_over(module):
            with _no_grad():
                coordinator.begin_module(module, forward=True)
        return None

    return gather_for_forward


def _release_after_forward(module: torch.nn.Module, original: Hook, coordinator: Any) -> Hook:
    if is_leaf(module):
        return original
    modules_in_forward = parameter_offload.FWD_MODULE_STACK

    def release_after_forward(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if _is_compiling() or not _without_weights(output):
            return original(module, inputs, output)
        modules_in_forward.pop()
        if not coordinator.passes_over(module):
            with _no_grad():
                coordinator.release_sub_module(module, forward=True)
        return None

    return release_after_forward


def _gather_for_backward(module: torch.nn.Module, original: Hook, coordinator: Any) -> Hook:
    def begin() -> None:
        attributes = module.__dict__
        if attributes["applied_pre_backward_ref_cnt"] > 0:
            with _no_grad():
                coordinator.begin_module(module, forward=False)
            attributes["applied_pre_backward_ref_cnt"] -= 1

    left_to_deepspeed = is_leaf(module)

    def gather_for_backward(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        # Reentrant checkpointing runs without gradients at first, in training mode.
        if not module.training and not torch.is_grad_enabled():
            return None
        if left_to_deepspeed or _is_compiling() or _transforms():
            return original(module, inputs, output)
        if coordinator.passes_over(module):
            return unchanged(output)
        if not _is_plain_tensor(output):
            return original(module, inputs, output)
        attributes = module.__dict__
        attributes["applied_pre_backward_ref_cnt"] = attributes.get("applied_pre_backward_ref_cnt", 0) + 1
        return _in_backward(begin, output)

    return gather_for_backward


def _release_after_backward(module: torch.nn.Module, original: Hook, coordinator: Any) -> Hook:
    def end() -> None:
        attributes = module.__dict__
        attributes["ds_grads_remaining"] -= 1
        if attributes["ds_grads_remaining"] == 0:
            with _no_grad():
                coordinator.release_sub_module(module, forward=False)

    left_to_deepspeed = is_leaf(module)

    def release_after_backward(module: torch.nn.Module, inputs: Any) -> Any:
        if not module.training and not torch.is_grad_enabled():
            return None
        if left_to_deepspeed or _is_compiling() or _transforms():
            return original(module, inputs)
        if coordinator.passes_over(module):
            return unchanged(inputs)
        if len(inputs) != 1 or not _is_plain_tensor(inputs[0]):
            return original(module, inputs)
        module.__dict__["ds_grads_remaining"] = int(inputs[0].requires_grad)
        return (_in_backward(end, inputs[0]),) if inputs[0].requires_grad else None

    return release_after_backward


def unchanged(value: Any) -> Any:
    """What enters or leaves a module, with the nodes of [Note: the order of sums], for modules with nothing to gather.

    Args:
        value: the positional inputs, or the output.

    Returns:
        The same, for a hook to return; None where gradients are off.
    """
    if not torch.is_grad_enabled():
        return None
    node = _with_view if _is_compiling() else _with_node
    return node(value) if _is_plain_tensor(value) else apply_to_tensors_only(node, value)


def _with_node(value: torch.Tensor) -> torch.Tensor:
    return _in_backward(_nothing, value) if value.requires_grad else value


def _with_view(value: torch.Tensor) -> torch.Tensor:
    """A node that the compiler can trace."""
    return value.view_as(value) if value.requires_grad else value


def _nothing() -> None:
    pass


def _is_plain_tensor(value: Any) -> bool:
    """Whether it is a tensor and no weight, nor made of one."""
    return isinstance(value, torch.Tensor) and not hasattr(value, "ds_id") and not hasattr(value, "ds_param_alias")


def _without_weights(output: Any) -> bool:
    """Whether there is certainly no weight in a module's output, as far as DeepSpeed would look for one."""
    if type(output) in (tuple, list):
        return all(item is None or _is_plain_tensor(item) for item in output)
    return output is None or _is_plain_tensor(output)


class _CallInBackward(torch.autograd.Function):
    """The identity, with a call when its gradient is computed. With a context in ``forward``, because with a separate
    one each ``apply`` binds the arguments of the other to their names."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], value: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.call()
        return None, grad


_in_backward: Callable[[Callable[[], None], torch.Tensor], torch.Tensor] = _CallInBackward.apply
