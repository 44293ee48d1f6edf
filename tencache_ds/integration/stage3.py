# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3's optimizer on TenCache's tiers: the class DeepSpeed instantiates for a config with the offload engine.

To the rest of DeepSpeed this looks like CPU offload (``swap_optimizer`` is False): checkpoints, state access and
loading take those paths, and the tensors they expect come from the tiers.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from tencache_ds.errors import TenCacheError, built
from tencache_ds.host_path import GradientBucketsMixin, GradientNorms, HostPath, finish_after_forward, install
from tencache_ds.integration.adapters.installed import ZeroOptimizer
from tencache_ds.integration.adapters.installed import calls as deepspeed_calls
from tencache_ds.integration.agreement import JobVotes
from tencache_ds.integration.checkpoint import CheckpointMixin
from tencache_ds.integration.chunked_step import guarding_weights, unguard_weights, wait_for_state_dict
from tencache_ds.integration.config_checks import refuse_optimizer
from tencache_ds.integration.model_weights import in_tier
from tencache_ds.integration.muon import MuonMixin
from tencache_ds.integration.optimizer_states import step_is_watched
from tencache_ds.integration.passes import GradientNormsMixin, PassesMixin
from tencache_ds.integration.release import end_passes, finish_gathers, release_model
from tencache_ds.integration.reporting import StepMonitor
from tencache_ds.integration.stage3_building import BuildingMixin
from tencache_ds.integration.watched_tensors import StateAccessMixin
from tencache_ds.observability import spans
from tencache_ds.observability.spans import Category, span
from tencache_ds.runtime.session import Session
from tencache_ds.runtime.step_guard import StepGuard
from tencache_ds.tiers.sub_group import MASTER

logger = logging.getLogger("DeepSpeed.tencache")
OVERFLOW_CHECK_NUMEL = 16 * 2**20
_numbers = itertools.count()
"""Numbers of the engines of this process; ranks build theirs in the same order."""


