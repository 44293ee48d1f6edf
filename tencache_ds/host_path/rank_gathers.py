# SPDX-License-Identifier: Apache-2.0
"""Gathers of weights on several ranks that the host does not wait for.

DeepSpeed copies shards to the device one by one with calls that return when the copy is over, so that meanwhile nothing
else is issued; and out of the memory in which it collects the shards of all ranks it copies each weight with operations
of its own. Here shards are copied straight into that memory with calls that return at once, and one operation takes all
weights out of it. The collectives are DeepSpeed's: all ranks gather the same weights, in the order of their ids.

Measured on two H100, 1.3 B parameters in RAM, phases synchronized, together with :mod:`.ordered_gathers`: forward 0.107
instead of 0.225 s, backward 0.165 instead of 0.290 s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from tencache_ds.integration.adapters.installed import calls
from tencache_ds.integration.chunked_step import wait_for_updates
from tencache_ds.tensors import empty


def gathered_here(params: Iterable[Any], *, least_ranks: int = 2) -> bool:
    """Whether these weights are plain shards: not quantized, without a second partition within a node, gathered in
    their own dtype, and each from ``least_ranks`` ranks or more. The same on every rank."""
    groups = {}
    for param in params:
        shard = param.ds_tensor
        if (
            param.ds_secondary_tensor is not None
            or param.ds_zero_param_process_group is not None
            or hasattr(shard, "ds_quant_scale")
            or calls.gather_dtype(param, shard) != shard.dtype
        ):
            return False
        groups[id(param.ds_process_group)] = param.ds_process_group
    return all(dist.get_world_size(group) >= least_ranks for group in groups.values())


def gather(params: Iterable[Any]) -> list[RankGather]:
    """Starts to gather weights that are partitioned, on the current stream: one collective for each process group and
    dtype. Until it is over their status is INFLIGHT.

    Args:
        params: those of which :func:`gathered_here` is true.

    Raises:
        TenCacheError: a shard cannot be read, or its update failed.
    """
    params = sorted(params, key=lambda param: param.ds_id)
    wait_for_updates(params)
    stored = [param for param in params if param.ds_tensor.status is PartitionedParamStatus.NOT_AVAILABLE]
    if stored:
        stored[0].nvme_swapper.swap_in(stored, async_op=False)
    alike: dict[tuple[int, torch.dtype], list[Any]] = {}
    for param in params:
        param.ds_status = ZeroParamStatus.INFLIGHT
        alike.setdefault((id(param.ds_process_group), param.ds_tensor.dtype), []).append(param)
    return [RankGather(each) for each in alike.values()]


def gather_at_once(params: Iterable[Any]) -> None:
    """Gathers weights, where DeepSpeed has a collective for each of them, if that is possible here. When it returns,
    the host may write their shards, and the current stream waits for the collectives.

    Args:
        params: partitioned or not.

    Raises:
        TenCacheError: a shard cannot be read, or its update failed.
    """
    partitioned = [param for param in params if param.ds_status is ZeroParamStatus.NOT_AVAILABLE]
    if not partitioned or not gathered_here(partitioned, least_ranks=1):
        return
    gathers = gather(partitioned)
    if not get_accelerator().is_synchronized_device():
        get_accelerator().current_stream().synchronize()  # it has copied shards, and not waited for other ranks
    for each in gathers:
        each.wait()


class RankGather:
    """A DeepSpeed handle of one collective. The constructor issues it, on the current stream.

    Args:
        params: whose shards have one dtype and one process group.

    Attributes:
        params: these.
        collected: 1-D, the shards of the first rank, then those of the next one, on the device; until it is finished.
    """

    def __init__(self, params: Sequence[Any]) -> None:
        self.params = tuple(params)
        group, shards = params[0].ds_process_group, [param.ds_tensor for param in params]
        self._n_ranks = dist.get_world_size(group)
        self._numels = [int(shard.ds_numel) for shard in shards]
        numel = sum(self._numels)
        device = get_accelerator().current_device_name()
        self.collected = empty(self._n_ranks * numel, shards[0].dtype, device)
        mine = self.collected.narrow(0, dist.get_rank(group) * numel, numel)
        for part, shard in zip(mine.split(self._numels), shards, strict=True):
            part.copy_(shard, non_blocking=True)
        self._work = None
        if self._n_ranks > 1:
            self._work = dist.allgather_fn(self.collected, mine, group=group, async_op=True)
        self._finished = False

    @property
    def is_over(self) -> bool:
        """Whether the weights have their values, so that :meth:`wait` does nothing."""
        return self._finished

    def finish(self) -> None:
        """The current stream waits for the collective, then the weights get their values; without streams the host
        waits. They keep their status. Once."""
        if self._work is not None:
            self._work.wait()
        collected, n_ranks = self.collected, self._n_ranks
        if len(self.params) == 1:
            whole = [collected]
        else:
            whole = [collected.new_empty(n_ranks * numel) for numel in self._numels]
            by_rank = [each.view(n_ranks, -1) for each in whole]
            torch.split_with_sizes_copy(collected.view(n_ranks, -1), self._numels, dim=1, out=by_rank)
        for param, values in zip(self.params, whole, strict=True):
            param.data = values.narrow(0, 0, param.ds_numel).view(param.ds_shape)
        self._finished = True
        del self.collected, self._work  # DeepSpeed may keep the handle until the last of the weights is needed

    def wait(self, **_: Any) -> None:
        """What DeepSpeed calls, for each of the weights: the first call finishes the gather."""
        if self._finished:
            return
        self.finish()
        for param in self.params:
            param.ds_status = ZeroParamStatus.AVAILABLE
