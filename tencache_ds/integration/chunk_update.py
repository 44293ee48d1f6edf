# SPDX-License-Identifier: Apache-2.0
"""One sub-group's optimizer step: chunk by chunk for DeepSpeed's CPU Adam, as a whole for every other optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch

from tencache_ds.integration.cpu_adam_op import LazyCpuAdam
from tencache_ds.integration.optimizer_states import OptimizerStates
from tencache_ds.planning.adam_scalars import AdamScalars, BetaPowers, adam_scalars
from tencache_ds.planning.chunks import Chunk
from tencache_ds.tiers.cpu_share import CpuShare, cores_for_arithmetic
from tencache_ds.tiers.device_adam import DeviceAdam
from tencache_ds.tiers.device_update import DeviceUpdate
from tencache_ds.tiers.fused_adam import FusedAdam
from tencache_ds.tiers.fused_update import FusedUpdate
from tencache_ds.tiers.gradients import GradientTier
from tencache_ds.tiers.optimizer_state import MASTER, ChunkInUse, OptimizerStateTier
from tencache_ds.tiers.weight_writer import WeightWriter


class SubGroupUpdater:
    """Applies an optimizer to the sub-groups of an :class:`OptimizerStateTier`. Used by the training thread."""

    def __init__(
        self,
        optimizer: Any,
        tier: OptimizerStateTier,
        states: OptimizerStates,
        gradients: GradientTier,
        writer: WeightWriter,
        *,
        cores: int,
        fused: FusedAdam | None,
        device: DeviceAdam | None = None,
    ) -> None:
        """
        Args:
            optimizer: the torch optimizer DeepSpeed wraps.
            tier: where master weights and moments live.
            states: what the optimizer keeps for each sub-group.
            gradients: the accumulated gradients.
            writer: where the model's weights get their new values.
            cores: how many of the host's cores arithmetic may use here.
            fused: Adam in one pass; None leaves Adam to DeepSpeed's op.
            device: Adam on state in device memory; None where there is none. Not without ``fused``.
        """
        self._optimizer = optimizer
        self._tier = tier
        self._states = states
        self._gradients = gradients
        self._writer = writer
        self._cores = cores
        self._fused = None if fused is None else FusedUpdate(fused, tier, gradients, writer)
        self._on_device = (
            None if fused is None or device is None else DeviceUpdate(device, fused.width, tier, gradients, writer)
        )
        self._powers: BetaPowers | None = None  # of Adam
        self._scratch: torch.Tensor | None = None
        self._cpu_share = CpuShare()

    def update_by_chunks(self, sub_group: int, group: dict[str, Any], start: int, scale: Any) -> None:
        """Adam on each chunk, with the arithmetic of DeepSpeed's CPU Adam on the whole sub-group.

        Chunks begin at multiples of every vector width, so the result is the same bit for bit.

        Args:
            sub_group: which one.
            group: its hyper-parameters (an entry of ``optimizer.param_groups``).
            start: first element of the sub-group in the gradient buffer.
            scale: what gradients are multiplied by: a float or a 0-dim tensor.
        """
        step = int(self._states.begin_step(sub_group))
        powers = self._powers_at(step, group)
        in_passes = partial(self._update_in_passes, group=group, step=step, start=start, scale=scale)
        if self._fused is not None:
            scalars = self._scalars(group, powers, float(scale))
            done = self._on_device.start(sub_group, start, scalars) if self._on_device is not None else frozenset()
            self._fused.run(sub_group, start, scalars, in_passes, done)
        else:
            for chunk in self._tier.chunks(sub_group):
                with self._tier.using(chunk) as used:
                    in_passes(used)
        # Of its parameter groups none has a parameter now, so this changes nothing, but torch sees that a step was
        # taken: LR schedulers ask for it, profilers show it.
        self._optimizer.step()

    def _powers_at(self, step: int, group: dict[str, Any]) -> tuple[np.float32, np.float32]:
        """Those of the step's betas. DeepSpeed's op, which keeps its own, counts along for chunks that it updates."""
        if self._powers is None:
            self._powers = BetaPowers(self._optimizer.defaults["betas"])
        nothing = torch.empty(0)
        for each in self._powers.steps_to_count(step):
            self._call_op(group, each, nothing, nothing, nothing, nothing)
        return self._powers.at(step, group["betas"])

    def _scalars(self, group: dict[str, Any], powers: tuple[np.float32, np.float32], scale: float) -> AdamScalars:
        return adam_scalars(
            lr=group["lr"],
            betas=group["betas"],
            powers=powers,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=self._optimizer.adam_w_mode,
            bias_correction=group["bias_correction"],
            scale=scale,
        )

    def _update_in_passes(self, used: ChunkInUse, group: dict[str, Any], step: int, start: int, scale: Any) -> None:
        """DeepSpeed's op between passes of torch's. The op keeps the bias correction of a step between calls with the
        same step number."""
        chunk, master = used.chunk, used.views[MASTER]
        if isinstance(self._optimizer.ds_opt_adam, LazyCpuAdam):
            self._optimizer.ds_opt_adam.load_now()  # with the OpenMP library that is limited below
        with self._limited_cores(chunk.sub_group):
            gradient = self._scratch_for(chunk.numel, master.dtype)
            self._gradients.fill(gradient, start + chunk.start)
            _multiply(gradient, scale)
            self._call_op(group, step, master, gradient, used.views["exp_avg"], used.views["exp_avg_sq"])
            publish(self._writer, chunk, master)

    def _call_op(self, group: dict[str, Any], step: int, *tensors: torch.Tensor) -> None:
        """DeepSpeed's CPU Adam on master weights, gradient and moments."""
        self._optimizer.ds_opt_adam.adam_update(
            self._optimizer.opt_id,
            step,
            group["lr"],
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group["bias_correction"],
            *tensors,
        )

    def update_as_whole(self, sub_group: int, start: int, scale: Any, step: Callable[[], None]) -> None:
        """Any optimizer, through its own ``step()``, with the sub-group's whole state in host memory for as long.

        Of a sub-group that is whole in host memory the optimizer works on the tier's own tensors.

        Args:
            sub_group: which one.
            start: first element of the sub-group in the gradient buffer.
            scale: what gradients are multiplied by: a float or a 0-dim tensor.
            step: calls ``optimizer.step()`` for the sub-group's placeholder.
        """
        with self._limited_cores(sub_group):
            with self._states.whole(sub_group) as placeholder:
                placeholder.grad = self._whole_gradient(sub_group, start, placeholder)
                _multiply(placeholder.grad, scale)
                step()
                master = placeholder.data
            for chunk in self._tier.chunks(sub_group):
                publish(self._writer, chunk, master[chunk.start : chunk.start + chunk.numel])

    def _whole_gradient(self, sub_group: int, start: int, like: torch.Tensor) -> torch.Tensor:
        """The sub-group's gradient in the master weights' dtype; the accumulation buffer itself where that has it."""
        view = self._gradients.view(start, like.numel())
        if view is not None and view.dtype == like.dtype:
            return view  # nobody reads it once the step is done
        whole = self._tier.whole(sub_group)
        gradient = self._scratch_for(like.numel(), like.dtype) if whole else torch.empty_like(like)
        self._gradients.fill(gradient, start)
        return gradient

    def _limited_cores(self, sub_group: int) -> AbstractContextManager[None]:
        """At most this rank's cores, with some left to the I/O lanes while chunks are streamed."""
        streamed = self._tier.streamed(sub_group)
        return self._cpu_share.limited(cores_for_arithmetic(torch.get_num_threads(), self._cores, streamed=streamed))

    def _scratch_for(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self._scratch is None or self._scratch.numel() < numel or self._scratch.dtype != dtype:
            self._scratch = torch.empty(numel, dtype=dtype)
        return self._scratch[:numel]


def publish(writer: WeightWriter, chunk: Chunk, master: torch.Tensor) -> None:
    """Rounds a chunk's master weights (1-D) to the model's dtype and puts them where the weights live."""
    for first, weight in writer.open(chunk):
        weight.copy_(master[first : first + weight.numel()])
    writer.close(chunk)


def _multiply(gradient: torch.Tensor, scale: Any) -> None:
    if not (isinstance(scale, float) and scale == 1.0):
        gradient.mul_(scale)
