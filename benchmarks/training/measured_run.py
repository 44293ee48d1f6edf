# SPDX-License-Identifier: Apache-2.0
"""The measured loop of all configurations: DeepSpeed, TenCache or torch alone.

All ranks run it; rank 0 writes the result after every step, so that a killed run leaves its finished steps. Ranks
communicate between the steps, over gloo, outside of all measured times.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from .. import workloads
from ..record import Measurement, Memory, Step, Task
from ..turns import Gate
from . import instruments
from .consumption import Consumption
from .device_profile import profile_step
from .storage_meter import StorageMeter
from .timeline import Timeline
from .warm_up import MOST_MORE_STEPS, warm_up

MODEL_SEED = 1234
DATA_SEED = 99
"""Plus the rank."""

MOVED = ("nvme_read_nbytes", "nvme_write_nbytes", "kernel_read_nbytes", "kernel_write_nbytes")
"""The fields of a step that are sums over the ranks."""


def nvme_paths(config: dict[str, Any]) -> list[str]:
    """Folders that a DeepSpeed config offloads to."""
    zero = config.get("zero_optimization", {})
    sections = (zero.get("offload_param") or {}, zero.get("offload_optimizer") or {})
    return [str(section["nvme_path"]) for section in sections if section.get("device") == "nvme"]


def limit_gpu_memory(nbytes: int | None) -> None:
    """Limits what torch's allocator takes of the current GPU; CUDA's context and NCCL's buffers come on top."""
    if nbytes is not None and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(nbytes / total, 1.0))


class Trainee(ABC):
    """The subject of the measurement: the three calls of a micro-step, none of which needs to synchronise the
    device.

    Attributes:
        device: where it computes.
        vocabulary: of the model.
        numel: parameters of the model, all ranks.
    """

    device: torch.device
    vocabulary: int
    numel: int

    @abstractmethod
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Loss of a micro-batch: int64 tokens of shape ``(micro_batch, sequence)``, which are the labels too."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None: ...

    @abstractmethod
    def step(self) -> None:
        """After each micro-step; updates the weights after the last one of an optimizer step."""

    @abstractmethod
    def loss_scale(self) -> float | None:
        """Loss scale of the micro-steps to come; None without one."""

    @abstractmethod
    def n_skipped(self) -> int:
        """Optimizer steps left out so far because a gradient was not finite."""

    def stall_s(self) -> float:
        """Waits for storage of training threads, in seconds, that the storage meter does not see."""
        return 0.0

    def settled(self) -> bool:
        """Whether steps are as they will be: some systems look at the first ones, and change their ways then. The same
        on all ranks."""
        return True

    def counts(self) -> dict[str, Any] | None:
        """What TenCache has counted so far, where it trains; waits for nothing."""
        return None

    def stats(self) -> dict[str, Any] | None:
        """TenCache's statistics, where it trains, once nothing goes on behind the training."""
        return None


