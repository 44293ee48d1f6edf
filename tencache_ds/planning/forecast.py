# SPDX-License-Identifier: Apache-2.0
"""Forecasts: the shortest step that a machine allows for a model and a placement, and the placement under a budget.

[Note: bound] A measured step is compared with the shortest one. Every resource has a time in which it could do its part
of a step alone. A perfect engine hides all of them behind the longest one, so that is the bound, and its resource is
the limit. No schedule may achieve it: gradients are final only after backward, and where they are clipped by their norm
the first update waits for the last gradient. A bound that is too short makes a fraction look worse, never better.

[Note: placement under a budget] The same order as when it runs, here in bytes instead of weights and chunks. At the
start weights, gradients in any case, then optimizer state go to host memory (:mod:`tencache_ds.placement.places`), the
rest to NVMe. After the recorded step GPU memory takes the items that save most
(:mod:`tencache_ds.placement.gpu_policy`): here all weights first, those on NVMe first, or state first, whichever gives
the shortest step. Host memory that state leaves takes state from NVMe. That of weights and gradients would too where
state is on NVMe; here they keep it, so that the step is rather shorter than forecast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from tencache_ds.errors import ConfigError
from tencache_ds.layout import BOUNCE_NBYTES, N_BOUNCES
from tencache_ds.names import StrEnum
from tencache_ds.planning.budget import (
    AUTO_CHUNK_SLOTS,
    AUTO_WEIGHT_STAGING_NBYTES,
    MemoryNeeds,
    PeakMemory,
    peak_memory,
)
from tencache_ds.profiling.hardware import Hardware, StorageRates

FLOPS_PER_PARAM_AND_TOKEN = 6
"""Forward 2 (a multiplication and an addition per weight), backward 4. Attention scores are not counted."""

FLOPS_WITH_RECOMPUTE = 8
"""The same with activation checkpointing: forward runs a second time."""

WEIGHT_NBYTES, GRADIENT_NBYTES, STATE_NBYTES = 2, 2, 12
"""Per parameter: 16-bit weights and gradients, fp32 master weights and two moments."""

SPLIT_NBYTES = 2
"""Bytes saved per element: the half of a master weight that a bfloat16 weight in host memory tells."""


class Resource(StrEnum):
    """The resources that can limit a step."""

    NVME = "nvme"
    """Scratch storage of a host, shared by its ranks."""

    H2D = "h2d"
    """Copies from pinned host memory to one GPU."""

    D2H = "d2h"
    """Copies from one GPU to pinned host memory."""

    CPU = "cpu"
    """CPU Adam on the cores of a host, shared by its ranks."""

    GPU = "gpu"
    """Matrix multiplications, and GPU Adam, on the device that trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The bytes and operations of one optimizer step.

    Raises:
        ValueError: a count is not positive, a share is outside [0, 1], or shares of one kind exceed 1 together.

    Attributes:
        numel: parameters of the model, those of all ranks together.
        tokens_per_step: tokens of all ranks in all micro-steps.
        ranks_on_host: ranks on each host, one GPU each.
        hosts: hosts, each of which keeps an equal share of the parameters.
        micro_steps: forward and backward passes in a step (gradient accumulation).
        weight_fetches_per_micro_step: how often a weight that is not on the GPU goes there: for forward and for
            backward. Recomputed activations need no third time: a layer's weights are there when its backward runs.
        weights_nvme: share of the 16-bit weights that lives on NVMe. It is read at every fetch and written once.
        optimizer_nvme: share of the optimizer state that lives on NVMe. It is read once and written once.
        weights_gpu: share of the 16-bit weights that stays on the GPU.
        optimizer_gpu: share of the optimizer state that stays on the GPU, where GPU Adam updates it.
        weight_nbytes: bytes of a weight as forward uses it.
        gradient_nbytes: bytes of a gradient as it leaves the GPU. It is counted once a step: in principle the
            gradients of several micro-steps can be added up on the GPU.
        gradient_nvme_nbytes: bytes per parameter of gradients that are written to NVMe and read back for the update,
            for the share of the optimizer state that is there: 4 in stock ZeRO-Infinity, 0 in TenCache.
        optimizer_state_nbytes_per_param: fp32 master weight and two fp32 moments: 12. With the master stored as 16-bit
            weight and 16-bit remainder: 10.
        activation_recompute: whether forward runs twice (activation checkpointing).
    """

    numel: int
    tokens_per_step: int
    ranks_on_host: int = 1
    hosts: int = 1
    micro_steps: int = 1
    weight_fetches_per_micro_step: int = 2
    weights_nvme: float = 0.0
    optimizer_nvme: float = 0.0
    weights_gpu: float = 0.0
    optimizer_gpu: float = 0.0
    weight_nbytes: float = WEIGHT_NBYTES
    gradient_nbytes: float = GRADIENT_NBYTES
    gradient_nvme_nbytes: float = 0.0
    optimizer_state_nbytes_per_param: float = STATE_NBYTES
    activation_recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("numel", "ranks_on_host", "hosts", "micro_steps", "weight_fetches_per_micro_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{field.name} must be finite and not negative, got {value}")
        for nvme, gpu in (("weights_nvme", "weights_gpu"), ("optimizer_nvme", "optimizer_gpu")):
            shares = getattr(self, nvme), getattr(self, gpu)
            if max(shares) > 1 or sum(shares) > 1 + 1e-9:
                raise ValueError(f"{nvme} and {gpu} are shares of one whole, got {shares[0]} and {shares[1]}")

    @property
    def nvme_read_nbytes(self) -> float:
        """Bytes that each host reads from NVMe in a step."""
        fetches = self.weight_fetches_per_micro_step * self.micro_steps
        per_param = self.weights_nvme * self.weight_nbytes * fetches + self._optimizer_nvme_nbytes
        return per_param * self.numel / self.hosts

    @property
    def nvme_write_nbytes(self) -> float:
        """Bytes that each host writes to NVMe in a step."""
        per_param = self.weights_nvme * self.weight_nbytes + self._optimizer_nvme_nbytes
        return per_param * self.numel / self.hosts

    @property
    def h2d_nbytes(self) -> float:
        """Bytes that go to each GPU in a step: fetched weights, and resident ones after an update on the CPU."""
        fetches = self.weight_fetches_per_micro_step * self.micro_steps
        # Only shares are known, not which weights: whatever can be updated where it lives is taken to be.
        updated_on_cpu = max(0.0, self.weights_gpu - self.optimizer_gpu)
        weights = (1 - self.weights_gpu) * fetches + updated_on_cpu
        return weights * self.weight_nbytes * self.numel / self._gpus

    @property
    def d2h_nbytes(self) -> float:
        """Bytes that leave each GPU in a step: gradients for CPU Adam, and weights that GPU Adam updated."""
        updated_for_host = max(0.0, self.optimizer_gpu - self.weights_gpu)
        per_param = (1 - self.optimizer_gpu) * self.gradient_nbytes + updated_for_host * self.weight_nbytes
        return per_param * self.numel / self._gpus

    @property
    def cpu_adam_numel(self) -> float:
        """Parameters that the CPU of each host updates in a step."""
        return (1 - self.optimizer_gpu) * self.numel / self.hosts

    @property
    def gpu_adam_numel(self) -> float:
        """Parameters that each GPU updates in a step."""
        return self.optimizer_gpu * self.numel / self._gpus

    @property
    def flops(self) -> float:
        """Floating-point operations of a step, of all ranks: 6 (8 with recomputation) x parameters x tokens."""
        per_token = FLOPS_WITH_RECOMPUTE if self.activation_recompute else FLOPS_PER_PARAM_AND_TOKEN
        return float(per_token) * self.numel * self.tokens_per_step

    @property
    def _gpus(self) -> int:
        return self.hosts * self.ranks_on_host

    @property
    def _optimizer_nvme_nbytes(self) -> float:
        """Per parameter, in each direction."""
        return self.optimizer_nvme * (self.optimizer_state_nbytes_per_param + self.gradient_nvme_nbytes)


@dataclass(frozen=True, slots=True)
class Bound:
    """The shortest possible step.

    Attributes:
        seconds: length of that step.
        limit: the resource that takes so long.
        by_resource: seconds of each resource whose rate is known, if it worked alone and without a pause.
    """

    seconds: float
    limit: Resource
    by_resource: dict[Resource, float]


def bound(demand: Demand, hardware: Hardware) -> Bound:
    """The shortest step that ``hardware`` allows for ``demand``. Any thread may call it.

    Every host and every GPU is taken to be like the measured one. A rate that is not known leaves its resource out,
    which can only make the bound shorter. On a machine without a GPU the ranks of a host train on the same cores.

    Raises:
        ConfigError: no rate at all is known.
    """
    by_resource: dict[Resource, float] = {}
    if hardware.storage is not None:
        by_resource[Resource.NVME] = storage_seconds(
            demand.nvme_read_nbytes, demand.nvme_write_nbytes, hardware.storage
        )
    if hardware.h2d_bytes_per_s is not None:
        by_resource[Resource.H2D] = demand.h2d_nbytes / hardware.h2d_bytes_per_s
    if hardware.d2h_bytes_per_s is not None:
        by_resource[Resource.D2H] = demand.d2h_nbytes / hardware.d2h_bytes_per_s
    if hardware.cpu_adam_params_per_s is not None:
        by_resource[Resource.CPU] = demand.cpu_adam_numel / hardware.cpu_adam_params_per_s
    # Multiplications and updates run one after the other: either can fill a GPU.
    devices = demand.hosts * (1 if hardware.gpu is None else demand.ranks_on_host)
    gpu = []
    if hardware.matmul_flops_per_s is not None:
        gpu.append(demand.flops / (devices * hardware.matmul_flops_per_s))
    if hardware.gpu_adam_params_per_s is not None:
        gpu.append(demand.gpu_adam_numel / hardware.gpu_adam_params_per_s)
    if gpu:
        by_resource[Resource.GPU] = sum(gpu)
    if not by_resource:
        raise ConfigError(
            "no rate of this machine is known, so no step time can be derived from it: measure it with "
            "tencache_ds.profiling.probe.probe(nvme_path)"
        )
    limit = max(by_resource, key=by_resource.__getitem__)
    return Bound(by_resource[limit], limit, by_resource)


def storage_seconds(read_nbytes: float, write_nbytes: float, rates: StorageRates) -> float:
    """Shortest time in which storage reads and writes these amounts, in any order and mixture.

    Devices differ in what they do at once. A duplex one reads and writes side by side at its full rates: the longer of
    the two times counts. An additive one has one rate to divide: the times add up. The mixed rate, measured with equal
    amounts of both, says where a device is between the two: ``interference`` is the part of the shorter time that did
    not fit beside the longer one, 0 for a duplex and 1 for an additive device. It is taken to be the same for unequal
    amounts. A mixed rate beyond these limits (measurements are noisy, and no engine has to mix) counts as the limit.

    Pairing equal amounts at the mixed rate would not do: a duplex device that writes at half the rate of its reads has
    an equal mixture far below the sum of both rates, and still reads twice as much in the time of its writes.
    """
    read_s = read_nbytes / rates.read_bytes_per_s
    write_s = write_nbytes / rates.write_bytes_per_s
    one_byte_s = 1 / rates.read_bytes_per_s, 1 / rates.write_bytes_per_s
    interference = (2 / rates.mixed_bytes_per_s - max(one_byte_s)) / min(one_byte_s)
    return max(read_s, write_s) + min(1.0, max(0.0, interference)) * min(read_s, write_s)


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
