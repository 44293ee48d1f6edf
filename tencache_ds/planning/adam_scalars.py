# SPDX-License-Identifier: Apache-2.0
"""The scalars of one Adam step, in the single-precision arithmetic of DeepSpeed's CPU Adam, or in bitsandbytes'.

Source: ``IncrementStep``, ``update_state`` and ``Step_AVX`` of ``deepspeed/ops/csrc/{adam,includes}`` (0.19.8). Every
line there is one operation on ``float``; the same operations in double precision differ in the last bit.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

_F = np.float32
_VANISHED = 26
"""Binary logarithm of a power of a beta, negated, from which on it is lost beside 1; with a margin for its rounding."""

_FACTORS = 2**16
"""Multiplied at a time."""


class WeightDecay(enum.IntEnum):
    """How weight decay enters the update; the values are those of the op."""

    NONE = 0
    L2 = 1
    """Added to the gradient (Adam)."""

    DECOUPLED = 2
    """Taken from the master weight (AdamW)."""


class BetaPowers:
    """``beta1^t`` and ``beta2^t`` of the current step, as DeepSpeed's op arrives at them.

    While steps follow one another with the same betas, it multiplies once per step; when the betas change, because
    groups of parameters differ or a scheduler changes them, or steps jump, it calls ``pow``. The two differ in the last
    bit, so the powers depend on the step of the last ``pow``: it is part of the optimizer's state.

    Args:
        betas: of the last step.
        step: the last one.
        pow_step: the step of the last ``pow``; 0 if the powers have been multiplied up from the first step.
        pow_when_repeated: whether it also calls ``pow`` for the second sub-group of a step and those after it, as
            DeepSpeed's op did before it was told a step from its repetition.
    """

    def __init__(
        self, betas: tuple[float, float], step: int = 0, pow_step: int = 0, *, pow_when_repeated: bool = False
    ) -> None:
        self._pow_when_repeated = pow_when_repeated
        self.betas = single(betas)
        """Betas of the last step, in single precision."""
        self.step = step
        """The last one."""
        self.pow_step = pow_step
        """The step from whose power the powers have been multiplied up."""
        n_multiplied = steps_to_multiply(self.betas, pow_step, step)
        first, second = _raised(self.betas, pow_step)
        self._powers = _multiplied(first, self.betas[0], n_multiplied), _multiplied(second, self.betas[1], n_multiplied)

    def at(self, step: int, betas: tuple[float, float]) -> tuple[np.float32, np.float32]:
        """The powers of optimizer step ``step``, counted from 1, with the betas of the parameters to be updated. Called
        once for each sub-group.
        """
        wanted = single(betas)
        repeated = step == self.step
        if wanted != self.betas or step - self.step not in (0, 1) or (repeated and self._pow_when_repeated):
            self.betas, self.pow_step = wanted, step
            self._powers = _raised(wanted, step)
        elif not repeated:
            self._powers = (self._powers[0] * wanted[0], self._powers[1] * wanted[1])
        self.step = step
        return self._powers

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep: the arguments of the constructor."""
        return {"betas": tuple(map(float, self.betas)), "step": self.step, "pow_step": self.pow_step}


def single(betas: tuple[float, float]) -> tuple[np.float32, np.float32]:
    """Betas in the op's precision."""
    return _F(betas[0]), _F(betas[1])


def steps_to_multiply(betas: tuple[np.float32, np.float32], pow_step: int, step: int) -> int:
    """How many multiplications after the last ``pow`` make a difference at ``step``.

    From 2^-25 on a power does not change the 1 that it is subtracted from.
    """
    last = max(_VANISHED / -math.log2(beta) if 0 < beta < 1 else math.inf if beta > 0 else 0 for beta in betas)
    return max(int(min(step, last + 1)) - pow_step, 0)


