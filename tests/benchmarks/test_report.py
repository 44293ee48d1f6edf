# SPDX-License-Identifier: Apache-2.0
"""The report, cell by cell, from plain values."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.record import Benchmark, Caps, Placement
from benchmarks.reporting.figures import (
    HOST_USED,
    PEAK_RSS,
    Figures,
    Peak,
    Ratio,
    Tier,
    all_figures,
    group_by_losses,
)
from benchmarks.reporting.report import render, write_report
from benchmarks.reporting.text import gist, joined, number, plain, without_paths
from tests.benchmarks.examples import (
    GIB,
    benchmark,
    counters,
    failed,
    hardware,
    memory,
    pair,
    run,
    small,
    step,
    stock,
    storage,
    tencache,
    with_failures,
)

pytestmark = pytest.mark.timeout(60)


def section(page: str, heading: str) -> str:
    return page.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]


def cells(text: str, label: str) -> list[str]:
    """The cells of the first row that begins with ``label``."""
    row = next(line for line in text.splitlines() if line.startswith(f"| {label}"))
    return [cell.strip() for cell in row.replace("\\|", "\0").strip("|").split("|")]


def top(page: str) -> str:
    return page.split("\n## ", 1)[0]


# The arithmetic


def ratio(example: Benchmark, baseline: str = "nvme-nvme", other: str = "tencache") -> Ratio | None:
    figures = all_figures(example)
    return figures[other].speed_over(figures[baseline])


def test_medians_and_ratios_by_hand():
    figures = all_figures(small())["nvme-nvme"]
    assert figures.median_s == 20.0
    assert sorted(figures.steps.seconds) == [18.0, 20.0, 20.0, 22.0]
    found = ratio(small())
    assert found.of_medians == 2.0
    assert list(found.turns) == [2.1, 1.9]
    assert ratio(pair(run("nvme-nvme", []), [1.0])) is None


def test_rounds_that_only_one_side_has_make_no_ratio_of_their_own():
    example = benchmark(
        [stock(), tencache()], [run("nvme-nvme", [20.0], 0), run("nvme-nvme", [22.0], 1), run("tencache", [10.0], 1)]
    )
    found = ratio(example)
    assert found.of_medians == 2.1
    assert list(found.turns) == [2.2]
    apart = benchmark([stock(), tencache()], [run("nvme-nvme", [20.0], 0), run("tencache", [10.0], 1)])
    assert "**2.00x** (no round in common)" in render(apart)


def test_ratios_are_taken_turn_by_turn():
    def in_turns_of(configuration, seconds):
        steps = [step(s, turn=turn, resumed=resumed) for turn, s in enumerate(seconds) for resumed in (True, False)]
        return run(configuration, [], warmup_steps=0, steps=steps)

    example = benchmark(
        [stock(), tencache()], [in_turns_of("nvme-nvme", [20.0, 40.0]), in_turns_of("tencache", [10.0, 16.0])]
    )
    found = ratio(example)
    assert found.of_medians == 30 / 13
    assert list(found.turns) == [2.0, 2.5]
    page = render(example)
    assert "had their measured steps in turns" in page
    assert "ratios within each turn" in page
    assert "in turns" not in render(small())


@pytest.mark.parametrize(
    ("tokens", "side"),
    [
        ({"nvme-nvme": 3000.0, "tencache": 2500.0}, "storage is"),
        ({"nvme-nvme": 1000.0, "tencache": 500.0}, "arithmetic is"),
        ({"nvme-nvme": 3000.0, "tencache": 500.0}, "for some storage, for others arithmetic is"),
    ],
)
def test_which_side_of_the_balance_is_said(tokens: dict[str, float], side: str):
    page = section(render(small().model_copy(update={"balance_tokens": tokens})), "Results")
    assert f"This workload has 2,000: {side} the slower one" in page
    assert f"stock NVMe + NVMe: {tokens['nvme-nvme']:,.0f}; TenCache (defaults): " in page
    assert "Storage or arithmetic" not in render(small())


@pytest.mark.parametrize(
    ("configuration", "device", "placement", "tier"),
    [
        (tencache("x"), "nvme", Placement(weights_nvme=0, optimizer_nvme=0), Tier.nvme),
        (tencache("x", peer="tencache-ram"), "cpu", None, Tier.ram),
        (stock("x"), "none", Placement(weights_nvme=0, optimizer_nvme=0), Tier.ram),
        (stock("x"), "cpu", Placement(weights_nvme=0, optimizer_nvme=0.5), Tier.nvme),
        (stock("x"), "none", Placement(weights_nvme=0, optimizer_nvme=0, weights_gpu=1, optimizer_gpu=1), Tier.gpu),
        (stock("x"), "none", None, Tier.gpu),
    ],
)
def test_lowest_tier(configuration, device, placement, tier):
    placements = {"x": placement} if placement else {}
    example = benchmark([configuration], [run("x", [1.0], device=device)], placements=placements)
    assert Figures(example, configuration).tier is tier


def test_tier_of_what_was_never_run_and_is_not_placed_is_unknown():
    assert Figures(benchmark([stock()], []), stock()).tier is None


# The page


def test_summary_gives_the_answer():
    assert top(render(small())).splitlines() == [
        "# Test benchmark",
        "",
        "- **TenCache (defaults)**: 10.0 s per step, **2.00x** the speed of stock NVMe + NVMe (20.0 s), 0.80 of the "
        "bound of this machine (NVMe).",
        "- Losses of all 4 runs are identical bit for bit over 3 steps.",
    ]


def test_every_cell_of_the_main_table():
    results = section(render(small()), "Results")
    assert cells(results, "stock NVMe + NVMe") == [
        "stock NVMe + NVMe", "**20.0** (18.0-22.0, ±10.0 %)", "1 (baseline, NVMe tier)", "2.00 / 4.00 / 14.0",
        "20.0 + 18.0", "10.0", "20.0 / 18.0", "8.0", "7.0", "3.00 + 12.0", "100", "0.60 (NVMe)",
    ]  # fmt: skip
    assert cells(results, "TenCache (defaults)") == [
        "TenCache (defaults)", "**10.0** (9.00-11.0, ±10.0 %)", "**2.00x** (2.00x, 1.90x-2.10x)", "1.00 / 2.00 / 7.00",
        "12.0 + 12.0", "5.00", "7.0 / 8.0", "8.0", "7.0", "3.00 + 12.0", "200", "0.80 (NVMe)",
    ]  # fmt: skip


def test_cells_of_the_other_tables():
    page = render(small())
    assert cells(section(page, "Memory caps"), "TenCache") == [
        "TenCache (defaults)", "24.0", "cgroup", "17.0 (host memory in use)", "-", "7.0", "yes",
    ]  # fmt: skip
    assert cells(section(page, "Bytes per step"), "TenCache") == [
        "TenCache (defaults)", "12.0", "20.0", "12.0", "18.0", "4.00", "2.00", "1 %", "2 %", "15 %",
    ]  # fmt: skip
    assert cells(section(page, "Bytes per step"), "stock")[5:] == ["-"] * 5
    assert cells(section(page, "TenCache: weights and waits"), "TenCache") == [
        "TenCache (defaults)", "100", "60.0 %", "30.0 %", "6.0 %", "4.0 %", "0.200", "1.00", "0.00", "0.00", "0.300",
    ]  # fmt: skip
    assert cells(section(page, "Energy and endurance"), "TenCache") == [
        "TenCache (defaults)", "1,000", "-", "12.0", "12.0", "104", "9.65",
    ]  # fmt: skip
    assert "identical bit for bit" in section(page, "Losses").lower()
    assert "| 3.50 GB/s | 3.00 GB/s | 4.00 GB/s | 50.0 GB/s | 40.0 GB/s | 200 GB/s" in page


def test_machine_workload_and_command_are_named():
    setting = section(render(small()), "Machine and workload")
    assert "Test CPU, 16 cores, 128 GiB of memory, 1 x Test GPU (80 GiB)" in setting
    assert "disk, Test disk, ext4, direct I/O, probed with 8 requests of 8 MiB in flight" in setting
    assert "llama-1b (1.00 B parameters), bf16, 1 rank" in setting
    assert "torch 2.11.0" in setting
    assert "```bash\npython -m benchmarks run --nvme-path FOLDER\n```" in setting


def test_each_tier_has_its_baseline():
    ram = Placement(weights_nvme=0, optimizer_nvme=0)
    example = benchmark(
        [
            stock(),
            stock("ram-ram", "stock RAM"),
            tencache(),
            tencache("tencache-ram", "TenCache RAM", peer="tencache-ram"),
        ],
        [
            run("nvme-nvme", [20.0]),
            run("ram-ram", [1.0], device="cpu"),
            run("tencache", [10.0]),
            run("tencache-ram", [0.5], device="cpu"),
        ],
        placements={"ram-ram": ram},
    )
    results = section(render(example), "Results")
    assert cells(results, "stock RAM")[2] == "1 (baseline, RAM tier)"
    assert cells(results, "TenCache RAM")[2] == "**2.00x** (one round)"
    assert cells(results, "TenCache (defaults)")[2] == "**2.00x** (one round)"
    chosen = section(render(example, baseline="ram-ram"), "Results")
    assert cells(chosen, "TenCache (defaults)")[2] == "**0.10x** (one round)"
    assert cells(chosen, "stock RAM")[2] == "1 (baseline)"
    assert "Speed is relative to stock RAM." in chosen


def test_the_best_peer_is_the_baseline_and_other_semantics_never_are():
    example = benchmark(
        [stock("a", "slow"), stock("b", "fast"), stock("z", "stale", semantics="old gradients"), tencache()],
        [run("a", [20.0]), run("b", [15.0]), run("z", [1.0]), run("tencache", [10.0])],
    )
    page = render(example)
    assert "**1.50x** the speed of fast (15.0 s)" in top(page)
    results = section(page, "Results")
    assert cells(results, "stale")[:3] == ["stale <sup>1</sup>", "**1.00** (1.00-1.00, ±0.0 %)", "-"]
    assert "<sup>1</sup> Different semantics, in no ratio: old gradients." in results


def test_failure_rows_say_why():
    error = 'Traceback:\n  File "/home/someone/x.py", line 3\nRuntimeError: no | buffers in /home/someone/scratch/w.bin'
    page = render(with_failures(error))
    results = section(page, "Results")
    assert cells(results, "stock")[1] == "failed: RuntimeError: no \0 buffers in .../w.bin"
    assert cells(results, "GPU only")[1] == "could not run: it needs 300 GiB of GPU memory"
    assert cells(results, "left out")[1] == "not run"
    assert all(len(cells(results, label)) == 12 for label in ("stock", "GPU only", "left out"))
    assert cells(results, "TenCache")[2] == "-"
    assert "There is no speed" in results
    assert "Errors of 1 failed run" in page
    assert "/home" not in page
    assert "- stock NVMe + NVMe failed: see the table." in top(page)
    assert "- GPU only could not run: see the table." in top(page)


def test_a_failure_of_tencache_is_at_the_top_and_a_lost_round_in_a_footnote():
    example = benchmark(
        [stock(), tencache()],
        [
            run("nvme-nvme", [20.0]),
            failed("nvme-nvme", "ValueError: lost", 1),
            failed("tencache", "OSError: disk full"),
        ],
    )
    page = render(example)
    assert "- **TenCache (defaults) failed**: OSError: disk full" in top(page)
    assert "<sup>1</sup> 1 of 2 runs failed: ValueError: lost." in page


def test_one_round_without_a_measured_step_and_without_memory():
    page = render(pair(run("nvme-nvme", [], memory=None), run("tencache", [10.0], memory=None)))
    results = section(page, "Results")
    assert cells(results, "stock")[1:] == [
        "no measured step", "-", "-", "-", "-", "-", "-", "-", "3.00 + 12.0", "-", "-",
    ]  # fmt: skip
    row = cells(results, "TenCache")
    assert row[1:3] == ["**10.0** (10.0-10.0, ±0.0 %)", "-"]
    assert row[6:9] == ["-", "-", "-"]
    assert row[-1] == "-"


def test_nothing_at_all_is_still_a_page(tmp_path: Path):
    page = write_report(
        benchmark([], [], hardware=hardware(gpu=None, storage=None)), tmp_path, name="empty"
    ).read_text()
    assert "Nothing was measured." in top(page)
    assert "There is nothing to plot" in page
    assert "no GPU" in page


def test_different_losses_are_grouped_and_located():
    same = [step(99.0, 9.0), step(10.0, 8.0), step(10.0, 4.0)]
    other = [step(99.0, 9.0), step(10.0, 8.0), step(10.0, 4.0 * (1 + 2**-20))]
    example = benchmark(
        [stock(), stock("b", "stock B"), tencache()],
        [
            run("nvme-nvme", [], 0, steps=same),
            run("b", [], 0, steps=same),
            run("nvme-nvme", [], 1, steps=other),
            run("tencache", [], 0, steps=[*same, step(10.0)]),
        ],
    )
    n_steps, groups = group_by_losses(all_figures(example).values())
    assert n_steps == 3
    assert [[(run.configuration, run.round) for run in runs] for runs in groups.values()] == [
        [("nvme-nvme", 0), ("b", 0), ("tencache", 0)],
        [("nvme-nvme", 1)],
    ]
    page = render(example)
    assert "- **Losses differ**: 2 groups of runs" in top(page)
    losses = section(page, "Losses")
    assert cells(losses, "A:") == [
        "A: stock NVMe + NVMe (round 1), stock B, TenCache (defaults)", "the reference", "-", "-",
    ]  # fmt: skip
    assert cells(losses, "B:") == ["B: stock NVMe + NVMe (round 2)", "step 3, micro-step 1", "9.5e-07", "9.5e-07"]
    assert "`--deterministic`" in top(page)
    assert "`--deterministic`" in losses


def test_different_losses_of_deterministic_kernels_are_not_put_down_to_them():
    runs = [run("nvme-nvme", [], 0, steps=[step(9.0, 8.0)]), run("tencache", [], 0, steps=[step(9.0, 7.0)])]
    exact = benchmark([stock(), tencache()], runs)
    exact = exact.model_copy(update={"workload": exact.workload.model_copy(update={"deterministic": True})})
    on_cpu = benchmark([stock(), tencache()], runs, hardware=hardware(gpu=None))
    for example in (exact, on_cpu):
        page = render(example)
        assert "- **Losses differ**: 2 groups of runs" in top(page)
        assert "`--deterministic`" not in page
    assert "deterministic algorithms" in render(exact)


def test_a_loss_that_is_not_finite_has_no_relative_size():
    lost = run("tencache", [], steps=[step(99.0, 9.0), step(1.0, float("nan"))])
    losses = section(render(pair([1.0], lost)), "Losses")
    assert cells(losses, "B:")[1:] == ["step 2, micro-step 1", "not finite", "not finite"]


def test_skipped_steps_and_loss_scales():
    skipping = [step(99.0, 9.0, loss_scale=8192.0, skipped=True), step(1.0, 8.0, loss_scale=4096.0, skipped=True)]
    plain_steps = [step(99.0, 9.0, loss_scale=4096.0), step(1.0, 8.0, loss_scale=4096.0)]
    page = render(pair(run("nvme-nvme", [], steps=skipping), run("tencache", [], steps=plain_steps)))
    losses = section(page, "Losses")
    assert cells(losses, "stock") == ["stock NVMe + NVMe, round 1", "1, 2", "8192 then 4096"]
    assert cells(losses, "TenCache") == ["TenCache (defaults), round 1", "none", "4096"]
    assert "**1 measured steps were skipped by the loss scaler**" in top(page)
    assert "loss scale" not in section(render(small()), "Losses")


def test_an_exceeded_cap_is_said_loudly():
    caps = Caps(host_nbytes=16 * GIB, host_enforced_by="measured", gpu_nbytes=4 * GIB)
    page = render(benchmark([tencache()], [run("tencache", [10.0], caps=caps, memory=memory())]))
    assert cells(section(page, "Memory caps"), "TenCache") == [
        "TenCache (defaults)", "16.0", "only measured", "20.0 (peak RSS)", "4.0", "7.0",
        "**EXCEEDED by 4.0 GiB of host memory**, **EXCEEDED by 3.0 GiB of GPU memory**",
    ]  # fmt: skip
    assert "**Memory cap exceeded** by TenCache (defaults)" in top(page)


def test_files_on_tmpfs_are_no_memory_of_the_training():
    big = {"host_used_nbytes": 99 * GIB}
    example = benchmark([stock()], [run("nvme-nvme", [1.0], step=big)])
    assert all_figures(example)["nvme-nvme"].training_peak == Peak(99 * GIB, HOST_USED)
    on_tmpfs = example.model_copy(update={"storage": "tmpfs (stands in for a fast array)"})
    assert all_figures(on_tmpfs)["nvme-nvme"].training_peak == Peak(18 * GIB, PEAK_RSS)


def test_tmpfs_is_labelled_as_a_stand_in():
    for example in (
        small().model_copy(update={"storage": "tmpfs (stands in for a fast array)"}),
        small().model_copy(update={"hardware": hardware(storage=storage(filesystem="tmpfs"))}),
    ):
        page = render(example)
        assert "- **Storage is tmpfs**" in top(page)
        assert "**tmpfs**, host memory that stands in" in section(page, "Machine and workload")
        assert "counts nothing on tmpfs" in section(page, "Bytes per step")


def test_a_fraction_above_one_is_questioned():
    page = render(small().model_copy(update={"bounds_s": {"tencache": 11.0}, "limits": {}}))
    assert cells(section(page, "Results"), "TenCache")[-1] == "1.10 <sup>1</sup>"
    assert "<sup>1</sup> A fraction above 1" in page


def test_tuning_shows_what_was_tried_and_what_won():
    slow, fast = {"aio_threads": 4, "pipeline": True}, {"aio_threads": 8, "pipeline": True}
    example = benchmark(
        [stock(knobs=fast | {"sub_group_size": 10**8}, searched={"aio_threads": [4, 8, 16]}), tencache()],
        [run("nvme-nvme", [20.0])],
        tuning=[
            run("nvme-nvme", [21.0], -1, knobs=slow),
            run("nvme-nvme", [19.0], -2, knobs=fast),
            failed("nvme-nvme", "RuntimeError: too few buffers", -3, knobs={"aio_threads": 16, "pipeline": True}),
        ],
    )
    tuning = section(render(example), "Tuning")
    assert (
        "stock NVMe + NVMe: 3 trials; it runs with aio_threads = 8, pipeline = True, sub_group_size = 100,000,000"
        in tuning
    )
    assert cells(tuning, "aio_threads") == ["aio_threads", "4, 8, 16", "8"]
    assert "| trial | aio_threads | s/step |" in tuning
    assert cells(tuning, "1 ") == ["1", "4", "21.0"]
    assert cells(tuning, "2 ") == ["2", "8", "**19.0**"]
    assert cells(tuning, "3 ") == ["3", "16", "RuntimeError: too few buffers"]
    assert "| TenCache (defaults) | its defaults |" in tuning


def test_rare_events_are_named():
    stats = counters(divergence=3)
    page = render(benchmark([tencache()], [run("tencache", [10.0], tencache_stats=stats)]))
    assert "Rare events: TenCache (defaults): 3 x divergence." in page


def test_counts_leave_the_warm_up_out_where_they_can():
    whole, later = counters(), counters((80, 20, 0, 0), weight_read_s=0.4, steps=4)["total"]
    with_warm_up = render(benchmark([tencache()], [run("tencache", [10.0], tencache_stats=whole)]))
    assert "warm-up included" in section(with_warm_up, "TenCache: weights and waits")
    runs = [run("tencache", [10.0], tencache_stats=whole, tencache_counts=later)]
    measured = section(render(benchmark([tencache()], runs)), "TenCache: weights and waits")
    assert cells(measured, "TenCache")[:7] == [
        "TenCache (defaults)", "25.0", "80.0 %", "20.0 %", "0.0 %", "0.0 %", "0.100",
    ]  # fmt: skip
    assert "over the steps after the warm-up" in measured


def test_repeatability():
    page = render(small(), repeat=pair([22.0], [10.0], storage="another", started_at="later"))
    repeated = section(page, "Repeatability")
    assert cells(repeated, "TenCache") == [
        "TenCache (defaults) against stock NVMe + NVMe", "10.0 / 10.0", "2.00x", "2.20x", "**10.0 %**",
    ]  # fmt: skip
    assert "**The two are not the same benchmark**: they differ in storage." in repeated
    assert "- **Measured twice, the speeds differ** by up to 10.0 % (TenCache (defaults))." in top(page)
    assert "- Measured twice, all speeds agree within 0.0 %." in top(render(small(), repeat=small()))
    assert "**Nothing was measured twice**" in render(small(), repeat=benchmark([], []))


def test_page_and_plots_lie_beside_each_other(tmp_path: Path):
    page = write_report(small(), tmp_path / "new", name="small")
    assert page == tmp_path / "new" / "small.md"
    images = sorted(path.name for path in page.parent.glob("*.png"))
    assert images == ["small_accesses.png", "small_frontier.png", "small_step_time.png", "small_storage.png"]
    assert all(f'<img src="{image}"' in page.read_text() for image in images)


def test_a_record_that_went_through_a_file_gives_the_same_page(tmp_path: Path):
    small().write(tmp_path / "small.json")
    assert render(Benchmark.read(tmp_path / "small.json")) == render(small())


def test_a_record_of_another_version_is_refused(tmp_path: Path):
    (tmp_path / "later.json").write_text(small().model_dump_json().replace('"schema_version":1', '"schema_version":2'))
    with pytest.raises(ValueError, match="schema_version"):
        Benchmark.read(tmp_path / "later.json")


def test_wrong_arguments_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="its configurations are: nvme-nvme, tencache"):
        write_report(small(), tmp_path, name="x", baseline="absent")
    with pytest.raises(ValueError, match="without a folder"):
        write_report(small(), tmp_path, name="a/b")
    stale = benchmark([stock(semantics="old gradients")], [])
    with pytest.raises(ValueError, match="trains differently"):
        write_report(stale, tmp_path, name="x", baseline="nvme-nvme")
    assert not list(tmp_path.iterdir())


# Markdown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (float("nan"), "-"),
        (0, "0.00"), (0.0124, "0.012"), (0.5, "0.500"), (1, "1.00"), (9.996, "10.0"), (15.64, "15.6"),
        (99.96, "100"), (0.9996, "1.00"), (123.4, "123"), (12345, "12,345"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits_that_count(value, text):
    assert number(value) == text


def test_the_gist_of_an_error():
    assert gist("") == "no message"
    assert gist("one\ntwo") == "two"
    assert gist("torch.cuda.OutOfMemoryError: 3 GiB\n[rank0] exits") == "torch.cuda.OutOfMemoryError: 3 GiB"
    assert gist("x" * 500) == "x" * 197 + "..."
    assert gist("a <b> | `c`") == "a &lt;b&gt; \\| 'c'"


def test_paths_are_cut_down_to_names():
    assert without_paths("in /a/b/c.py, /a and 3/4 and http://x/y/z") == "in .../c.py, /a and 3/4 and http://x/y/z"
    assert without_paths('"/a/b/c.py"') == '".../c.py"'


def test_words_are_joined():
    assert [joined(words) for words in ([], ["a"], ["a", "b"], ["a", "b", "c"], ["a, b", "c"])] == [
        "", "a", "a and b", "a, b and c", "a, b; and c",
    ]  # fmt: skip


def test_nothing_is_taken_for_markdown():
    assert plain("a\n b*") == "a b\\*"


def test_places_and_predictions():
    stats = counters() | {
        "gpu_weight_nbytes": 2 * 2**30,
        "gpu_state_nbytes": 3 * 2**30,
        "resident_state_nbytes": 2**29,
        "stored_nbytes": 0,
        "predicted_seconds": 8.0,
    }
    page = render(benchmark([tencache()], [run("tencache", [10.0], tencache_stats=stats)]))
    assert cells(section(page, "TenCache: places"), "TenCache") == [
        "TenCache (defaults)", "2.0", "-", "3.0", "-", "0.5", "0.0", "8.00", "10.0", "1.25",
    ]  # fmt: skip
    without = run("tencache", [10.0], tencache_stats=None)
    assert "No run recorded" in section(render(benchmark([tencache()], [without])), "TenCache: places")


def test_what_more_ram_was_to_give():
    """A step of 10 s, of which the update waits 8 for 8 GB on NVMe: with half of it, and with none."""

    def counted(in_ram: int, stored: int):
        last = {
            "step": 7, "seconds": 10.0, "update_seconds": 8.0, "background_seconds": 0.0,
            "stall_seconds": {"optimizer_read": 8.0}, "background_stall_seconds": {},
            "nbytes": {"nvme_read": stored, "nvme_write": stored},
        }  # fmt: skip
        held = [{"contents": [{"kind": "optimizer", "nbytes": stored}]}] if stored else []
        return counters() | {
            "last_step": last, "paths": held, "stored_nbytes": stored, "state_nbytes": 8 * GIB, "gpu_state_nbytes": 0,
            "resident_state_nbytes": in_ram, "resident_weight_nbytes": 0, "predicted_seconds": None,
            "staging_nbytes": 0,
        }  # fmt: skip

    cases = {"a": (0, 10.0, 0), "b": (4 * GIB, 6.5, 0), "c": (8 * GIB, 2.0, 0), "other": (8 * GIB, 1.0, 5)}
    configurations, runs = [], []
    for name, (in_ram, seconds, gpu_memory) in cases.items():
        section_of = {"host_memory": in_ram + 1, "gpu_memory": gpu_memory}
        config = {"zero_optimization": {"stage": 3}, "tencache": section_of}
        configurations.append(tencache(name, f"TenCache {name}"))
        runs.append(run(name, [seconds], tencache_stats=counted(in_ram, 8 * GIB - in_ram), deepspeed_config=config))
    page = section(render(benchmark(configurations, runs)), "TenCache: places")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| TenCache ")][len(cases) :]
    assert [[cell.strip("| ") for cell in row] for row in rows] == [
        ["TenCache a", "TenCache b", "4.0", "6.00", "6.50", "1.08"],
        ["TenCache a", "TenCache c", "8.0", "2.00", "2.00", "1.00"],
        ["TenCache b", "TenCache c", "4.0", "2.00", "2.00", "1.00"],
    ]
