# SPDX-License-Identifier: Apache-2.0
"""Fetching and prefetching of weights: DeepSpeed's coordinator, fed from the recorded order of accesses.

DeepSpeed looks one stored parameter ahead and waits for every read in flight. Here the read-ahead is as deep as there
are free staging buffers, in the order of the last recorded pass and into the next one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, free_param
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator, iter_params

from tencache_ds.host_path import QuickCoordinator, partition
from tencache_ds.integration.adapters.installed import calls
from tencache_ds.integration.agreement import agreed
from tencache_ds.integration.chunked_step import refuse_void_weights
from tencache_ds.integration.hooked_modules import (
    awaited_of,
    is_free,
    is_leaf,
    n_user_gathers,
    nbytes_by_id,
    params_of,
    uncompiled,
)
from tencache_ds.integration.model_weights import released
from tencache_ds.integration.param_swapper import ParamSwapper, end_changes
from tencache_ds.observability import spans
from tencache_ds.observability.counters import Event
from tencache_ds.observability.spans import Category, span
from tencache_ds.planning.lookahead import CommitWindow, Walk
from tencache_ds.profiling.access_trace import AccessTrace
from tencache_ds.profiling.waits import FetchRecorder
from tencache_ds.tiers.update import UpdateGate

_coordinators: weakref.WeakSet[TenCacheCoordinator] = weakref.WeakSet()


class PassListener:
    """What an engine does within its passes; by default nothing. On the thread that computes, with gradients off."""

    def pass_begins(self) -> None:
        """A forward pass begins."""

    def backward_begins(self) -> None:
        """A backward pass begins."""

    def fetched(self, module: Any, forward: bool) -> None:
        """The weights of a module are there."""

    def weights_stay(self) -> bool:
        """Whether the weights are the same in the next pass: not on the last micro-step before an optimizer step."""
        return True


class TenCacheCoordinator(QuickCoordinator):
    """DeepSpeed's coordinator with TenCache's read-ahead around each fetch."""

    def __init__(self, *args: Any, prefetch_nvme: bool = False, **kwargs: Any) -> None:
        # DeepSpeed's own NVMe look-ahead is replaced; its prefetch of gathers to the device stays.
        super().__init__(*args, prefetch_nvme=False, **kwargs)
        # DeepSpeed caches which parameters to release in one table for all coordinators of the process, which keeps
        # every model. Each gets a table that goes with it.
        self.forget_releases()
        _coordinators.add(self)
        self._tencache_lock = threading.RLock()
        self._tencache_trace: AccessTrace[int] = AccessTrace()
        self._tencache_reads = Walk(self._tencache_trace)
        self._tencache_commits = Walk(self._tencache_trace)
        self._tencache_window: CommitWindow[int] | None = None
        self._tencache_committed: set[int] = set()  # since their last use
        self._tencache_params: dict[int, Any] = {}
        self._tencache_swappers: dict[int, ParamSwapper] = {}
        self._tencache_listener = PassListener()
        self._tencache_gate: UpdateGate | None = None
        self._tencache_recorder: FetchRecorder | None = None
        self._tencache_forward = False
        self._tencache_update_continues = False

    def follow(self, listener: PassListener, trained: Sequence[Any] = (), gate: UpdateGate | None = None) -> None:
        """Tells an engine of its passes from now on.

        Args:
            listener: of the engine.
            trained: parameters of a model with backward passes, trained or not.
            gate: of their updates: a weight that stays gathered is awaited where a module with DeepSpeed's hooks uses
                it.
        """
        self._tencache_listener, self.trained, self._tencache_gate = listener, trained, gate

    def record_fetches(self, recorder: FetchRecorder | None) -> None:
        """Tells a recorder of each fetch in a recorded step; None: no more."""
        self._tencache_recorder = recorder

    def step_done(self, *, update_continues: bool) -> None:
        """An optimizer step has returned.

        Args:
            update_continues: whether it may continue behind the next forward pass; the same on every rank.
        """
        self._tencache_update_continues = update_continues
        self.read_ahead(updated=True)

    @property
    def reads_ahead(self) -> bool:
        """See :meth:`QuickCoordinator.reads_ahead`: where weights are on NVMe."""
        return bool(self._tencache_swappers)

    def begin_module(self, module: Any, forward: bool) -> None:
        """A module is about to be computed: its place in the order is recorded or compared, and its weights are
        gathered. Gradients are off."""
        if self._tencache_recorder is not None and module.training:
            self._tencache_recorder.begin_hook()
        self.trace_prologue(module)
        if self.is_record_trace():
            self.record_module(module)
        self.fetch_sub_module(module, forward)

    def fetch_sub_module(self, current_submodule: Any, forward: bool) -> None:
        """DeepSpeed's fetch, between committing completed reads and reading further ahead. The hooks on modules, which
        call this, have switched gradients off.
        """
        with span(Category.FETCH, "fetch", f"module id {getattr(current_submodule, 'ds_id', '?')}"):
            if not torch.is_inference_mode_enabled():
                self._fetch(current_submodule, forward)
                return
            # A weight that is gathered ahead may be used by the next pass, for which autograd saves it.
            with torch.inference_mode(False), torch.no_grad():
                self._fetch(current_submodule, forward)

    def _fetch(self, current_submodule: Any, forward: bool) -> None:
        if self._tencache_forward and not forward:
            self._tencache_forward = False
            self.bounds_prefetch = False
            self._tencache_listener.backward_begins()
        params = params_of(current_submodule)
        recorder = self._tencache_recorder if current_submodule.training else None
        awaited = () if recorder is None else awaited_of(params)
        if recorder is not None:
            recorder.before_fetch(waits=bool(awaited))
        stored = _stored(params)
        if stored or self._tencache_swappers:
            with self._tencache_lock:
                for param in stored:
                    self._access(param)
                self._commit(stored)
        self.gather_module(current_submodule, params, forward)
        if self._tencache_gate is not None:
            self._tencache_gate.wait_for(params)
        if self._tencache_swappers:
            needed = {param.ds_id for param in stored}
            with self._tencache_lock:
                for swapper in self._swappers():
                    # A weight gathered ahead of its use has a use before the one that its bytes would be kept for.
                    swapper.retire(
                        self._issued, lambda key: self._tencache_reads.worth_keeping(key, skip=key not in needed)
                    )
                self.read_ahead()
        self._tencache_listener.fetched(current_submodule, forward)
        if recorder is not None:
            recorder.after_fetch(nbytes_by_id(params.values()), awaited)

    def release_sub_module(self, submodule: Any, forward: bool = False) -> None:
        """DeepSpeed's release of a module's weights."""
        recorder = self._tencache_recorder if submodule.training else None
        if recorder is None or is_leaf(submodule) or torch.compiler.is_compiling():
            super().release_sub_module(submodule, forward)
            return
        recorder.begin_hook()
        super().release_sub_module(submodule, forward)
        recorder.after_release(nbytes_by_id(params_of(submodule).values()))

    def _PartitionedParameterCoordinator__all_gather_params_(
        self, params: Any, forward: bool, quantize: bool = False
    ) -> None:
        """DeepSpeed's start of gathers."""
        recorder = self._tencache_recorder
        if recorder is None:
            super()._PartitionedParameterCoordinator__all_gather_params_(params, forward, quantize=quantize)
            return
        issued = [param for param in params if param.ds_status is ZeroParamStatus.NOT_AVAILABLE]
        recorder.before_gather()
        super()._PartitionedParameterCoordinator__all_gather_params_(params, forward, quantize=quantize)
        recorder.after_gather(nbytes_by_id(issued))

    @uncompiled
    def reset_step(self) -> None:
        """The start of a forward pass."""
        spans.phase("forward")
        refuse_void_weights(self.trained[:1])  # all weights of a model have one guard
        super().reset_step()
        in_order = self._PartitionedParameterCoordinator__param_order
        continues, self._tencache_update_continues = self._tencache_update_continues, False
        behind_update = continues and not any(n_user_gathers(entry.param) for entry in in_order)
        self.begin_fetches(behind_update=behind_update)
        self._tencache_forward = True
        self._tencache_listener.pass_begins()
        with self._tencache_lock:
            self.hide_unused()
            self._tencache_trace.begin_cycle(torch.is_grad_enabled())
            self.read_ahead()

    @uncompiled
    def end_gathers_of(self, params: Iterable[Any]) -> None:
        """Waits for gathers that were begun ahead of a module, and releases the weights again. A pass leaves some
        behind if it is shorter than the order that was recorded, as an evaluation is."""
        in_flight = self._PartitionedParameterCoordinator__inflight_param_registry
        ahead = [param for param in params if param in in_flight]
        if not ahead:
            return
        stream = self._PartitionedParameterCoordinator__allgather_stream
        with get_accelerator().stream(stream):
            for param in ahead:
                in_flight.pop(param).wait()
        if not get_accelerator().is_synchronized_device():
            get_accelerator().current_stream().wait_stream(stream)
        for param in ahead:
            if param.ds_status is ZeroParamStatus.AVAILABLE and is_free(param):
                self.release(param)

    @uncompiled
    def release_and_reset_all(self, module: Any) -> None:
        """DeepSpeed's release of all weights, before an update or a checkpoint."""
        in_flight = self._PartitionedParameterCoordinator__inflight_param_registry
        if in_flight:
            for param in iter_params(module, recurse=True):
                if param in in_flight:
                    in_flight.pop(param).wait()
        if dist.get_world_size() == 1:
            # An interrupt came between a gather, which waits for no other rank, and its handle.
            for param in iter_params(module, recurse=True):
                if param.ds_status is ZeroParamStatus.INFLIGHT:
                    partition(param)
        super().release_and_reset_all(module)
        self.finish_gathers()

    def read_ahead(self, *, updated: bool = False) -> None:
        """Starts the reads that come next, as far as there are free staging buffers; never blocks.

        Args:
            updated: the weights have the values of the next pass, although this is the micro-step before an update: the
                update is over. A read of a weight whose write is still under way waits for it in the store.
        """
        with self._tencache_lock:
            trace = self._tencache_trace
            end = trace.cycle_end
            if updated or self._tencache_listener.weights_stay():
                end = trace.now + len(trace.order)
            self._tencache_reads.go(self._read_one_ahead, end)

    def order_gathers(self) -> None:
        """Later gathers wait for what the current stream has been given: it changes shards in device memory."""
        if not get_accelerator().is_synchronized_device():
            gathers = self._PartitionedParameterCoordinator__allgather_stream
            gathers.wait_stream(get_accelerator().current_stream())

    def forget_releases(self) -> None:
        """Weights are kept gathered from now on that were not, or no longer."""
        self._PartitionedParameterCoordinator__params_to_release = functools.lru_cache(maxsize=None)(
            functools.partial(_without_cache(PartitionedParameterCoordinator), self)
        )

    @property
    def gathered_numel(self) -> int:
        """Elements of weights that have been gathered in this pass and not released."""
        return max(int(self._PartitionedParameterCoordinator__n_available_params), 0)

    @property
    def most_gathered_numel(self) -> int:
        """At how many of them DeepSpeed gathers nothing ahead of its use any more (``stage3_max_live_parameters``)."""
        return int(self._PartitionedParameterCoordinator__max_n_available_params)

    def hide_unused(self) -> None:
        """Takes back weights that were committed but not gathered, before they go out of date."""
        with self._tencache_lock:
            for swapper in self._swappers():
                swapper.hide_unused()

    def _commit(self, needed: list[Any]) -> None:
        """Makes weights visible to DeepSpeed's gather of this module and to its prefetch of the next ones.

        On one rank upcoming weights are committed when their reads have completed, so that nothing waits for a read
        that is not needed yet. On several, the set of weights in a collective must not depend on the timing of this
        rank's disk: it is a distance in the recorded order, the same on every rank (:class:`CommitWindow`).
        """
        single = dist.get_world_size() == 1
        chosen = {param.ds_id: param for param in needed if param.ds_status is ZeroParamStatus.NOT_AVAILABLE}

        def choose(key: int) -> bool:
            param = self._tencache_params[key]
            if not param.nvme_swapper.stored(param):
                return True  # it has moved to memory since the order was recorded
            if param.ds_status is ZeroParamStatus.NOT_AVAILABLE and key not in chosen:
                if single and not param.nvme_swapper.ready(param):
                    return False
                chosen[key] = param
            return True

        self._tencache_commits.go(choose, self._window_end())
        self._tencache_committed.update(chosen.keys() - {param.ds_id for param in needed})
        for swapper in self._swappers():
            mine = [param for param in chosen.values() if param.nvme_swapper is swapper]
            if mine:
                with get_accelerator().stream(self._PartitionedParameterCoordinator__allgather_stream):
                    swapper.commit(mine)

    def _window_end(self) -> int:
        """The first place too far ahead to commit. The first call of all is a collective, to agree on figures."""
        swappers = self._swappers()
        if not swappers:
            return self._tencache_trace.now
        if self._tencache_window is None:
            params = self._tencache_params
            self._tencache_window = CommitWindow(
                self._tencache_trace,
                lambda key: params[key].ds_numel,
                lambda key: params[key].ds_tensor.ds_numel * params[key].ds_tensor.element_size(),
                bucket_numel=self._PartitionedParameterCoordinator__prefetch_bucket_sz,
                # Of all ranks: they have to commit to the same gathers.
                read_ahead_nbytes=agreed("how much is read ahead", swappers[0].read_ahead_nbytes, min),
            )
        return self._tencache_window.end()

    def _read_one_ahead(self, key: int) -> bool:
        param = self._tencache_params[key]
        return bool(param.nvme_swapper.read_ahead(param))

    def _issued(self, param: Any) -> bool:
        """Whether the copy of a shard to the device was issued: DeepSpeed calls a parameter INFLIGHT before that, and
        files the gather's handle afterwards. Several autograd threads may be fetching.
        """
        return (
            param.ds_status is ZeroParamStatus.AVAILABLE
            or param in self._PartitionedParameterCoordinator__inflight_param_registry
        )

    def _access(self, param: Any) -> None:
        """Takes down that a weight is used now."""
        swapper, key = param.nvme_swapper, param.ds_id
        self._tencache_params[key] = param
        if id(swapper) not in self._tencache_swappers:
            self._tencache_swappers[id(swapper)] = swapper
            swapper.engine.weights.follow(self._tencache_reads)
            swapper.follow(self._tencache_reads.gone)
            swapper.follow(self._tencache_commits.gone)
        held = param.ds_status is not ZeroParamStatus.NOT_AVAILABLE and key not in self._tencache_committed
        self._tencache_committed.discard(key)
        if not self._tencache_trace.access(key, held=held):
            swapper.engine.counters.happened(Event.DIVERGENCE)
        if held and not self._tencache_reads.worth_keeping(key):
            swapper.engine.weights.forget(key)

    def _swappers(self) -> list[ParamSwapper]:
        return list(self._tencache_swappers.values())


