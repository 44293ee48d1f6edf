# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark: search, then rounds in which the configurations alternate; all on one machine, one at a time.

Everything done so far is in ``benchmark.json`` of the output folder after every run. The same command continues from
there, after an interruption or a ``--time-limit``.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tencache_ds.errors import ConfigError
from tencache_ds.planning.bound import Bound

from ..record import Benchmark, Configuration, Outcome, Placement, Run, Task
from ..workloads import census
from .host_limit import HostLimit, host_limit
from .limits import balance_tokens, bound_of, placement_of
from .machine import Machine
from .neighbours import busy_cores
from .peers import PEERS, Setting
from .process import Request, execute, execute_in_turns
from .suites import Entry, Plan
from .tuning import Search, Trial

RESULT_FILE = "benchmark.json"
TYPICAL_RUN_S = 90.0
"""Assumed of a run before the first one has shown how long one takes."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a plan is run."""

    out: Path  # folder for the record, the report, logs
    nvme_path: Path  # folder on the storage to measure; a folder of our own is made in it, and removed
    command: str  # for the record
    host_nbytes: int | None = None  # cap on the host memory of each run
    gpu_nbytes: int | None = None  # cap on the memory of each GPU
    timeout_s: float = 900.0  # a run that takes longer is stopped and counts as failed
    time_limit_s: float | None = None  # no run is begun that would probably end later than this after the start
    profile: bool = True  # whether runs of the first round end with a step under the profiler (GPUs only)
    retry_failed: bool = False  # whether configurations that failed earlier are tried again


class OutOfTime(Exception):
    """The time limit does not allow another run; finished runs are on record."""


