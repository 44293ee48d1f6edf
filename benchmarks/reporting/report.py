# SPDX-License-Identifier: Apache-2.0
"""A benchmark as a Markdown page with plots beside it: the answer first, then how it was measured, then the details."""

from __future__ import annotations

from pathlib import Path

from ..record import Benchmark, Configuration, Outcome
from . import plots, report_sections
from .losses import compare_losses
from .markdown import GB, GIB, MISSING, gib, gist, joined, number, percent, plain, table, without_paths
from .peaks import check_caps
from .repeatability import repeat_sentence, repeatability_section
from .report_tuning import tuning_section
from .spread import (
    SpeedRatio,
    Tier,
    baseline_for,
    best_peer,
    bound_fraction,
    in_turns,
    is_ours,
    run_median,
    speed_ratio,
    step_mean,
    step_seconds,
    step_spread,
    tier_of,
)

MAX_ANSWERS = 6
"""TenCache configurations with a sentence of their own at the top; the rest is in the table."""

TURNS = (
    "All configurations of a round were in memory at once and had their measured steps in turns; the first step of "
    "each turn does not count. "
)

VERBS = {Outcome.failed: "failed", Outcome.cannot_run: "could not run"}

RESOURCES = {"nvme": "NVMe", "h2d": "host to GPU", "d2h": "GPU to host", "cpu": "CPU", "gpu": "GPU"}
"""Names of what can set a bound (``tencache_ds.planning.bound.Resource``)."""

RESULT_HEADER = (
    "configuration", "s/step (min-max)", "speed", "fwd / bwd / update, s", "NVMe read + written, B/param",
    "storage wait, s", "peak RSS GiB, start / steady", "pinned GiB", "GPU peak GiB", "start s, model + initialize",
    "tokens/s", "fraction of bound",
)  # fmt: skip


def write_report(
    benchmark: Benchmark, folder: Path, *, name: str, baseline: str | None = None, repeat: Benchmark | None = None
) -> Path:
    """Writes ``<folder>/<name>.md`` and its plots ``<folder>/<name>_<plot>.png``.

    Without matplotlib the page is written all the same and says how to get the plots.

    Args:
        benchmark: what to report; anything in it may have failed.
        folder: made if it is not there.
        name: of the page, without a folder or an extension.
        baseline: name of the configuration that all speeds are relative to. None takes, for each configuration, the
            fastest one in the same tier that is not TenCache's.
        repeat: the same benchmark measured again on the same machine; adds a section on how well the speeds repeat.

    Returns:
        The page.

    Raises:
        ValueError: ``name`` is not a plain file name, or ``baseline`` is not a configuration that others compare to.
        OSError: the folder cannot be written.
    """
    if Path(name).name != name or not name:
        raise ValueError(f'the name of a report is a file name without a folder, got "{name}"')
    check_baseline(benchmark, baseline)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = plots.write_plots(benchmark, folder, name) if plots.available() else None
    page = folder / f"{name}.md"
    page.write_text(render(benchmark, drawn, baseline=baseline, repeat=repeat))
    return page


def check_baseline(benchmark: Benchmark, baseline: str | None) -> None:
    """Whether everything can be compared with ``baseline``; None is left to the report.

    Raises:
        ValueError: it is not a configuration of the benchmark, or trains with other semantics.
    """
    if baseline is None:
        return
    chosen = next((configuration for configuration in benchmark.configurations if configuration.name == baseline), None)
    if chosen is None:
        names = ", ".join(configuration.name for configuration in benchmark.configurations)
        raise ValueError(f'the baseline "{baseline}" is not in this benchmark; its configurations are: {names}')
    if chosen.semantics:
        raise ValueError(f'"{baseline}" cannot be the baseline: it trains differently ({chosen.semantics})')


