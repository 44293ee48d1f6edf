# SPDX-License-Identifier: Apache-2.0
"""The record of a benchmark: one JSON file per benchmark, the source of the report and the plots.

Units are bytes and seconds, as in the names. The file is written after every run, so that an interruption loses
nothing; later versions read files of the same ``schema_version``.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from tencache_ds.names import StrEnum
from tencache_ds.planning.forecast import STATE_NBYTES
from tencache_ds.profiling.hardware import Hardware

if TYPE_CHECKING:
    from typing_extensions import Self


class Record(BaseModel):
    """Base of all records: immutable, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def read(cls, path: Path) -> Self:
        """The record in a file.

        Raises:
            pydantic.ValidationError: the file is not one of this schema.
            OSError: it cannot be read.
        """
        return cls.model_validate_json(path.read_text())

    def write(self, path: Path) -> None:
        """Writes it as JSON; a reader, and an interruption, see the old file or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(self.model_dump_json(indent=1))
        os.replace(partial, path)


class Outcome(StrEnum):
    """How a run ended."""

    ok = "ok"
    failed = "failed"
    """It ended with an error, or at its time limit."""

    cannot_run = "cannot_run"
    """It was not started: this machine or this DeepSpeed lacks a requirement, which the error names."""


class Step(Record):
    """One optimizer step, on rank 0. It begins where the last one ended, and every phase ends with a synchronisation of
    the device."""

    losses: list[str]  # loss of each micro-step: exact hexadecimal floats (``float.hex``)
    seconds: float  # of the whole; the next three are its parts, summed over the micro-steps
    forward_s: float
    backward_s: float
    update_s: float
    storage_wait_s: float  # the training thread was blocked in a call of ``aio_handle`` or a wait of TenCache
    # asked of storage, counted at the ``aio_handle`` (or TenCache's backend), summed over the ranks
    nvme_read_nbytes: int
    nvme_write_nbytes: int
    # the same as the kernel counts it for the processes (``/proc/self/io``; 0 on tmpfs), summed over the ranks
    kernel_read_nbytes: int
    kernel_write_nbytes: int
    rss_nbytes: int  # resident memory after the step
    host_used_nbytes: int  # in use beyond that before the run, without page cache; counts driver-pinned pages
    loss_scale: float | None = None  # before the step; None without one
    skipped: bool = False  # whether the loss scaler left this optimizer step out
    turn: int = 0  # of its round, from 0, where runs that stay in memory alternate turn by turn
    resumed: bool = False  # whether it is the first of its turn, after the turns of others: it does not count


class Sample(Record):
    """Cumulative counts on rank 0 at a moment, in seconds since the first measured step began."""

    t_s: float
    nvme_read_nbytes: int
    nvme_write_nbytes: int
    rss_nbytes: int


class DeviceProfile(Record):
    """One further step under torch's profiler (CUPTI), on rank 0: the same instrument for every configuration.

    ``kernel_busy_s`` is the time in which at least one kernel ran.
    """

    seconds: float
    h2d_nbytes: int
    d2h_nbytes: int
    h2d_busy_s: float
    d2h_busy_s: float
    kernel_busy_s: float


class Memory(Record):
    """Host and GPU memory of a run: the largest over the ranks."""

    peak_rss_start_nbytes: int  # up to and including ``deepspeed.initialize``
    peak_rss_steady_nbytes: int  # after it
    locked_nbytes: int  # mlock'ed (``VmLck``)
    torch_pinned_nbytes: int  # of torch's pinned allocator
    registered_nbytes: int  # registered with CUDA by TenCache
    gpu_peak_nbytes: int  # of torch's allocator


class Caps(Record):
    """The caps of a run; None means no cap."""

    host_nbytes: int | None = None  # per host
    host_enforced_by: str = ""  # "cgroup", or "measured" where the peak is only compared with the cap
    gpu_nbytes: int | None = None  # per GPU, through torch's allocator


class Measurement(Record):
    """The record of a training process: the measured part of a :class:`Run`."""

    numel: int = 0  # parameters of the model, all ranks
    model_s: float = 0.0  # building the model, under ``zero.Init`` where DeepSpeed is used
    initialize_s: float = 0.0  # ``deepspeed.initialize``
    warmup_steps: int = 0  # how many of the first :attr:`steps` do not count
    steps: list[Step] = []  # all of them, warm-up included
    memory: Memory | None = None  # None where the run ended before it was read
    timeline: list[Sample] = []  # of the measured steps
    device_profile: DeviceProfile | None = None  # None where no step was profiled
    gpu_energy_j: float | None = None  # of the measured steps, as NVML counts; None where it cannot be read
    cpu_energy_j: float | None = None  # of the measured steps, as RAPL counts; None where it cannot be read
    disk_write_nbytes: int | None = None  # of the measured steps, on the block device of the NVMe path, if any
    tencache_stats: dict[str, Any] | None = None  # ``dataclasses.asdict(tencache_ds.stats(engine))`` at the end
    tencache_counts: dict[str, Any] | None = None  # its ``total``, less what it was at the end of the warm-up

    @property
    def measured(self) -> list[Step]:
        """The measured steps."""
        return [step for step in self.steps[self.warmup_steps :] if not step.resumed]


class Run(Measurement):
    """One run of one configuration in its own processes."""

    configuration: str  # name of a :class:`Configuration`
    round: int  # round of the alternation, from 0. A tuning trial has a negative one
    outcome: Outcome  # how it ended; ``error`` says why
    error: str = ""
    started_at: str = ""  # ISO 8601, UTC
    wall_s: float = 0.0  # from the launcher's start to its end, without the turns of others
    knobs: dict[str, Any] = {}  # the peer's settings in this run
    deepspeed_config: dict[str, Any] = {}  # without the paths of the machine
    caps: Caps = Caps()  # on its memory

    @property
    def step_s(self) -> float:
        """Median seconds of a measured step; infinity for a run that did not end well or has none."""
        ended_well = self.outcome is Outcome.ok and self.measured
        return statistics.median(step.seconds for step in self.measured) if ended_well else math.inf


SMALLEST_SIZE_NBYTES = 10**7
"""Smallest size that a setting in GB can mean."""


def setting_label(knob: str, value: Any) -> str:
    """A setting in labels of configurations."""
    if knob == "host_memory_share":
        return f"RAM for {value:.0%}"
    if knob.endswith("_memory") and isinstance(value, int) and value >= SMALLEST_SIZE_NBYTES:
        return f"{knob} {value / 1e9:.3g} GB"
    return f"{knob} {value}"


class Configuration(Record):
    """One of the things compared."""

    name: str  # as on the command line
    label: str  # for tables and legends
    peer: str  # which of ``benchmarks.comparison.peers`` it belongs to; "tencache" for ours
    semantics: str = ""  # its differences from synchronous training; empty for the same results as all others
    knobs: dict[str, Any] = {}  # the settings it runs with: the best of the search where there was one
    searched: dict[str, list[Any]] = {}  # the values tried for each knob, where several were


class Placement(Record):
    """The placement of a configuration, the input of the bound: shares of the parameters whose 16-bit weights and
    optimizer state are on NVMe and on the GPU.

    ``optimizer_nvme_nbytes`` are bytes per parameter of the state on NVMe; fewer where master weights are split.
    """

    weights_nvme: float = 0.0
    optimizer_nvme: float = 0.0
    weights_gpu: float = 0.0
    optimizer_gpu: float = 0.0
    optimizer_nvme_nbytes: float = STATE_NBYTES


class Workload(Record):
    """The training."""

    model: str  # name in ``benchmarks.workloads``
    micro_batch: int  # sequences per micro-step and rank
    sequence: int  # tokens per sequence
    accumulation: int = 1  # micro-steps per optimizer step
    ranks: int  # processes, one per GPU
    precision: str  # "bf16" or "fp16"
    activation_checkpointing: bool = False  # whether activations are recomputed in backward
    busy_cores: int = 0  # additional processes that only keep a core busy
    deterministic: bool = False  # whether kernels that give other bits from run to run are left out

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in one optimizer step."""
        return self.micro_batch * self.sequence * self.accumulation * self.ranks


