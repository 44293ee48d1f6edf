# SPDX-License-Identifier: Apache-2.0
"""Modules with DeepSpeed's hooks on them: the weights that it gathers for each, and what torch's compiler keeps out of.

[Note: the compiler] In a compiled model dynamo traces hooks too, unless they are disabled for it, and whatever they
call: buffers, stores and the coordinator's tables, which other threads change between its guards and its code.
DeepSpeed disables some of its hooks and some methods of its coordinator. With TenCache all of DeepSpeed's hooks are
disabled, and they are what is called while a model is compiled; so are all of TenCache's but those on modules, and
what DeepSpeed calls where a weight is gathered at its use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params

_N_CONTEXTS = "tencache_n_user_gathers"

KEEPER = "tencache_kept_by"
"""Attribute of a parameter that stays gathered: the ``SuspendedHooks`` that keep it."""

Function = TypeVar("Function", bound=Callable[..., Any])


def is_leaf(module: Any) -> bool:
    """Whether DeepSpeed gathers a module and all that it consists of at once (``set_z3_leaf_modules``)."""
    return bool(module.__dict__.get("_z3_leaf", False))


def params_of(module: Any) -> dict[int, Any]:
    """The parameters that a fetch of a module is for, by id: DeepSpeed's ``iter_params``, at a tenth of its cost."""
    attributes = module.__dict__
    if is_leaf(module):
        return {param.ds_id: param for param in iter_params(module, recurse=True)}
    params = (*attributes["_parameters"].values(), *attributes["_external_params"].values())
    return {param.ds_id: param for param in params if param is not None}


def has_weights(module: Any) -> bool:
    """Whether :func:`params_of` a module that is no leaf has any."""
    attributes = module.__dict__
    if attributes["_external_params"]:
        return True
    # A loop: any() of a generator takes three times as long.
    for param in attributes["_parameters"].values():  # noqa: SIM110
        if param is not None:
            return True
    return False


def begin_user_gather(params: Iterable[Any]) -> None:
    """Parameters were gathered in a ``GatheredParameters``."""
    for param in params:
        setattr(param, _N_CONTEXTS, n_user_gathers(param) + 1)


def end_user_gather(params: Iterable[Any]) -> None:
    """That context is over."""
    for param in params:
        if n_user_gathers(param) > 1:
            setattr(param, _N_CONTEXTS, n_user_gathers(param) - 1)
        else:
            param.__dict__.pop(_N_CONTEXTS, None)


def n_user_gathers(param: Any) -> int:
    """How many ``GatheredParameters`` hold a parameter now."""
    return param.__dict__.get(_N_CONTEXTS, 0)


def is_free(param: Any) -> bool:
    """Whether no module, gather or user has a parameter now."""
    held = n_user_gathers(param) or param.ds_active_sub_modules
    return not held and param.ds_status is not ZeroParamStatus.INFLIGHT


def modules_wait_for(param: Any) -> bool:
    """Whether a parameter that stays gathered may get its new value behind the next forward pass: all modules that use
    it wait for that."""
    keeper = getattr(param, KEEPER, None)
    return keeper is not None and keeper.modules_wait_for(param)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a model, or one of its modules, is called through torch's compiler."""
    return any(each._compiled_call_impl is not None or "_orig_mod" in each._modules for each in module.modules())


def awaited_of(params: dict[int, Any]) -> list[int]:
    """The ids of those that are not gathered."""
    return [key for key, param in params.items() if param.ds_status is not ZeroParamStatus.AVAILABLE]


def shard_nbytes(param: Any) -> int:
    """Bytes of this rank's shard of a weight."""
    return int(param.ds_tensor.ds_numel) * param.ds_tensor.element_size()


def nbytes_by_id(params: Iterable[Any]) -> dict[int, int]:
    """:func:`shard_nbytes` of each."""
    return {param.ds_id: shard_nbytes(param) for param in params}


def uncompiled(function: Function) -> Function:
    """A function that the compiler neither traces nor looks into; a decorator too. It costs a microsecond a call, and
    does not import the compiler, as ``torch.compiler.disable`` would."""
    return cast(Function, cast(Any, torch)._disable_dynamo(function))  # which torch does not export
