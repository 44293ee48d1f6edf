# SPDX-License-Identifier: Apache-2.0
"""Fetches and releases of modules by DeepSpeed's coordinator, with less Python, and limits to what it prefetches behind
an update.

[Note: a fetch of what is there] Weights are gathered in buckets, ahead of their modules, and DeepSpeed keeps some from
the forward to the backward pass. So at most modules a fetch only counts: it marks the weights as used by the module.
DeepSpeed's code takes about 60 microseconds for that (sets of parameters, messages that are not printed, an event that
the device waits for once more), several hundred times a step, and twice as long while an update uses the machine's
memory beside it.

Measured: the fetches of a backward pass of 24 layers take 1.2 ms on a CPU, DeepSpeed's 3.1 ms. Releasing all weights
before an update, and gathering those that stay gathered at once (:mod:`.gathers`): ``step()`` of 24 layers takes
7 ms on two CPU ranks, 34 ms with DeepSpeed's functions.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, free_param
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params

from tencache_ds.host_path import gathers
from tencache_ds.host_path.gathers import OrderedGathers
from tencache_ds.host_path.parts import HostPath
from tencache_ds.host_path.suspended_hooks import before_release
from tencache_ds.integration.adapters.installed import Coordinator
from tencache_ds.integration.hooked_modules import has_weights, is_leaf, params_of, uncompiled

_ORDER = ("submodule_order", "param_order", "trace_mode", "params_to_release")
"""Private attributes of DeepSpeed's coordinator that make up its order of modules and what it has derived from that."""


class PrefetchingCoordinator(Coordinator):
    """DeepSpeed's coordinator with limits of its own to what it gathers ahead. Used by the thread that computes."""

    _PartitionedParameterCoordinator__prefetch_bucket_sz: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bounds_prefetch = False
        """Whether this is a forward pass behind an update."""
        # Of DeepSpeed's order of parameters, in this pass: used, gathered, and elements of those gathered but not used.
        self._tencache_n_used = self._tencache_n_gathered = self._tencache_numel_ahead = 0

    def begin_fetches(self, *, behind_update: bool) -> None:
        """A forward pass begins.

        Args:
            behind_update: an update may continue beside it; the same on every rank.
        """
        self.bounds_prefetch = behind_update
        self._tencache_n_used = self._tencache_n_gathered = self._tencache_numel_ahead = 0

    def forget_unused(self) -> None:
        """Takes weights out of DeepSpeed's queue that were recorded for modules before the one at hand, and that these
        have not asked for. DeepSpeed looks at a module's weights when the recorded pass is over; while it is computed,
        it may have fewer, as experts under PEFT's adapters, whose weights are another module's for that time. Where no
        prefetch has taken such an entry out of the queue, as none does for weights on NVMe, DeepSpeed raises an error.
        """
        if not self.is_complete_trace():
            return
        queue = self._PartitionedParameterCoordinator__param_queue
        while queue and queue[0].step_id_last_used_at < self._PartitionedParameterCoordinator__step_id:
            queue.popleft()

    def prefetch_numel(self, forward: bool) -> int:
        """Elements that DeepSpeed may prefetch at this module."""
        numel = int(self._PartitionedParameterCoordinator__prefetch_bucket_sz)
        available = self._PartitionedParameterCoordinator__n_available_params
        left = int(self._PartitionedParameterCoordinator__max_n_available_params) - available
        if forward and self.bounds_prefetch and self.is_complete_trace() and 2 * self._numel_ahead() >= numel:
            return 0
        return min(numel, left)

    @contextmanager
    def bounded_prefetch(self, forward: bool) -> Iterator[None]:
        """DeepSpeed prefetches another bucket at every module, until ``stage3_max_live_parameters`` are gathered.
        Gathering a weight waits for its update: behind an update, the first modules would wait for nearly all of it.
        So a forward pass behind one is never more than one and a half buckets ahead: it prefetches a bucket when less
        than half of one is left. Smaller parts, to stay exactly one ahead, are a gather for each module, and on several
        ranks each has its latency. By DeepSpeed's order alone, not by the state of the update: all ranks have to gather
        the same weights together. A pass within a user's ``GatheredParameters`` releases what the context has gathered
        as soon as DeepSpeed's prefetch comes to it, so that stays as it is.
        """
        if self.prefetch_numel(forward) > 0:
            yield
            return
        bucket_numel = self._PartitionedParameterCoordinator__prefetch_bucket_sz
        self._PartitionedParameterCoordinator__prefetch_bucket_sz = 0
        try:
            yield
        finally:
            self._PartitionedParameterCoordinator__prefetch_bucket_sz = bucket_numel

    def _numel_ahead(self) -> int:
        """Elements of the weights that this pass has gathered for modules after the one at hand."""
        order = self._PartitionedParameterCoordinator__param_order
        n_gathered = len(order) - len(self._PartitionedParameterCoordinator__param_queue)
        step_id = self._PartitionedParameterCoordinator__step_id
        for entry in order[self._tencache_n_gathered : n_gathered]:
            self._tencache_numel_ahead += int(entry.param.ds_numel)
        self._tencache_n_gathered = n_gathered
        while self._tencache_n_used < n_gathered and order[self._tencache_n_used].step_id_last_used_at <= step_id:
            self._tencache_numel_ahead -= int(order[self._tencache_n_used].param.ds_numel)
            self._tencache_n_used += 1
        return self._tencache_numel_ahead


