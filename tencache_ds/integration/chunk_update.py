# SPDX-License-Identifier: Apache-2.0
"""One sub-group's optimizer step: chunk by chunk for DeepSpeed's CPU Adam, as a whole for every other optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from tencache_ds.planning.chunks import Chunk
from tencache_ds.tiers.cpu_share import CpuShare, cores_for_arithmetic
from tencache_ds.tiers.gradients import GradientTier
from tencache_ds.tiers.optimizer_state import MASTER, OptimizerStateTier, StateResidency

Publish = Callable[[Chunk, torch.Tensor], None]
"""Takes a chunk and its updated master weights (1-D) and puts them into the model's weights."""


def known_kinds(optimizer: Any, master_dtype: torch.dtype) -> tuple[tuple[str, torch.dtype], ...]:
    """``(kind, dtype)`` of the states an optimizer is known to keep per element, besides the master weight.

    For optimizers not listed they are found out at the first step; listing them lets their space be reserved at start.
    """
    if type(optimizer) is DeepSpeedCPUAdam:
        dtype = torch.float32 if optimizer.fp32_optimizer_states else master_dtype
        return (("exp_avg", dtype), ("exp_avg_sq", dtype))
    by_name = {
        "DeepSpeedCPULion": ("exp_avg",),
        "DeepSpeedCPUAdagrad": ("exp_avg_sq",),
        "Adam": ("exp_avg", "exp_avg_sq"),
        "AdamW": ("exp_avg", "exp_avg_sq"),
    }
    return tuple((kind, master_dtype) for kind in by_name.get(type(optimizer).__name__, ()))


class SubGroupUpdater:
    """Applies an optimizer to the sub-groups of an :class:`OptimizerStateTier`. Used by the training thread."""

    def __init__(
        self,
        optimizer: Any,
        state: OptimizerStateTier,
        gradients: GradientTier,
        placeholders: list[torch.Tensor],
        local_ranks: int,
    ) -> None:
        """
        Args:
            optimizer: the torch optimizer DeepSpeed wraps.
            state: where master weights and moments live.
            gradients: the accumulated gradients.
            placeholders: per sub-group, the (empty) fp32 tensor under which the optimizer knows it.
            local_ranks: ranks that share this host's cores.
        """
        self._optimizer = optimizer
        self._state = state
        self._gradients = gradients
        self._placeholders = placeholders
        self._local_ranks = local_ranks
        self._scratch: torch.Tensor | None = None
        self._started: set[int] = set()
        self._cpu_share = CpuShare()

    def started(self, sub_group: int) -> bool:
        """Whether the optimizer has made its states for a sub-group (at its first step, or by loading)."""
        return sub_group in self._started

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
        state = self._optimizer.state[self._placeholders[sub_group]]
        state["step"] = state.get("step", 0) + 1
        self._started.add(sub_group)
        with self._cores(sub_group):
            self._update_chunks(sub_group, group, state["step"], start, scale, publish)

    def _update_chunks(
        self, sub_group: int, group: dict[str, Any], step: int, start: int, scale: Any, publish: Publish
    ) -> None:
        beta1, beta2 = group["betas"]
        for chunk in self._state.chunks(sub_group):
            used = self._state.take(chunk)
            master = used.views[MASTER]
            gradient = self._scratch_for(chunk.numel, master.dtype)
            self._gradients.fill(gradient, start + chunk.start)
            if not (isinstance(scale, float) and scale == 1.0):
                gradient.mul_(scale)
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
            self._state.put(used)

    def update_as_whole(
        self, sub_group: int, start: int, scale: Any, step: Callable[[], None], publish: Publish
    ) -> None:
        """Any optimizer, through its own ``step()``, with the sub-group's whole state in host memory for as long."""
        placeholder = self._placeholders[sub_group]
        with self.whole_state(sub_group) as master:
            placeholder.grad = torch.empty(master.numel(), dtype=master.dtype)
            self._gradients.fill(placeholder.grad, start)
            placeholder.grad.mul_(scale)
            self._begin_adagrad(placeholder)
            step()
        for chunk in self._state.chunks(sub_group):
            publish(chunk, master[chunk.start : chunk.start + chunk.numel])

    @contextmanager
    def whole_state(self, sub_group: int) -> Iterator[torch.Tensor]:
        """The sub-group's state in host memory under its placeholder; changes and new states are kept."""
        placeholder, tier = self._placeholders[sub_group], self._state
        state = self._optimizer.state[placeholder]
        values = tier.read_all(sub_group)
        master = values.pop(MASTER)
        placeholder.data = master
        if self.started(sub_group):  # before its first step the optimizer makes its own states
            state.update(values)
        try:
            yield master
            self.store_state(sub_group)
        finally:
            self.detach(sub_group)

    def store_state(self, sub_group: int) -> None:
        """Puts what the optimizer holds for a sub-group (placeholder and per-element states) into the tier."""
        placeholder, tier = self._placeholders[sub_group], self._state
        state, numel = self._optimizer.state[placeholder], placeholder.numel()
        values = {MASTER: placeholder.data}
        values |= {
            kind: value
            for kind, value in state.items()
            if torch.is_tensor(value) and value.dim() and value.numel() == numel
        }
        if state:
            self._started.add(sub_group)
        added = [(kind, value.dtype) for kind, value in values.items() if kind not in tier.kinds(sub_group)]
        if added:
            tier.add_kinds(sub_group, added)
        tier.write(sub_group, values)

    def detach(self, sub_group: int) -> None:
        """Lets go of a sub-group's tensors; the optimizer keeps the rest of its state (the step number)."""
        placeholder = self._placeholders[sub_group]
        state = self._optimizer.state.get(placeholder, {})
        for kind in self._state.kinds(sub_group)[1:]:
            state.pop(kind, None)
        placeholder.data = torch.empty(0, dtype=placeholder.dtype)
        placeholder.grad = None

    def _begin_adagrad(self, placeholder: torch.Tensor) -> None:
        """torch's Adagrad makes its state in its constructor, for parameters that ZeRO has replaced since."""
        state = self._optimizer.state[placeholder]
        if isinstance(self._optimizer, torch.optim.Adagrad) and not state:
            state["step"] = torch.tensor(0.0)
            state["sum"] = torch.full_like(placeholder.data, self._optimizer.defaults["initial_accumulator_value"])

    def _cores(self, sub_group: int) -> AbstractContextManager[None]:
        """Leaves cores to the I/O lanes while chunks are streamed."""
        if self._state.residency(sub_group) is StateResidency.HOST:
            return nullcontext()
        cores = len(os.sched_getaffinity(0))
        return self._cpu_share.limited(cores_for_arithmetic(torch.get_num_threads(), cores, self._local_ranks))

    def _scratch_for(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self._scratch is None or self._scratch.numel() < numel or self._scratch.dtype != dtype:
            self._scratch = torch.empty(numel, dtype=dtype)
        return self._scratch[:numel]