def _raised(betas: tuple[np.float32, np.float32], step: int) -> tuple[np.float32, np.float32]:
    return _F(float(betas[0]) ** step), _F(float(betas[1]) ** step)


def _multiplied(power: np.float32, beta: np.float32, times: int) -> np.float32:
    """``power * beta * beta ...``, rounded after each."""
    while times:
        factors = np.full(min(times, _FACTORS) + 1, beta)
        factors[0] = power
        power, times = np.multiply.accumulate(factors)[-1], times - (len(factors) - 1)
    return power


@dataclass(frozen=True, slots=True)
class AdamScalars:
    """The scalars that the kernel uses, all single precision; the names are those of the op."""

    scale: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    bias_correction2: float
    eps: float
    step_size: float
    weight_decay: WeightDecay
    decay: float


@dataclass(frozen=True, slots=True)
class DescentScalars:
    """The scalars of a step along the gradient; the names are those of the op.

    Attributes:
        scale: what gradients are multiplied by.
        retained: what master weights are multiplied by.
        step: the multiple of the gradient that is added to them.
    """

    scale: float
    retained: float
    step: float


@dataclass(frozen=True, slots=True)
class BlockwiseScalars:
    """The scalars of Adam with 8-bit moments; the names are those of the op."""

    scale: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    correction2: float
    eps: float
    step_size: float
    decays: bool
    decay: float


def blockwise_scalars(
    *, lr: float, betas: tuple[float, float], step: int, eps: float, weight_decay: float, scale: float
) -> BlockwiseScalars:
    """The scalars of one step as bitsandbytes has them: in double precision, rounded to single at their use.

    Source: ``_optimizer_update_8bit_blockwise_cpu`` of bitsandbytes 0.50.

    Args:
        lr: learning rate.
        betas: Adam's two betas.
        step: counted from 1.
        eps: added to the denominator.
        weight_decay: of AdamW; not positive means none.
        scale: what gradients are multiplied by.
    """
    beta1, beta2 = betas
    return BlockwiseScalars(
        scale=scale,
        beta1=beta1,
        one_minus_beta1=1.0 - beta1,
        beta2=beta2,
        one_minus_beta2=1.0 - beta2,
        correction2=math.sqrt(1.0 - beta2**step),
        eps=eps,
        step_size=-lr / (1.0 - beta1**step),
        decays=weight_decay > 0.0,
        decay=1.0 - lr * weight_decay,
    )


def adam_scalars(
    *,
    lr: float,
    betas: tuple[float, float],
    powers: tuple[np.float32, np.float32],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
    scale: float,
) -> AdamScalars:
    """The scalars of one step.

    Args:
        lr: learning rate.
        betas: Adam's two betas.
        powers: their powers at this step, of :class:`BetaPowers`.
        eps: added to the denominator.
        weight_decay: the option; not positive means none.
        decoupled: AdamW; otherwise L2.
        bias_correction: the option.
        scale: what gradients are multiplied by.
    """
    beta1, beta2, alpha = _F(betas[0]), _F(betas[1]), _F(lr)
    correction1, correction2 = _F(1), _F(1)
    if bias_correction:
        correction1 = _F(1) - powers[0]
        correction2 = _F(1) / np.sqrt(_F(1) - powers[1])
    kind = WeightDecay.NONE
    if weight_decay > 0:
        kind = WeightDecay.DECOUPLED if decoupled else WeightDecay.L2
    decay = _F(-1) * alpha * _F(weight_decay) if kind is WeightDecay.DECOUPLED else _F(weight_decay)
    return AdamScalars(
        scale=float(_F(scale)),
        beta1=float(beta1),
        one_minus_beta1=float(_F(1) - beta1),
        beta2=float(beta2),
        one_minus_beta2=float(_F(1) - beta2),
        bias_correction2=float(correction2),
        eps=float(_F(eps)),
        step_size=float(_F(-1) * alpha / correction1),
        weight_decay=kind,
        decay=float(decay),
    )
