# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark: search, then rounds in which the configurations alternate; all on one machine, one at a time.

Everything done so far is in ``benchmark.json`` of the output folder after every run. The same command continues from
there, after an interruption or a ``--time-limit``.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tencache_ds.errors import ConfigError
from tencache_ds.profiling.host import available_nbytes

from ..record import Benchmark, Configuration, Outcome, Run, Task
from ..workloads import census
from .conditions import busy_cores, host_limit
from .limits import balance_tokens, bound_of, placement_of
from .machine import Machine
from .peers import PEERS, Setting
from .process import Request, execute, now
from .suites import Entry, Plan
from .tuning import Search, Trial

RESULT_FILE = "benchmark.json"
TYPICAL_RUN_S = 90.0
"""Assumed of a run before the first one has shown how long one takes."""


class OutOfTime(Exception):
    """The time limit does not allow another run; finished runs are on record."""


class Session:
    """One plan on one machine."""

    def __init__(self, plan: Plan, machine: Machine) -> None:
        self._plan = plan
        self._machine = machine
        self._t_start = time.perf_counter()
        self._file = plan.out / RESULT_FILE
        self._longest: dict[str, float] = {}

    def run(self) -> Benchmark:
        """Does the remaining work and returns the whole record.

        Raises:
            OutOfTime: the time limit came first.
            ConfigError: the output folder holds another benchmark, or one of another machine.
            KeyboardInterrupt: the user stopped it.
        """
        plan = self._plan
        self._benchmark = self._resume() or self._begin()
        self._update()
        with (
            self._scratch() as scratch,
            host_limit(self._plan.host_memory) as self._limit,
            busy_cores(plan.workload.busy_cores),
            tqdm(total=plan.rounds * len(plan.entries), unit="run", dynamic_ncols=True) as self._bar,
        ):
            self._bar.update(len(self._benchmark.runs))
            self._setting = self._describe_setting(scratch)
            for entry in plan.entries:
                self._tune(entry)
            for index in range(plan.rounds):
                due = [entry for entry in plan.entries if self._is_due(entry, index)]
                for entries in [due] if plan.turns > 1 and due else [[entry] for entry in due]:
                    self._execute([(entry, self._knobs(entry)) for entry in entries], index, plan.turns)
        self._conclude()
        return self._benchmark

    # What is on record

    def _begin(self) -> Benchmark:
        peers, gpus = [PEERS[entry.peer] for entry in self._plan.entries], self._machine.gpus()
        operators = {name for peer in peers if gpus or not peer.needs_gpu for name in peer.operators}
        self._machine.build_operators(operators)  # a continued benchmark has built them, of the same versions
        hardware = self._machine.probe(self._plan.nvme_path, self._plan.probe_s)
        on_tmpfs = hardware.storage is not None and hardware.storage.in_memory
        return Benchmark(
            title=self._plan.title, started_at=now(), command=self._plan.command,
            storage="tmpfs (stands in for a fast array)" if on_tmpfs else "disk", hardware=hardware,
            versions=self._machine.versions(), workload=self._plan.workload, configurations=[],
        )  # fmt: skip

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
        if not self._plan.retry_failed:
            return found
        runs, tuning = (
            [run for run in runs if run.outcome is not Outcome.failed] for runs in (found.runs, found.tuning)
        )
        return found.model_copy(update={"runs": runs, "tuning": tuning})

    def _update(self, **fields: Any) -> None:
        self._benchmark = self._benchmark.model_copy(update=fields)
        self._benchmark.write(self._file)

    def _add(self, run: Run) -> None:
        if run.round < 0:
            self._update(tuning=[*self._benchmark.tuning, run])
        else:
            self._update(runs=[*self._benchmark.runs, run])
            self._bar.update()
        when = "trial" if run.round < 0 else f"round {run.round + 1}"
        found = f"{run.outcome.value.replace('_', ' ')}: {run.error}"
        if math.isfinite(run.step_s):
            found = f"{run.step_s:.3g} s per step"
        tqdm.write(f"{when}, {run.configuration}: {found} ({run.wall_s:.0f} s in all)")

    # The search

    def _tune(self, entry: Entry) -> None:
        peer = PEERS[entry.peer]
        refusal = peer.refuse(self._setting)
        if refusal and not any(run.configuration == entry.name for run in self._benchmark.runs):
            config = _without_path(peer.configure(self._setting, self._knobs(entry)), self._setting.nvme_path)
            self._add(Run(configuration=entry.name, round=0, outcome=Outcome.cannot_run, error=refusal,
                          deepspeed_config=config))  # fmt: skip
        while not refusal and (knobs := self._search(entry).next_trial(self._trials(entry))) is not None:
            self._execute([(entry, knobs)], -1 - len(self._trials(entry)))
        knobs, trials = self._knobs(entry), self._trials(entry)
        tried = {knob: list(dict.fromkeys(trial.knobs[knob] for trial in trials)) for knob in knobs}
        described = Configuration(
            name=entry.name, label=entry.label, peer=entry.peer, semantics=peer.semantics, knobs=knobs,
            searched={knob: values for knob, values in tried.items() if len(values) > 1},
        )  # fmt: skip
        known = {configuration.name: configuration for configuration in self._benchmark.configurations}
        planned = dict.fromkeys((entry.name for entry in self._plan.entries), None)
        ordered = (planned | known | {entry.name: described}).values()
        self._update(configurations=[configuration for configuration in ordered if configuration is not None])

    def _search(self, entry: Entry) -> Search:
        wanted = self._plan.searched is None or entry.name in self._plan.searched
        most = self._plan.max_trials if wanted else 0
        return Search(PEERS[entry.peer].space, entry.fixed, most, self._plan.confirm)

    def _trials(self, entry: Entry) -> list[Trial]:
        tried = (run for run in self._benchmark.tuning if run.configuration == entry.name)
        return [Trial(run.knobs, run.step_s) for run in tried]

    def _knobs(self, entry: Entry) -> dict[str, Any]:
        return self._search(entry).best(self._trials(entry))

    # The runs

    def _is_due(self, entry: Entry, index: int) -> bool:
        done = [run for run in self._benchmark.runs if run.configuration == entry.name]
        # What failed once is not tried again in each round: it would mostly be the same error, after the same wait.
        return not any(run.round == index or run.outcome is not Outcome.ok for run in done)

    def _execute(self, chosen: list[tuple[Entry, dict[str, Any]]], index: int, n_turns: int = 1) -> None:
        """Runs configurations with these knobs: one, or several in turns, each with its own folder on the storage.

        Raises:
            OutOfTime: one after another they would end beyond the time limit.
        """
        longest = max(self._longest.values(), default=TYPICAL_RUN_S)
        expected_s = sum(self._longest.get(entry.name, longest) for entry, _ in chosen)
        elapsed_s = time.perf_counter() - self._t_start
        if self._plan.time_limit is not None and elapsed_s + expected_s > self._plan.time_limit:
            raise OutOfTime(f"the next run takes about {expected_s:.0f} s, which exceeds the time limit")
        names = ", ".join(entry.name for entry, _ in chosen)
        self._bar.set_description(f"{len(chosen)} in turns" if n_turns > 1 else names + " (trial)" * (index < 0))
        logs = self._plan.out / "runs"
        logs.mkdir(exist_ok=True)
        with ExitStack() as folders:
            requests = [
                self._request(entry, knobs, index, folders.enter_context(_temporary("", self._setting.nvme_path)))
                for entry, knobs in chosen
            ]
            runs = execute(
                requests, logs, n_turns=n_turns, host_limit=self._limit, on_progress=self._show_that_time_passes
            )
        for run, request in zip(runs, requests, strict=True):
            self._longest[run.configuration] = max(run.wall_s, self._longest.get(run.configuration, 0.0))
            described = {
                "knobs": request.knobs,
                "deepspeed_config": _without_path(request.task.deepspeed_config, request.nvme_path),
                "tencache_stats": _without_path(run.tencache_stats, request.nvme_path),
            }
            self._add(run.model_copy(update=described))

    def _request(self, entry: Entry, knobs: dict[str, Any], index: int, nvme_path: str) -> Request:
        trial, peer, plan = index < 0, PEERS[entry.peer], self._plan
        own = replace(self._setting, nvme_path=nvme_path)
        task = Task(
            workload=plan.workload, deepspeed_config=peer.configure(own, knobs), zero_init=peer.zero_init,
            steps=plan.trial_steps if trial else plan.steps, warmup=1 if trial else plan.warmup,
            profile=self._plan.profile and own.gpus > 0 and index == 0, gpu_nbytes=self._plan.gpu_memory,
        )  # fmt: skip
        return Request(entry.name, index, peer, task, self._plan.timeout, knobs, nvme_path)

    def _show_that_time_passes(self) -> None:
        if sys.stderr.isatty():  # in a file every refresh would be one more line
            self._bar.refresh()

    def _conclude(self) -> None:
        """Adds where each configuration kept things and how fast that could be."""
        workload, hardware = self._plan.workload, self._benchmark.hardware
        last = {run.configuration: run for run in self._benchmark.runs if run.outcome is Outcome.ok}
        placed = {
            entry.name: placement_of(PEERS[entry.peer], last[entry.name], workload.ranks)
            for entry in self._plan.entries
            if entry.name in last
        }
        placements = {name: placement for name, placement in placed.items() if placement is not None}
        bounds = {name: bound_of(hardware, workload, last[name].numel, at) for name, at in placements.items()}
        balance = {name: balance_tokens(bound, workload) for name, bound in bounds.items()}
        self._update(
            placements=placements,
            bounds_s={name: bound.seconds for name, bound in bounds.items()},
            limits={name: bound.limit.value for name, bound in bounds.items()},
            balance_tokens={name: tokens for name, tokens in balance.items() if tokens is not None},
        )

    # Surroundings

    def _describe_setting(self, nvme_path: str) -> Setting:
        counts = census(self._plan.workload.model, self._plan.workload.sequence)
        hardware = self._benchmark.hardware
        return Setting(
            workload=self._plan.workload, numel=counts.numel, largest=counts.largest, nvme_path=nvme_path,
            gpus=hardware.gpus, gpu_nbytes=self._plan.gpu_memory or hardware.gpu_memory_nbytes or 0,
            host_nbytes=self._plan.host_memory or available_nbytes(),
        )  # fmt: skip

    def _scratch(self) -> tempfile.TemporaryDirectory[str]:
        """A folder of our own on the storage: stock removes its own folder there at every start."""
        try:
            self._plan.nvme_path.mkdir(parents=True, exist_ok=True)
            return _temporary("tencache-bench-", self._plan.nvme_path.resolve())
        except OSError as error:
            raise ConfigError(f"--nvme-path {self._plan.nvme_path} cannot be written: {error.strerror}") from error


def _temporary(prefix: str, parent: Path | str) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)


def _without_path(value: Any, nvme_path: str) -> Any:
    """A config or statistics without the folder on the storage, which is private and new every time."""
    return json.loads(json.dumps(value).replace(json.dumps(nvme_path)[1:-1], "FOLDER"))