class Assignment(Record):
    """What a program is asked to do, in the file that is its one argument."""

    deepspeed_config: dict[str, Any]
    result: str = ""  # JSON file to write

    @classmethod
    def of_command_line(cls) -> Self:
        """The one in the file that the command line names; the launcher adds ``--local_rank``."""
        (file,) = (word for word in sys.argv[1:] if not word.startswith("--local_rank"))
        return cls.read(Path(file))


class Task(Assignment):
    """The task of a training process, of which rank 0 writes a :class:`Measurement`."""

    workload: Workload
    steps: int  # measured optimizer steps
    warmup: int = 2  # steps before them, which do not count
    turns: int = 1  # the measured steps are split into so many turns, each released by the gate; divides the steps
    gate: str | None = None  # folder of the benchmark's turnstile (``benchmarks.turns``)
    zero_init: bool = True  # False builds the unpartitioned model
    gpu_nbytes: int | None = None  # limit of torch's allocator per GPU
    profile: bool = False  # whether a further step is made under torch's profiler
    timeline_hz: float = 20.0  # samples per second; 0 takes none


class Benchmark(Record):
    """A whole benchmark: one machine, one workload, one alternation."""

    schema_version: Literal[1] = 1
    title: str
    started_at: str
    command: str  # how to repeat it; paths of the machine are left out
    storage: str  # kind of the NVMe path: "disk", or "tmpfs (stands in for a fast array)"
    hardware: Hardware  # rates that the probe measured
    versions: dict[str, str]  # of python, torch, deepspeed, tencache_ds, cuda and the kernel
    workload: Workload
    configurations: list[Configuration]
    placements: dict[str, Placement] = {}  # by configuration, where it is known
    bounds_s: dict[str, float] = {}  # shortest step of each of these on this hardware (``planning.bound``)
    limits: dict[str, str] = {}  # which resource sets each of :attr:`bounds_s`
    # tokens per step at which arithmetic takes as long as NVMe, at the rates of the probe and with as many
    # micro-steps, for configurations that use NVMe: with fewer storage is the limit, with more the GPU
    balance_tokens: dict[str, float] = {}
    tuning: list[Run] = []  # trials of the search
    runs: list[Run] = []  # the measured ones

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
