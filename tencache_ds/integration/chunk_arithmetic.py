# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose arithmetic is known here, so that it can be applied to any run of elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from tencache_ds.errors import TenCacheError
from tencache_ds.integration.cpu_adam_op import LazyCpuAdam
from tencache_ds.integration.eight_bit_adam import PROOF_TIMEOUT_S, EightBitAdam, compared
from tencache_ds.integration.optimizer_states import known_kinds
from tencache_ds.planning.adam_scalars import AdamScalars, BetaPowers, DescentScalars, adam_scalars
from tencache_ds.tensors import empty
from tencache_ds.tiers.fused_adam import AdamAndDescent, FusedAdam
from tencache_ds.tiers.kinds import EXP_AVG, EXP_AVG_SQ, MASTER, MOMENTUM
from tencache_ds.tiers.sub_group import Kinds
from tencache_ds.tiers.update import SubGroupStep


class CpuAdam:
    """The arithmetic of a ``DeepSpeedCPUAdam``. Its op is a :class:`~tencache_ds.tiers.unfused_update.ChunkOp`.

    Args:
        optimizer: of DeepSpeed.
    """

    scales: Kinds = ()
    """``(kind, dtype)`` of state with one value for several elements."""

    temporaries_in_chunks = 1
    """Memory that its op needs for a chunk, in chunks: the gradient in fp32."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._op = LazyCpuAdam.of(optimizer)

    def needed(self, sub_group: int) -> frozenset[str]:
        """Names of the states that an update of a sub-group requires once it has begun."""
        return frozenset({"step", EXP_AVG, EXP_AVG_SQ})

    def kinds(self, sub_group: int, master_dtype: torch.dtype) -> Kinds:
        """``(kind, dtype)`` of a sub-group's state per element, beside the master weight."""
        return known_kinds(self._optimizer, master_dtype)

    def shared_states(self) -> Mapping[str, Any]:
        """States that the optimizer makes at its first step, and never changes."""
        return {}

    def one_pass(self, n_threads: int) -> FusedAdam:
        """The same in one pass, on so many threads.

        Raises:
            ConfigError, TenCacheError: it cannot be had; says why.
        """
        return FusedAdam(n_threads)

    @property
    def powers(self) -> BetaPowers | None:
        """Of its betas, at its last step: part of its state."""
        return self._op.powers

    @powers.setter
    def powers(self, powers: BetaPowers) -> None:
        self._op.powers = powers

    def scalars(self, number: int, group: Mapping[str, Any], scale: float) -> tuple[AdamScalars, int]:
        """The scalars of a step, and the step from which on powers of the betas are multiplied.

        Args:
            number: of the step, from 1.
            group: hyper-parameters.
            scale: what gradients are multiplied by.
        """
        powers = self._op.powers
        assert powers is not None
        scalars = adam_scalars(
            lr=group["lr"],
            betas=group["betas"],
            powers=powers.at(number, group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=self._optimizer.adam_w_mode,
            bias_correction=group["bias_correction"],
            scale=scale,
        )
        return scalars, powers.pow_step

    def load(self) -> None:
        """See :meth:`ChunkOp.load`."""
        self._op.load_now()

    def __call__(self, step: SubGroupStep, state: Mapping[str, torch.Tensor], gradient: torch.Tensor) -> None:
        """See :class:`ChunkOp`."""
        group = step.hyper
        self._op.update(
            step.pow_step,
            self._optimizer.opt_id,
            step.number,
            group["lr"],
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group["bias_correction"],
            state[MASTER],
            gradient,
            state[EXP_AVG],
            state[EXP_AVG_SQ],
        )


class MuonWithCpuAdam(CpuAdam):
    """The arithmetic of a ``MuonWithAuxAdam``, once gradients are orthogonalized.

    Args:
        optimizer: of DeepSpeed, with a ``DeepSpeedCPUAdam`` as its auxiliary optimizer.
        uses_muon: of each sub-group, whether its parameters are matrices of Muon's.
    """

    def __init__(self, optimizer: Any, uses_muon: Sequence[bool]) -> None:
        super().__init__(optimizer.aux_optimizer)
        self._uses_muon = tuple(uses_muon)

    @classmethod
    def of(cls, optimizer: Any, uses_muon: Sequence[bool]) -> MuonWithCpuAdam | None:
        """The arithmetic of an optimizer; None of another one, or with another auxiliary optimizer."""
        if uses_muon and type(getattr(optimizer, "aux_optimizer", None)) is DeepSpeedCPUAdam:
            return cls(optimizer, uses_muon)
        return None

    def kinds(self, sub_group: int, master_dtype: torch.dtype) -> Kinds:
        """See :meth:`CpuAdam.kinds`; momentum is kept apart, by :class:`~tencache_ds.integration.muon.Momentum`."""
        return () if self._uses_muon[sub_group] else super().kinds(sub_group, master_dtype)

    def needed(self, sub_group: int) -> frozenset[str]:
        """See :meth:`CpuAdam.needed`."""
        return frozenset({MOMENTUM}) if self._uses_muon[sub_group] else super().needed(sub_group)

    def one_pass(self, n_threads: int) -> AdamAndDescent:
        """See :meth:`CpuAdam.one_pass`.

        Raises:
            ConfigError: the op cannot be built.
            TenCacheError: its bits would not be torch's.
        """
        return compared(AdamAndDescent(n_threads), _compare_with_torch)

    def scalars(self, number: int, group: Mapping[str, Any], scale: float) -> tuple[Any, int]:
        """See :meth:`CpuAdam.scalars`."""
        return (_descent(group, scale), 0) if group["use_muon"] else super().scalars(number, group, scale)

    def load(self) -> None:
        """Nothing: Adam's op is loaded when it gets elements."""

    def __call__(self, step: SubGroupStep, state: Mapping[str, torch.Tensor], gradient: torch.Tensor) -> None:
        """See :class:`ChunkOp`."""
        group = step.hyper
        if not group["use_muon"]:
            super().__call__(step, state, gradient)
            return
        descent = _descent(group, 1.0)
        state[MASTER].mul_(descent.retained).add_(gradient, alpha=descent.step)


def _descent(group: Mapping[str, Any], scale: float) -> DescentScalars:
    """What ``MuonWithAuxAdam.step()`` does with an orthogonalized gradient."""
    return DescentScalars(scale, 1 - group["lr"] * group["weight_decay"], -group["lr"])


@torch.no_grad()
def _compare_with_torch(fused: AdamAndDescent) -> None:
    """Raises TenCacheError unless a step along the gradient is torch's: how that is contracted is its compiler's
    choice."""
    generator = torch.Generator().manual_seed(0)
    for numel in (*range(1, 80), 32 * 1024 + 37):
        theirs = empty(numel, torch.float32).normal_(generator=generator)
        gradient = empty(numel, torch.float32).normal_(generator=generator)
        ours, weight, scalars = theirs.clone(), empty(numel, torch.bfloat16), DescentScalars(0.3, 1 - 0.02 * 0.1, -0.02)
        job = fused.start({MASTER: ours}, gradient, [(0, weight)], scalars)
        theirs.mul_(scalars.retained).add_(gradient * scalars.scale, alpha=scalars.step)
        if not job.wait(PROOF_TIMEOUT_S) or not torch.equal(ours, theirs):
            raise TenCacheError("on this processor, Muon's step in one pass differs from that of torch, which is used")


def chunk_arithmetic(
    optimizer: Any, numels: Sequence[int], master_dtype: torch.dtype, uses_muon: Sequence[bool]
) -> CpuAdam | EightBitAdam | None:
    """The arithmetic of an optimizer; None where only its own ``step()`` knows it.

    Args:
        optimizer: the torch optimizer DeepSpeed wraps.
        numels: elements of each sub-group.
        master_dtype: of the master weights.
        uses_muon: of each sub-group, whether its parameters are matrices of Muon's; empty with any other optimizer.
    """
    if type(optimizer) is DeepSpeedCPUAdam:
        return CpuAdam(optimizer)
    return MuonWithCpuAdam.of(optimizer, uses_muon) or EightBitAdam.of(optimizer, numels, master_dtype)
