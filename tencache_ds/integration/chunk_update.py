# SPDX-License-Identifier: Apache-2.0
"""One sub-group's optimizer step for the optimizer that DeepSpeed wraps: chunk by chunk for DeepSpeed's CPU Adam, the
whole sub-group at once for all others. The update itself is :mod:`tencache_ds.tiers.update`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tencache_ds.integration.adapters.installed import calls
from tencache_ds.integration.cpu_adam_op import LazyCpuAdam
from tencache_ds.integration.optimizer_states import OptimizerStates
from tencache_ds.integration.optimizers import updates_by_chunks
from tencache_ds.memory.device_memory import DeviceMemory
from tencache_ds.planning.adam_scalars import AdamScalars, BetaPowers, adam_scalars
from tencache_ds.tiers.cpu_share import ArithmeticCores
from tencache_ds.tiers.device_adam import DeviceAdam
from tencache_ds.tiers.device_update import DeviceUpdate
from tencache_ds.tiers.fused_adam import FusedAdam
from tencache_ds.tiers.fused_update import FusedUpdate
from tencache_ds.tiers.gradients import GradientTier
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.unfused_update import Scratch, UnfusedUpdate, WholeUpdate
from tencache_ds.tiers.update import ChunkedUpdate, SubGroupStep, UpdateKernel
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
        device: tuple[DeviceMemory, DeviceAdam] | None = None,
    ) -> None:
        """
        Args:
            optimizer: the torch optimizer DeepSpeed wraps.
            tier: where master weights and moments live.
            states: the optimizer's states of each sub-group.
            gradients: the accumulated gradients.
            writer: where the model's weights get their new values.
            cores: how many of the host's cores arithmetic may use here.
            fused: Adam in one pass; None leaves Adam to DeepSpeed's op.
            device: memory of the compute device, and Adam on state there; None where there is none. Not without
                ``fused``.
        """
        self._optimizer = optimizer
        self._states = states
        self._adam = LazyCpuAdam.of(optimizer) if updates_by_chunks(optimizer) else None
        limit, scratch = ArithmeticCores(cores, tier.streamed), Scratch()
        kernels: list[UpdateKernel] = [UnfusedUpdate(_DeepSpeedCpuAdam(optimizer), limit, scratch)]
        in_place = None
        self.one_pass = fused is not None
        """Whether chunks of fp32 state are updated on threads of the update's own, and nothing else of the process."""
        if fused is not None:
            kernels.insert(0, FusedUpdate(fused))
            if device is not None:
                memory, adam = device
                in_place = DeviceUpdate(adam, fused.width, memory, tier, gradients, writer)
        self.by_chunks = ChunkedUpdate(tier, gradients, writer, kernels, in_place)
        """Adam on chunks, with the arithmetic of DeepSpeed's CPU Adam on the whole sub-group. Chunks begin at multiples
        of every vector width, so the result is the same bit for bit."""
        self._as_whole = WholeUpdate(tier, gradients, writer, limit, scratch)

    @property
    def beta_powers(self) -> BetaPowers | None:
        """Those of the last step of DeepSpeed's CPU Adam; None with any other optimizer."""
        return None if self._adam is None else self._adam.powers

    def resume(self, saved: Mapping[str, Any] | None, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes the powers of the betas to where they were when a checkpoint was saved, after its states.

        Args:
            saved: their :meth:`BetaPowers.state_dict`. None, in a checkpoint of stock DeepSpeed or of an older version,
                means that betas never changed: each group of parameters had those that it has now.
            groups: the hyper-parameters of each sub-group, as loaded.
        """
        if self._adam is None:
            return
        if saved is None:
            step, betas = self._states.n_steps(len(groups) - 1), tuple(groups[-1]["betas"])
            jumped = any(tuple(group["betas"]) != betas for group in groups)
            jumped |= calls.pow_when_repeated and len(groups) > 1
            saved = {"betas": betas, "step": step, "pow_step": step if jumped else 0}
        self._adam.powers = BetaPowers(**saved, pow_when_repeated=calls.pow_when_repeated)

    def begin_step(self, sub_group: int, group: dict[str, Any], start: int, scale: Any) -> SubGroupStep:
        """Counts a step of a sub-group that is updated by chunks, and captures all that it depends on.

        Args:
            sub_group: which one.
            group: its hyper-parameters (an entry of ``optimizer.param_groups``).
            start: first element of the sub-group in the gradient buffer.
            scale: factor applied to gradients: a float or a 0-dim tensor.

        Returns:
            The step, for :attr:`by_chunks`.
        """
        number = int(self._states.begin_step(sub_group))
        powers = self.beta_powers
        assert powers is not None
        scalars = self._scalars(group, powers.at(number, group["betas"]), float(scale))
        # Of its parameter groups none has a parameter now, so this changes nothing, but torch sees that a step was
        # taken: LR schedulers ask for it, profilers show it.
        self._optimizer.step()
        return SubGroupStep(sub_group, start, number, scale, group, scalars, powers.pow_step)

    def update_as_whole(self, sub_group: int, start: int, scale: Any, step: Callable[[], None]) -> None:
        """Any optimizer, through its own ``step()``, with the sub-group's whole state in host memory for as long.

        Of a sub-group that is whole in host memory the optimizer works on the tier's own tensors.

        Args:
            sub_group: which one.
            start: first element of the sub-group in the gradient buffer.
            scale: factor applied to gradients: a float or a 0-dim tensor.
            step: calls ``optimizer.step()`` for the sub-group's placeholder.
        """
        self._as_whole.run(sub_group, start, scale, self._states.whole(sub_group), step)

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


class _DeepSpeedCpuAdam:
    """The op of a ``DeepSpeedCPUAdam``: a :class:`~tencache_ds.tiers.unfused_update.AdamOp`."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def load(self) -> None:
        """See :meth:`AdamOp.load`."""
        LazyCpuAdam.of(self._optimizer).load_now()

    def __call__(
        self,
        step: SubGroupStep,
        master: torch.Tensor,
        gradient: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
    ) -> None:
        """See :class:`AdamOp`."""
        group = step.hyper
        LazyCpuAdam.of(self._optimizer).update(
            step.pow_step,
            self._optimizer.opt_id,
            step.number,
            group["lr"],
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group["bias_correction"],
            master,
            gradient,
            exp_avg,
            exp_avg_sq,
        )
