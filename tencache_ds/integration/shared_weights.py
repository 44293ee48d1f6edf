# SPDX-License-Identifier: Apache-2.0
"""Rejoins split master weights before their weight changes or leaves host memory.
See [Note: whose bits a master weight shares] in :mod:`tencache_ds.tiers.split_master`.

DeepSpeed changes weights in three ways. The optimizer's step writes the chunks itself. Loading a checkpoint replaces
master weights first. Everything else, ``load_state_dict`` too, gathers a weight, changes it and has it partitioned as
updated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from tencache_ds.integration.model_weights import ModelWeights
from tencache_ds.planning.chunks import Chunk
from tencache_ds.tiers.optimizer_state import OptimizerStateTier

_ATTRIBUTE = "tencache_shared_weights"


def gathered(params: Iterable[Any]) -> None:
    """Parameters were gathered for a user, who may change them; :func:`released` has to follow."""
    for param in params:
        shared = getattr(param, _ATTRIBUTE, None)
        if shared is not None:
            shared.gathered(param)


def released(params: Iterable[Any]) -> None:
    """The user has done with gathered parameters, which are partitioned again.

    Raises:
        StorageError, SpaceError: master weights could not be rewritten.
    """
    by_owner: dict[SharedWeights, list[Any]] = {}
    for param in params:
        shared = getattr(param, _ATTRIBUTE, None)
        if shared is not None:
            by_owner.setdefault(shared, []).append(param)
    for shared, mine in by_owner.items():
        shared.released(mine)


def overwriting(param: Any) -> contextlib.AbstractContextManager[None]:
    """Around DeepSpeed's partitioning of a gathered parameter that was changed."""
    shared = getattr(param, _ATTRIBUTE, None)
    return contextlib.nullcontext() if shared is None else shared.overwriting(param)


class SharedWeights:
    """The weights of one DeepSpeed engine: a :class:`~tencache_ds.tiers.split_master.RoundedWeights`. Used by the
    training thread, and by that of an update under way.

    Args:
        groups: the parameters of each sub-group.
        weights: where they are.
        finish_step: returns when no update is under way.

    Attributes:
        state: the optimizer's state, once it is there.
    """

    def __init__(self, groups: Sequence[Sequence[Any]], weights: ModelWeights, finish_step: Callable[[], None]) -> None:
        self.state: OptimizerStateTier | None = None
        self._groups = groups
        self._weights = weights
        self._finish_step = finish_step
        self._former: dict[int, torch.Tensor] = {}
        weights.leaving = lambda key: self._join({key})
        for group in groups:
            for param in group:
                setattr(param, _ATTRIBUTE, self)

    def close(self) -> None:
        """The engine ends: nothing is stored as the difference to its weights any more. Idempotent."""
        self.state = None
        self._former.clear()
        for group in self._groups:
            for param in group:
                if param.__dict__.get(_ATTRIBUTE) is self:
                    delattr(param, _ATTRIBUTE)

    # RoundedWeights

    def rounded(self, chunk: Chunk) -> list[tuple[int, torch.Tensor]] | None:
        """See :meth:`RoundedWeights.rounded`."""
        return self._weights.bfloat16_in_host_memory(chunk, self._former)

    def being_changed(self, chunk: Chunk) -> bool:
        """See :meth:`RoundedWeights.being_changed`."""
        return bool(self._former) and not self._former.keys().isdisjoint(self._weights.keys_of(chunk))

    # Changes by others

    def gathered(self, param: Any) -> None:
        """See :func:`gathered`. Where a gathered weight is the shard itself, as on one rank without a device, its value
        is kept until :meth:`released`; elsewhere the shard stays as it is until the weight is partitioned."""
        shard = self._weights.shard_in_host_memory(param)
        if shard is not None and param.data.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr():
            self._finish_step()
            self._former[param.ds_id] = shard.clone()

    def released(self, params: Sequence[Any]) -> None:
        """See :func:`released`."""
        kept = [param for param in params if param.ds_id in self._former]
        changed = {param.ds_id for param in kept if not self._is_as_before(param)}
        try:
            self._join(changed)
        finally:
            for param in kept:
                self._former.pop(param.ds_id, None)

    @contextlib.contextmanager
    def overwriting(self, param: Any) -> Iterator[None]:
        """See :func:`overwriting`."""
        shard = self._weights.shard_in_host_memory(param)
        if shard is None or param.ds_id in self._former or param.ds_status is not ZeroParamStatus.AVAILABLE:
            yield
            return
        self._finish_step()
        self._former[param.ds_id] = shard.clone()
        try:
            yield
        finally:
            self.released([param])

    def _is_as_before(self, param: Any) -> bool:
        shard, former = self._weights.shard_in_host_memory(param), self._former[param.ds_id]
        return shard is not None and torch.equal(shard.view(torch.uint8), former.view(torch.uint8))

    def _join(self, keys: set[int]) -> None:
        """Has master weights stored whole that are the difference to some weights."""
        if not keys or self.state is None:
            return
        self._finish_step()
        for sub_group in sorted({index for key in keys if (index := self._weights.sub_group_of(key)) is not None}):
            chunks = self.state.chunks(sub_group)
            self.state.join(chunk for chunk in chunks if not keys.isdisjoint(self._weights.keys_of(chunk)))
