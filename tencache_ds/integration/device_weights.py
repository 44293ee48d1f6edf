# SPDX-License-Identifier: Apache-2.0
"""Shards of a model's weights in device memory, and weights that stay gathered there.

DeepSpeed gathers from ``param.ds_tensor`` on any device. With its memory on the device there is nothing to copy; on one
rank the gathered weight is the shard itself, as in training without offload.

[Note: weights that stay gathered] On one rank the gathered weight is the shard itself, once that is in GPU memory.
DeepSpeed would still release and gather it in every pass, which costs more than a small module's arithmetic. So it is
marked as what DeepSpeed keeps gathered (``ds_persist``) as long as it is there, and modules all of whose weights are
there run without DeepSpeed's hooks (:class:`~tencache_ds.host_path.suspended_hooks.SuspendedHooks`). The optimizer
updates the shard, and so the gathered weight: unlike DeepSpeed's own persistent weights these are not gathered anew
after each step. On several ranks a gathered weight takes memory of its own, and is gathered in each pass from the
shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from tencache_ds.integration.hooked_modules import shard_nbytes
from tencache_ds.integration.model_weights import ModelWeights, home_in_tier, in_tier
from tencache_ds.placement.moves import Shard
from tencache_ds.placement.places import Place
from tencache_ds.tiers.weight_homes import Home


class DeviceWeights:
    """A :class:`tencache_ds.placement.moves.MovableWeights`. Used by the training thread, between two steps.

    Args:
        params: the model's parameters, each once.
        model_weights: where the optimizer writes them; None without an optimizer.
    """

    def __init__(self, params: Sequence[Any], model_weights: ModelWeights | None = None) -> None:
        self._params = {param.ds_id: param for param in params if _is_movable(param)}
        self._model_weights = model_weights
        self._own: dict[int, Home] = {}  # of DeepSpeed's own shards that are in device memory

    def shards(self) -> list[Shard]:
        """See :meth:`MovableWeights.shards`."""
        shards = []
        for key, param in self._params.items():
            stored = in_tier(param) and param.nvme_swapper.stored(param)
            shards.append(Shard(key, shard_nbytes(param), stored, in_tier(param) and not stored))
        return shards

    def to_device(self, key: int, memory: torch.Tensor) -> None:
        """See :meth:`MovableWeights.to_device`."""
        if self._model_weights is not None:
            self._model_weights.leaving(key)
        param = self._params[key]
        shard = memory.view(param.ds_tensor.dtype)
        if in_tier(param):
            param.nvme_swapper.to_device(param, shard)
            return
        if self._model_weights is not None:
            self._model_weights.part_from_flat(param)
        self._own[key] = home = Home(param.ds_tensor.data)
        home.to_device(shard)
        param.ds_tensor.data = shard

    def to_host(self, key: int) -> None:
        """See :meth:`MovableWeights.to_host`."""
        param = self._params[key]
        if in_tier(param):
            param.nvme_swapper.to_host(param)
            return
        home = self._own.pop(key)
        home.memory = param.ds_tensor.data  # DeepSpeed may have given it other memory
        home.leave_device()
        param.ds_tensor.data = home.memory

    def belongs_to_host(self, key: int) -> bool:
        """See :meth:`MovableWeights.belongs_to_host`."""
        home = self._home_of(key)
        return home is not None and home.place is Place.GPU and home.returns_to is Place.HOST

    def host_nbytes_of(self, keys: Iterable[int]) -> int:
        """See :meth:`MovableWeights.host_nbytes_of`."""
        homes = (self._home_of(key) for key in keys)
        return sum(home.missing_nbytes for home in homes if home is not None)

    def free_unused(self) -> int:
        """See :meth:`MovableWeights.free_unused`. The memory of DeepSpeed's own shards is never freed."""
        tiers = {param.nvme_swapper.engine.weights for param in self._params.values() if in_tier(param)}
        return sum(tier.free_unused() for tier in tiers)

    def _home_of(self, key: int) -> Home | None:
        """The home of a weight; None of one of DeepSpeed's own that is where DeepSpeed has put it."""
        param = self._params[key]
        return home_in_tier(param) if in_tier(param) else self._own.get(key)


