# SPDX-License-Identifier: Apache-2.0
"""Gathers on several ranks: the values that DeepSpeed's give, and which weights are left to it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from tencache_ds.host_path import gathers
from tencache_ds.host_path.gathers import gather, gather_at_once, gathered_here

pytestmark = pytest.mark.timeout(120)
N_RANKS = 3


class Work:
    """A collective, which is over when someone has waited for it."""

    def __init__(self, complete: Callable[[], None]) -> None:
        self._complete = complete
        self.n_waits = 0

    def wait(self) -> None:
        self.n_waits += 1
        self._complete()


class Group:
    """A process group in which every rank's shard of a weight holds the weight's id, the rank, and a number."""

    def __init__(self, rank: int, n_ranks: int = N_RANKS) -> None:
        self.rank, self.n_ranks = rank, n_ranks
        self.issued: list[Work] = []

    def all_gather(self, collected: torch.Tensor, mine: torch.Tensor) -> Work:
        by_rank = collected.view(self.n_ranks, -1)
        assert mine.data_ptr() == by_rank[self.rank].data_ptr(), "in place"
        sent = mine.clone()

        def complete() -> None:
            for rank in range(self.n_ranks):
                by_rank[rank] = sent + 100 * (rank - self.rank)

        self.issued.append(Work(complete))
        return self.issued[-1]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    group = Group(rank=1)
    monkeypatch.setattr(
        gathers,
        "dist",
        SimpleNamespace(
            get_world_size=lambda group: group.n_ranks,
            get_rank=lambda group: group.rank,
            allgather_fn=lambda collected, mine, group, async_op: group.all_gather(collected, mine),
        ),
    )
    return group


def make_param(key: int, shape: tuple[int, ...], group: Group, dtype: torch.dtype = torch.float32) -> Any:
    """Partitioned; its last shard is padded."""
    param = torch.nn.Parameter(torch.empty(0, dtype=dtype))
    numel = torch.Size(shape).numel()
    shard = -(-numel // group.n_ranks)
    param.ds_id, param.ds_shape, param.ds_numel, param.ds_status = key, shape, numel, ZeroParamStatus.NOT_AVAILABLE
    param.ds_process_group, param.ds_secondary_tensor, param.ds_zero_param_process_group = group, None, None
    param.ds_tensor = (torch.arange(shard) + 1000 * key + 100 * group.rank).to(dtype)
    param.ds_tensor.ds_numel, param.ds_tensor.status = shard, PartitionedParamStatus.AVAILABLE
    return param


def value_of(key: int, shape: tuple[int, ...], n_ranks: int = N_RANKS) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    shard = -(-numel // n_ranks)
    shards = [torch.arange(shard) + 1000 * key + 100 * rank for rank in range(n_ranks)]
    return torch.cat(shards)[:numel].view(shape)


SHAPES: dict[int, tuple[int, ...]] = {3: (2, 3), 1: (7,), 2: (1,), 5: (4, 4)}


def test_all_weights_get_their_values_from_one_collective(group: Group) -> None:
    params = {key: make_param(key, shape, group) for key, shape in SHAPES.items()}
    (handle,) = gather(params.values())
    assert [param.ds_id for param in handle.params] == sorted(SHAPES), "the same order on every rank"
    assert all(param.ds_status is ZeroParamStatus.INFLIGHT for param in params.values())
    for _ in params:  # as DeepSpeed does, for each of them
        handle.wait(handle_dependency=True)
    assert [work.n_waits for work in group.issued] == [1]
    for key, param in params.items():
        assert param.ds_status is ZeroParamStatus.AVAILABLE
        torch.testing.assert_close(param.data, value_of(key, SHAPES[key]).float(), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(2, 3), (7,), ()])
def test_one_weight(group: Group, shape: tuple[int, ...]) -> None:
    param = make_param(4, shape, group)
    (handle,) = gather([param])
    handle.wait()
    torch.testing.assert_close(param.data, value_of(4, shape).float(), rtol=0, atol=0)


def test_each_group_and_dtype_has_a_collective(group: Group) -> None:
    other = Group(rank=0, n_ranks=2)
    params = [
        make_param(1, (6,), group),
        make_param(2, (6,), group, torch.float64),
        make_param(3, (6,), other),
        make_param(4, (6,), group),
    ]
    handles = gather(reversed(params))
    assert [[param.ds_id for param in handle.params] for handle in handles] == [[1, 4], [2], [3]]
    for handle in handles:
        handle.wait()
    for param in params:
        expected = value_of(param.ds_id, (6,), param.ds_process_group.n_ranks).to(param.dtype)
        torch.testing.assert_close(param.data, expected, rtol=0, atol=0)


def test_a_finished_gather_leaves_the_status(group: Group) -> None:
    param = make_param(1, (6,), group)
    (handle,) = gather([param])
    handle.finish()
    assert param.ds_status is ZeroParamStatus.INFLIGHT
    handle.wait()
    assert param.ds_status is ZeroParamStatus.INFLIGHT, "whoever finished it has the handle"


@pytest.mark.parametrize("n_ranks", [1, N_RANKS])
def test_weights_are_gathered_at_once(group: Group, n_ranks: int) -> None:
    group.rank, group.n_ranks = n_ranks - 1, n_ranks
    params = {key: make_param(key, shape, group) for key, shape in SHAPES.items()}
    there = params[1]
    there.data, there.ds_status = torch.zeros(7), ZeroParamStatus.AVAILABLE
    gather_at_once(params.values())
    assert len(group.issued) == (n_ranks > 1)
    torch.testing.assert_close(there.data, torch.zeros(7), rtol=0, atol=0)
    for key in params.keys() - {1}:
        assert params[key].ds_status is ZeroParamStatus.AVAILABLE
        expected = value_of(key, SHAPES[key], n_ranks).float()
        torch.testing.assert_close(params[key].data, expected, rtol=0, atol=0)
        assert params[key].untyped_storage().nbytes() < 4 * (expected.numel() + n_ranks), "memory of its own"
    gather_at_once(params.values())
    assert len(group.issued) == (n_ranks > 1)


def test_what_cannot_be_gathered_here_is_left_alone(group: Group) -> None:
    param = make_param(1, (6,), group)
    param.ds_secondary_tensor = torch.ones(2)
    gather_at_once([param])
    assert param.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert not group.issued


def test_shards_on_nvme_are_read_first(group: Group) -> None:
    read = []
    param = make_param(1, (6,), group)
    shard, param.ds_tensor.data = param.ds_tensor.data.clone(), torch.empty(0)
    param.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE

    def swap_in(params: list[Any], async_op: bool) -> None:
        read.extend(params)
        param.ds_tensor.data = shard

    param.nvme_swapper = SimpleNamespace(swap_in=swap_in)
    (handle,) = gather([param, make_param(2, (6,), group)])
    handle.wait()
    assert read == [param]
    torch.testing.assert_close(param.data, value_of(1, (6,)).float(), rtol=0, atol=0)


def test_what_is_left_to_deepspeed(group: Group) -> None:
    plain = make_param(1, (6,), group)
    assert gathered_here([plain])
    quantized = make_param(2, (6,), group)
    quantized.ds_tensor.ds_quant_scale = torch.ones(1)
    secondary = make_param(3, (6,), group)
    secondary.ds_secondary_tensor = torch.ones(2)
    within_node = make_param(4, (6,), group)
    within_node.ds_zero_param_process_group = object()
    autocast = make_param(5, (6,), group)
    autocast.comm_dtype = torch.bfloat16
    alone = make_param(6, (6,), Group(rank=0, n_ranks=1))
    for param in (quantized, secondary, within_node, autocast, alone):
        assert not gathered_here([plain, param]), param.ds_id
