# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed and its optimizer add to a rank's memory: the part of :mod:`tencache_ds.planning.peak_memory` that is
read off a model's parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tencache_ds.config import TenCacheConfig
from tencache_ds.integration.hooked_modules import shard_nbytes
from tencache_ds.integration.model_weights import in_tier
from tencache_ds.integration.optimizer_states import known_kinds
from tencache_ds.memory.device_memory import DeviceMemory
from tencache_ds.placement.gpu_policy import limit_nbytes
from tencache_ds.placement.moves import Shard
from tencache_ds.planning.peak_memory import OutsideNeeds, OwnShard
from tencache_ds.tiers.optimizer_state import OptimizerStateTier

TEMPORARIES = 3
"""Tensors as long as the master weights that torch's own optimizers make in a step, beside the gradient."""


def outside_needs(
    module: torch.nn.Module,
    options: TenCacheConfig,
    *,
    pinned: bool,
    movable: Sequence[Shard] = (),
    memory: DeviceMemory | None = None,
    groups: Sequence[Sequence[Any]] = (),
    later_state: int = 0,
    update: int = 0,
) -> OutsideNeeds:
    """What is needed beside TenCache's tiers.

    Args:
        module: the model.
        options: of the user.
        pinned: DeepSpeed's ``pin_memory`` option, on a GPU.
        movable: the shards that may go to GPU memory.
        memory: of the compute device; None where nothing of TenCache's lives there.
        groups: the parameters of each sub-group.
        later_state: see :class:`OutsideNeeds`.
        update: see :class:`OutsideNeeds`.
    """
    updated = {param.ds_id for param in itertools.chain.from_iterable(groups)}
    params: Iterable[Any] = module.parameters()
    shards = [
        OwnShard(shard_nbytes(param), param.ds_id in updated)
        for param in params
        if not in_tier(param) and param.ds_tensor.device.type == "cpu"
    ]
    gpu_limit = None
    if memory is not None:
        usage = memory.usage()
        wanted = limit_nbytes(usage, options.gpu_memory)
        gpu_limit = usage.available_nbytes + usage.allocated_nbytes if wanted is None else wanted
    return OutsideNeeds(
        own_shards=shards,
        own_shards_pinned=pinned,
        later_state=later_state,
        update=update,
        gpu_weights=sum(shard.nbytes for shard in movable),
        gpu_limit=gpu_limit,
    )


def update_needs(
    optimizer: Any, state: OptimizerStateTier, numels: Sequence[int], *, in_chunks: int | None
) -> tuple[int, int]:
    """Host memory for states that an optimizer makes in its first step, and for an update, in bytes. States of an
    optimizer that is not known here are not foreseen.

    Args:
        optimizer: the torch optimizer.
        state: of it.
        numels: elements of each sub-group.
        in_chunks: what an update of one chunk needs, in chunks; None where it is updated a sub-group at a time.
    """
    if in_chunks is not None:
        return 0, in_chunks * max(state.chunk_nbytes, default=0)
    later, update = 0, 0
    for index, numel in enumerate(numels):
        dtype = state.dtype(index, state.kinds(index)[0])
        new = [dtype.itemsize for kind, dtype in known_kinds(optimizer, dtype) if kind not in state.kinds(index)]
        later += numel * sum(new)
        borrowed = 0 if state.whole(index) else sum(state.dtype(index, kind).itemsize for kind in state.kinds(index))
        update = max(update, numel * (borrowed + (1 + TEMPORARIES) * dtype.itemsize))
    return later, update
