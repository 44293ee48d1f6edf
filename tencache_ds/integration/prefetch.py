# SPDX-License-Identifier: Apache-2.0
"""How far DeepSpeed prefetches behind an update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tencache_ds.integration.adapters.installed import Coordinator


class PrefetchingCoordinator(Coordinator):
    """DeepSpeed's coordinator with limits of its own to what it gathers ahead. Used by the thread that computes."""

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
