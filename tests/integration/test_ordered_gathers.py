# SPDX-License-Identifier: Apache-2.0
"""Gathers on one rank that streams wait for, and not the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import NoGatherCoalescedHandle, NoGatherHandle, ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry

from tencache_ds.integration import ordered_gathers
from tencache_ds.integration.ordered_gathers import OrderedGather, finish_after_forward, order_on_device

pytestmark = pytest.mark.timeout(400)


class Stream:
    def __init__(self) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of gathers and of arithmetic, and the one that is current."""
    streams = SimpleNamespace(gathers=Stream(), arithmetic=Stream())
    streams.current = streams.gathers
    device = SimpleNamespace(current_stream=lambda: streams.current)
    monkeypatch.setattr(ordered_gathers, "get_accelerator", lambda: device)
    return streams


def make_param(key: int) -> Any:
    param = torch.nn.Parameter(torch.ones(4))
    param.ds_id, param.ds_status, param.ds_shape = key, ZeroParamStatus.INFLIGHT, (4,)
    param.ds_tensor = torch.ones(4)
    return param


def in_flight(*handles: Any) -> InflightParamRegistry:
    registry = InflightParamRegistry()
    for params, handle in handles:
        for param in params:
            registry[param] = handle
    return registry


def test_a_stream_waits_for_the_one_of_the_copies(streams: SimpleNamespace) -> None:
    one, two, three = (make_param(key) for key in range(3))
    registry = in_flight(([one, two], NoGatherCoalescedHandle([one, two])), ([three], NoGatherHandle(three)))
    assert order_on_device(registry, {one, two, three}, streams.gathers)
    assert registry[one] is registry[two] is not registry[three]
    streams.current = streams.arithmetic
    registry[one].wait(handle_dependency=True)
    assert one.ds_status is two.ds_status is ZeroParamStatus.AVAILABLE
    assert three.ds_status is ZeroParamStatus.INFLIGHT
    assert streams.arithmetic.waited_for == [streams.gathers]
    streams.current = streams.gathers
    registry[three].wait()
    assert three.ds_status is ZeroParamStatus.AVAILABLE
    assert streams.gathers.waited_for == []


def test_a_gather_is_waited_for_once(streams: SimpleNamespace) -> None:
    param = make_param(1)
    gather = OrderedGather([param], streams.gathers)
    streams.current = streams.arithmetic
    gather.wait()
    param.ds_status = ZeroParamStatus.NOT_AVAILABLE  # released, and gathered again by someone else
    gather.wait()
    assert param.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert streams.arithmetic.waited_for == [streams.gathers]


def test_collectives_keep_their_handles(streams: SimpleNamespace) -> None:
    param, handle = make_param(1), object()
    registry = in_flight(([param], handle))
    assert not order_on_device(registry, [param, make_param(2)], streams.gathers)
    assert registry[param] is handle


def test_the_host_waits_after_a_forward_pass_that_fails() -> None:
    class Fails(torch.nn.Module):
        def forward(self) -> None:
            raise ValueError("no batch")

    module, finished = Fails(), []
    hook = finish_after_forward(module, lambda: finished.append(1))
    with pytest.raises(ValueError, match="no batch"):
        module()
    assert finished == [1]
    hook.remove()
    with pytest.raises(ValueError, match="no batch"):
        module()
    assert finished == [1]


IN_RAM = {"offload_param": "cpu", "offload_optimizer": "cpu", "tencache": {"gpu_memory": 0}}
ON_NVME = {"tencache": {"gpu_memory": 0, "host_memory": 0}}
CASES: dict[str, dict[str, Any]] = {
    f"{late}_{where}": {"model": model, "steps": 5, "late": late} | places
    for late in ("gathers", "arithmetic")
    for where, model, places in (("ram", "mlp", IN_RAM), ("nvme", "mlp", ON_NVME), ("llama", "llama", IN_RAM))
}
CASES["unordered"] = CASES["gathers_ram"] | {"unordered": True}


@pytest.fixture(scope="module")
def outcome(harness: Any) -> Any:
    cases = [(name, case, engine) for name, case in CASES.items() for engine in ("stock", "tencache")]
    return harness.run(cases, program="stream_cases.py", timeout_s=300)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CASES if name != "unordered"])
def test_streams_far_apart(outcome: Any, name: str) -> None:
    ours = outcome.result(name, "tencache")
    assert ours["losses"] == outcome.result(name, "stock")["losses"]
    assert len(set(ours["evaluated"])) == 1


@pytest.mark.gpu
def test_streams_without_order_are_noticed(outcome: Any) -> None:
    assert outcome.result("unordered", "tencache")["losses"] != outcome.result("unordered", "stock")["losses"]