class QuickCoordinator(PrefetchingCoordinator):
    """DeepSpeed's coordinator, the same account of weights at less cost. Used by the thread that computes.

    Args:
        host_path: the parts that are TenCache's; all others are DeepSpeed's.
    """

    _PartitionedParameterCoordinator__allgather_stream: Any
    _PartitionedParameterCoordinator__max_ongoing_fetch_events: int
    _PartitionedParameterCoordinator__submodule_order: Sequence[Any]

    def __init__(self, *args: Any, host_path: HostPath, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.host_path = host_path
        self.trained: Sequence[Any] = ()
        """Parameters of a model with backward passes, trained or not."""
        self._tencache_passes_over = False  # modules without weights, in this pass
        self._tencache_ongoing_fetches = self._PartitionedParameterCoordinator__max_ongoing_fetch_events
        self._tencache_gathers: OrderedGathers | None = None
        if host_path.gathers and not get_accelerator().is_synchronized_device():
            self._tencache_gathers = OrderedGathers(self._PartitionedParameterCoordinator__allgather_stream)
            self._PartitionedParameterCoordinator__allgather_stream = self._tencache_gathers.stream

    # Fetches

    def gather_module(self, module: Any, params: Mapping[int, Any], forward: bool) -> None:
        """Gathers a module's weights: DeepSpeed's fetch. Modules other than leaves are fetched by one thread at a time:
        without its lock for them, and without its profiler range.

        Args:
            module: that is about to be computed.
            params: its weights, by id.
            forward: whether in a forward pass, or in a recomputation.
        """
        if self._fetch_what_is_there(module, params, forward):
            return
        self.forget_unused()
        gathers = self._tencache_gathers
        if gathers is not None:
            gathers.fetch_begins(params.values())
        try:
            with self.bounded_prefetch(forward):
                if is_leaf(module) or not self.host_path.fetches:
                    super().fetch_sub_module(module, forward)
                else:
                    if not forward:
                        self.backward_begins(module)
                    self._fetch_sub_module_impl(module, forward, False)
        finally:
            if gathers is not None:
                gathers.fetch_ended()

    def _fetch_what_is_there(self, module: Any, params: Mapping[int, Any], forward: bool) -> bool:
        """Fetches a module where nothing is to be gathered, waited for or prefetched: see [Note: a fetch of what is
        there]. Otherwise nothing has happened, and it is for DeepSpeed's fetch.
        """
        if not self.host_path.fetches or not self.is_complete_trace() or is_leaf(module):
            return False
        if forward and torch._C._current_graph_task_id() != -1:
            return False  # a recomputed module, for whose frozen weights DeepSpeed keeps account
        in_flight = self._PartitionedParameterCoordinator__inflight_param_registry.data
        fetched_for = self._PartitionedParameterCoordinator__most_recent_step_id_param_fetched_for
        step_id = self._PartitionedParameterCoordinator__step_id
        for param in params.values():
            # One that was not fetched ahead is the next in DeepSpeed's queue, which it has to leave.
            if param.ds_status is not ZeroParamStatus.AVAILABLE or fetched_for[param] < step_id:
                return False
            handle = in_flight.get(param)
            if handle is not None and not getattr(handle, "is_over", False):
                return False
        if self._PartitionedParameterCoordinator__param_queue and self.prefetch_numel(forward) > 0:
            return False
        if self._tencache_gathers is not None and not self._tencache_gathers.follow_gathers(params.values()):
            return False
        key = module.ds_id
        if not forward:
            self.backward_begins(module)
        for param in params.values():
            in_flight.pop(param, None)
            param.ds_active_sub_modules.add(key)
        self._PartitionedParameterCoordinator__step_id += 1
        return True

    # Gathers

    def _PartitionedParameterCoordinator__all_gather_params_(
        self, params: Any, forward: bool, quantize: bool = False
    ) -> None:
        """DeepSpeed's start of gathers. The device's streams wait for them, instead of the host."""
        gathers = self._tencache_gathers
        if self.host_path.rank_gathers and not quantize and self._gather_from_ranks(params):
            ordered = True
        else:
            super()._PartitionedParameterCoordinator__all_gather_params_(params, forward, quantize=quantize)
            in_flight = self._PartitionedParameterCoordinator__inflight_param_registry
            # On several ranks weights of some groups may be copies, and the others collectives of DeepSpeed's.
            ordered = gathers is not None and gathers.take(in_flight, params) and dist.get_world_size() == 1
        if gathers is not None:
            # Those here have a limit of their own to how far the host runs ahead.
            limit = sys.maxsize if ordered else self._tencache_ongoing_fetches
            self._PartitionedParameterCoordinator__max_ongoing_fetch_events = limit

    def _gather_from_ranks(self, params: Iterable[Any]) -> bool:
        """Starts to gather shards of several ranks, if that is possible here: see :mod:`.gathers`."""
        partitioned = [param for param in params if param.ds_status is ZeroParamStatus.NOT_AVAILABLE]
        if not partitioned or not gathers.gathered_here(partitioned):
            return False
        in_flight, ordered = self._PartitionedParameterCoordinator__inflight_param_registry, self._tencache_gathers
        with get_accelerator().stream(self._PartitionedParameterCoordinator__allgather_stream):
            for gather in gathers.gather(partitioned):
                handle = gather if ordered is None else ordered.follow(gather)
                for param in gather.params:
                    in_flight[param] = handle
        self._PartitionedParameterCoordinator__n_available_params += sum(param.ds_numel for param in partitioned)
        kept = [
            param
            for param in partitioned
            if param.ds_persist and param.ds_tensor.final_location == OffloadDeviceEnum.nvme
        ]
        if kept:  # they are never partitioned again
            kept[0].nvme_swapper.remove_partition_and_release_buffers(kept)
        return True

    def finish_gathers(self) -> None:
        """The host waits for copies of shards to the device: at the end of a pass, after which it may write shards."""
        if self._tencache_gathers is not None:
            self._tencache_gathers.finish()

    # Releases

    def release_sub_module(self, submodule: Any, forward: bool = False) -> None:
        """DeepSpeed's release of a module's weights, without its profiler ranges and log messages."""
        if (
            not self.host_path.fetches
            or torch.compiler.is_compiling()
            or is_leaf(submodule)
            or not self.releases_own_weights(submodule, forward)
        ):
            super().release_sub_module(submodule, forward)
            return
        key, releasable = submodule.ds_id, None
        if self.is_complete_trace():
            releasable = self._PartitionedParameterCoordinator__params_to_release(
                submodule, self._PartitionedParameterCoordinator__step_id
            )
        if not forward:
            self.backward_ends(submodule)
        for param in params_of(submodule).values():
            users = param.ds_active_sub_modules
            users.discard(key)
            if (
                param.ds_status is ZeroParamStatus.AVAILABLE
                and not users
                and not param.is_external_param
                and (releasable is None or param.ds_id in releasable)
            ):
                self.release(param)

    def release(self, param: Any) -> None:
        """Releases the gathered value of a parameter."""
        partition(param)
        self._PartitionedParameterCoordinator__n_available_params -= param.ds_numel

    @uncompiled
    def release_and_reset_all(self, module: Any) -> None:
        """DeepSpeed's release of all weights, before an update or a checkpoint, without its profiler ranges and log
        messages for each."""
        if not self.host_path.fetches:
            super().release_and_reset_all(module)
            return
        in_flight = self._PartitionedParameterCoordinator__inflight_param_registry
        params = list(iter_params(module, recurse=True))
        for param in params:
            if in_flight and param in in_flight:
                in_flight.pop(param).wait()
            param.ds_active_sub_modules.clear()
            if param.ds_status is ZeroParamStatus.AVAILABLE:
                self.release(param)
        for param in params:
            if param.ds_status is not ZeroParamStatus.NOT_AVAILABLE:
                raise RuntimeError(f"{param.ds_summary()} expected to be released")

    # The order of modules

    @property
    def reads_ahead(self) -> bool:
        """Whether every module is an occasion to read further ahead, also one without weights."""
        return False

    @uncompiled
    def reset_step(self) -> None:
        """DeepSpeed's start of a forward pass; see [Note: modules without weights] in :mod:`.module_hooks`."""
        may_pass_over = (
            self.host_path.hooks and not self.reads_ahead and all(param.requires_grad for param in self.trained)
        )
        if may_pass_over and self.is_record_trace():
            self._leave_out_modules_without_weights()
        super().reset_step()
        self._tencache_passes_over = may_pass_over and self.is_complete_trace()

    def passes_over(self, module: torch.nn.Module) -> bool:
        """Whether a module, which is no leaf, is left out of passes: see [Note: modules without weights] in
        :mod:`.module_hooks`."""
        return self._tencache_passes_over and not has_weights(module)

    def _leave_out_modules_without_weights(self) -> None:
        """Removes modules without weights from the order that was recorded in the last pass. Not while it is recorded:
        DeepSpeed notices within a pass that a module uses a weight of another one."""
        order = [
            module
            for module in self._PartitionedParameterCoordinator__submodule_order
            if is_leaf(module) or has_weights(module)
        ]
        places: dict[int, Any] = collections.defaultdict(collections.deque)
        for place, module in enumerate(order):
            places[module.ds_id].append(place)
        self._PartitionedParameterCoordinator__submodule_order = order
        self._PartitionedParameterCoordinator__step_id_module_fetched_for = places

    def order(self) -> dict[str, Any]:
        """DeepSpeed's complete order of modules and their weights, for :meth:`restore`."""
        names = (f"_PartitionedParameterCoordinator__{name}" for name in _ORDER)
        return {name: getattr(self, name) for name in names}

    def restore(self, order: dict[str, Any]) -> None:
        """Modules run in that order again, from the next forward pass on. Between passes."""
        if not self.is_invalid_trace():
            self._invalidate_trace()
        for name, value in order.items():
            setattr(self, name, value)


def partition(param: Any) -> None:
    """DeepSpeed's ``partition`` of a parameter, which formats four log messages, without these."""
    if param.ds_tensor is None or param.ds_zero_param_process_group is not None:
        param.partition()
        return
    before_release(param)
    free_param(param)
    if param.ds_tensor.final_location == OffloadDeviceEnum.nvme:
        param.nvme_swapper.remove_partition_and_release_buffers([param])
    param.ds_status = ZeroParamStatus.NOT_AVAILABLE
