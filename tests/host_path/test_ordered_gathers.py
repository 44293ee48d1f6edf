# SPDX-License-Identifier: Apache-2.0
"""Gathers that streams wait for, and not the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import NoGatherCoalescedHandle, NoGatherHandle, ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry

from tencache_ds.host_path import gathers as gathers_module
from tencache_ds.host_path.gathers import FETCHES_AHEAD, OrderedGathers, finish_after_forward
from tencache_ds.integration.model_weights import ModelWeights
from tencache_ds.observability.counters import Counters
from tencache_ds.planning.chunks import Chunk

pytestmark = pytest.mark.timeout(400)


class Event:
    """Event of a device on which nothing is over before the host waits for it."""

    def __init__(self) -> None:
        self.synchronized = False

    def record(self, stream: Any) -> None:
        self.recorded_on = stream

    def query(self) -> bool:
        return self.synchronized

    def synchronize(self) -> None:
        self.synchronized = True


class Stream:
    def __init__(self) -> None:
        self.waited_for: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event)


@pytest.fixture
def arithmetic(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The current stream."""
    stream = Stream()
    device = SimpleNamespace(current_stream=lambda: stream, Event=Event)
    monkeypatch.setattr(gathers_module, "get_accelerator", lambda: device)
    return stream


def make_param(key: int, status: ZeroParamStatus = ZeroParamStatus.INFLIGHT) -> Any:
    param = torch.nn.Parameter(torch.ones(4))
    param.ds_id, param.ds_status, param.ds_shape = key, status, (4,)
    param.ds_tensor = torch.ones(4)
    return param


def in_flight(*handles: Any) -> InflightParamRegistry:
    registry = InflightParamRegistry()
    for params, handle in handles:
        for param in params:
            registry[param] = handle
    return registry


def gather(gathers: OrderedGathers, *params: Any) -> Any:
    """The handle with which DeepSpeed waits for copies of them."""
    registry = in_flight((params, NoGatherCoalescedHandle(list(params))))
    assert gathers.take(registry, params)
    return registry[params[0]]


@contextmanager
def fetching(gathers: OrderedGathers, *params: Any) -> Iterator[None]:
    gathers.fetch_begins(params)
    yield
    gathers.fetch_ended()


def test_a_stream_waits_for_copies(arithmetic: Stream) -> None:
    one, two, three = (make_param(key) for key in range(3))
    registry = in_flight(([one, two], NoGatherCoalescedHandle([one, two])), ([three], NoGatherHandle(three)))
    stream = Stream()
    assert OrderedGathers(stream).take(registry, {one, two, three})
    assert registry[one] is registry[two] is not registry[three]
    registry[one].wait(handle_dependency=True)
    assert one.ds_status is two.ds_status is ZeroParamStatus.AVAILABLE
    assert three.ds_status is ZeroParamStatus.INFLIGHT
    assert [event.recorded_on for event in arithmetic.waited_for] == [stream]
    registry[three].wait()
    assert three.ds_status is ZeroParamStatus.AVAILABLE


def test_a_gather_is_waited_for_once(arithmetic: Stream) -> None:
    param = make_param(1)
    handle = gather(OrderedGathers(Stream()), param)
    handle.wait()
    param.ds_status = ZeroParamStatus.NOT_AVAILABLE  # released, and gathered again by someone else
    handle.wait()
    assert param.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert len(arithmetic.waited_for) == 1


def test_collectives_keep_their_handles(arithmetic: Stream) -> None:
    param, handle = make_param(1), object()
    registry = in_flight(([param], handle))
    gathers = OrderedGathers(Stream())
    assert not gathers.take(registry, [param, make_param(2)])
    assert registry[param] is handle
    with fetching(gathers, param):
        assert gathers._awaited() is None  # all of them


def test_a_module_waits_for_its_own_weights(arithmetic: Stream) -> None:
    gathers = OrderedGathers(Stream())
    one, two, ahead = (make_param(key) for key in range(3))
    handles = [gather(gathers, param) for param in (one, two, ahead)]
    copied = [handle._copied for handle in handles]
    with fetching(gathers, two, one):
        assert gathers._awaited() is copied[1]
    with fetching(gathers, one):
        assert gathers._awaited() is copied[0]
    handles[0].wait()
    with fetching(gathers, one):  # once more: another stream may be using it
        assert gathers._awaited() is copied[0]
    with fetching(gathers):
        assert not hasattr(gathers._awaited(), "recorded_on")
    assert gathers._awaited() is None  # outside a fetch: all of them


