# SPDX-License-Identifier: Apache-2.0
"""When a staging buffer may go back: after the copy to the device was issued, and behind it, on its stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from tencache_ds.errors import TenCacheError
from tencache_ds.integration import param_swapper
from tencache_ds.integration.coordinator import TenCacheCoordinator
from tencache_ds.integration.param_swapper import ParamSwapper


class Event:
    """What was issued on a stream when it was recorded."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.after: list[str] = []
        self.stream = ""

    def record(self, stream: str) -> None:
        self.stream = stream
        self.after = list(self._device.issued.get(stream, []))


class Device:
    """An accelerator whose streams are names, for which a copy is done some time after it was issued."""

    def __init__(self) -> None:
        self.stream = "gathers"
        self.issued: dict[str, list[str]] = {}

    def is_synchronized_device(self) -> bool:
        return False

    def current_stream(self) -> str:
        return self.stream

    def Event(self) -> Event:
        return Event(self)


def make_engine(weights: Weights) -> Any:
    return SimpleNamespace(closed=False, close=lambda: None, weights=weights)


class Weights:
    """A weight tier that notes what is given back."""

    def __init__(self) -> None:
        self.given_back: dict[int, Event | None] = {}

    def expose(self, keys: list[int]) -> list[torch.Tensor]:
        return [torch.ones(4) for _ in keys]

    def staged_for_gpu(self, key: int) -> bool:
        return False

    def give_back(self, key: int, event: Event | None = None, *, keep: bool = False) -> None:
        self.given_back[key] = event


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(param_swapper, "get_accelerator", lambda: device)
    return device


def make_param(key: int) -> Any:
    param = torch.nn.Parameter(torch.empty(0))
    param.ds_id, param.ds_status = key, ZeroParamStatus.NOT_AVAILABLE
    param.ds_shape = torch.Size([4])
    param.ds_tensor = torch.empty(0)
    param.ds_tensor.ds_numel = 4
    param.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE
    return param


def test_a_buffer_waits_until_the_copy_of_another_thread_was_issued(device: Device) -> None:
    """Two autograd threads: one has set INFLIGHT and has not copied yet, the other ends its own fetch."""
    weights = Weights()
    swapper = ParamSwapper(make_engine(weights), torch.float32, 0)
    registry: dict[Any, object] = {}
    coordinator = SimpleNamespace(_PartitionedParameterCoordinator__inflight_param_registry=registry)

    def end_of_a_fetch() -> None:
        swapper.retire(lambda param: TenCacheCoordinator._issued(coordinator, param), lambda key: False)

    param = make_param(1)
    swapper.commit([param])
    end_of_a_fetch()
    assert weights.given_back == {}
    param.ds_status = ZeroParamStatus.INFLIGHT
    end_of_a_fetch()
    assert weights.given_back == {}
    assert torch.equal(param.ds_tensor, torch.ones(4))  # it is still to be copied from
    device.issued["gathers"] = ["copy of 1"]
    registry[param] = object()
    end_of_a_fetch()
    with pytest.raises(TenCacheError, match="its shard is on NVMe"):
        param.ds_tensor.isnan()
    event = weights.given_back[1]
    assert event is not None
    assert event.after == ["copy of 1"]


def test_a_buffer_waits_for_the_stream_on_which_it_is_copied(device: Device) -> None:
    """A weight gathered by its user is copied on the user's stream, not on the one of DeepSpeed's fetches."""
    weights = Weights()
    swapper = ParamSwapper(make_engine(weights), torch.float32, 0)
    fetched, gathered = make_param(1), make_param(2)
    swapper.commit([fetched])
    device.stream = "the user's"
    swapper.commit([gathered])
    device.issued = {"gathers": ["copy of 1"], "the user's": ["copy of 2"]}
    for param in (fetched, gathered):
        param.ds_status = ZeroParamStatus.AVAILABLE
    swapper.retire(lambda param: True, lambda key: False)
    assert {key: event.after for key, event in weights.given_back.items() if event} == {
        1: ["copy of 1"],
        2: ["copy of 2"],
    }
