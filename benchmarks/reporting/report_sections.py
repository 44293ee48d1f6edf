# SPDX-License-Identifier: Apache-2.0
"""The parts of the report below its main table: each is Markdown without its heading."""

from __future__ import annotations

from typing import Any

from ..record import Benchmark, Configuration, DeviceProfile, Outcome
from .losses import LossGroup, compare_losses
from .markdown import MISSING, details, gb, gib, joined, number, percent, plain, table, without_paths
from .peaks import CapCheck, check_caps
from .spread import (
    Spread,
    per_measured_step,
    run_median,
    step_mean,
    step_seconds,
)

SECONDS_PER_DAY = 86400


def _labels(benchmark: Benchmark) -> dict[str, str]:
    return {configuration.name: plain(configuration.label) for configuration in benchmark.configurations}


def failures(benchmark: Benchmark) -> str:
    """The errors of all runs that did not end well, longer than a table cell; empty when there are none."""
    labels = _labels(benchmark)
    parts = []
    for run in benchmark.runs:
        if run.outcome is Outcome.failed:
            # A fence of four: an error may contain Markdown.
            tail = "\n".join(without_paths(run.error).strip().splitlines()[-30:]) or "no message"
            label = labels.get(run.configuration, plain(run.configuration))
            parts.append(f"{label}, round {run.round + 1}:\n\n````text\n{tail}\n````")
    if not parts:
        return ""
    return details(f"Errors of {len(parts)} failed run{'s' if len(parts) > 1 else ''}", "\n\n".join(parts))


def losses(benchmark: Benchmark) -> str:
    """Which runs have the same losses bit for bit, where the others leave them, and what the loss scaler did."""
    compared, labels = compare_losses(benchmark), _labels(benchmark)
    parts = []
    if not compared.groups:
        parts.append("No run that ended well recorded losses.")
    elif len(compared.groups) == 1:
        named = joined([_members(benchmark, compared.groups[0], name, labels) for name in compared.groups[0].rounds])
        parts.append(f"Identical bit for bit in all {compared.steps} steps, warm-up included: {named}.")
    else:
        rows = []
        for letter, group in zip(_letters(len(compared.groups)), compared.groups, strict=True):
            members = ", ".join(_members(benchmark, group, name, labels) for name in group.rounds)
            difference = group.difference
            rows.append(
                [f"{letter}: {members}", "the reference", MISSING, MISSING]
                if difference is None
                else [
                    f"{letter}: {members}",
                    f"step {difference.step}, micro-step {difference.micro_step}",
                    _relative(difference.relative),
                    _relative(difference.largest_relative),
                ]
            )
        parts.append(
            f"Compared exactly over {compared.steps} steps, warm-up included. The runs of a group are identical bit "
            "for bit; the other columns compare a group with group A."
        )
        parts.append(table(("group", "first difference at", "relative size there", "largest in any step"), rows))
    if compared.without:
        parts.append(f"Without losses in the record: {joined([labels[name] for name in compared.without])}.")
    return "\n\n".join([*parts, *_loss_scales(benchmark, labels)])


def _members(benchmark: Benchmark, group: LossGroup, name: str, labels: dict[str, str]) -> str:
    """The configuration, with its rounds where only some of them are in the group."""
    rounds = group.rounds[name]
    if len(rounds) == len(benchmark.runs_of(name)):
        return labels[name]
    return f"{labels[name]} (round{'s' if len(rounds) > 1 else ''} {joined([str(index + 1) for index in rounds])})"


