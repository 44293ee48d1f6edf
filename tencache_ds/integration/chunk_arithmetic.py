# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose arithmetic is known here, so that it can be applied to any run of elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from tencache_ds.integration.cpu_adam_op import LazyCpuAdam
from tencache_ds.integration.eight_bit_adam import EightBitAdam
from tencache_ds.integration.optimizers import known_kinds
from tencache_ds.planning.adam_scalars import AdamScalars, BetaPowers, adam_scalars
from tencache_ds.tiers.fused_adam import FusedAdam
from tencache_ds.tiers.kinds import EXP_AVG, EXP_AVG_SQ, MASTER
from tencache_ds.tiers.sub_group import Kinds
from tencache_ds.tiers.update import SubGroupStep


class CpuAdam:
    """The arithmetic of a ``DeepSpeedCPUAdam``. Its op is a :class:`~tencache_ds.tiers.unfused_update.ChunkOp`.

    Args:
        optimizer: of DeepSpeed.
    """

    needed = frozenset({"step", EXP_AVG, EXP_AVG_SQ})
    """Names of the states that an update requires once it has begun."""

    scales: Kinds = ()
    """``(kind, dtype)`` of state with one value for several elements."""

    temporaries_in_chunks = 1
    """Memory that its op needs for a chunk, in chunks: the gradient in fp32."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._op = LazyCpuAdam.of(optimizer)

    def kinds(self, master_dtype: torch.dtype) -> Kinds:
        """``(kind, dtype)`` of state per element, beside the master weight."""
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


def chunk_arithmetic(optimizer: Any, numels: Sequence[int], master_dtype: torch.dtype) -> CpuAdam | EightBitAdam | None:
    """The arithmetic of an optimizer; None where only its own ``step()`` knows it.

    Args:
        optimizer: the torch optimizer DeepSpeed wraps.
        numels: elements of each sub-group.
        master_dtype: of the master weights.
    """
    if type(optimizer) is DeepSpeedCPUAdam:
        return CpuAdam(optimizer)
    return EightBitAdam.of(optimizer, numels, master_dtype)
