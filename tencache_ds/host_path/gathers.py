# SPDX-License-Identifier: Apache-2.0
"""Gathers of weights in the order of the device's streams, without waits of the host.

On one rank a gather is a copy of the shard to the device, on several a collective follows. DeepSpeed has the host wait
until all copies issued so far have ended, whenever a module needs one of them, and has the stream of arithmetic wait
for the same: also for copies that were issued far ahead for later modules. Meanwhile nothing more is issued, neither
copies nor arithmetic, and both stand still in turn. Here each gather has an event behind it, and a module waits for its
own weights only.

Measured on an H200: a token of 6.7 B parameters with 8 GiB of them in GPU memory takes 91 instead of 140 ms, and the
link is busy for 0.94 instead of 0.66 of the time.

[Note: two streams] Shards are copied on DeepSpeed's stream of gathers. On several ranks a stream of its own waits for
the collectives and takes the weights out of them, so that later copies do not wait for that. All events are recorded on
the one stream or on the other: then they end in the order of their numbers.

[Note: shards that are being copied] What the host's wait also did: after it, the host could write the shard. Now a copy
may still be to come when DeepSpeed calls its weight gathered. The host writes shards between passes only, and waits for
the copies at the end of each pass (:meth:`OrderedGathers.finish`). Staging buffers go back with an event.

[Note: how far the host runs ahead] DeepSpeed limits it to :data:`FETCHES_AHEAD` fetches, so that what it has released
is soon free on the device too. The same limit holds here, by the copies of those fetches instead of by all copies that
were issued before them.

[Note: several ranks] DeepSpeed copies shards to the device one by one with calls that return when the copy is over, so
that meanwhile nothing else is issued; and out of the memory in which it collects the shards of all ranks it copies each
weight with operations of its own. Here shards are copied straight into that memory with calls that return at once, and
one operation takes all weights out of it. The collectives are DeepSpeed's: all ranks gather the same weights, in the
order of their ids.

Measured on two H100, 1.3 B parameters in RAM, phases synchronized: forward 0.107 instead of 0.225 s, backward 0.165
instead of 0.290 s.
"""

from __future__ import annotations

import collections
import threading
from collections import UserDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import NoGatherCoalescedHandle, NoGatherHandle, ZeroParamStatus

from tencache_ds.integration.adapters.installed import calls
from tencache_ds.integration.chunked_step import wait_for_updates
from tencache_ds.integration.hooked_modules import uncompiled
from tencache_ds.tensors import empty

# Collectives that the host does not wait for


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


# In the order of the device's streams


FETCHES_AHEAD = 2
"""Gathers that modules have waited for and that are not over when the host waits for the first one of them."""


class OrderedGather:
    """A DeepSpeed handle of a gather that has been issued. See [Note: shards that are being copied].

    Args:
        params: that it gathers.
        copied: an event behind it.
        throttle: called once with the event, when a module needs one of the weights.
    """

    def __init__(self, params: Iterable[Any], copied: Any, throttle: Callable[[Any], None]) -> None:
        self._params = tuple(params)
        self._copied = copied
        self._throttle = throttle
        self._waited = False

    @property
    def is_over(self) -> bool:
        """Whether a module has needed one of the weights, so that further calls of :meth:`wait` do nothing."""
        return self._waited

    def wait(self, **_: Any) -> None:
        """The current stream waits for the gather, and the weights are gathered in DeepSpeed's eyes. Further calls, for
        the other weights, do nothing. DeepSpeed's fetch calls it on the stream of the copies, for which the stream of
        arithmetic then waits."""
        if self._waited:
            return
        self._waited = True
        self._throttle(self._copied)
        get_accelerator().current_stream().wait_event(self._copied)
        for param in self._params:
            param.ds_status = ZeroParamStatus.AVAILABLE


