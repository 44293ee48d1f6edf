# SPDX-License-Identifier: Apache-2.0
"""One sub-group's optimizer step: chunk by chunk for DeepSpeed's CPU Adam, as a whole for every other optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tencache_ds.integration.optimizer_states import OptimizerStates
from tencache_ds.planning.chunks import Chunk
from tencache_ds.tiers.cpu_share import CpuShare, cores_for_arithmetic
from tencache_ds.tiers.gradients import GradientTier
from tencache_ds.tiers.optimizer_state import MASTER, OptimizerStateTier, StateResidency

Publish = Callable[[Chunk, torch.Tensor], None]
"""Takes a chunk and its updated master weights (1-D) and puts them into the model's weights."""


class SubGroupUpdater:
    """Applies an optimizer to the sub-groups of an :class:`OptimizerStateTier`. Used by the training thread."""

    def __init__(
        self,
        optimizer: Any,
        tier: OptimizerStateTier,
        states: OptimizerStates,
        gradients: GradientTier,
        local_ranks: int,
    ) -> None:
        """
        Args:
            optimizer: the torch optimizer DeepSpeed wraps.
            tier: where master weights and moments live.
            states: what the optimizer keeps for each sub-group.
            gradients: the accumulated gradients.
            local_ranks: ranks that share this host's cores.
        """
        self._optimizer = optimizer
        self._tier = tier
        self._states = states
        self._gradients = gradients
        self._local_ranks = local_ranks
        self._scratch: torch.Tensor | None = None
        self._cpu_share = CpuShare()

    def update_by_chunks(self, sub_group: int, group: dict[str, Any], start: int, scale: Any, publish: Publish) -> None:
        """DeepSpeed's CPU Adam on each chunk, with the arithmetic of the whole sub-group.

        The op keeps the bias correction of a step between calls with the same step number, and chunks begin at
        multiples of every vector width, so the result is the same bit for bit.

        Args:
            sub_group: which one.
            group: its hyper-parameters (an entry of ``optimizer.param_groups``).
            start: first element of the sub-group in the gradient buffer.
            scale: what gradients are multiplied by: a float or a 0-dim tensor.
            publish: receives each updated chunk.
        """
        step = self._states.begin_step(sub_group)
        with self._cores(sub_group):
            self._update_chunks(sub_group, group, step, start, scale, publish)
        # Of its parameter groups none has a parameter now, so this changes nothing, but torch sees that a step was
        # taken: LR schedulers ask for it, profilers show it.
        self._optimizer.step()

    def _update_chunks(
        self, sub_group: int, group: dict[str, Any], step: int, start: int, scale: Any, publish: Publish
    ) -> None:
        beta1, beta2 = group["betas"]
        for chunk in self._tier.chunks(sub_group):
            used = self._tier.take(chunk)
            master = used.views[MASTER]
            gradient = self._scratch_for(chunk.numel, master.dtype)
            self._gradients.fill(gradient, start + chunk.start)
            _multiply(gradient, scale)
            self._optimizer.ds_opt_adam.adam_update(
                self._optimizer.opt_id,
                step,
                group["lr"],
                beta1,
                beta2,
                group["eps"],
                group["weight_decay"],
                group["bias_correction"],
                master,
                gradient,
                used.views["exp_avg"],
                used.views["exp_avg_sq"],
            )
            publish(chunk, master)
            self._tier.put(used)

    def update_as_whole(
        self, sub_group: int, start: int, scale: Any, step: Callable[[], None], publish: Publish
    ) -> None:
        """Any optimizer, through its own ``step()``, with the sub-group's whole state in host memory for as long.

        Of a sub-group that lives in host memory the optimizer works on the tier's own tensors.

        Args:
            sub_group: which one.
            start: first element of the sub-group in the gradient buffer.
            scale: what gradients are multiplied by: a float or a 0-dim tensor.
            step: calls ``optimizer.step()`` for the sub-group's placeholder.
            publish: receives each updated chunk.
        """
        with self._states.whole(sub_group) as placeholder:
            placeholder.grad = self._whole_gradient(sub_group, start, placeholder)
            _multiply(placeholder.grad, scale)
            step()
            master = placeholder.data
        for chunk in self._tier.chunks(sub_group):
            publish(chunk, master[chunk.start : chunk.start + chunk.numel])

    def _whole_gradient(self, sub_group: int, start: int, like: torch.Tensor) -> torch.Tensor:
        """The sub-group's gradient in the master weights' dtype; the accumulation buffer itself where that has it."""
        if self._gradients.buffer.dtype == like.dtype:
            return self._gradients.buffer[start : start + like.numel()]  # nobody reads it once the step is done
        resident = self._tier.residency(sub_group) is StateResidency.HOST
        gradient = self._scratch_for(like.numel(), like.dtype) if resident else torch.empty_like(like)
        self._gradients.fill(gradient, start)
        return gradient

    def _cores(self, sub_group: int) -> AbstractContextManager[None]:
        """Leaves cores to the I/O lanes while chunks are streamed."""
        if self._tier.residency(sub_group) is StateResidency.HOST:
            return nullcontext()
        cores = len(os.sched_getaffinity(0))
        return self._cpu_share.limited(cores_for_arithmetic(torch.get_num_threads(), cores, self._local_ranks))

    def _scratch_for(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self._scratch is None or self._scratch.numel() < numel or self._scratch.dtype != dtype:
            self._scratch = torch.empty(numel, dtype=dtype)
        return self._scratch[:numel]


def _multiply(gradient: torch.Tensor, scale: Any) -> None:
    if not (isinstance(scale, float) and scale == 1.0):
        gradient.mul_(scale)