class TenCacheZeroOptimizer_Stage3(
    BuildingMixin,
    PassesMixin,
    CheckpointMixin,
    StateAccessMixin,
    GradientBucketsMixin,
    GradientNormsMixin,
    MuonMixin,
    ZeroOptimizer,
):
    """``DeepSpeedZeroOptimizer_Stage3`` with weights, gradients and optimizer state in TenCache's tiers."""

    params_already_reduced: dict[Any, bool]

    def __init__(self, module: Any, init_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        options, deepspeed_engine = kwargs.pop("tencache_options"), kwargs.pop("deepspeed_engine")
        self._tencache_options = options
        self._deepspeed_engine = weakref.ref(deepspeed_engine)
        self._optimizer_on_nvme = False
        self._combined_scale: Any = 1.0
        self._weights_changing = False
        self._by_chunks = False
        self._update_seconds = 0.0
        self.host_path = HostPath.of(options, deepspeed_engine._config.zero_config)
        self._quick_norms = GradientNorms() if self.host_path.norms else None
        self._collected = []
        self._adds_gradients = self._gradients_mixed = False
        self._monitor = StepMonitor()
        self._warned_of_watched_step = False
        self.step_guard = StepGuard(JobVotes.of_job(f"engine {next(_numbers)}"))
        """Knows whether the last step is void."""
        self._update_passed: Callable[[], None] = lambda: None
        offload = kwargs.get("offload_optimizer_config")
        try:
            refuse_optimizer(
                type(init_optimizer).__name__,
                offloaded=offload is not None and offload.device != "none",
                on_gpu=get_accelerator().device_name() != "cpu",
            )
            with guarding_weights(list(module.parameters()), self.step_guard):
                super().__init__(module, init_optimizer, *args, **kwargs)
        except BaseException:
            # The weights stay their model's, which may get another engine with another config.
            if self._shared_weights is not None:
                self._shared_weights.close()
            if self.tencache is not None:
                self.tencache.close()
            if hasattr(self, "parameter_offload"):
                self.parameter_offload.destroy()
            raise
        install(self.host_path, self.parameter_offload)
        self._follow_passes(self._gathered, None if self._chunked_step is None else self._chunked_step.gate)
        coordinator = self._get_param_coordinator()
        self._showing = self.parameter_offload.module.register_state_dict_pre_hook(wait_for_state_dict)
        self._finishing = finish_after_forward(self.parameter_offload.module, coordinator.finish_gathers)
        self._plan_peak()

    # Gradients

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> Any:
        """Accumulates gradient partitions in host memory; on the last micro-step only their norms are kept in
        addition."""
        self._adds_gradients = self.micro_step_id > 0
        if self._gradients is None:
            return super().partition_grads(params_to_release, grad_partitions)
        built(self._chunked_step).wait_for_gradients(params_to_release)
        accelerator, last = get_accelerator(), self.at_boundary()
        stream = None if accelerator.is_synchronized_device() else accelerator.current_stream()
        rank = self._get_param_partition_rank(params_to_release[0])  # a bucket has one process group
        buffers = []
        for param, partition in zip(params_to_release, grad_partitions, strict=False):
            if param.partition_numel() * rank < param.ds_numel:
                self.note_reduced(param)
                accumulated = self._gradients.accumulate(param.ds_id, partition, first=self.micro_step_id == 0)
                buffers.append(self._gradients.segment(param.ds_id)[: partition.numel()])
                if last:
                    self._offload_grad_partition_at_boundary(param, accumulated, {}, {})
                if param.grad is not None and stream is not None:
                    param.grad.record_stream(stream)
                    if partition.device == param.grad.device:
                        partition.record_stream(stream)
            param.grad = None
        return buffers

    def forget_interrupted_backward(self) -> None:
        """Gradients on their way into the buffer when an exception ended a backward pass are not of the next one. What
        has been added to those of earlier micro-steps cannot be taken out again."""
        self.empty_buckets()
        self._collected, self._collected_numel = [], 0
        for param in itertools.chain.from_iterable(self.fp16_groups):
            param.grad = None
        self.params_already_reduced = dict.fromkeys(self.params_already_reduced, False)
        self.end_backward()
        self._gradients_mixed |= self._adds_gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """DeepSpeed's; the next micro-step is the first one."""
        self._gradients_mixed = False
        super().zero_grad(set_to_none)

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """DeepSpeed's check for inf and NaN, without a boolean copy of every gradient in host memory."""
        if self._gradients is None or not partition_gradients:
            return super().has_overflow(partition_gradients)
        if not get_accelerator().resolves_data_dependency():
            self.reduce_and_partition_stream.synchronize()
        overflow = get_accelerator().ByteTensor([not self._gradients.all_finite(OVERFLOW_CHECK_NUMEL)])
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=overflow, op=dist.ReduceOp.MAX)
        return bool(overflow[0].item())

    # The step

    def step(self, closure: Any = None) -> None:
        """DeepSpeed's step; the update itself is streamed chunk by chunk in :meth:`_optimizer_step`."""
        spans.phase("optimizer step")
        try:
            with self.step_guard.step():
                self._step(closure)
        finally:
            spans.phase(None)

    def _step(self, closure: Any) -> None:
        with self.step_guard.together("the beginning of an optimizer step"):
            engine = self._require_engine()
            before = engine.counters.last_step  # with its update, which is over now
            self._write_figures()
            engine.check()
            if self._gradients_mixed:
                raise TenCacheError(
                    "a backward pass failed after it had added to the gradients of earlier micro-steps. Load a "
                    "checkpoint, or drop the gradients of all micro-steps so far with engine.optimizer.zero_grad()"
                )
            t_start_ns = time.perf_counter_ns()
            self._update_seconds = 0.0
            if self._gradients is not None:
                self._gradients.settle()
                self._complete_norms()
        with self.step_guard.together("the update of an optimizer step") as self._update_passed:
            try:
                with self._updating_gathered_weights(), engine.updating():
                    super().step(closure)
            finally:
                self._weights_changing = False
        if self._gradients is not None:
            self._gradients.end_step()
        record = engine.step_done(time.perf_counter_ns() - t_start_ns)
        spans.phase("optimizer step")  # of a trace that has begun with this step's end
        if self._gpu_homes is not None:
            self._gpu_homes.step_done(record, before, self._update_seconds)
        if self._host_homes is not None:
            self._host_homes.step_done()
        if engine.activations is not None and self._state_moves is not None:
            engine.activations.make_room(self._state_moves)
        self._follow_step()
        self._get_param_coordinator().step_done(update_continues=engine.options.overlap_step)
        self._monitor.step_done(self._deepspeed_engine())
        if engine.background is None or not engine.background.running:
            self._write_figures()

    def _update_scale(self, has_overflow: bool = False) -> None:
        """DeepSpeed's; the loss scale is the first thing that a step changes."""
        self.step_guard.begin_change()
        super()._update_scale(has_overflow)

    def _write_figures(self) -> None:
        """Gives the last step's figures to DeepSpeed's monitor, once that step is over."""
        self._monitor.write(self._deepspeed_engine(), self.tencache)

    def _prepare_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        if self._state is None:
            super()._prepare_sub_group(sub_group_id, timer_names)

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        """Remembers the factor that each chunk's gradient is multiplied by."""
        if self._state is None:
            super().unscale_and_clip_grads(sub_group_id, total_norm)
            return
        combined_scale = self.loss_scale
        if self.clip_grad > 0.0:
            clip = ((total_norm / self.loss_scale) + 1e-6) / self.clip_grad
            clip = torch.clamp(clip, min=1.0)
            combined_scale = clip * self.loss_scale
        self._combined_scale = 1.0 / combined_scale

    def _optimizer_step(self, sub_group_id: int) -> None:
        """One sub-group's update: chunk by chunk where the optimizer's arithmetic is known, or its ``step()``.

        As in stock DeepSpeed, ``optimizer.step()`` is called once per sub-group. Step hooks, the optimizer's own and
        torch's global ones, are therefore called once per sub-group and see the same as in stock: the sub-group's fp32
        weights as the one parameter of its group, with the gradient that is about to be applied, and, on NVMe too, its
        states. They may change any of it, and the hyper-parameters. For that, the sub-group's whole state is held in
        host memory while there are such hooks.
        """
        if self._state is None:
            self._begin_weight_change()
            super()._optimizer_step(sub_group_id)
            return
        if self._begin_weight_change():
            self._by_chunks = self._may_update_by_chunks()
            if self._by_chunks:
                built(self._chunked_step).begin()
        start, updater = self._sub_group_starts[sub_group_id], built(self._updater)
        t_start_s = time.perf_counter()
        stock_step = super()._optimizer_step
        with span(Category.UPDATE, "update::sub_group", f"sub-group {sub_group_id}"):
            if self._by_chunks:
                group = self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]
                step = updater.begin_step(sub_group_id, group, start, self._combined_scale)
                built(self._chunked_step).update(step)
            else:
                scale = self._combined_scale
                updater.update_as_whole(sub_group_id, start, scale, lambda: stock_step(sub_group_id))
        self._update_seconds += time.perf_counter() - t_start_s

    def _may_update_by_chunks(self) -> bool:
        if self._arithmetic is None or self.torch_autocast_gradscaler is not None:
            return False
        if not step_is_watched(self.optimizer):
            return True
        if self._optimizer_on_nvme and not self._warned_of_watched_step and dist.get_rank() == 0:
            largest = max(int(numel) for numel in self.fp16_partitioned_groups_flat_numel)
            logger.warning(
                "step() of the optimizer has hooks or was replaced: the whole optimizer state of one sub-group is held "
                'in host memory for them (%.1f GiB here; a smaller "sub_group_size" needs less)',
                largest * 16 / 2**30,
            )
        self._warned_of_watched_step = True
        return False

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        if self._state is None:
            super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)

    def _release_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        if self._state is None:
            super()._release_sub_group(sub_group_id, timer_names)

    # Weights and master weights

    def _begin_weight_change(self) -> bool:
        """Before the first weight of a step changes: staged copies of the old values are dropped. True the first
        time.
        """
        if self._weights_changing:
            return False
        self._weights_changing = True
        self._drop_staged_weights()
        return True

    def _drop_staged_weights(self) -> None:
        """Forgets every staged copy of a weight that is about to change."""
        self._get_param_coordinator().hide_unused()
        for engine in self._require_engine().claimed:
            engine.weights.drop_stale()

    def _partitioned_params_swap_out(self, i: int) -> None:
        """Weights in the tier under an optimizer that stays on the device (``offload_optimizer`` none)."""
        built(self._model_weights).write(i, self.fp32_partitioned_groups_flat[i].data)

    def _copy_weights_to_master(self, sub_group: int, *, fresh: bool = False) -> None:
        """Master weights from the model's weights; ``fresh`` chunks have no older state worth reading."""
        model_weights = built(self._model_weights)
        if self._state is None:
            master = self.fp32_partitioned_groups_flat[sub_group].data
            for start, shard in model_weights.whole_shards(sub_group):
                master[start : start + shard.numel()].copy_(shard)
            return
        for chunk, weights in model_weights.by_chunk(self._state.chunks(sub_group)):
            if fresh and self._state.start_split(chunk):
                continue
            used = self._state.overwrite(chunk, fresh=True) if fresh else self._state.take(chunk)
            for overlap_start, values in weights:
                used.views[MASTER][overlap_start : overlap_start + values.numel()].copy_(values)
            self._state.put(used)

    # Lifetime

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's, as long as there is a state."""
        self._require_engine()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's, as long as there is a state."""
        with self.loading():
            self._require_engine()
            super().load_state_dict(*args, **kwargs)

    def destroy(self) -> None:
        """DeepSpeed's clean-up, then that of this engine: optimizer state, gradients, staging buffers, files. The
        weights stay with their model. Idempotent.
        """
        session = self.tencache
        if session is not None and session.closed:
            return
        module = self.parameter_offload.module
        with contextlib.ExitStack() as stack:  # every step runs, even if an earlier one raises
            stack.callback(release_model, module)
            if session is not None:
                stack.callback(session.close)
            stack.callback(super().destroy)
            if self._gpu_homes is not None:
                stack.callback(self._gpu_homes.close)
            stack.callback(self._stop_following)
            stack.callback(end_passes, module)
            stack.callback(self._finishing.remove)
            stack.callback(self._showing.remove)
            stack.callback(unguard_weights, list(module.parameters()), self.step_guard)
            stack.callback(self._write_figures)
            if self._shared_weights is not None:
                stack.callback(self._shared_weights.close)
            if self._chunked_step is not None:
                stack.callback(self._chunked_step.close)
            stack.callback(finish_gathers, module, session.keep_memory if session is not None else lambda: None)
            stack.callback(self.finish_save)

    def _finish_step(self) -> None:
        """Waits for the end of the last step, wherever it runs; not where a checkpoint is begun whose state is saved
        behind it.

        Raises:
            VoidStepError: it has failed half-way.
        """
        if self._chunked_step is not None and not self.defers_whole_state:
            self._chunked_step.finish()
        self.step_guard.check()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around a load, for which a void step is not in the way: see :meth:`StepGuard.loading`."""
        if self._chunked_step is not None:
            self._chunked_step.abandon()
        begins_anew = self.step_guard.void or self._gradients_mixed
        with self.step_guard.loading():
            yield
        if begins_anew and not self.step_guard.void:
            self._forget_passes()

    def _forget_passes(self) -> None:
        """What passes before a load have left of their micro-steps, where it cannot be used: as in an engine that has
        just been built, the next one is the first of a step."""
        self.forget_interrupted_backward()
        self.zero_grad()
        if self._gradients is not None:
            self._gradients.end_step()
            if self._quick_norms is not None:
                self._quick_norms.clear()
            self.reset_cpu_buffers()
        deepspeed_engine = self._deepspeed_engine()
        if deepspeed_engine is not None:
            deepspeed_calls.forget_micro_steps(deepspeed_engine)

    def _require_engine(self) -> Session:
        """The session, with the last step over.

        Raises:
            TenCacheError: it was destroyed.
            VoidStepError: the last step has failed half-way.
        """
        self._finish_step()
        if self.tencache is None or self.tencache.closed:
            raise TenCacheError(
                "this DeepSpeed engine and its optimizer state were destroyed; the model's weights still exist: "
                "call deepspeed.initialize() again to train them"
            )
        return self.tencache

    def _require_claims(self) -> None:
        """No two engines may update a weight: each would continue from its own master weight."""
        for param in itertools.chain.from_iterable(self.fp16_groups):
            if in_tier(param) and param.nvme_swapper.engine.claimant is not self.tencache:
                raise TenCacheError(
                    f"the parameter of shape {tuple(param.ds_shape)} (ds_id {param.ds_id}) is already trained by "
                    "another DeepSpeed engine: call destroy() of that engine first"
                )
