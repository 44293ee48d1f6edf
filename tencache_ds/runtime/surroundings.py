# SPDX-License-Identifier: Apache-2.0
"""The environment of an engine: its process and machine."""

from __future__ import annotations

from dataclasses import dataclass

from tencache_ds.planning import cores


@dataclass(frozen=True, slots=True)
class AioSettings:
    """The values of DeepSpeed's ``aio`` section.

    Attributes:
        block_nbytes: None where the user gives none.
    """

    block_nbytes: int | None
    queue_depth: int
    single_submit: bool
    overlap_events: bool


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Properties of the process that an engine runs in.

    Attributes:
        rank: global rank.
        local_ranks: ranks on this machine, which share its memory, cores and disks.
        cores: how many of the machine's cores this rank may use for arithmetic.
        on_cuda: whether the compute device copies over PCIe from registered host memory.
        weights_paths: NVMe folders for weights; none when weights are not offloaded to NVMe.
        optimizer_paths: NVMe folders for optimizer state; none when it stays in host memory.
        pin_memory: DeepSpeed's ``pin_memory`` option.
        aio: DeepSpeed's ``aio`` section.
        host_nbytes: host memory for weights, gradients and optimizer state, the same figure on every rank.
        host_reason: where that figure comes from.
    """

    rank: int
    local_ranks: int
    cores: int
    on_cuda: bool
    weights_paths: tuple[str, ...]
    optimizer_paths: tuple[str, ...]
    pin_memory: bool
    aio: AioSettings
    host_nbytes: int
    host_reason: str

    @property
    def cores_beside_training(self) -> int:
        """Number of :attr:`cores` that the optimizer's update and copies may keep busy while a pass runs."""
        return cores.cores_beside_training(self.cores, on_gpu=self.on_cuda)
