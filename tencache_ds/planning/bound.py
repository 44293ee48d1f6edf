# SPDX-License-Identifier: Apache-2.0
"""The shortest step that a machine allows for a model and a placement: what a measured step is compared with.

Every resource has a time in which it could do its part of a step alone. A perfect engine hides all of them behind the
longest one, so that is the bound, and its resource is the limit. No schedule may achieve it: gradients are final only
after backward, and where they are clipped by their norm the first update waits for the last gradient. A bound that is
too short makes a fraction look worse, never better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from tencache_ds.errors import ConfigError
from tencache_ds.names import StrEnum
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
