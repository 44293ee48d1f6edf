# SPDX-License-Identifier: Apache-2.0
"""The record of a benchmark: one JSON file per benchmark, the source of the report and the plots.

Units are bytes and seconds, as in the names. The file is written after every run, so that an interruption loses
nothing; later versions read files of the same :data:`SCHEMA`.
"""

from __future__ import annotations

import os
import statistics
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tencache_ds.planning.bound import STATE_NBYTES
from tencache_ds.profiling.hardware import Hardware

SCHEMA = 1


class Record(BaseModel):
    """Base of all records: immutable, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Outcome(StrEnum):
    """How a run ended."""

    ok = "ok"
    failed = "failed"
    """It ended with an error, or at its time limit."""

    cannot_run = "cannot_run"
    """It was not started: this machine or this DeepSpeed lacks a requirement, which the error names."""


class Step(Record):
    """One optimizer step, on rank 0. Every phase ends with a synchronisation of the device."""

    losses: list[str]
    """Loss of each micro-step: exact hexadecimal floats (``float.hex``)."""

    seconds: float
    forward_s: float
    backward_s: float
    update_s: float
    """Parts of ``seconds``, summed over the micro-steps."""

    storage_wait_s: float
    """Time the training thread was blocked in the storage layer: in a call of ``aio_handle`` or a wait of TenCache."""

    nvme_read_nbytes: int
    nvme_write_nbytes: int
    """Bytes asked of storage, counted at the ``aio_handle`` (or TenCache's backend), summed over the ranks."""

    kernel_read_nbytes: int
    kernel_write_nbytes: int
    """The same as the kernel counts it for the processes (``/proc/self/io``; 0 on tmpfs), summed over the ranks."""

    rss_nbytes: int
    host_used_nbytes: int
    """Host memory in use minus that before the run, without page cache; counts driver-pinned pages too."""

    loss_scale: float | None = None
    skipped: bool = False
    """Whether the loss scaler left this optimizer step out."""

    turn: int = 0
    """Which turn of its round it belongs to, from 0, where runs that stay in memory alternate turn by turn."""

    resumed: bool = False
    """Whether it is the first of its turn, after a wait for the turns of others: it does not count."""


class Sample(Record):
    """Cumulative counts at a moment of the measured steps, on rank 0."""

    t_s: float
    """Since the first measured step began."""

    nvme_read_nbytes: int
    nvme_write_nbytes: int
    rss_nbytes: int


class DeviceProfile(Record):
    """One further step under torch's profiler (CUPTI), on rank 0: the same instrument for every configuration."""

    seconds: float
    h2d_nbytes: int
    d2h_nbytes: int
    h2d_busy_s: float
    d2h_busy_s: float
    kernel_busy_s: float
    """Time in which at least one kernel ran."""


class Memory(Record):
    """Host and GPU memory of a run: the largest over the ranks."""

    peak_rss_start_nbytes: int
    """Up to and including ``deepspeed.initialize``."""

    peak_rss_steady_nbytes: int
    locked_nbytes: int
    """``VmLck``: mlock'ed."""

    torch_pinned_nbytes: int
    """Of torch's pinned allocator."""

    registered_nbytes: int
    """Registered with CUDA by TenCache."""

    gpu_peak_nbytes: int

    @property
    def pinned_nbytes(self) -> int:
        """All pinned host memory."""
        return self.locked_nbytes + self.torch_pinned_nbytes + self.registered_nbytes


class Caps(Record):
    """The caps of a run."""

    host_nbytes: int | None = None
    """Per host; None means no cap."""

    host_enforced_by: str = ""
    """"cgroup" where a real limit was set, "measured" where the peak is only compared with the cap, else empty."""

    gpu_nbytes: int | None = None
    """Per GPU, through torch's allocator."""


class Measurement(Record):
    """The record of a training process: the measured part of a :class:`Run`."""

    numel: int = 0
    """Parameters of the model, all ranks."""

    model_s: float = 0.0
    """Building the model, under ``zero.Init`` where DeepSpeed is used."""

    initialize_s: float = 0.0
    """``deepspeed.initialize``."""

    warmup_steps: int = 0
    """How many of the first :attr:`steps` do not count."""

    steps: list[Step] = Field(default_factory=list)
    memory: Memory | None = None
    timeline: list[Sample] = Field(default_factory=list)
    device_profile: DeviceProfile | None = None
    gpu_energy_j: float | None = None
    """Of the measured steps, as NVML counts; None where it cannot be read."""

    cpu_energy_j: float | None = None
    """Of the measured steps, as RAPL counts; None where it cannot be read."""

    disk_write_nbytes: int | None = None
    """Bytes written by the block device under the NVMe path in the measured steps; None without one."""

    tencache_stats: dict[str, Any] | None = None
    """``dataclasses.asdict(tencache_ds.stats(engine))`` at the end."""

    @property
    def measured(self) -> list[Step]:
        """The measured steps."""
        return [step for step in self.steps[self.warmup_steps :] if not step.resumed]

    @property
    def median_s(self) -> float:
        """Median seconds of a measured step.

        Raises:
            statistics.StatisticsError: nothing was measured.
        """
        return statistics.median(step.seconds for step in self.measured)


class Run(Measurement):
    """One run of one configuration in its own processes."""

    configuration: str
    """Name of a :class:`Configuration`."""

    round: int
    """Round of the alternation, from 0. A tuning trial has a negative one."""

    outcome: Outcome
    error: str = ""
    started_at: str = ""
    """ISO 8601, UTC."""

    wall_s: float = 0.0
    """From the launcher's start to its end, without the turns of others."""

    knobs: dict[str, Any] = Field(default_factory=dict)
    """The peer's settings in this run."""

    deepspeed_config: dict[str, Any] = Field(default_factory=dict)
    caps: Caps = Caps()


class Configuration(Record):
    """One of the things compared."""

    name: str
    label: str
    """For tables and legends."""

    peer: str
    """Which of ``benchmarks.comparison.peers`` it belongs to; "tencache" for ours."""

    semantics: str = ""
    """Its differences from synchronous training; empty for the same results as all others."""

    knobs: dict[str, Any] = Field(default_factory=dict)
    """The settings it runs with: the best of the search where there was one."""

    searched: dict[str, list[Any]] = Field(default_factory=dict)
    """The values tried for each knob; empty for a configuration that was not tuned."""


class Placement(Record):
    """The placement of a configuration, as shares of the parameters; the input of the bound."""

    weights_nvme: float
    """Share of the 16-bit weights on NVMe."""

    optimizer_nvme: float
    """Share of the optimizer state on NVMe."""

    weights_gpu: float = 0.0
    """Share of the 16-bit weights that stays on the GPU."""

    optimizer_gpu: float = 0.0
    """Share of the optimizer state that stays on the GPU."""

    optimizer_nvme_nbytes: float = STATE_NBYTES
    """Bytes per parameter of the optimizer state on NVMe; fewer where master weights are split."""


class Workload(Record):
    """The training."""

    model: str
    """Name in ``benchmarks.workloads``."""

    micro_batch: int
    """Sequences per micro-step and rank."""

    sequence: int
    """Tokens per sequence."""

    accumulation: int
    """Micro-steps per optimizer step."""

    ranks: int
    precision: str
    """"bf16" or "fp16"."""

    activation_checkpointing: bool
    busy_cores: int = 0
    """Additional processes that only keep a core busy."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in one optimizer step."""
        return self.micro_batch * self.sequence * self.accumulation * self.ranks


class Benchmark(Record):
    """A whole benchmark: one machine, one workload, one alternation."""

    schema_version: int = SCHEMA
    title: str
    started_at: str
    command: str
    """How to repeat it; paths of the machine are left out."""

    storage: str
    """Kind of the NVMe path: "disk", or "tmpfs (stands in for a fast array)"."""

    hardware: Hardware
    versions: dict[str, str]
    """Versions of python, torch, deepspeed, tencache_ds, cuda and the kernel."""

    workload: Workload
    configurations: list[Configuration]
    placements: dict[str, Placement] = Field(default_factory=dict)
    """By configuration, where it is known."""

    bounds_s: dict[str, float] = Field(default_factory=dict)
    """Shortest possible step of each configuration's placement on this hardware (``planning.bound``)."""

    limits: dict[str, str] = Field(default_factory=dict)
    """Which resource sets each of :attr:`bounds_s`."""

    balance_tokens: dict[str, float] = Field(default_factory=dict)
    """Tokens per optimizer step at which arithmetic takes as long as NVMe, at the rates of the probe and with as many
    micro-steps; for configurations that use NVMe. With fewer tokens storage is the limit, with more it is the GPU."""

    tuning: list[Run] = Field(default_factory=list)
    """Trials of the search."""

    runs: list[Run] = Field(default_factory=list)

    @property
    def on_tmpfs(self) -> bool:
        """Whether host memory was used in place of NVMe."""
        storage = self.hardware.storage
        return self.storage.startswith("tmpfs") or (storage is not None and storage.in_memory)

    def runs_of(self, name: str) -> list[Run]:
        """Runs of a configuration that ended well, in order."""
        return [run for run in self.runs if run.configuration == name and run.outcome is Outcome.ok]

    def failure_of(self, name: str) -> Run | None:
        """The last run of a configuration that did not end well, if no run of it did."""
        failed = [run for run in self.runs if run.configuration == name and run.outcome is not Outcome.ok]
        return failed[-1] if failed and not self.runs_of(name) else None

    def write(self, path: Path) -> None:
        """Writes the file at once: a reader, and an interruption, see the old one or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(self.model_dump_json(indent=1))
        os.replace(partial, path)

    @classmethod
    def read(cls, path: Path) -> Benchmark:
        """The benchmark in a file.

        Raises:
            pydantic.ValidationError: the file is not one of this schema.
            OSError: it cannot be read.
        """
        return cls.model_validate_json(path.read_text())
