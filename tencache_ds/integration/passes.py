# SPDX-License-Identifier: Apache-2.0
"""The forward and backward passes of a training engine with data in GPU memory: which modules run without DeepSpeed's
hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tencache_ds.host_path import SuspendedHooks, gather_at_once
from tencache_ds.integration.gathered_weights import GatheredWeights
from tencache_ds.observability import spans
from tencache_ds.placement.gpu_homes import GpuHomes
from tencache_ds.placement.host_homes import HostHomes


class PassesMixin:
    """Overrides of DeepSpeed's methods around passes for :class:`TenCacheZeroOptimizer_Stage3`."""

    _suspended: SuspendedHooks | None = None
    _n_hook_changes = 0
    _had_suspended = False
    _lacks_buckets = False
    _updating = False
    _host_homes: HostHomes | None

    def _follow_passes(self, homes: GpuHomes, weights: GatheredWeights) -> None:
        """Once DeepSpeed's hooks are there."""
        coordinator = self._get_param_coordinator()
        coordinator.before_pass = self._begin_pass
        coordinator.before_backward = self._begin_backward
        if weights.stay_gathered:
            self._suspended = SuspendedHooks(self.parameter_offload, weights)

    def _begin_pass(self) -> None:
        if self._suspended is not None and self._suspended.n_changes != self._n_hook_changes:
            self._n_hook_changes = self._suspended.n_changes
            if self.activation_hooks is not None:
                for module in self._suspended.modules:
                    self.activation_hooks.note_weights(module)
        self._gpu_homes.begin_pass()

    def _begin_backward(self) -> None:
        if self._suspended is not None:
            self._suspended.begin_backward()
        self._gpu_homes.begin_backward()

    def backward_prologue(self) -> None:
        """The start of a backward pass."""
        self.step_guard.check()
        if self._lacks_buckets:
            self._lacks_buckets = False
            self.allocate_buckets(self.reduce_bucket_size)
        super().backward_prologue()
        self._adds_gradients = False
        spans.phase("backward")
        if self.activation_hooks is not None:
            self.activation_hooks.begin_backward()

    def backward_epilogue(self) -> None:
        """Its end."""
        super().backward_epilogue()
        self._get_param_coordinator().finish_gathers()
        if self._suspended is not None:
            self._suspended.end_pass()
        if self._host_homes is not None and not self.at_boundary():
            self._host_homes.backward_done()
        spans.phase(None)

    def lend_buckets(self) -> None:
        """DeepSpeed's buckets of gradients take no memory until the next backward pass."""
        if self.contiguous_gradients:
            self._lacks_buckets = True
            self.free_buckets()

    # The step

    @contextlib.contextmanager
    def _updating_gathered_weights(self) -> Iterator[None]:
        """Within the block DeepSpeed releases all weights in order to update them: not those that stay gathered."""
        self._updating = True
        try:
            yield
        finally:
            self._updating = False

    def _partition_all_parameters(self) -> None:
        with contextlib.ExitStack() as stack:
            if self._updating and self._suspended is not None:
                stack.enter_context(self._suspended.update())
            super()._partition_all_parameters()

    def _follow_step(self) -> None:
        """After each step: once it is decided which weights live in GPU memory, their modules need no hooks."""
        if self._suspended is not None and self._gpu_homes.settled:
            self._suspended.step_done()

    def _post_step(self, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's, which gathers the weights that always are: here with one collective for all of them, once every
        rank has updated its part."""
        self._update_passed()
        if self.host_path.rank_gathers:
            gather_at_once(self.persistent_parameters)
        super()._post_step(*args, **kwargs)

    # Checkpoints

    def checkpoint_event_prologue(self) -> None:
        """DeepSpeed's, which releases all weights before it saves a checkpoint."""
        self._had_suspended = self._suspended is not None and bool(self._suspended.modules)
        super().checkpoint_event_prologue()

    def checkpoint_event_epilogue(self) -> None:
        """DeepSpeed's, after it has saved a checkpoint."""
        super().checkpoint_event_epilogue()
        if self._had_suspended:
            self._suspended.suspend()

    def _stop_following(self) -> None:
        """All hooks are back. Idempotent."""
        if self._suspended is not None:
            self._suspended.close()
