# SPDX-License-Identifier: Apache-2.0
"""The plots from plain values: what is drawn, from which figures, and when there is nothing to draw."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.record import Sample
from benchmarks.reporting import plots
from benchmarks.reporting.figures import all_figures
from benchmarks.reporting.plots import OURS, PEERS
from benchmarks.reporting.report import render
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
    stock,
    tencache,
    timeline,
    with_failures,
)

pytestmark = pytest.mark.timeout(120)

MAX_NBYTES = 150 * 1000


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_nothing_measured_is_no_figure(tmp_path: Path):
    for example in (benchmark([], []), benchmark([stock()], [failed("nvme-nvme", "lost")]), benchmark([stock()], [])):
        for draw in (plots.step_time, plots.frontier, plots.storage_bandwidth, plots.access_classes):
            assert draw(example) is None
        assert plots.write_plots(example, tmp_path, "none") == []
    assert not list(tmp_path.iterdir())


def test_phases_are_stacked_and_the_bound_is_marked():
    axes = plots.step_time(small()).axes[0]
    bars = [(round(bar.get_x(), 6), round(bar.get_width(), 6)) for bar in axes.patches if bar.get_width()]
    assert bars == [(0, 2.0), (0, 1.0), (2.0, 4.0), (1.0, 2.0), (6.0, 14.0), (3.0, 7.0)]
    spreads, bounds = ([[x for x, _ in line] for line in lines.get_segments()] for lines in axes.collections)
    assert (spreads, bounds) == ([[18.0, 22.0], [9.0, 11.0]], [[12.0, 12.0], [8.0, 8.0]])
    assert texts(axes) == ["20.0 s   0.60 of bound", "10.0 s   0.80 of bound"]


def test_what_did_not_run_has_its_line_in_the_step_times():
    axes = plots.step_time(with_failures()).axes[0]
    assert texts(axes) == ["failed", "cannot run", "10.0 s"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [
        "stock NVMe + NVMe",
        "GPU only",
        "TenCache (defaults)",
    ]


def test_frontier_takes_the_larger_memory_and_sorts_tencache_by_it():
    example = benchmark(
        [tencache("b", "more"), tencache("a", "less"), stock()],
        [
            run("b", [5.0], memory=memory(peak_rss_steady_nbytes=30 * GIB)),
            run("a", [10.0], memory=memory(peak_rss_steady_nbytes=8 * GIB), step={"host_used_nbytes": 12 * GIB}),
            run("nvme-nvme", [20.0], memory=None),
        ],
        bounds_s={"a": 9.0, "b": 4.0},
    )
    axes = plots.frontier(example).axes[0]
    line, bound, *points = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    assert line == ([12.0, 30.0], [10.0, 5.0])
    assert bound == ([12.0, 30.0], [9.0, 4.0])
    assert points == [([30.0], [5.0]), ([12.0], [10.0]), ([17.0], [20.0])]
    assert sorted(texts(axes)) == ["less", "more", "stock NVMe + NVMe"]
    assert axes.get_yscale() == "linear"


def test_points_of_one_limit_of_gpu_memory_make_a_line():
    limits = {"a": 0, "b": 0, "c": 2 * 10**9, "d": 2 * 10**9, "e": None}
    configurations = [
        tencache(name, name, knobs={} if limit is None else {"gpu_memory": limit}) for name, limit in limits.items()
    ]
    runs = [
        run(name, [10.0 - index], memory=memory(peak_rss_steady_nbytes=(20 + index) * GIB))
        for index, name in enumerate(limits)
    ]
    runs[2] = runs[2].model_copy(update={"tencache_stats": counters() | {"predicted_seconds": 7.5}})
    axes = plots.frontier(benchmark(configurations, runs)).axes[0]
    named = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    assert list(named) == ["TenCache, gpu_memory 0", "TenCache, gpu_memory 2 GB", "predicted"]
    first, second, predicted = ([list(line.get_xdata()), list(line.get_ydata())] for line in named.values())
    assert first == [[20.0, 21.0], [10.0, 9.0]]
    assert second == [[22.0, 23.0], [8.0, 7.0]]
    assert predicted == [[22.0], [7.5]]


def test_points_of_a_line_are_named_by_what_the_legend_does_not_say():
    configurations = [
        tencache(
            f"{gpu}{host}", f"TenCache, gpu_memory {gpu} GB, host_memory {host} GB", knobs={"gpu_memory": gpu * 10**9}
        )
        for gpu in (1, 2)
        for host in (3, 4)
    ]
    runs = [
        run(each.name, [9.0 - index], memory=memory(peak_rss_steady_nbytes=(20 + index) * GIB))
        for index, each in enumerate(configurations)
    ]
    figure = plots.frontier(benchmark(configurations, runs))
    assert texts(figure.axes[0]) == [f"host_memory {host} GB" for host in (3, 4, 3, 4)]
    figure.draw_without_rendering()
    assert figure.axes[0].get_position().width > 0.5, "the legend leaves room for the plot"


def test_frontier_is_logarithmic_over_more_than_a_factor_of_ten():
    assert plots.frontier(pair([11.0], [1.0])).axes[0].get_yscale() == "log"


def test_names_on_the_frontier_do_not_lie_on_each_other():
    configurations = [stock(f"s{i}", f"a rather long name of peer {i}") for i in range(6)]
    runs = [run(f"s{i}", [20.0 + 0.1 * i]) for i in range(6)]
    figure = plots.frontier(benchmark(configurations, runs))
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 6
    overlapping = [(i, j) for i in range(6) for j in range(i) if boxes[i].overlaps(boxes[j])]
    assert overlapping == []


def test_storage_rates_are_differences_of_the_samples():
    example = benchmark(
        [tencache(), stock("ram-ram", "RAM")],
        [run("tencache", [10.0, 10.0], timeline=timeline(20, 1.5, 0.5, count=4)), run("ram-ram", [1.0], device="cpu")],
    )
    figure = plots.storage_bandwidth(example)
    assert len(figure.axes) == 1
    read, write, both = (patch.get_data() for patch in figure.axes[0].patches)
    assert list(read.edges) == [0, 5, 10, 15, 20]
    assert list(read.values) == pytest.approx([1.5] * 4)
    assert list(write.values) == pytest.approx([-0.5] * 4)
    assert list(both.values) == pytest.approx([2.0] * 4)
    assert figure.axes[0].get_title("right") == "dashed: probe, read + write 4 GB/s"


def test_storage_without_a_probe_and_with_samples_at_one_moment():
    samples = [
        *timeline(1, 1, 1, count=2),
        Sample(t_s=1.0, nvme_read_nbytes=10**9, nvme_write_nbytes=10**9, rss_nbytes=0),
    ]
    example = benchmark([tencache()], [run("tencache", [1.0], timeline=samples)], hardware=hardware(storage=None))
    figure = plots.storage_bandwidth(example)
    assert list(figure.axes[0].patches[0].get_data().edges) == [0, 0.5, 1.0]
    assert figure.axes[0].get_title("right") == ""


def test_many_samples_are_thinned_and_lose_no_bytes():
    edges, read, write = plots.storage_rates(run("tencache", [100.0], timeline=timeline(100, 2.0, 1.0, count=1001)))
    assert len(read) <= plots.MAX_BINS
    assert sum(r * (b - a) for r, a, b in zip(read, edges[:-1], edges[1:], strict=True)) == pytest.approx(200.0)
    assert edges[-1] == 100


def test_access_classes_are_shares():
    example = benchmark([tencache()], [run("tencache", [1.0], tencache_stats=counters((600, 300, 60, 40)))])
    axes = plots.access_classes(example).axes[0]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([60, 30, 6, 4])
    assert texts(axes) == ["60 %", "30 %", "6 %", "4 %"]


def test_colours_are_those_of_the_configuration():
    example = benchmark([stock("a"), tencache("b"), stock("c"), tencache("d")], [])
    assert plots.colours(all_figures(example)) == {"a": PEERS[0], "b": OURS[0], "c": PEERS[1], "d": OURS[1]}


def test_files_are_small(tmp_path: Path):
    written = plots.write_plots(small(), tmp_path, "small")
    assert written == ["step_time", "frontier", "storage", "accesses"]
    files = [tmp_path / f"small_{plot}.png" for plot in written]
    assert all(0 < file.stat().st_size < MAX_NBYTES for file in files)


def test_the_caption_says_which_memory_is_shown():
    def caption(example):
        return render(example, name="page", plots=["frontier"]).splitlines()[-1]

    example = pair([1.0], run("tencache", [1.0], step={"host_used_nbytes": 25 * GIB}))
    assert "host memory in use for TenCache (defaults), peak RSS for the others." in caption(example)
    assert "here peak RSS for all." in caption(benchmark([stock()], [run("nvme-nvme", [1.0])]))