def end_gathers_ahead(params: Sequence[Any]) -> None:
    """Parameters are about to be gathered for a user: DeepSpeed leaves out those that are being gathered for a module,
    and cannot release them."""
    for coordinator in list(_coordinators):
        coordinator.end_gathers_of(params)


@contextlib.contextmanager
def undone_after_error(params: Iterable[Any]) -> Iterator[list[Any]]:
    """Around the gather of parameters for a user: after an error those that it has gathered are released. Gives those
    that are in no other context of the user's."""
    own = [param for param in params if not n_user_gathers(param)]
    missing = [param for param in own if param.ds_status is ZeroParamStatus.NOT_AVAILABLE]
    try:
        yield own
    except BaseException:
        for param in own:
            calls.forget_contexts(param)
        released(own)
        end_changes(own)
        for param in missing:
            if param.ds_status is ZeroParamStatus.AVAILABLE:
                param.partition()
            else:  # DeepSpeed says so when it has gathered all of them
                free_param(param)
        raise


def _stored(params: dict[int, Any]) -> list[Any]:
    """Those on NVMe, in the order of their ids."""
    stored = [
        param
        for param in params.values()
        if isinstance(param.nvme_swapper, ParamSwapper) and param.nvme_swapper.stored(param)
    ]
    return sorted(stored, key=lambda param: param.ds_id) if len(stored) > 1 else stored


def _without_cache(coordinator: type[PartitionedParameterCoordinator]) -> Callable[..., Any]:
    """DeepSpeed's function behind ``__params_to_release``, which is wrapped in a cache and in a profiler range."""
    wrapped = coordinator._PartitionedParameterCoordinator__params_to_release
    cached = next(cell.cell_contents for cell in wrapped.__closure__ if hasattr(cell.cell_contents, "cache_info"))
    return cached.__wrapped__