def render(
    benchmark: Benchmark,
    drawn: list[plots.Plot] | None = None,
    *,
    baseline: str | None = None,
    repeat: Benchmark | None = None,
) -> str:
    """The page as text. ``drawn`` are the plots that lie beside it; None means that they could not be drawn."""
    sections = [
        f"# {plain(benchmark.title)}",
        "\n".join(f"- {sentence}" for sentence in summary(benchmark, baseline, repeat)),
        "## Machine and workload",
        setting(benchmark),
        "## Results",
        results(benchmark, baseline),
        report_sections.failures(benchmark),
        "## Losses",
        report_sections.losses(benchmark),
        "## Memory caps",
        report_sections.caps(benchmark),
        "## Bytes per step",
        report_sections.traffic(benchmark),
        "## TenCache: places",
        report_sections.places(benchmark),
        "## TenCache: weights and waits",
        report_sections.accesses(benchmark),
        "## Tuning",
        tuning_section(benchmark),
        "## Energy and endurance",
        report_sections.energy(benchmark),
    ]
    if repeat is not None:
        sections += ["## Repeatability", repeatability_section(benchmark, repeat, baseline)]
    sections += ["## Plots", _plots(benchmark, drawn)]
    return "\n\n".join(section for section in sections if section) + "\n"


def summary(benchmark: Benchmark, baseline: str | None = None, repeat: Benchmark | None = None) -> list[str]:
    """The answer in a few sentences: speeds, then what has to be known to believe them."""
    ours = [configuration for configuration in benchmark.configurations if is_ours(configuration)]
    measured = [configuration for configuration in ours if step_seconds(benchmark, configuration.name)]
    sentences = [_answer(benchmark, configuration, baseline) for configuration in measured[:MAX_ANSWERS]]
    if len(measured) > MAX_ANSWERS:
        sentences.append(f"{len(measured) - MAX_ANSWERS} more TenCache configurations are in the table.")
    sentences += _failed(benchmark)
    compared = compare_losses(benchmark)
    runs = sum(len(rounds) for group in compared.groups for rounds in group.rounds.values())
    if runs > 1 and len(compared.groups) == 1:
        sentences.append(f"Losses of all {runs} runs are identical bit for bit over {compared.steps} steps.")
    elif len(compared.groups) > 1:
        sentences.append(f"**Losses differ**: {len(compared.groups)} groups of runs, see [Losses](#losses).")
    skipped = sum(step.skipped for run in benchmark.runs for step in run.measured)
    if skipped:
        sentences.append(f"**{skipped} measured steps were skipped by the loss scaler**, see [Losses](#losses).")
    over = [
        plain(configuration.label)
        for configuration in benchmark.configurations
        if (check := check_caps(benchmark, configuration.name)) is not None and check.exceeded
    ]
    if over:
        sentences.append(f"**Memory cap exceeded** by {joined(over)}, see [Memory caps](#memory-caps).")
    if benchmark.on_tmpfs:
        sentences.append("**Storage is tmpfs**: host memory that stands in for a fast NVMe array, not a drive.")
    if repeat is not None:
        sentences.append(repeat_sentence(benchmark, repeat, baseline))
    return sentences or ["Nothing was measured."]


def _failed(benchmark: Benchmark) -> list[str]:
    sentences = []
    peers: dict[Outcome, list[str]] = {Outcome.failed: [], Outcome.cannot_run: []}
    for configuration in benchmark.configurations:
        failure = benchmark.failure_of(configuration.name)
        if failure is not None and is_ours(configuration):
            sentences.append(f"**{plain(configuration.label)} {VERBS[failure.outcome]}**: {gist(failure.error)}")
        elif failure is not None:
            peers[failure.outcome].append(plain(configuration.label))
    sentences += [f"{joined(labels)} {VERBS[how]}: see the table." for how, labels in peers.items() if labels]
    return sentences


def _answer(benchmark: Benchmark, configuration: Configuration, baseline: str | None) -> str:
    seconds = step_seconds(benchmark, configuration.name)
    assert seconds is not None
    parts = [f"**{plain(configuration.label)}**: {number(seconds.median)} s per step"]
    against = baseline_for(benchmark, configuration, baseline)
    if against is not None and against != configuration.name:
        ratio = speed_ratio(benchmark, against, configuration.name)
        slow = step_seconds(benchmark, against)
        if ratio is not None and slow is not None:
            label = next(plain(other.label) for other in benchmark.configurations if other.name == against)
            parts.append(f"**{ratio.of_medians:.2f}x** the speed of {label} ({number(slow.median)} s)")
    fraction = bound_fraction(benchmark, configuration.name)
    if fraction is not None:
        parts.append(f"{fraction:.2f} of the bound of this machine{_limit(benchmark, configuration.name)}")
    return ", ".join(parts) + "."


