# SPDX-License-Identifier: Apache-2.0
"""The forward and backward passes of a training engine: which modules run without DeepSpeed's hooks while data is in
GPU memory, and the norms of gradients that are accumulated in a :class:`~tencache_ds.tiers.gradients.GradientTier`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from tencache_ds.host_path import GradientNorms, SuspendedHooks, gather_at_once
from tencache_ds.integration.adapters.versions import DeepSpeedClass
from tencache_ds.integration.coordinator import PassListener
from tencache_ds.integration.model_weights import GatheredWeights
from tencache_ds.observability import spans
from tencache_ds.placement.gpu_homes import GpuHomes
from tencache_ds.placement.host_homes import HostHomes
from tencache_ds.tiers.update import UpdateGate


class PassesMixin(PassListener, DeepSpeedClass):
    """Overrides of DeepSpeed's methods around passes for :class:`TenCacheZeroOptimizer_Stage3`, which listens to its
    coordinator."""

    _suspended: SuspendedHooks | None = None
    _n_hook_changes = 0
    _had_suspended = False
    _lacks_buckets = False
    _updating = False
    _gpu_homes: GpuHomes | None
    _host_homes: HostHomes | None

    def _follow_passes(self, weights: GatheredWeights | None, gate: UpdateGate | None) -> None:
        """Once DeepSpeed's hooks are there."""
        module = self.parameter_offload.module
        self._get_param_coordinator().follow(self, list(module.parameters()), gate)
        if self._gpu_homes is not None and weights is not None and weights.stay_gathered:
            self._suspended = SuspendedHooks(self.parameter_offload, weights, gate=gate)

    def pass_begins(self) -> None:
        """See :meth:`PassListener.pass_begins`."""
        if self._suspended is not None and self._suspended.n_changes != self._n_hook_changes:
            self._n_hook_changes = self._suspended.n_changes
            if self.activation_hooks is not None:
                for module in self._suspended.modules:
                    self.activation_hooks.note_weights(module)
        if self._gpu_homes is not None:
            self._gpu_homes.begin_pass()

    def backward_begins(self) -> None:
        """See :meth:`PassListener.backward_begins`."""
        if self._suspended is not None:
            self._suspended.begin_backward()
        if self._gpu_homes is not None:
            self._gpu_homes.begin_backward()

    def fetched(self, module: Any, forward: bool) -> None:
        """See :meth:`PassListener.fetched`."""
        if forward and self.activation_hooks is not None:
            self.activation_hooks.note_weights(module)

    def weights_stay(self) -> bool:
        """See :meth:`PassListener.weights_stay`."""
        deepspeed_engine = self._deepspeed_engine()
        if deepspeed_engine is None or not deepspeed_engine.module.training:
            return True
        return not deepspeed_engine.is_gradient_accumulation_boundary()

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
            # DeepSpeed then walks through all weights once more, to check what this has checked.
            self._get_param_coordinator().release_and_reset_all(self.parameter_offload.module)

    def _follow_step(self) -> None:
        """After each step: once it is decided which weights live in GPU memory, their modules need no hooks."""
        if self._suspended is not None and self._gpu_homes is not None and self._gpu_homes.settled:
            self._suspended.step_done()

    def _post_step(self, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's, which gathers the weights that always are, once every rank has updated its part."""
        self._update_passed()
        self._gather_persistent()
        super()._post_step(*args, **kwargs)

    def _gather_persistent(self) -> None:
        """Gathers the weights that always are, with one collective where DeepSpeed has one for each."""
        if self.host_path.rank_gathers:
            gather_at_once(self.persistent_parameters)

    # Checkpoints

    def checkpoint_event_prologue(self) -> None:
        """DeepSpeed's, which releases all weights before it saves a checkpoint."""
        self._had_suspended = self._suspended is not None and bool(self._suspended.modules)
        super().checkpoint_event_prologue()

    def checkpoint_event_epilogue(self) -> None:
        """DeepSpeed's, after it has saved a checkpoint."""
        super().checkpoint_event_epilogue()
        if self._suspended is not None and self._had_suspended:
            self._suspended.suspend()

    def _stop_following(self) -> None:
        """All hooks are back. Idempotent."""
        if self._suspended is not None:
            self._suspended.close()


class GradientNormsMixin(DeepSpeedClass):
    """Overrides of DeepSpeed's methods for :class:`TenCacheZeroOptimizer_Stage3`.

    Attributes:
        _quick_norms: those that are completed together; None: DeepSpeed computes each.
    """

    norm_for_param_grads: dict[Any, torch.Tensor]
    _quick_norms: GradientNorms | None = None

    def _offload_grad_partition_at_boundary(
        self, param: Any, grad_buffer: torch.Tensor, offload_fp32_gradients: Any, offload_fp32_offsets: Any
    ) -> None:
        if self._gradients is None:
            super()._offload_grad_partition_at_boundary(
                param, grad_buffer, offload_fp32_gradients, offload_fp32_offsets
            )
            return
        key = self.get_param_id(param)
        if self._quick_norms is not None and self._quick_norms.add(key, grad_buffer):
            self.norm_for_param_grads.pop(key, None)
        else:
            self.norm_for_param_grads[key] = self._constant_buffered_norm2(grad_buffer)

    def _get_norm_groups(self) -> Any:
        """DeepSpeed's norm of each sub-group. Some scripts ask for it between a backward pass and the step."""
        if self._gradients is not None:
            self._complete_norms()
        return super()._get_norm_groups()

    def _complete_norms(self) -> None:
        """The norms of all gradients, in host memory, where DeepSpeed adds them one by one; also of those that came in
        an earlier micro-step only, which DeepSpeed would forget."""
        norms = dict(self.norm_for_param_grads)
        if self._quick_norms is not None:
            norms = self._quick_norms.complete() | norms
        params = {param.ds_id: param for param in itertools.chain.from_iterable(self.fp16_groups)}
        device = get_accelerator().current_device_name()
        for key in self._gradients.live():
            if key not in norms:
                segment = self._gradients.segment(key).to(device)
                norms[self.get_param_id(params[key])] = self._constant_buffered_norm2(segment)
        self.norm_for_param_grads = {key: norm.cpu() for key, norm in norms.items()}  # all on one device
