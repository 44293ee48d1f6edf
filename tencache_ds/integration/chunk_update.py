# SPDX-License-Identifier: Apache-2.0
"""One sub-group's optimizer step for the optimizer that DeepSpeed wraps: chunk by chunk where its arithmetic is
known, the whole sub-group at once for all others. The update itself is :mod:`tencache_ds.tiers.update`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.integration.adapters.installed import calls
from tencache_ds.integration.chunk_arithmetic import CpuAdam
from tencache_ds.integration.eight_bit_adam import EightBitAdam
from tencache_ds.integration.optimizer_states import OptimizerStates
from tencache_ds.memory.device_memory import DeviceMemory
from tencache_ds.planning.adam_scalars import BetaPowers
from tencache_ds.tiers.device_adam import TritonAdam
from tencache_ds.tiers.device_update import DeviceUpdate
from tencache_ds.tiers.fused_adam import FusedAdam
from tencache_ds.tiers.fused_update import FusedUpdate
from tencache_ds.tiers.gradients import GradientTier
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.unfused_update import ArithmeticCores, Scratch, UnfusedUpdate, WholeUpdate
from tencache_ds.tiers.update import ChunkedUpdate, SubGroupStep, UpdateKernel, WeightWriter


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
        arithmetic: CpuAdam | EightBitAdam | None,
        fused: FusedAdam | None,
        device: tuple[DeviceMemory, TritonAdam] | None = None,
    ) -> None:
        """
        Args:
            optimizer: the torch optimizer DeepSpeed wraps.
            tier: where master weights and moments live.
            states: the optimizer's states of each sub-group.
            gradients: the accumulated gradients.
            writer: where the model's weights get their new values.
            cores: how many of the host's cores arithmetic may use here.
            arithmetic: of the optimizer; None leaves it to its ``step()``.
            fused: the same in one pass; None leaves it to the optimizer's own op.
            device: memory of the compute device, and Adam on state there; None where there is none. Not without
                ``fused``.
        """
        self._optimizer = optimizer
        self._states = states
        self.arithmetic = arithmetic
        """By which it is updated by chunks."""
        limit, scratch = ArithmeticCores(cores, tier.streamed), Scratch()
        kernels: list[UpdateKernel] = [] if arithmetic is None else [UnfusedUpdate(arithmetic, limit, scratch)]
        in_place = None
        self.one_pass_states: tuple[Mapping[str, torch.dtype], ...] = () if fused is None else fused.states
        """Chunks with state of such dtypes are updated on threads of the update's own, and nothing else of the
        process."""
        if fused is not None:
            kernels.insert(0, FusedUpdate(fused))
            if device is not None:
                memory, adam = device
                in_place = DeviceUpdate(adam, fused.width, memory, tier, gradients, writer)
        self.by_chunks = ChunkedUpdate(tier, gradients, writer, kernels, in_place)
        """The optimizer on chunks, with its arithmetic on the whole sub-group. Chunks begin at multiples of every
        vector width, and where scales do, so the result is the same bit for bit."""
        self._as_whole = WholeUpdate(tier, gradients, writer, limit, scratch)

    @property
    def beta_powers(self) -> BetaPowers | None:
        """Those of the last step of DeepSpeed's CPU Adam; None with any other optimizer."""
        return None if self.arithmetic is None else self.arithmetic.powers

    def resume(self, saved: Mapping[str, Any] | None, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes the powers of the betas to where they were when a checkpoint was saved, after its states.

        Args:
            saved: their :meth:`BetaPowers.state_dict`. None, in a checkpoint of stock DeepSpeed or of an older version,
                means that betas never changed: each group of parameters had those that it has now.
            groups: the hyper-parameters of each sub-group, as loaded.
        """
        if not isinstance(self.arithmetic, CpuAdam):
            return
        if saved is None:
            counted = [index for index in range(len(groups)) if "step" in self.arithmetic.needed(index)]
            step, betas = self._states.n_steps(counted[-1]), tuple(groups[counted[-1]]["betas"])
            jumped = any(tuple(groups[index]["betas"]) != betas for index in counted)
            jumped |= calls.pow_when_repeated and len(counted) > 1
            saved = {"betas": betas, "step": step, "pow_step": step if jumped else 0}
        self.arithmetic.powers = BetaPowers(**saved, pow_when_repeated=calls.pow_when_repeated)

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
        if self.arithmetic is None:
            raise TenCacheError(f"{type(self._optimizer).__name__} is not updated by chunks")
        number = int(self._states.begin_step(sub_group))
        scalars, pow_step = self.arithmetic.scalars(number, group, float(scale))
        # Of its parameter groups none has a parameter now, so this changes nothing, but torch sees that a step was
        # taken: LR schedulers ask for it, profilers show it.
        self._optimizer.step()
        return SubGroupStep(sub_group, start, number, scale, group, scalars, pow_step)

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
