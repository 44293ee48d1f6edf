# SPDX-License-Identifier: Apache-2.0
"""Properties of the optimizers that DeepSpeed may wrap: how they are updated and the states they keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from torch.optim import optimizer as torch_optimizer

from tencache_ds.tiers.sub_group import Kinds

_Groups = list[dict[str, Any]]
_KINDS: Mapping[type, Callable[[_Groups], tuple[str, ...]]] = {
    DeepSpeedCPUAdam: lambda groups: ("exp_avg", "exp_avg_sq"),
    DeepSpeedCPULion: lambda groups: ("exp_avg", "exp_avg_sq"),  # the second is created, and never used
    DeepSpeedCPUAdagrad: lambda groups: ("exp_avg_sq",),
    torch.optim.Adam: lambda groups: ("exp_avg", "exp_avg_sq", *_where(groups, "amsgrad", "max_exp_avg_sq")),
    torch.optim.AdamW: lambda groups: ("exp_avg", "exp_avg_sq", *_where(groups, "amsgrad", "max_exp_avg_sq")),
    torch.optim.NAdam: lambda groups: ("exp_avg", "exp_avg_sq"),
    torch.optim.RAdam: lambda groups: ("exp_avg", "exp_avg_sq"),
    torch.optim.Adamax: lambda groups: ("exp_avg", "exp_inf"),
    torch.optim.Adadelta: lambda groups: ("square_avg", "acc_delta"),
    torch.optim.Adagrad: lambda groups: ("sum",),
    torch.optim.ASGD: lambda groups: ("ax",),
    torch.optim.Rprop: lambda groups: ("prev", "step_size"),
    torch.optim.SGD: lambda groups: _where(groups, "momentum", "momentum_buffer"),
    torch.optim.RMSprop: lambda groups: (
        "square_avg",
        *_where(groups, "momentum", "momentum_buffer"),
        *_where(groups, "centered", "grad_avg"),
    ),
}


def known_kinds(optimizer: Any, master_dtype: torch.dtype) -> Kinds:
    """``(kind, dtype)`` of the states an optimizer is known to keep per element, besides the master weight.

    Of optimizers not listed they turn up at the first step; knowing them reserves their space at the start.
    """
    kinds_of = _KINDS.get(type(optimizer))
    kinds = kinds_of(optimizer.param_groups) if kinds_of is not None else ()
    in_fp32 = getattr(optimizer, "fp32_optimizer_states", False)
    return tuple((kind, torch.float32 if in_fp32 else master_dtype) for kind in kinds)


def step_is_watched(optimizer: Any) -> bool:
    """Whether something observes ``optimizer.step()``: a step hook, its own or a global one, or a replacement of
    ``step``.

    The function that an LR scheduler puts there only notes that ``step`` was called.
    """
    hooks = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    )
    step = optimizer.step
    while hasattr(step, "_wrapped_by_lr_sched"):
        step = step.__wrapped__
    return any(hooks) or getattr(step, "__func__", step) is not type(optimizer).step


def _where(groups: _Groups, option: str, kind: str) -> tuple[str, ...]:
    """``kind`` if an option of some parameter group asks for it."""
    return (kind,) if any(group.get(option) for group in groups) else ()