def lies_on_device(param: Any) -> bool:
    """Whether DeepSpeed itself keeps a plain shard of it in device memory, and no second one or quantized values."""
    return _has_plain_shard(param) and not in_tier(param) and _on_device(param.ds_tensor)


def place_of(param: Any) -> Place:
    """Where the shard of a weight lives between two uses."""
    if in_tier(param):
        return home_in_tier(param).place
    return Place.GPU if _on_device(param.ds_tensor) else Place.HOST


def _is_movable(param: Any) -> bool:
    """Whether DeepSpeed keeps a plain shard of it off the device, and no second one or quantized values."""
    return _has_plain_shard(param) and (in_tier(param) or not _on_device(param.ds_tensor))


def _has_plain_shard(param: Any) -> bool:
    shard = getattr(param, "ds_tensor", None)
    if shard is None or hasattr(shard, "ds_quant_scale") or getattr(param, "ds_secondary_tensor", None) is not None:
        return False
    return in_tier(param) or shard.status is PartitionedParamStatus.AVAILABLE


def _on_device(shard: torch.Tensor) -> bool:
    """Without a device, host memory is none."""
    return not get_accelerator().is_synchronized_device() and bool(get_accelerator().on_accelerator(shard))


class GatheredWeights:
    """A :class:`tencache_ds.placement.moves.MovableWeights`; see [Note: weights that stay gathered]. Used by the
    thread that computes, between passes.

    Args:
        params: the model's parameters, each once.
        model_weights: where the optimizer writes them; None without an optimizer.
        may_stay: whether any may stay gathered.
    """

    def __init__(
        self, params: Sequence[Any], model_weights: ModelWeights | None = None, *, may_stay: bool = True
    ) -> None:
        self._params = {param.ds_id: param for param in params}
        self._weights = DeviceWeights(params, model_weights)
        self._single = dist.get_world_size() == 1
        self._stay = may_stay and self._single
        self._there: set[int] = set()
        self._version = 0

    @property
    def stay_gathered(self) -> bool:
        """Whether weights in GPU memory do."""
        return self._stay

    @property
    def version(self) -> int:
        """Another one whenever a weight has moved."""
        return self._version

    def stays(self, param: Any) -> bool:
        """Whether a parameter stays gathered: its shard is in GPU memory, moved there or by DeepSpeed itself."""
        return self._stay and (param.ds_id in self._there or lies_on_device(param))

    def shards(self) -> list[Shard]:
        """See :meth:`MovableWeights.shards`."""
        return self._weights.shards()

    def to_device(self, key: int, memory: torch.Tensor) -> None:
        """See :meth:`MovableWeights.to_device`."""
        if self._single:
            _release(self._params[key])  # a copy of the shard
        self._weights.to_device(key, memory)
        self._there.add(key)
        self._version += 1

    def to_host(self, key: int) -> None:
        """See :meth:`MovableWeights.to_host`."""
        if self._single:
            _release(self._params[key])
        self._weights.to_host(key)
        self._there.discard(key)
        self._version += 1

    def belongs_to_host(self, key: int) -> bool:
        """See :meth:`MovableWeights.belongs_to_host`."""
        return self._weights.belongs_to_host(key)

    def host_nbytes_of(self, keys: Iterable[int]) -> int:
        """See :meth:`MovableWeights.host_nbytes_of`."""
        return self._weights.host_nbytes_of(keys)

    def free_unused(self) -> int:
        """See :meth:`MovableWeights.free_unused`."""
        return self._weights.free_unused()


def _release(param: Any) -> None:
    if param.ds_status is ZeroParamStatus.AVAILABLE:
        param.partition()