def use_deterministic_kernels() -> None:
    """From now on in this process, kernels that give other bits from run to run are not chosen, and an operation that
    has no others is an error. Before the first work on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # With ``warn_only`` cuDNN's attention keeps a backward pass whose sums change from run to run.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # which shows mistakes, and takes time


Make = Callable[[torch.nn.Module, Task, torch.device], Trainee]
Building = Callable[[Task, torch.device, "MeasuredRun"], AbstractContextManager[object]]


def run_task(building: Building, make: Make) -> tuple[MeasuredRun, Trainee]:
    """Carries out the task of the command line in this process, after ``torch.distributed`` was initialised if it has
    to be in a particular way.

    Args:
        building: the context in which the model is built.
        make: gets it ready to train.
    """
    task, accelerator = Task.of_command_line(), get_accelerator()
    if task.workload.deterministic:
        use_deterministic_kernels()
    deepspeed.init_distributed()
    accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device(accelerator.current_device_name())
    run = MeasuredRun(task, nvme_paths(task.deepspeed_config))
    workloads.prepare()
    context, workload = building(task, device, run), task.workload
    t_start = time.perf_counter()
    torch.manual_seed(MODEL_SEED)
    with context:
        model = workloads.build(workload.model, workload.sequence, checkpointing=workload.activation_checkpointing)
    t_model = time.perf_counter()
    trainee = make(model, task, device)
    accelerator.synchronize()
    model_s, initialize_s = t_model - t_start, time.perf_counter() - t_model
    if dist.get_rank() == 0:
        print(f"model {model_s:.1f} s, initialize {initialize_s:.1f} s, {trainee.numel / 1e9:.3f} B", flush=True)
    run.train(trainee, model_s, initialize_s)
    return run, trainee


@dataclass(slots=True)
class MeasuredRun:
    """One training run under measurement. Make it before the model, after ``torch.distributed`` is initialised."""

    task: Task
    paths: Iterable[str] = ()  # folders on NVMe, whose block devices are watched
    meter: StorageMeter = field(default_factory=StorageMeter)  # the storage meter of this process
    _result: Measurement = field(default_factory=Measurement)
    _host_used_before: int = field(default_factory=instruments.host_used_nbytes)
    _children_nbytes: int = 0
    _peak_rss: int = 0
    _can_reset_peak: bool = True
    _last_mark: dict[str, Any] | None = None
    _t_last_step: float | None = None  # when the last step ended
    _gloo: Any = None
    _rank: int = 0

    def __post_init__(self) -> None:
        self._rank = dist.get_rank()
        self._gloo = dist.new_group(backend="gloo")  # gathers between steps stay off the device's streams

    def train(self, trainee: Trainee, model_s: float, initialize_s: float) -> Measurement:
        """Runs warm-up and measured steps, and one more under the profiler if requested.

        Args:
            trainee: ready to train.
            model_s: seconds in which the model was built.
            initialize_s: seconds from there until ``trainee`` was ready.

        Returns:
            What rank 0 has written; on other ranks their own part of it.
        """
        task, accelerator = self.task, get_accelerator()
        accelerator.synchronize()
        start_rss = instruments.process_nbytes("VmHWM") + instruments.children_nbytes()
        self._can_reset_peak = instruments.reset_peak_rss()
        if not self._can_reset_peak and self._rank == 0:
            print("the peak of resident memory cannot be reset here: the steady one comes from samples", flush=True)
        accelerator.reset_peak_memory_stats()
        self._update(numel=trainee.numel, model_s=model_s, initialize_s=initialize_s, warmup_steps=task.warmup)
        batches = self._draw(trainee)
        timeline = Timeline(self.meter, task.timeline_hz if self._rank == 0 else 0, lambda: self._children_nbytes)
        self._warm_up(trainee, batches)
        self._children_nbytes = instruments.children_nbytes()
        counts_before = trainee.counts()
        consumption = Consumption(self.paths)
        gate = Gate(Path(task.gate)) if task.gate is not None else None
        for turn in range(task.turns):
            if gate is not None:
                self._wait_for_turn(gate, turn)
                # What ran behind the training had the whole wait to end in: the first step after it is no fair one.
                self._keep(self._step(trainee, next(batches), turn, resumed=True))
            with consumption.span(), timeline.span():
                for _ in range(task.steps // task.turns):
                    self._keep(self._step(trainee, next(batches), turn))
                    consumption.counts()
        spent = consumption.spent
        gpu_joules = self._gather(spent["gpu_energy_j"])
        counts, stats = trainee.counts(), trainee.stats()
        self._update(
            timeline=timeline.samples,
            **spent | {"gpu_energy_j": None if None in gpu_joules else sum(gpu_joules)},
            tencache_stats=stats,
            tencache_counts=None if counts is None or counts_before is None else _difference(counts, counts_before),
            memory=self._memory(start_rss, stats),
        )
        self._write()
        if task.profile and torch.cuda.is_available():
            batch = next(batches)
            if self._rank == 0:
                self._update(device_profile=profile_step(partial(self._micro_steps, trainee, batch)))
                self._write()
            else:
                self._micro_steps(trainee, batch)
        return self._result

    def _warm_up(self, trainee: Trainee, batches: Iterator[list[torch.Tensor]]) -> None:
        """The steps that do not count: as many as requested, or as it takes to settle."""
        n_steps = warm_up(self.task.warmup, lambda: self._keep(self._step(trainee, next(batches))), trainee.settled)
        self._update(warmup_steps=n_steps)

    def _draw(self, trainee: Trainee) -> Iterator[list[torch.Tensor]]:
        """Micro-batches of all possible steps, the same for every configuration, moved to the device when taken."""
        task, workload = self.task, self.task.workload
        generator = torch.Generator().manual_seed(DATA_SEED + self._rank)
        shape = (workload.micro_batch, workload.sequence)
        per_step = workload.accumulation
        resumed = task.turns if task.gate is not None else 0
        most_warmup = task.warmup + MOST_MORE_STEPS
        micro_batches = [
            torch.randint(0, trainee.vocabulary, shape, generator=generator)
            for _ in range((most_warmup + task.steps + resumed + 1) * per_step)
        ]
        for first in range(0, len(micro_batches), per_step):
            yield [tokens.to(trainee.device) for tokens in micro_batches[first : first + per_step]]

    def _wait_for_turn(self, gate: Gate, turn: int) -> None:
        """Corrects this run's memory for memory that others took or released while it waited."""
        before = instruments.host_used_nbytes()
        self._gather(None)
        if self._rank == 0:
            gate.announce(turn)
        gate.wait(turn)
        self._gather(None)
        self._t_last_step = None
        self._host_used_before += instruments.host_used_nbytes() - before

    def _micro_steps(
        self, trainee: Trainee, batch: list[torch.Tensor], after: Callable[[str], None] = lambda phase: None
    ) -> list[torch.Tensor]:
        """One optimizer step; calls ``after`` with the name of each phase that has ended on the device."""
        synchronize = get_accelerator().synchronize
        losses = []
        for tokens in batch:
            loss = trainee.forward(tokens)
            losses.append(loss.detach())
            synchronize()
            after("forward_s")
            trainee.backward(loss)
            synchronize()
            after("backward_s")
            trainee.step()
            synchronize()
            after("update_s")
        return losses

    def _step(self, trainee: Trainee, batch: list[torch.Tensor], turn: int = 0, resumed: bool = False) -> Step:
        get_accelerator().synchronize()
        loss_scale, n_skipped = trainee.loss_scale(), trainee.n_skipped()
        phases_s = dict.fromkeys(("forward_s", "backward_s", "update_s"), 0.0)
        # Bytes that went on between the steps belong to the next one: nothing written back behind the training is lost.
        before = self._last_mark or self._mark(trainee)
        # A step begins where the last one ended, as in a loop that does nothing else: what an engine finishes between
        # two steps is a part of the next forward.
        t_start = t_last = time.perf_counter() if self._t_last_step is None else self._t_last_step

        def after(phase: str) -> None:
            nonlocal t_last
            now = time.perf_counter()
            phases_s[phase] += now - t_last
            t_last = now

        losses = self._micro_steps(trainee, batch, after)
        self._t_last_step = t_last
        now = self._last_mark = self._mark(trainee)
        step = Step(
            losses=[float(loss.item()).hex() for loss in losses],
            seconds=t_last - t_start,
            **phases_s,
            **{key: now[key] - before[key] for key in now},
            rss_nbytes=instruments.rss_nbytes() + self._children_nbytes,
            host_used_nbytes=instruments.host_used_nbytes() - self._host_used_before,
            loss_scale=loss_scale,
            skipped=trainee.n_skipped() > n_skipped,
            turn=turn,
            resumed=resumed,
        )
        self._peak_rss = max(self._peak_rss, step.rss_nbytes)
        return step

    def _mark(self, trainee: Trainee) -> dict[str, Any]:
        """Counters of this rank, by the field of a step that is their difference."""
        counts, by_kernel = self.meter.counts(), instruments.process_io()
        moved = (counts.read_nbytes, counts.write_nbytes, *by_kernel)
        return dict(zip(MOVED, moved, strict=True)) | {"storage_wait_s": counts.wait_ns / 1e9 + trainee.stall_s()}

    def _keep(self, step: Step) -> None:
        """Adds the ranks' bytes to rank 0's step, and writes it down."""
        parts = self._gather([getattr(step, key) for key in MOVED])
        step = step.model_copy(update=dict(zip(MOVED, map(sum, zip(*parts, strict=True)), strict=True)))
        self._update(steps=[*self._result.steps, step])
        self._write()
        if self._rank == 0:
            print(
                f"step {len(self._result.steps) - 1}: {step.seconds:.2f} s (forward {step.forward_s:.2f}, "
                f"backward {step.backward_s:.2f}, update {step.update_s:.2f}; storage {step.storage_wait_s:.2f}), "
                f"loss {', '.join(f'{float.fromhex(loss):.6f}' for loss in step.losses)}"
                f"{', skipped' if step.skipped else ''}",
                flush=True,
            )

    def _memory(self, start_rss: int, stats: dict[str, Any] | None) -> Memory:
        self._children_nbytes = instruments.children_nbytes()
        peak = instruments.process_nbytes("VmHWM") + self._children_nbytes if self._can_reset_peak else 0
        mine = {
            "peak_rss_start_nbytes": start_rss,
            "peak_rss_steady_nbytes": max(peak, self._peak_rss),  # the kernel's peak lags by some pages per thread
            "locked_nbytes": instruments.process_nbytes("VmLck"),
            "torch_pinned_nbytes": instruments.pinned_by_torch_nbytes(),
            "registered_nbytes": stats["pinned_nbytes"] if stats is not None and torch.cuda.is_available() else 0,
            "gpu_peak_nbytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        }
        of_ranks = self._gather(mine)
        return Memory(**{key: max(values[key] for values in of_ranks) for key in mine})

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._gloo)
        return values

    def _update(self, **fields: Any) -> None:
        self._result = self._result.model_copy(update=fields)

    def _write(self) -> None:
        if self._rank == 0:
            self._result.write(Path(self.task.result))


def _difference(counts: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Later values less earlier ones of two records of the same nested counters."""
    return {
        key: _difference(value, before[key]) if isinstance(value, Mapping) else value - before[key]
        for key, value in counts.items()
    }