def _limit(benchmark: Benchmark, name: str) -> str:
    limit = benchmark.limits.get(name)
    if limit == "gpu" and not benchmark.hardware.gpus:
        return " (arithmetic)"
    return f" ({RESOURCES.get(limit, plain(limit))})" if limit else ""


def setting(benchmark: Benchmark) -> str:
    """Machine, rates, versions, workload, storage, and the command that repeats it."""
    hardware, workload = benchmark.hardware, benchmark.workload
    gpu = f"{hardware.gpus} x {hardware.gpu} ({_whole_gib(hardware.gpu_memory_nbytes)})" if hardware.gpu else "no GPU"
    machine = f"{hardware.cpu}, {hardware.cores} cores, {_whole_gib(hardware.memory_nbytes)} of memory, {gpu}"
    numel = max((run.numel for run in benchmark.runs), default=0)
    size = f" ({number(numel / GB)} B parameters)" if numel else ""
    trained = (
        f"{workload.model}{size}, {workload.precision}, {workload.ranks} rank{'s' if workload.ranks != 1 else ''}, "
        f"batch {workload.micro_batch} x {workload.sequence} tokens per micro-step and rank, "
        f"{workload.accumulation} micro-step{'s' if workload.accumulation != 1 else ''} per optimizer step "
        f"({workload.tokens_per_step:,} tokens), activation checkpointing "
        f"{'on' if workload.activation_checkpointing else 'off'}"
        + (f", {workload.busy_cores} processes beside it that keep a core busy each" if workload.busy_cores else "")
    )
    versions = ", ".join(f"{what} {version}" for what, version in benchmark.versions.items())
    paragraph = (
        f"Machine: {plain(machine)}. Storage: {_storage(benchmark)}. Workload: {plain(trained)}. "
        f"{TURNS if in_turns(benchmark) else ''}"
        f"Versions: {plain(versions) or 'not recorded'}. Started {plain(benchmark.started_at)}."
    )
    return "\n\n".join(
        [
            paragraph,
            f"What the probe measured on it{f' in {number(hardware.probe_s)} s' if hardware.probe_s else ''}:",
            _rates(benchmark),
            "To repeat it:",
            f"```bash\n{without_paths(benchmark.command.strip())}\n```",
        ]
    )


def _whole_gib(nbytes: int | None) -> str:
    return "size unknown" if nbytes is None else f"{nbytes / GIB:.0f} GiB"


def _storage(benchmark: Benchmark) -> str:
    storage = benchmark.hardware.storage
    if benchmark.on_tmpfs:
        return "**tmpfs**, host memory that stands in for a fast NVMe array (it takes memory bandwidth and CPU time)"
    if storage is None:
        return plain(benchmark.storage)
    direct = "direct I/O" if storage.direct else "**no direct I/O: the page cache took part**"
    device = f", {plain(storage.device)}" if storage.device else ""
    return (
        f"{plain(benchmark.storage)}{device}, {plain(storage.filesystem)}, {direct}, probed with {storage.lanes} "
        f"requests of {storage.request_nbytes / 2**20:g} MiB in flight"
    )


def _rates(benchmark: Benchmark) -> str:
    hardware, storage = benchmark.hardware, benchmark.hardware.storage
    rates = [
        ("NVMe read", storage and storage.read_bytes_per_s, "GB/s"),
        ("NVMe write", storage and storage.write_bytes_per_s, "GB/s"),
        ("NVMe read + write together", storage and storage.mixed_bytes_per_s, "GB/s"),
        ("host to GPU", hardware.h2d_bytes_per_s, "GB/s"),
        ("GPU to host", hardware.d2h_bytes_per_s, "GB/s"),
        ("memory copy", hardware.memory_copy_bytes_per_s, "GB/s"),
        ("CPU Adam", hardware.cpu_adam_params_per_s, "Gparam/s"),
        ("GPU Adam", hardware.gpu_adam_params_per_s, "Gparam/s"),
        ("matmul", hardware.matmul_flops_per_s and hardware.matmul_flops_per_s / 1000, "TFLOP/s"),
    ]
    known = [(what, f"{number(rate / GB)} {unit}") for what, rate, unit in rates if rate]
    return table([what for what, _ in known], [[rate for _, rate in known]]) if known else "Nothing: it was not probed."