class Session:
    """One plan on one machine."""

    def __init__(self, plan: Plan, options: Options, machine: Machine) -> None:
        self._plan = plan
        self._options = options
        self._machine = machine
        self._t_start = time.perf_counter()
        self._file = options.out / RESULT_FILE
        self._longest: dict[str, float] = {}

    def run(self) -> Benchmark:
        """Does the remaining work and returns the whole record.

        Raises:
            OutOfTime: the time limit came first.
            ConfigError: the output folder holds another benchmark, or one of another machine.
            KeyboardInterrupt: the user stopped it.
        """
        self._benchmark = self._resume() or self._begin()
        self._update()
        with (
            self._scratch() as nvme_path,
            host_limit(self._options.host_nbytes) as limit,
            busy_cores(self._plan.workload.busy_cores),
            tqdm(total=self._expected_runs(), unit="run", dynamic_ncols=True) as bar,
        ):
            self._bar = bar
            bar.update(len(self._benchmark.runs) + len(self._benchmark.tuning))
            setting = self._setting(nvme_path)
            for entry in self._plan.entries:
                self._tune(entry, setting, limit)
            for index in range(self._plan.rounds):
                if self._plan.turns > 1:
                    self._measure_in_turns(index, setting)
                    continue
                for entry in self._plan.entries:
                    if self._is_due(entry, index):
                        self._execute(entry, self._knobs(entry), index, setting, limit)
        self._conclude()
        return self._benchmark

    def _on_progress(self) -> None:
        """Shows that time passes; in a file every refresh would be one more line."""
        if sys.stderr.isatty():
            self._bar.refresh()

    # What is on record

    def _begin(self) -> Benchmark:
        self._machine.build_operators()  # a continued benchmark has built them, of the same versions
        hardware = self._machine.probe(self._options.nvme_path, self._plan.probe_s)
        on_tmpfs = hardware.storage is not None and hardware.storage.in_memory
        return Benchmark(
            title=self._plan.title,
            started_at=self._machine.now(),
            command=self._options.command,
            storage="tmpfs (stands in for a fast array)" if on_tmpfs else "disk",
            hardware=hardware,
            versions=self._machine.versions(),
            workload=self._plan.workload,
            configurations=[],
        )

    def _resume(self) -> Benchmark | None:
        if not self._file.exists():
            return None
        found = Benchmark.read(self._file)
        for what, theirs, ours in (
            ("workload", found.workload, self._plan.workload),
            ("machine", (found.hardware.cpu, found.hardware.cores, found.hardware.gpu), self._machine.identity()),
            ("set of versions", found.versions, self._machine.versions()),
        ):
            if theirs != ours:
                raise ConfigError(
                    f"{self._file} holds a benchmark of another {what} ({theirs}, now {ours}), whose results are "
                    "not comparable; choose another folder with --out"
                )
        runs, tried = found.runs, found.tuning
        if self._options.retry_failed:
            runs = [run for run in runs if run.outcome is not Outcome.failed]
            tried = [run for run in tried if run.outcome is not Outcome.failed]
        return found.model_copy(update={"runs": runs, "tuning": tried})

    def _update(self, **fields: Any) -> None:
        self._benchmark = self._benchmark.model_copy(update=fields)
        self._benchmark.write(self._file)

    def _add(self, run: Run) -> None:
        which = "tuning" if run.round < 0 else "runs"
        self._update(**{which: [*getattr(self._benchmark, which), run]})
        if run.outcome is Outcome.ok and run.measured:
            line = f"{run.configuration}: {run.median_s:.3g} s per step"
        else:
            line = f"{run.configuration}: {run.outcome.value.replace('_', ' ')}: {run.error}"
        tqdm.write(f"{'trial' if run.round < 0 else f'round {run.round + 1}'}, {line} ({run.wall_s:.0f} s in all)")
        self._bar.update()

    # The search

    def _tune(self, entry: Entry, setting: Setting, limit: HostLimit) -> None:
        refusal = PEERS[entry.peer].refuse(setting)
        if refusal and not any(run.configuration == entry.name for run in self._benchmark.runs):
            config = PEERS[entry.peer].configure(setting, self._knobs(entry))
            self._add(Run(configuration=entry.name, round=0, outcome=Outcome.cannot_run, error=refusal,
                          deepspeed_config=_without_paths(config, setting)))  # fmt: skip
        while not refusal:
            trials = self._trials(entry)
            knobs = self._search(entry).next_trial(trials)
            if knobs is None:
                break
            if any(trial.knobs == knobs for trial in trials):
                self._bar.total += 1  # once more to confirm: not foreseen
            self._execute(entry, knobs, -1 - len(trials), setting, limit)
        self._describe(entry)

    def _search(self, entry: Entry) -> Search:
        wanted = self._plan.searched is None or entry.name in self._plan.searched
        most = self._plan.max_trials if wanted else 0
        return Search(PEERS[entry.peer].space, entry.fixed, most, self._plan.confirm)

    def _trials(self, entry: Entry) -> list[Trial]:
        return [
            Trial(run.knobs, run.median_s if run.outcome is Outcome.ok and run.measured else math.inf)
            for run in self._benchmark.tuning
            if run.configuration == entry.name
        ]

    def _knobs(self, entry: Entry) -> dict[str, Any]:
        return self._search(entry).best(self._trials(entry))

    def _describe(self, entry: Entry) -> None:
        trials = self._trials(entry)
        tried = {knob: list(dict.fromkeys(trial.knobs[knob] for trial in trials)) for knob in self._knobs(entry)}
        described = Configuration(
            name=entry.name, label=entry.label, peer=entry.peer, semantics=PEERS[entry.peer].semantics,
            knobs=self._knobs(entry), searched={knob: values for knob, values in tried.items() if len(values) > 1},
        )  # fmt: skip
        others = [known for known in self._benchmark.configurations if known.name != entry.name]
        order = {planned.name: index for index, planned in enumerate(self._plan.entries)}
        configurations = sorted([*others, described], key=lambda item: order.get(item.name, len(order)))
        self._update(configurations=configurations)

    # The rounds

    def _is_due(self, entry: Entry, index: int) -> bool:
        done = [run for run in self._benchmark.runs if run.configuration == entry.name]
        # What failed once is not tried again in each round: it would mostly be the same error, after the same wait.
        return not any(run.round == index or run.outcome is not Outcome.ok for run in done)

    def _measure_in_turns(self, index: int, setting: Setting) -> None:
        """A round in which all runs stay in memory, each with its own folder on the storage."""
        due = [entry for entry in self._plan.entries if self._is_due(entry, index)]
        if not due:
            return
        self._check_time(due)
        prepared = []
        for number, entry in enumerate(due):
            own = replace(setting, nvme_path=str(Path(setting.nvme_path) / str(number)))
            Path(own.nvme_path).mkdir()
            knobs = self._knobs(entry)
            prepared.append((self._request(entry, knobs, index, own), knobs, own))
        self._bar.set_description(f"{len(due)} in turns")
        requests = [request for request, _, _ in prepared]
        runs = execute_in_turns(requests, self._logs(), n_turns=self._plan.turns, on_progress=self._on_progress)
        _empty(Path(setting.nvme_path))
        for run, of in zip(runs, prepared, strict=True):
            self._add(self._described(run, *of))

    def _execute(self, entry: Entry, knobs: dict[str, Any], index: int, setting: Setting, limit: HostLimit) -> None:
        self._check_time([entry])
        self._bar.set_description(f"{entry.name}{' (trial)' if index < 0 else ''}")
        request = self._request(entry, knobs, index, setting)
        run = execute(request, self._logs(), host_limit=limit, on_progress=self._on_progress)
        _empty(Path(setting.nvme_path))
        self._add(self._described(run, request, knobs, setting))

    def _check_time(self, entries: list[Entry]) -> None:
        """Raises OutOfTime if runs of these configurations, one after another, would end beyond the time limit."""
        longest = max(self._longest.values(), default=TYPICAL_RUN_S)
        expected_s = sum(self._longest.get(entry.name, longest) for entry in entries)
        elapsed_s = time.perf_counter() - self._t_start
        if self._options.time_limit_s is not None and elapsed_s + expected_s > self._options.time_limit_s:
            raise OutOfTime(f"the next run takes about {expected_s:.0f} s, which exceeds the time limit")

    def _request(self, entry: Entry, knobs: dict[str, Any], index: int, setting: Setting) -> Request:
        trial, peer, plan = index < 0, PEERS[entry.peer], self._plan
        task = Task(
            workload=plan.workload, deepspeed_config=peer.configure(setting, knobs), zero_init=peer.zero_init,
            steps=plan.trial_steps if trial else plan.steps, warmup=1 if trial else plan.warmup,
            profile=self._options.profile and setting.gpus > 0 and index == 0, gpu_nbytes=self._options.gpu_nbytes,
        )  # fmt: skip
        return Request(entry.name, index, peer, task, self._options.timeout_s)

    def _described(self, run: Run, request: Request, knobs: dict[str, Any], setting: Setting) -> Run:
        name = request.configuration
        self._longest[name] = max(run.wall_s, self._longest.get(name, 0.0))
        config, stats = (
            _without_paths(request.task.deepspeed_config, setting),
            _without_paths(run.tencache_stats, setting),
        )
        return run.model_copy(update={"knobs": knobs, "deepspeed_config": config, "tencache_stats": stats})

    def _logs(self) -> Path:
        folder = self._options.out / "runs"
        folder.mkdir(exist_ok=True)
        return folder

    def _conclude(self) -> None:
        """Adds where each configuration kept things and how fast that could be."""
        workload, hardware = self._plan.workload, self._benchmark.hardware
        placements: dict[str, Placement] = {}
        bounds: dict[str, Bound] = {}
        for entry in self._plan.entries:
            for run in self._benchmark.runs_of(entry.name)[-1:]:
                placement = placement_of(PEERS[entry.peer], run, workload.ranks)
                if placement is not None:
                    placements[entry.name] = placement
                    bounds[entry.name] = bound_of(hardware, workload, run.numel, placement)
        balance = {name: balance_tokens(bound, workload) for name, bound in bounds.items()}
        self._update(
            placements=placements,
            bounds_s={name: bound.seconds for name, bound in bounds.items()},
            limits={name: bound.limit.value for name, bound in bounds.items()},
            balance_tokens={name: tokens for name, tokens in balance.items() if tokens is not None},
        )

    # Surroundings

    def _setting(self, nvme_path: Path) -> Setting:
        counts = census(self._plan.workload.model, self._plan.workload.sequence)
        hardware = self._benchmark.hardware
        return Setting(
            workload=self._plan.workload, numel=counts.numel, largest=counts.largest, nvme_path=str(nvme_path),
            gpus=hardware.gpus, gpu_nbytes=self._options.gpu_nbytes or hardware.gpu_memory_nbytes or 0,
            host_nbytes=self._options.host_nbytes or self._machine.available_nbytes(),
        )  # fmt: skip

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """A folder of our own on the storage: stock removes its own folder there at every start."""
        try:
            self._options.nvme_path.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="tencache-bench-", dir=self._options.nvme_path))
        except OSError as error:
            raise ConfigError(f"--nvme-path {self._options.nvme_path} cannot be written: {error.strerror}") from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _expected_runs(self) -> int:
        trials = 0
        for entry in self._plan.entries:
            search = self._search(entry)
            free = sum(len(values) - 1 for knob, values in search.space.items() if knob not in entry.fixed)
            trials += min(int(search.most), free + 1) if free else 0
        return trials + self._plan.rounds * len(self._plan.entries)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        shutil.rmtree(entry, ignore_errors=True)


def _without_paths(value: Any, setting: Setting) -> Any:
    """A config or statistics without the scratch folder, which is private and new every time."""
    if isinstance(value, dict):
        return {key: _without_paths(item, setting) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item, setting) for item in value]
    return value.replace(setting.nvme_path, "FOLDER") if isinstance(value, str) else value