def _letters(count: int) -> list[str]:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return [alphabet[index % 26] * (1 + index // 26) for index in range(count)]


def _relative(size: float | None) -> str:
    return "a loss is not finite" if size is None else f"{size:.1e}"


def _loss_scales(benchmark: Benchmark, labels: dict[str, str]) -> list[str]:
    """A table, when a step was skipped or the scales of two runs differ."""
    runs = [run for configuration in benchmark.configurations for run in benchmark.runs_of(configuration.name)]
    scales = {tuple(step.loss_scale for step in run.steps) for run in runs}
    length = min((len(sequence) for sequence in scales), default=0)
    if len({sequence[:length] for sequence in scales}) <= 1 and not any(s.skipped for run in runs for s in run.steps):
        return []
    rows = []
    for run in runs:
        skipped = [str(index) for index, step in enumerate(run.steps, start=1) if step.skipped]
        known = [f"{step.loss_scale:g}" for step in run.steps if step.loss_scale is not None]
        changes = [scale for index, scale in enumerate(known) if index == 0 or scale != known[index - 1]]
        label = f"{labels[run.configuration]}, round {run.round + 1}"
        rows.append([label, ", ".join(skipped) or "none", " then ".join(changes) or MISSING])
    return [
        "The loss scaler skipped steps, or did not do the same everywhere. A skipped step has no update: its time is "
        "not that of a step.",
        table(("run", "skipped steps", "loss scale"), rows),
    ]


def caps(benchmark: Benchmark) -> str:
    """The caps of each configuration, how they were enforced, and whether they were exceeded."""
    rows = []
    for configuration in benchmark.configurations:
        check = check_caps(benchmark, configuration.name)
        if check is not None and (check.caps.host_nbytes is not None or check.caps.gpu_nbytes is not None):
            rows.append(_cap_row(configuration, check))
    if not rows:
        return "No cap was set on host or GPU memory."
    header = ("configuration", "host cap GiB", "enforced by", "host peak GiB", "GPU cap GiB", "GPU peak GiB", "kept to")
    return "\n\n".join(
        [
            table(header, rows),
            "The host peak is the largest of the RSS of a rank (start included) and of what the whole host had in use "
            'beyond what it had before the run. "Only measured" means that nothing stopped a run at its cap.',
        ]
    )


def _cap_row(configuration: Configuration, check: CapCheck) -> list[str]:
    enforced = {"cgroup": "cgroup", "measured": "only measured"}.get(check.caps.host_enforced_by, MISSING)
    excesses = []
    if check.host_excess_nbytes:
        excesses.append(f"**EXCEEDED by {gib(check.host_excess_nbytes)} GiB of host memory**")
    if check.gpu_excess_nbytes:
        excesses.append(f"**EXCEEDED by {gib(check.gpu_excess_nbytes)} GiB of GPU memory**")
    unknown = (check.caps.host_nbytes is not None and check.host is None) or (
        check.caps.gpu_nbytes is not None and check.gpu_nbytes is None
    )
    return [
        plain(configuration.label),
        gib(check.caps.host_nbytes),
        enforced if check.caps.host_nbytes is not None else MISSING,
        f"{gib(check.host.nbytes)} ({check.host.source})" if check.host is not None else MISSING,
        gib(check.caps.gpu_nbytes),
        gib(check.gpu_nbytes),
        ", ".join(excesses) or ("not recorded" if unknown else "yes"),
    ]


def traffic(benchmark: Benchmark) -> str:
    """Bytes of a step on each link, and how busy the GPU and its links were."""
    rows = []
    for configuration in benchmark.configurations:
        name = configuration.name
        if step_seconds(benchmark, name) is None:
            continue
        counted = [
            step_mean(benchmark, name, lambda step: step.nvme_read_nbytes),
            step_mean(benchmark, name, lambda step: step.kernel_read_nbytes),
            step_mean(benchmark, name, lambda step: step.nvme_write_nbytes),
            step_mean(benchmark, name, lambda step: step.kernel_write_nbytes),
        ]
        profiles = [run.device_profile for run in benchmark.runs_of(name) if run.device_profile is not None]
        rows.append([plain(configuration.label), *(gb(mean) for mean in counted), *_profile(profiles)])
    if not rows:
        return "No step was measured."
    header = ("configuration", "NVMe read GB", "kernel", "NVMe written GB", "kernel", "host to GPU GB",
              "GPU to host GB", "H2D busy", "D2H busy", "GPU busy")  # fmt: skip
    notes = (
        "NVMe bytes are means of the measured steps: those asked of the storage layer, and beside them what the kernel "
        "counted for the processes"
        f"{', which counts nothing on tmpfs' if benchmark.on_tmpfs else ''}. Copies and busy shares come from one "
        "further step of rank 0 under torch's profiler, the same instrument for every configuration. GB are 1e9 bytes."
    )
    return f"{table(header, rows)}\n\n{notes}"


def _profile(profiles: list[DeviceProfile]) -> list[str]:
    if not profiles:
        return [MISSING] * 5

    def busy(values: list[float]) -> str:
        shares = [value / p.seconds for value, p in zip(values, profiles, strict=True) if p.seconds]
        spread = Spread.of(shares)
        return percent(spread.median if spread else None)

    h2d, d2h = Spread.of(p.h2d_nbytes for p in profiles), Spread.of(p.d2h_nbytes for p in profiles)
    return [
        gb(h2d.median if h2d else None),
        gb(d2h.median if d2h else None),
        busy([p.h2d_busy_s for p in profiles]),
        busy([p.d2h_busy_s for p in profiles]),
        busy([p.kernel_busy_s for p in profiles]),
    ]


def tencache_totals(benchmark: Benchmark, name: str) -> dict[str, Any] | None:
    """TenCache's own counts of a configuration, summed over its runs.

    Keys: ``step``, ``background_seconds``, ``accesses``, ``stall_seconds``, ``events``; the names within are those of
    ``tencache_ds.observability.counters``. None when no run recorded any.
    """
    totals = [run.tencache_stats["total"] for run in benchmark.runs_of(name) if run.tencache_stats]
    if not totals:
        return None
    summed: dict[str, Any] = {key: sum(total.get(key, 0) for total in totals) for key in ("step", "background_seconds")}
    for kind in ("accesses", "stall_seconds", "events"):
        names = dict.fromkeys(key for total in totals for key in total.get(kind, {}))
        summed[kind] = {key: sum(total.get(kind, {}).get(key, 0) for total in totals) for key in names}
    return summed


def places(benchmark: Benchmark) -> str:
    """Where TenCache kept everything at the end, and the step that it predicted when it decided so."""
    rows = []
    for configuration in benchmark.configurations:
        runs = [run for run in benchmark.runs_of(configuration.name) if run.tencache_stats]
        if not runs:
            continue
        stats = runs[-1].tencache_stats or {}
        seconds, predicted = step_seconds(benchmark, configuration.name), stats.get("predicted_seconds")
        measured = None if seconds is None else seconds.median
        kinds = ("weight", "gradient", "state")
        rows.append(
            [
                plain(configuration.label),
                *(gib(stats.get(f"gpu_{kind}_nbytes")) for kind in kinds),
                gib(stats.get("resident_weight_nbytes")),
                gib(stats.get("resident_state_nbytes")),
                gib(stats.get("stored_nbytes")),
                number(predicted),
                number(measured),
                number(measured / predicted if measured and predicted else None),
            ]
        )
    if not rows:
        return "No run recorded TenCache's counters."
    header = ("configuration", "weights on GPU", "gradients on GPU", "state on GPU", "weights in RAM", "state in RAM",
              "on NVMe", "predicted s/step", "measured", "measured / predicted")  # fmt: skip
    return (
        f"{table(header, rows)}\n\nGiB of rank 0, at the end of the last run. Weights that DeepSpeed keeps in RAM and "
        "gradients in RAM are not listed. Where everything fits into GPU memory there is nothing to decide, and "
        "nothing is predicted."
    )


def accesses(benchmark: Benchmark) -> str:
    """Where TenCache found the weights when the training asked for them, and what it waited for."""
    totals = {
        plain(configuration.label): total
        for configuration in benchmark.configurations
        if (total := tencache_totals(benchmark, configuration.name)) is not None
    }
    if not totals:
        return "No run recorded TenCache's counters."
    kinds = list(dict.fromkeys(kind for total in totals.values() for kind in total["accesses"]))
    causes = list(dict.fromkeys(cause for total in totals.values() for cause in total["stall_seconds"]))
    rows = []
    for label, total in totals.items():
        counts, steps = total["accesses"], total["step"]
        n_accesses = sum(counts.values())
        rows.append(
            [
                label,
                number(n_accesses / steps if steps else None),
                *(percent(counts.get(kind, 0) / n_accesses if n_accesses else None, 1) for kind in kinds),
                *(number(total["stall_seconds"].get(cause, 0.0) / steps if steps else None) for cause in causes),
                number(total["background_seconds"] / steps if steps else None),
            ]
        )
    header = ("configuration", "accesses per step", *(plain(kind) for kind in kinds),
              *(f"{cause.replace('_', ' ')} wait, s/step" for cause in causes),
              "update beside the training, s/step")  # fmt: skip
    rare = [
        f"{label}: {joined([f'{count} x {event}' for event, count in total['events'].items() if count])}"
        for label, total in totals.items()
        if any(total["events"].values())
    ]
    parts = [
        table(header, rows),
        "Counted on rank 0, once for each use of a weight, over all steps since the engine was "
        "built, warm-up included. Resident: in host memory for good. Prefetched: read ahead, and there in time. Late: "
        "read ahead, but the read still ran. Demand: not asked for before, so the training waited for the whole read. "
        "Waits are those of training threads; waits of several threads at the same time add up. Of the update beside "
        "the training, the part that it did not hide is the update wait.",
    ]
    return "\n\n".join([*parts, *([f"Rare events: {'; '.join(rare)}."] if rare else [])])


def energy(benchmark: Benchmark) -> str:
    """Energy of a step and wear of the drive, as far as they could be read."""
    rows = []
    any_energy = False
    for configuration in benchmark.configurations:
        name = configuration.name
        seconds = step_seconds(benchmark, name)
        written = step_mean(benchmark, name, lambda step: step.nvme_write_nbytes)
        if seconds is None or written is None:
            continue
        gpu_j = run_median(benchmark, name, lambda run: per_measured_step(run, run.gpu_energy_j))
        cpu_j = run_median(benchmark, name, lambda run: per_measured_step(run, run.cpu_energy_j))
        disk = run_median(benchmark, name, lambda run: per_measured_step(run, run.disk_write_nbytes))
        any_energy = any_energy or gpu_j is not None or cpu_j is not None
        per_day = written / seconds.median * SECONDS_PER_DAY if seconds.median else None
        rows.append(
            [
                plain(configuration.label),
                number(gpu_j),
                number(cpu_j),
                gb(written),
                gb(disk),
                number(per_day / 1e12 if per_day is not None else None),
                number(1e15 / per_day) if per_day else MISSING,
            ]
        )
    if not rows:
        return "No step was measured."
    header = ("configuration", "GPU J/step", "CPU J/step", "NVMe written GB/step", "by the disk's count GB/step",
              "written TB/day", "days to 1 PB written")  # fmt: skip
    note = (
        "Per day: at this pace without a pause, all ranks. The data sheet of a drive says how much may be written to "
        "it in its life."
    )
    if not any_energy:
        note += " Neither the GPU's nor the CPU's energy counter could be read on this machine."
    return f"{table(header, rows)}\n\n{note}"