def results(benchmark: Benchmark, baseline: str | None = None) -> str:
    """The main table, its footnotes, and what its last column means."""
    footnotes: list[str] = []
    rows = [_row(benchmark, configuration, baseline, footnotes) for configuration in benchmark.configurations]
    notes = [
        "s/step is the median over the measured steps of all rounds, with the extremes and half of their distance. "
        f"{_baseline_note(benchmark, baseline)} In brackets: median of the ratios within each "
        f"{'turn' if in_turns(benchmark) else 'round'}, and their range. "
        "Phases and waits are medians, bytes are means, memory is the largest of any run, start is a median of runs.",
        *(f"<sup>{index}</sup> {note}" for index, note in enumerate(footnotes, start=1)),
        "**What the fraction means.** The bound is the shortest step that this machine allows for what a row keeps "
        "where: the longest of the times that its bytes and operations take on each resource at the rates of the "
        "probe, all at once. A fraction of 0.95 means that 95 % of the step is that time on the resource in brackets, "
        "and what is left to gain without moving fewer bytes is the other 5 %.",
        *balance(benchmark),
    ]
    return "\n\n".join([table(RESULT_HEADER, rows), *notes])


def balance(benchmark: Benchmark) -> list[str]:
    """On which side of the point the workload lies where arithmetic takes as long as storage; empty without storage."""
    workload = benchmark.workload
    points = [
        f"{plain(configuration.label)}: {float(f'{tokens:.2g}'):,.0f}"
        for configuration in benchmark.configurations
        if (tokens := benchmark.balance_tokens.get(configuration.name)) is not None
    ]
    if not points:
        return []
    sides = {tokens < workload.tokens_per_step for tokens in benchmark.balance_tokens.values()}
    side = "for some storage, for others arithmetic" if len(sides) > 1 else "arithmetic" if True in sides else "storage"
    return [
        "**Storage or arithmetic.** Tokens per step with which arithmetic takes as long as NVMe, at the probe's rates "
        f"and in {workload.accumulation} micro-step{'s' if workload.accumulation != 1 else ''}: {'; '.join(points)}. "
        f"This workload has {workload.tokens_per_step:,}: {side} is the slower one. `--micro-batch` and "
        "`--accumulation` take several numbers, to measure both sides."
    ]


def _baseline_note(benchmark: Benchmark, baseline: str | None) -> str:
    labels = {configuration.name: plain(configuration.label) for configuration in benchmark.configurations}
    if baseline is not None:
        missing = "" if step_seconds(benchmark, baseline) else ", **which has no measured step**"
        return f"Speed is relative to {labels[baseline]}{missing}."
    best = {tier: name for tier in Tier if (name := best_peer(benchmark, tier)) is not None}
    if not best:
        return "There is no speed, because no peer with the same semantics was measured."
    named = joined([f"{labels[name]} ({tier})" for tier, name in best.items()])
    return f"Speed is relative to the fastest peer with the same semantics in the same lowest tier: {named}."


