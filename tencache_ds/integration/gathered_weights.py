# SPDX-License-Identifier: Apache-2.0
"""Weights in GPU memory that stay gathered from pass to pass, on one rank.

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
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from tencache_ds.integration.device_weights import DeviceWeights, lies_on_device
from tencache_ds.integration.model_weights import ModelWeights
from tencache_ds.placement.weight_moves import Shard


class GatheredWeights:
    """A :class:`tencache_ds.placement.weight_moves.MovableWeights`; see [Note: weights that stay gathered]. Used by the
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
