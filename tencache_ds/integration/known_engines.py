# SPDX-License-Identifier: Apache-2.0
"""The engines of this process. DeepSpeed's: one that takes idle GPU memory between its passes may take what another
one's next pass needs. TenCache's: which of them hold the weights of a model.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tencache_ds.integration.param_swapper import ParamSwapper
from tencache_ds.runtime.engine import TenCacheEngine

_engines: weakref.WeakSet[Any] = weakref.WeakSet()


def note(engine: Any) -> None:
    """A ``DeepSpeedEngine`` has been configured for ZeRO."""
    _engines.add(engine)


def beside(engine: Any) -> bool:
    """Whether there is another one. Those of stock DeepSpeed, which cannot be asked, count as long as they are
    referred to."""
    return any(other is not engine and not _is_destroyed(other) for other in _engines)


def _is_destroyed(engine: Any) -> bool:
    session = getattr(getattr(engine, "optimizer", None), "tencache", None)
    return session is not None and bool(session.closed)


def swappers_of(module: torch.nn.Module) -> dict[ParamSwapper, list[Any]]:
    """The swappers of a model's weights, each with its parameters: one per ``zero.Init`` context in which a part of the
    model was made.
    """
    by_swapper: dict[ParamSwapper, list[Any]] = {}
    for param in module.parameters():
        swapper = getattr(param, "nvme_swapper", None)
        if isinstance(swapper, ParamSwapper) and swapper.manages(param):
            by_swapper.setdefault(swapper, []).append(param)
    return by_swapper


def engines_for(module: torch.nn.Module) -> list[TenCacheEngine]:
    """The engines that hold a model's weights, ready to be claimed: where an unclaimed one also holds weights of other
    models (actor and critic created in one ``zero.Init`` context), this model's weights get their own engine. Weights
    whose parameters no longer exist are released.
    """
    engines = []
    for swapper, params in swappers_of(module).items():
        homes, mine = swapper.engine.weights.homes, {param.ds_id for param in params}
        part = swapper
        if homes.keys != mine and swapper.engine.claimant is None:
            swapper.drop_unused(homes.keys - mine)
            if homes.keys != mine:
                part = swapper.split(params)
        engines.append(part.engine)
    return engines