def _row(benchmark: Benchmark, configuration: Configuration, baseline: str | None, footnotes: list[str]) -> list[str]:
    name, label = configuration.name, plain(configuration.label)
    if configuration.semantics:
        label += _footnote(footnotes, f"Different semantics, in no ratio: {plain(configuration.semantics)}.")
    runs = benchmark.runs_of(name)
    failure = benchmark.failure_of(name)
    empty = [MISSING] * (len(RESULT_HEADER) - 2)
    if failure is not None:
        return [label, f"{VERBS[failure.outcome]}: {gist(failure.error)}", *empty]
    if not runs:
        return [label, "not run", *empty]
    lost = [run for run in benchmark.runs if run.configuration == name and run.outcome is not Outcome.ok]
    if lost:
        label += _footnote(footnotes, f"{len(lost)} of {len(lost) + len(runs)} runs failed: {gist(lost[-1].error)}.")
    seconds = step_seconds(benchmark, name)
    memories = [run.memory for run in runs if run.memory is not None]
    tokens = benchmark.workload.tokens_per_step / seconds.median if seconds and seconds.median else None
    rss = (max(memory.peak_rss_start_nbytes for memory in memories) if memories else None,
           max(memory.peak_rss_steady_nbytes for memory in memories) if memories else None)  # fmt: skip
    start = run_median(benchmark, name, lambda run: run.model_s), run_median(benchmark, name, lambda r: r.initialize_s)
    return [
        label,
        f"**{number(seconds.median)}** ({number(seconds.least)}-{number(seconds.most)}, "
        f"±{percent(seconds.half_spread, 1)})" if seconds else "no measured step",
        _speed(benchmark, configuration, baseline),
        _phases(benchmark, name),
        _bytes_per_parameter(benchmark, name),
        number(wait.median if (wait := step_spread(benchmark, name, lambda step: step.storage_wait_s)) else None),
        f"{gib(rss[0])} / {gib(rss[1])}" if memories else MISSING,
        gib(max((memory.pinned_nbytes for memory in memories), default=None)),
        gib(max((memory.gpu_peak_nbytes for memory in memories), default=None)),
        f"{number(start[0])} + {number(start[1])}",
        MISSING if tokens is None else f"{tokens:,.0f}",
        _fraction(benchmark, name, footnotes),
    ]  # fmt: skip


def _footnote(footnotes: list[str], text: str) -> str:
    """The mark of a footnote; the same text keeps its mark."""
    if text not in footnotes:
        footnotes.append(text)
    return f" <sup>{footnotes.index(text) + 1}</sup>"


def _speed(benchmark: Benchmark, configuration: Configuration, baseline: str | None) -> str:
    against = baseline_for(benchmark, configuration, baseline)
    if against is None:
        return MISSING
    if against == configuration.name:
        if step_seconds(benchmark, against) is None:
            return MISSING
        tier = tier_of(benchmark, configuration) if baseline is None else None
        return f"1 (baseline, {tier} tier)" if tier else "1 (baseline)"
    ratio = speed_ratio(benchmark, against, configuration.name)
    return MISSING if ratio is None else format_ratio(ratio)


def format_ratio(ratio: SpeedRatio) -> str:
    """A speed and how it varies between rounds, or between the turns of rounds."""
    turns = ratio.over_turns
    if turns is None:
        return f"**{ratio.of_medians:.2f}x** (no round in common)"
    if turns.count == 1:
        return f"**{ratio.of_medians:.2f}x** (one round)"
    return f"**{ratio.of_medians:.2f}x** ({turns.median:.2f}x, {turns.least:.2f}x-{turns.most:.2f}x)"


def _phases(benchmark: Benchmark, name: str) -> str:
    phases = (
        step_spread(benchmark, name, lambda step: step.forward_s),
        step_spread(benchmark, name, lambda step: step.backward_s),
        step_spread(benchmark, name, lambda step: step.update_s),
    )
    return " / ".join(number(phase.median) for phase in phases if phase is not None) or MISSING


def _bytes_per_parameter(benchmark: Benchmark, name: str) -> str:
    numel = run_median(benchmark, name, lambda run: run.numel)
    read = step_mean(benchmark, name, lambda step: step.nvme_read_nbytes)
    written = step_mean(benchmark, name, lambda step: step.nvme_write_nbytes)
    if not numel or read is None or written is None:
        return MISSING
    return f"{read / numel:.1f} + {written / numel:.1f}"


def _fraction(benchmark: Benchmark, name: str, footnotes: list[str]) -> str:
    fraction = bound_fraction(benchmark, name)
    if fraction is None:
        return MISSING
    text = f"{fraction:.2f}{_limit(benchmark, name)}"
    if round(fraction, 2) > 1:
        text += _footnote(
            footnotes,
            "A fraction above 1: the run was faster than the rates of the probe allow, so the machine was slower "
            "while it was probed, or the placement on which the bound rests is not what the run had.",
        )
    return text


def _plots(benchmark: Benchmark, drawn: list[plots.Plot] | None) -> str:
    if drawn is None:
        return "The plots need matplotlib: `pip install tencache-ds[bench]`, then write the report again."
    if not drawn:
        return "There is nothing to plot: no step was measured."
    return "\n\n".join(
        f'<img src="{plot.path.name}" alt="{plot.title}" width="{plot.width_px}">\n\n{plot.caption}' for plot in drawn
    )