def test_a_collective_is_taken_apart_on_a_stream_of_its_own(
    arithmetic: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    within: list[Stream] = []

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        within.append(stream)
        yield
        within.pop()

    device = SimpleNamespace(current_stream=lambda: arithmetic, Event=Event, Stream=Stream, stream=on)
    monkeypatch.setattr(gathers_module, "get_accelerator", lambda: device)
    gathers, param, used_by, taken_apart_on = OrderedGathers(Stream()), make_param(1), [], []
    collective: Any = SimpleNamespace(
        params=(param,),
        collected=SimpleNamespace(record_stream=used_by.append),
        finish=lambda: taken_apart_on.extend(within),
    )
    handle = gathers.follow(collective)
    assert used_by == taken_apart_on == [handle._copied.recorded_on]
    assert used_by != [gathers.stream]
    assert param.ds_status is ZeroParamStatus.INFLIGHT
    with fetching(gathers, param):
        assert gathers._awaited() is handle._copied
    handle.wait()
    assert param.ds_status is ZeroParamStatus.AVAILABLE
    assert arithmetic.waited_for == [handle._copied]
    # A later copy without a collective is over no earlier than the collective.
    copy = gather(gathers, make_param(2))
    assert [copy._copied.recorded_on] == used_by
    assert [event.recorded_on for event in used_by[0].waited_for] == [gathers.stream]


def test_a_stream_follows_each_gather_once(arithmetic: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    gathers = OrderedGathers(Stream())
    one, two, kept = (make_param(key) for key in range(3))
    assert not gathers.follow_gathers([one]), "DeepSpeed waits for everything"
    handles = [gather(gathers, param) for param in (one, two)]
    copied = [handle._copied for handle in handles]
    assert not handles[0].is_over
    handles[0].wait()
    assert handles[0].is_over
    arithmetic.waited_for.clear()
    assert gathers.follow_gathers([kept])  # not gathered by this class: DeepSpeed has waited for it
    assert arithmetic.waited_for == []
    assert gathers.follow_gathers([one, kept])
    assert gathers.follow_gathers([one])
    assert arithmetic.waited_for == copied[:1]
    assert gathers.follow_gathers([two, one])
    assert gathers.follow_gathers([one])  # which was over before the other
    assert arithmetic.waited_for == copied
    another = Stream()
    device = SimpleNamespace(current_stream=lambda: another, Event=Event)
    monkeypatch.setattr(gathers_module, "get_accelerator", lambda: device)
    assert gathers.follow_gathers([one])
    assert another.waited_for == copied[:1]
    one.ds_status = ZeroParamStatus.INFLIGHT  # released, and gathered again
    again = gather(gathers, one)
    assert gathers.follow_gathers([one])
    assert another.waited_for == [copied[0], again._copied]


def test_gathers_of_other_kinds_are_waited_for(arithmetic: Stream) -> None:
    gathers = OrderedGathers(Stream())
    one = make_param(1)
    handle = gather(gathers, one)
    with fetching(gathers, one, make_param(2)):
        assert gathers._awaited() is None
    with fetching(gathers, one, make_param(3, ZeroParamStatus.AVAILABLE)):
        assert gathers._awaited() is handle._copied


def test_a_thread_that_fetches_does_not_change_what_others_wait_for(arithmetic: Stream) -> None:
    gathers = OrderedGathers(Stream())
    one = make_param(1)
    gather(gathers, one)
    found = []
    with fetching(gathers, one):
        thread = threading.Thread(target=lambda: found.append(gathers._awaited()))
        thread.start()
        thread.join()
    assert found == [None]


def test_the_host_does_not_run_far_ahead(arithmetic: Stream) -> None:
    gathers = OrderedGathers(Stream())
    handles = [gather(gathers, make_param(key)) for key in range(FETCHES_AHEAD + 3)]
    for handle in handles[:FETCHES_AHEAD]:
        handle.wait()
    assert not any(handle._copied.synchronized for handle in handles)
    handles[FETCHES_AHEAD].wait()
    assert [handle._copied.synchronized for handle in handles[:3]] == [True, False, False]


@pytest.mark.gpu
def test_arithmetic_does_not_wait_for_copies_far_ahead() -> None:
    stream = torch.cuda.Stream()
    gathers = OrderedGathers(stream)
    assert gathers.stream == stream
    handles = []
    needed, ahead = make_param(1), make_param(2)
    with torch.cuda.stream(gathers.stream):
        handles.append(gather(gathers, needed))
        torch.cuda._sleep(400_000_000)
        handles.append(gather(gathers, ahead))
    with fetching(gathers, needed):
        torch.cuda.current_stream().wait_stream(gathers.stream)
    torch.cuda.current_stream().synchronize()
    assert handles[0]._copied.query()
    assert not handles[1]._copied.query()
    torch.cuda.current_stream().wait_stream(gathers.stream)
    torch.cuda.current_stream().synchronize()
    assert handles[1]._copied.query()
    gathers.finish()


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


def test_gathers_follow_new_weights_in_device_memory() -> None:
    device, ordered = get_accelerator().current_device_name(), []
    chunk = Chunk(0, 0, 0, 8, (), 0)
    shard = torch.zeros(8, device=device)
    shard.ds_numel = 8
    param = SimpleNamespace(ds_id=1, ds_tensor=shard, nvme_swapper=None)
    for flat in (shard, None):
        weights = ModelWeights([[param]], [flat], [[shard]], Counters(), lambda: ordered.append(1))
        weights.close(chunk)
    assert ordered == [1, 1]