class OrderedGathers:
    """Those of one coordinator. Several autograd threads may be fetching.

    Args:
        stream: on which DeepSpeed issues them.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = _ordered(stream, self._awaited)
        """The same stream, for DeepSpeed: waiting for it in a fetch is waiting for the module's weights."""
        self._copied: dict[int, tuple[int, Any]] = {}  # by weight: the number of its last gather, and its event
        self._n_gathers = 0
        self._throttled: collections.deque[Any] = collections.deque()
        self._lock = threading.Lock()
        self._fetching = threading.local()
        self._copying = False
        self._nothing = get_accelerator().Event()  # never recorded
        self._followed: dict[Any, int] = {}  # by stream: the number of the last gather that it has waited for
        self._unpacking: Any = None  # a stream, from the first collective on: see [Note: two streams]

    def take(self, in_flight: UserDict[Any, Any], params: Iterable[Any]) -> bool:
        """Replaces the handles of copies without a collective that were just issued; whether there were any.

        Args:
            in_flight: DeepSpeed's handles by parameter.
            params: that it may have begun to gather.
        """
        issued: dict[int, list[Any]] = {}
        for param in params:
            handle = in_flight.get(param)
            if isinstance(handle, (NoGatherHandle, NoGatherCoalescedHandle)):
                issued.setdefault(id(handle), []).append(param)
        if not issued:
            return False
        copied = get_accelerator().Event()
        copied.record(self.stream)
        if self._unpacking is not None:
            self._unpacking.wait_event(copied)
            copied = get_accelerator().Event()
            copied.record(self._unpacking)
        self._n_gathers += 1
        for group in issued.values():
            gather = self._follow(group, copied)
            for param in group:
                in_flight.data[param] = gather  # item assignment refuses to replace one
        return True

    def follow(self, gather: RankGather) -> OrderedGather:
        """The handle of a collective that was just issued."""
        if self._unpacking is None:
            self._unpacking = get_accelerator().Stream()
        gather.collected.record_stream(self._unpacking)
        with get_accelerator().stream(self._unpacking):
            gather.finish()
        gathered = get_accelerator().Event()
        gathered.record(self._unpacking)
        self._n_gathers += 1
        return self._follow(gather.params, gathered)

    def _follow(self, params: Iterable[Any], gathered: Any) -> OrderedGather:
        for param in params:
            self._copied[param.ds_id] = self._n_gathers, gathered
        self._copying = True
        return OrderedGather(params, gathered, self._throttle)

    def fetch_begins(self, params: Iterable[Any]) -> None:
        """This thread fetches a module with these parameters, until :meth:`fetch_ended`."""
        if self._copied:  # else no gather has an event: DeepSpeed's wait for all of them stays
            params = tuple(params)
            missing = [param.ds_id for param in params if param.ds_status is not ZeroParamStatus.AVAILABLE]
            self._fetching.now = params, missing

    def fetch_ended(self) -> None:
        """It has fetched them."""
        self._fetching.now = None

    def follow_gathers(self, params: Iterable[Any]) -> bool:
        """The current stream waits for the last gathers of weights that are gathered in DeepSpeed's eyes, unless it has
        done so: gathers end in the order of their numbers. False if no gather so far has an event."""
        if not self._copied:
            return False
        number, event = 0, self._nothing
        for param in params:
            gather = self._copied.get(param.ds_id)
            if gather is not None and gather[0] > number:
                number, event = gather
        stream = get_accelerator().current_stream()
        if self._followed.get(stream, 0) < number:
            stream.wait_event(event)
            self._followed[stream] = number
        return True

    def finish(self) -> None:
        """The host waits for all copies: at the end of a pass, after which it may write shards."""
        if self._copying:
            self._copying = False
            self.stream.synchronize()

    def _awaited(self) -> Any:
        """What a stream that waits for the one of copies has to wait for: an event; None: everything."""
        now = getattr(self._fetching, "now", None)
        if now is None:
            return None
        params, missing = now
        last = 0, self._nothing
        for param in params:
            gather = self._copied.get(param.ds_id)
            if gather is not None:
                last = max(last, gather, key=lambda each: each[0])
            elif param.ds_id in missing:
                return None  # gathered in another way
        return last[1]

    def _throttle(self, copied: Any) -> None:
        """See [Note: how far the host runs ahead]."""
        with self._lock:
            self._throttled.append(copied)
            while self._throttled and self._throttled[0].query():
                self._throttled.popleft()
            if len(self._throttled) <= FETCHES_AHEAD:
                return
            first = self._throttled.popleft()
        first.synchronize()


class _OrderedStream(torch.cuda.Stream):
    """A stream that others wait for as far as they need.

    Args:
        stream: the stream.
        awaited: what the stream that waits has to wait for: an event; None: everything.
    """

    _awaited: Callable[[], Any]

    def __new__(cls, stream: torch.cuda.Stream, awaited: Callable[[], Any]) -> _OrderedStream:
        same = {"stream_id": stream.stream_id, "device_index": stream.device_index, "device_type": stream.device_type}
        ordered: _OrderedStream = super().__new__(cls, **same)  # type: ignore[no-untyped-call]
        ordered._awaited = awaited
        return ordered

    def record_event(self, event: Any = None) -> Any:
        """PyTorch's, which ``wait_stream`` calls."""
        awaited = self._awaited() if event is None else None
        return super().record_event(event) if awaited is None else awaited


def _ordered(stream: Any, awaited: Callable[[], Any]) -> Any:
    """Other accelerators' streams stay what they are: who waits for them waits for all copies."""
    return _OrderedStream(stream, awaited) if isinstance(stream, torch.cuda.Stream) else stream


def finish_after_forward(module: torch.nn.Module, finish: Callable[[], None]) -> Any:
    """Has the host wait for copies at the end of each forward pass, even one that fails.

    Args:
        module: the model.
        finish: waits (:meth:`OrderedGathers.finish`).

    Returns:
        the hook's handle.
    """
    return module.register_forward_hook(uncompiled(lambda *_: finish()), always_call=True)
