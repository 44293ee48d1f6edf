# SPDX-License-Identifier: Apache-2.0
"""What torch's compiler keeps out of.

[Note: the compiler] In a compiled model dynamo traces hooks too, unless they are disabled for it, and whatever they
call: buffers, stores and the coordinator's tables, which other threads change between its guards and its code.
DeepSpeed disables some of its hooks and some methods of its coordinator. With TenCache all of DeepSpeed's hooks are
disabled, and they are what is called while a model is compiled; so are all of TenCache's but those on modules, and
what DeepSpeed calls where a weight is gathered at its use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """A function that the compiler neither traces nor looks into; a decorator too. It costs a microsecond a call, and
    does not import the compiler, as ``torch.compiler.disable`` would."""
    return cast(Function, torch._disable_dynamo(function))
