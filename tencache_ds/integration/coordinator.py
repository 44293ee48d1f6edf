# SPDX-License-Identifier: Apache-2.0
"""Fetching and prefetching of weights: DeepSpeed's coordinator, fed from the recorded order of accesses.

DeepSpeed looks one stored parameter ahead and waits for every read in flight. Here reads go as deep as there are free
staging buffers, in the order of the last recorded pass, and only what the current module needs is ever waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator, iter_params
from deepspeed.utils import z3_leaf_module

from tencache_ds.integration.param_swapper import ParamSwapper
from tencache_ds.observability.counters import Event
from tencache_ds.profiling.access_trace import AccessTrace


class TenCacheCoordinator(PartitionedParameterCoordinator):
    """DeepSpeed's coordinator with TenCache's read-ahead around each fetch."""

    def __init__(self, *args: Any, prefetch_nvme: bool = False, **kwargs: Any) -> None:
        # DeepSpeed's own NVMe look-ahead is replaced; its prefetch of gathers to the device stays.
        super().__init__(*args, prefetch_nvme=False, **kwargs)
        self._tencache_lock = threading.RLock()
        self._tencache_trace: AccessTrace[int] = AccessTrace()
        self._tencache_params: dict[int, Any] = {}
        self._tencache_swappers: dict[int, ParamSwapper] = {}
        self.weights_stay: Callable[[], bool] = lambda: True
        """Whether the weights are the same in the next pass: false on the last micro-step before an optimizer step."""

    @torch.no_grad()
    def fetch_sub_module(self, current_submodule: Any, forward: bool) -> None:
        """DeepSpeed's fetch, between committing what has arrived and reading further ahead."""
        params = self._stored_params(current_submodule)
        with self._tencache_lock:
            for param in params:
                self._tencache_params[param.ds_id] = param
                self._tencache_swappers.setdefault(id(param.nvme_swapper), param.nvme_swapper)
                if not self._tencache_trace.access(param.ds_id):
                    param.nvme_swapper.engine.counters.happened(Event.DIVERGENCE)
            self._commit(params)
        super().fetch_sub_module(current_submodule, forward)
        with self._tencache_lock:
            for swapper in self._swappers():
                swapper.retire(self._PartitionedParameterCoordinator__allgather_stream)
            self.read_ahead()

    def reset_step(self) -> None:
        """The start of a forward pass."""
        super().reset_step()
        with self._tencache_lock:
            for swapper in self._swappers():
                swapper.hide_unused()
            self._tencache_trace.begin_cycle()
            self.read_ahead()

    def read_ahead(self) -> None:
        """Starts the reads that come next, as far as there are free staging buffers; never blocks."""
        with self._tencache_lock:
            swappers = self._swappers()
            for swapper in swappers:
                upcoming = (
                    self._tencache_params[key] for key in self._tencache_trace.upcoming(wrap=self.weights_stay())
                )
                swapper.read_ahead(
                    upcoming if len(swappers) == 1 else (p for p in upcoming if p.nvme_swapper is swapper)
                )

    def hide_unused(self) -> None:
        """Takes back weights that were committed but not gathered, before they go out of date."""
        with self._tencache_lock:
            for swapper in self._swappers():
                swapper.hide_unused()

    def _commit(self, needed: list[Any]) -> None:
        """Makes weights visible to DeepSpeed's gather of this module and to its prefetch of the next ones.

        On one rank only what has arrived is committed, so that nothing waits for a read that is not needed yet. On
        several, which weights enter a collective must not depend on the timing of this rank's disk: everything within
        the prefetch bucket is committed.
        """
        single = dist.get_world_size() == 1
        exposed = [param for param in needed if param.ds_status is ZeroParamStatus.NOT_AVAILABLE]
        numel = 0
        for param in self._next_on_nvme():
            numel += param.ds_numel
            if numel > self._PartitionedParameterCoordinator__prefetch_bucket_sz or (
                single and not param.nvme_swapper.ready(param)
            ):
                break
            if all(param is not other for other in needed):
                exposed.append(param)
        for swapper in self._swappers():
            mine = [param for param in exposed if param.nvme_swapper is swapper]
            if mine:
                with get_accelerator().stream(self._PartitionedParameterCoordinator__allgather_stream):
                    swapper.commit(mine)

    def _next_on_nvme(self) -> Iterator[Any]:
        for key in self._tencache_trace.upcoming():
            param = self._tencache_params[key]
            if param.ds_status is ZeroParamStatus.NOT_AVAILABLE:
                yield param

    def _stored_params(self, module: Any) -> list[Any]:
        params = {param.ds_id: param for param in iter_params(module, recurse=z3_leaf_module(module))}
        return [
            param
            for _, param in sorted(params.items())
            if isinstance(param.nvme_swapper, ParamSwapper) and param.nvme_swapper.stored(param)
        ]

    def _swappers(self) -> list[ParamSwapper]:
        return list(self._tencache_swappers.values())
