# SPDX-License-Identifier: Apache-2.0
"""What a training keeps where under a budget of host memory, and the shortest step that this allows.

The same order as when it runs: weights first, gradients in any case, then optimizer state
(:mod:`tencache_ds.planning.placement`), here in bytes instead of weights and chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from tencache_ds.planning.bound import GRADIENT_NBYTES, STATE_NBYTES, WEIGHT_NBYTES, Bound, Demand, bound
from tencache_ds.profiling.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained on one host.

    Attributes:
        numel: parameters of the model.
        ranks: of the host, one GPU each.
        tokens_per_step: of all ranks in all micro-steps.
        micro_steps: forward and backward passes in a step.
        activation_recompute: whether forward runs twice.
        weight_nbytes: bytes of a weight as forward uses it.
        gradient_nbytes: bytes of an accumulated gradient.
        state_nbytes: bytes of master weight and moments of a parameter.
    """

    numel: int
    ranks: int = 1
    tokens_per_step: int
    micro_steps: int = 1
    activation_recompute: bool = False
    weight_nbytes: int = WEIGHT_NBYTES
    gradient_nbytes: int = GRADIENT_NBYTES
    state_nbytes: int = STATE_NBYTES

    @property
    def nbytes(self) -> int:
        """Of weights, gradients and optimizer state together."""
        return self.numel * (self.weight_nbytes + self.gradient_nbytes + self.state_nbytes)


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes of one kind on a host, by place."""

    host_nbytes: int
    nvme_nbytes: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a budget leads to.

    Attributes:
        budget_nbytes: host memory of all ranks of the host.
        weights: where they are.
        gradients: where they are.
        state: where the optimizer's state is.
        demand: bytes and operations of a step.
        bound: the shortest step, and what limits it.
    """

    budget_nbytes: int
    weights: Share
    gradients: Share
    state: Share
    demand: Demand
    bound: Bound

    @property
    def host_nbytes(self) -> int:
        """In host memory, of all kinds. More than the budget where gradients alone exceed it."""
        return self.weights.host_nbytes + self.gradients.host_nbytes + self.state.host_nbytes

    @property
    def nvme_nbytes(self) -> int:
        """On NVMe, of all kinds."""
        return self.weights.nvme_nbytes + self.state.nvme_nbytes


def forecast(training: Training, budget_nbytes: int, hardware: Hardware) -> Forecast:
    """The places of everything under a budget, and the bound that follows.

    Args:
        training: what is trained.
        budget_nbytes: ``host_memory`` of all ranks of the host together.
        hardware: rates of the host.

    Raises:
        ConfigError: no rate is known.
    """
    weights = _split(training.numel * training.weight_nbytes, budget_nbytes)
    gradients = Share(training.numel * training.gradient_nbytes, 0)
    left = budget_nbytes - weights.host_nbytes - gradients.host_nbytes
    state = _split(training.numel * training.state_nbytes, left)
    demand = Demand(
        numel=training.numel,
        tokens_per_step=training.tokens_per_step,
        ranks_on_host=training.ranks,
        micro_steps=training.micro_steps,
        weights_nvme=weights.nvme_nbytes / (training.numel * training.weight_nbytes),
        optimizer_nvme=state.nvme_nbytes / (training.numel * training.state_nbytes),
        weight_nbytes=training.weight_nbytes,
        gradient_nbytes=training.gradient_nbytes,
        optimizer_state_nbytes_per_param=training.state_nbytes,
        activation_recompute=training.activation_recompute,
    )
    return Forecast(budget_nbytes, weights, gradients, state, demand, bound(demand, hardware))


def _split(nbytes: int, budget_nbytes: int) -> Share:
    host = min(nbytes, max(0, budget_nbytes))
    return Share(host, nbytes - host)
