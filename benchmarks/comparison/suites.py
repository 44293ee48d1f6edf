# SPDX-License-Identifier: Apache-2.0
"""The suites: the quick check of CI, a comparison of chosen configurations, and the paper's models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..record import Workload, setting_label
from ..workloads import SPECS
from .peers import PEERS

PAIR = ("nvme-nvme", "tencache")
FRONTIER = tuple(f"tencache:host_memory_share={share}" for share in (0, 0.25, 0.5, 0.75, 1))
"""TenCache at several budgets: its line in the plot of step time over memory."""

STOCK_TIERS = ("nvme-nvme", "ram-nvme", "ram-ram", "gpu-ram", "gpu-gpu")
ALL = (*STOCK_TIERS, "twin-flow", "superoffload", "zenflow", "fsdp2", "tencache", *FRONTIER)
PAPER = ("nvme-nvme", "ram-nvme", "ram-ram", "tencache", *FRONTIER)

PAPER_MODELS = tuple(name for name, spec in SPECS.items() if spec.paper)

SETS: dict[str, tuple[str, ...]] = {"pair": PAIR, "frontier": (*PAIR, *FRONTIER), "all": ALL}
"""Names of sets of configurations on the command line."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One configuration of a benchmark."""

    name: str  # as written on the command line; unique within the benchmark
    peer: str  # key of :data:`.peers.PEERS`
    fixed: dict[str, Any]  # knobs chosen by the caller: they are not searched

    @property
    def label(self) -> str:
        """For tables and legends."""
        return ", ".join([PEERS[self.peer].label, *(setting_label(knob, value) for knob, value in self.fixed.items())])


@dataclass(frozen=True, slots=True)
class Plan:
    """A benchmark to run."""

    title: str  # heading of the report
    workload: Workload
    entries: tuple[Entry, ...]  # in the order in which they alternate
    rounds: int = 2  # how often each is run
    steps: int = 3  # measured optimizer steps per run
    warmup: int = 2  # steps before them, which do not count
    turns: int = 1  # more than 1 keeps the runs of a round in memory together and splits their steps into so many turns
    max_trials: int = 8  # of the search per configuration; 0 means no search
    confirm: bool = True  # whether the result of the search has to win twice, which takes two more trials
    trial_steps: int = 2  # measured steps of a trial; one step before them does not count
    searched: tuple[str, ...] | None = None  # the configurations that are searched; None means all with knobs
    probe_s: float = 10.0  # time for the hardware probe
    out: Path = Path("benchmark_results")  # folder for the record, the report, logs
    nvme_path: Path = Path()  # folder on the storage to measure; a folder of our own is made in it, and removed
    command: str = ""  # for the record
    host_memory: int | None = None  # cap on the host memory of each run, in bytes
    gpu_memory: int | None = None  # cap on the memory of each GPU, in bytes
    timeout: float = 900.0  # seconds; a run that takes longer is stopped and counts as failed
    time_limit: float | None = None  # seconds; no run is begun that would probably end later than this
    profile: bool = True  # whether runs of the first round end with a step under the profiler (GPUs only)
    retry_failed: bool = False  # whether configurations that failed earlier are tried again


def parse_settings(text: str) -> tuple[str, dict[str, Any]]:
    """Name and settings from ``name`` or ``name:key=value+key=value``; values are JSON, or else strings.

    Raises:
        ValueError: names the faulty part.
    """
    name, _, chosen = text.partition(":")
    found: dict[str, Any] = {}
    for word in filter(None, chosen.split("+")):
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{text!r}: expected KEY=VALUE, found {word!r}")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return name, found


def parse_entry(text: str) -> Entry:
    """An entry from ``peer`` or ``peer:knob=value+knob=value``.

    Raises:
        ValueError: names the faulty part and the known values.
    """
    peer, fixed = parse_settings(text)
    if peer not in PEERS:
        raise ValueError(f"unknown configuration {peer!r}; known: {', '.join([*PEERS, *SETS])}")
    space = PEERS[peer].space
    if fixed and not space and not peer.startswith("tencache"):
        raise ValueError(f"{text!r}: {peer} has no settings")
    if space and (unknown := fixed.keys() - space.keys()):
        raise ValueError(f"{text!r}: {peer} has no setting {', '.join(sorted(unknown))}, only {', '.join(space)}")
    return Entry(text, peer, fixed)


def parse_entries(texts: Sequence[str]) -> tuple[Entry, ...]:
    """Entries of a command line, sets written out, each once.

    Raises:
        ValueError: see :func:`parse_entry`.
    """
    names = [name for text in texts for name in SETS.get(text, (text,))]
    return tuple(parse_entry(name) for name in dict.fromkeys(names))


def smoke(gpus: int) -> Plan:
    """Everything once in small: a 7 M model, stock on NVMe and in RAM, TenCache, a search of two trials."""
    return Plan(
        title="Smoke test of the benchmark",
        workload=workload_of("7M", ranks=1, micro_batch=1, sequence=32, precision="bf16"),
        entries=parse_entries(["nvme-nvme", "tencache:host_memory_share=0.5+chunk_size=4194304", "ram-ram"]),
        rounds=1, steps=3, warmup=1, max_trials=2, confirm=False, trial_steps=1, searched=("nvme-nvme",),
        probe_s=10.0 if gpus else 5.0,
    )  # fmt: skip


def paper(model: str, entries: Sequence[str] = PAPER) -> Plan:
    """One of the paper's models on a big GPU host, as in its tables: batch 16, fp16, one GPU."""
    return Plan(
        title=f"{model}, the shape and batch of 10Cache's paper",
        workload=workload_of(model, ranks=1, activation_checkpointing=True),
        entries=parse_entries(entries),
        rounds=2, steps=3, warmup=1, max_trials=4, trial_steps=1,
    )  # fmt: skip


def workload_of(model: str, *, ranks: int, **chosen: Any) -> Workload:
    """A workload with the model's own defaults for what is not chosen, or None.

    Raises:
        ValueError: unknown model.
    """
    if model not in SPECS:
        raise ValueError(f"there is no model {model!r}; known: {', '.join(SPECS)}")
    given = {key: value for key, value in chosen.items() if value is not None}
    defaults = {key: getattr(SPECS[model], key) for key in ("micro_batch", "sequence", "precision")}
    return Workload(model=model, ranks=ranks, **(defaults | given))
