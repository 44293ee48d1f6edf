# SPDX-License-Identifier: Apache-2.0
"""The scalars of one Adam step, in the single-precision arithmetic of DeepSpeed's CPU Adam.

Source: ``IncrementStep``, ``update_state`` and ``Step_AVX`` of ``deepspeed/ops/csrc/{adam,includes}`` (0.19.8). Every
line there is one operation on ``float``; the same operations in double precision differ in the last bit.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

_F = np.float32


class WeightDecay(enum.IntEnum):
    """How weight decay enters the update; the values are those of the op."""

    NONE = 0
    L2 = 1
    """Added to the gradient (Adam)."""

    DECOUPLED = 2
    """Taken from the master weight (AdamW)."""


class BetaPowers:
    """``beta1^t`` and ``beta2^t`` of the current step.

    DeepSpeed multiplies once per step while steps follow one another, and calls ``pow`` when betas change or steps
    jump, as after a resume: the two differ in the last bit from the third step on. Here a jump multiplies all the way
    up from the first step instead, so that a run that is stopped and resumed equals the run that never stopped.

    Args:
        betas: of the optimizer.
    """

    def __init__(self, betas: tuple[float, float]) -> None:
        self._betas = (_F(betas[0]), _F(betas[1]))
        self._step = 0
        self._powers = (_F(1), _F(1))

    def steps_to_count(self, step: int) -> range:
        """The steps by which ``step`` is reached: itself alone, or all from 0 after a jump.

        DeepSpeed's op, called with each of them, arrives at the same powers as :meth:`at`.
        """
        return range(step if step - self._step in (0, 1) else 0, step + 1)

    def at(self, step: int, betas: tuple[float, float]) -> tuple[np.float32, np.float32]:
        """The powers of optimizer step ``step``, counted from 1, with the betas of the parameters to be updated."""
        wanted = (_F(betas[0]), _F(betas[1]))
        for each in self.steps_to_count(step):
            if wanted != self._betas:  # groups of parameters differ, or a scheduler changes them: DeepSpeed calls pow
                self._betas = wanted
                self._powers = (_F(float(wanted[0]) ** each), _F(float(wanted[1]) ** each))
            elif each == 0:
                self._powers = (_F(1), _F(1))
            elif each != self._step:
                self._powers = (self._powers[0] * wanted[0], self._powers[1] * wanted[1])
            self._step = each
        return self._powers


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
