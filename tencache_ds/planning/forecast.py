# SPDX-License-Identifier: Apache-2.0
"""The placement of a training run under budgets of host and GPU memory, and the shortest step it allows.

The same order as when it runs, here in bytes instead of weights and chunks. At the start weights, gradients in any
case, then optimizer state go to host memory (:mod:`tencache_ds.placement.places`), the rest to NVMe. After the
recorded step GPU memory takes the items that save most (:mod:`tencache_ds.placement.gpu_policy`): here all weights
first, those on NVMe first, or state first, whichever gives the shortest step. Host memory that state leaves takes state
from NVMe. That of weights and gradients would too where state is on NVMe; here they keep it, so that the step is rather
shorter than forecast.
"""

from __future__ import annotations

from dataclasses import dataclass

from tencache_ds.layout import BOUNCE_NBYTES, N_BOUNCES
from tencache_ds.planning.bound import GRADIENT_NBYTES, STATE_NBYTES, WEIGHT_NBYTES, Bound, Demand, bound
from tencache_ds.planning.budget import AUTO_CHUNK_SLOTS, AUTO_WEIGHT_STAGING_NBYTES
from tencache_ds.planning.peak_memory import MemoryNeeds, PeakMemory, peak_memory
from tencache_ds.profiling.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The model and the ranks on one host.

    Attributes:
        numel: parameters of the model.
        ranks: of the host, one GPU each.
        tokens_per_step: of all ranks in all micro-steps.
        micro_steps: forward and backward passes in a step.
        activation_recompute: whether forward runs twice.
        weight_nbytes: bytes of a weight as forward uses it.
        gradient_nbytes: bytes of an accumulated gradient.
        state_nbytes: bytes of master weight and moments of a parameter; scales are a fraction of one.
        state_on_gpu: whether state may go to GPU memory.
        split_nbytes: the part of these that does not move to NVMe while the weight is in host memory; 0 without
            ``split_master``.
    """

    numel: int
    ranks: int = 1
    tokens_per_step: int
    micro_steps: int = 1
    activation_recompute: bool = False
    weight_nbytes: int = WEIGHT_NBYTES
    gradient_nbytes: int = GRADIENT_NBYTES
    state_nbytes: float = STATE_NBYTES
    state_on_gpu: bool = True
    split_nbytes: float = 0

    @property
    def nbytes(self) -> int:
        """Bytes of weights, gradients and optimizer state together."""
        return self.numel * (self.weight_nbytes + self.gradient_nbytes) + self.state_of(self.numel)

    def state_of(self, numel: int) -> int:
        """Bytes of optimizer state of so many parameters."""
        return int(numel * self.state_nbytes)


@dataclass(frozen=True, slots=True)
class ByPlace:
    """Bytes of one kind on a host and its GPUs, by place. Those with host memory to go back to count in both."""

    host_nbytes: int
    nvme_nbytes: int
    gpu_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """The placement and the bound that follow from a budget.

    Attributes:
        budget_nbytes: host memory of all ranks of the host.
        gpu_budget_nbytes: GPU memory of all of them.
        weights: where they are.
        gradients: where they are.
        state: where the optimizer's state is.
        demand: bytes and operations of a step.
        bound: the shortest step, and what limits it.
    """

    budget_nbytes: int
    gpu_budget_nbytes: int
    weights: ByPlace
    gradients: ByPlace
    state: ByPlace
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

    @property
    def gpu_nbytes(self) -> int:
        """In GPU memory, of all kinds."""
        return self.weights.gpu_nbytes + self.gradients.gpu_nbytes + self.state.gpu_nbytes


def forecast(training: Training, budget_nbytes: int, hardware: Hardware, *, gpu_budget_nbytes: int = 0) -> Forecast:
    """The places of everything under two budgets, and the bound that follows.

    Args:
        training: the model and its step.
        budget_nbytes: ``host_memory`` of all ranks of the host together.
        hardware: rates of the host.
        gpu_budget_nbytes: ``gpu_memory`` of all of them; 0 gives the placement during the recorded step.

    Raises:
        ConfigError: no rate is known.
    """
    if not training.state_on_gpu:  # nor its weights and gradients
        gpu_budget_nbytes = 0
    per_weight, per_state = training.weight_nbytes, training.state_nbytes
    beside = per_weight + training.gradient_nbytes
    all_weights = training.numel * per_weight
    stored_weights = max(0, all_weights - budget_nbytes)
    counts = [gpu_budget_nbytes // per_state, gpu_budget_nbytes // (per_state + beside), 0]
    for first in (all_weights, stored_weights):
        left = max(0, gpu_budget_nbytes - first)
        counts += [left // per_state, left // (per_state + training.gradient_nbytes)]
    # With one parameter less, what its state would take holds weights: so more memory never gives a longer step.
    counts += [max(0, count - 1) for count in counts]
    forecasts = []
    for updated in {min(training.numel, int(count)) for count in counts}:
        left = gpu_budget_nbytes - training.state_of(updated)
        trained = min(updated, left // beside)  # parameters whose weights and gradients are there with their state
        on_gpu = trained * per_weight + (left - trained * beside if trained == updated else 0)
        forecasts.append(
            _placed(training, budget_nbytes, hardware, gpu_budget_nbytes, min(all_weights, on_gpu), updated, trained)
        )
    return min(forecasts, key=lambda each: (each.bound.seconds, sum(each.bound.by_resource.values())))


def _placed(
    training: Training,
    budget_nbytes: int,
    hardware: Hardware,
    gpu_budget_nbytes: int,
    on_gpu: int,
    updated: int,
    trained: int,
) -> Forecast:
    """The forecast for given bytes of weights in GPU memory, and numbers of parameters with state, and with everything,
    there."""
    numel, per_weight = training.numel, training.weight_nbytes
    weights = _split(numel * per_weight, budget_nbytes)
    gradient_nbytes = numel * training.gradient_nbytes
    left = budget_nbytes - weights.host_nbytes - gradient_nbytes
    state = _split(training.state_of(numel - updated), left)
    weights = ByPlace(weights.host_nbytes, max(0, weights.nvme_nbytes - on_gpu), on_gpu)
    gradients = ByPlace(gradient_nbytes, 0, trained * training.gradient_nbytes)
    state = ByPlace(state.host_nbytes, state.nvme_nbytes, training.state_of(updated))
    shared = max(0, weights.host_nbytes - on_gpu) / (numel * per_weight)  # spread over the step, as state on NVMe is
    demand = Demand(
        numel=numel,
        tokens_per_step=training.tokens_per_step,
        ranks_on_host=training.ranks,
        micro_steps=training.micro_steps,
        weights_nvme=weights.nvme_nbytes / (numel * per_weight),
        optimizer_nvme=state.nvme_nbytes / (numel * training.state_nbytes),
        weights_gpu=weights.gpu_nbytes / (numel * per_weight),
        optimizer_gpu=updated / numel,
        weight_nbytes=per_weight,
        gradient_nbytes=training.gradient_nbytes,
        optimizer_state_nbytes_per_param=training.state_nbytes - shared * training.split_nbytes,
        activation_recompute=training.activation_recompute,
    )
    return Forecast(budget_nbytes, gpu_budget_nbytes, weights, gradients, state, demand, bound(demand, hardware))


def _split(nbytes: int, budget_nbytes: int) -> ByPlace:
    host = min(nbytes, max(0, budget_nbytes))
    return ByPlace(host, nbytes - host)


def peak_of_forecast(
    training: Training,
    at_start: Forecast,
    *,
    host_budget: int,
    gpu_limit: int,
    chunk: int,
    may_use_nvme: bool,
    pinned: bool,
) -> PeakMemory:
    """The limits of one rank before anything runs, when the sizes of single weights are not known.

    Args:
        training: the model, and the ranks that share it.
        at_start: the forecast without GPU memory.
        host_budget: ``host_memory`` of a rank.
        gpu_limit: ``gpu_memory`` of a rank; 0 for none.
        chunk: ``chunk_size``.
        may_use_nvme: whether there is a drive. Without one weights are DeepSpeed's, and in RAM.
        pinned: whether the ranks train on GPUs.
    """

    def per_rank(nbytes: int) -> int:
        return -(-nbytes // training.ranks)

    weights = per_rank(at_start.weights.host_nbytes)
    stored = per_rank(at_start.weights.nvme_nbytes) if may_use_nvme else 0
    state_nvme = per_rank(at_start.state.nvme_nbytes) if may_use_nvme else 0
    # At most an eighth of a slot is more than what it is for.
    staging = min(stored + -(-stored // 7), AUTO_WEIGHT_STAGING_NBYTES)
    if may_use_nvme:
        building = weights
    else:  # torch pins powers of two
        weights = per_rank(training.numel * training.weight_nbytes)
        building = weights + (2 * weights if pinned else 0)
    return peak_memory(
        MemoryNeeds(
            weights_host=weights,
            weights_building=building,
            weights_nvme=stored,
            largest_weight=stored,
            gradients=per_rank(at_start.gradients.host_nbytes),
            state_host=per_rank(at_start.state.host_nbytes),
            state_gpu=0 if may_use_nvme else per_rank(at_start.state.nvme_nbytes),
            state_nvme=state_nvme,
            state_may_go_to_nvme=may_use_nvme,
            largest_chunk=chunk,
            host_budget=host_budget,
            staging=staging + (AUTO_CHUNK_SLOTS * chunk if state_nvme else 0),
            late_staging=0 if state_nvme else AUTO_CHUNK_SLOTS * chunk,
            bounces=N_BOUNCES * BOUNCE_NBYTES if pinned and gpu_limit else 0,
            gpu_weights=per_rank(training.numel * training.weight_nbytes),
            gpu_limit=gpu_limit or None,
            weights_pinned=pinned,
            gradients_pinned=pinned,
            staging_pinned=pinned,
        )
    )
