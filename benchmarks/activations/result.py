# SPDX-License-Identifier: Apache-2.0
"""What one system is asked to train, and its figures."""

from __future__ import annotations

from ..record import Assignment, Record


class ActivationTask(Assignment):
    """What to train: with activation checkpointing, one GPU."""

    system: str  # key of :data:`.command.SYSTEMS`
    model: str  # name in ``benchmarks.workloads``
    sequence: int  # tokens of each sequence
    batch: int  # sequences of each micro-step
    accumulation: int  # micro-steps of each step
    steps: int  # measured
    warmup: int  # steps before them; more where TenCache has not settled
    gpu_nbytes: int | None = None  # GPU memory that torch may take


class ActivationRun(Record):
    """Figures of one system."""

    seconds: list[float]  # of each measured step
    tokens: int  # of a step
    losses: list[float]  # of each micro-step from the first, without those by which the warm-up was extended
    activation_peak_nbytes: int  # GPU memory at its highest, less what was taken when the micro-step began
    gpu_peak_nbytes: int  # the most that tensors took
    rss_peak_nbytes: int  # the most that the process took of RAM
    late_seconds: float  # the host's waits for activations on NVMe, in the measured steps
    host_activation_nbytes: int = 0  # moved to RAM in the last pass, by TenCache
    nvme_activation_nbytes: int = 0  # and to NVMe
