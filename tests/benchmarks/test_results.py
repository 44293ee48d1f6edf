# SPDX-License-Identifier: Apache-2.0
"""Rows of results: from made-up records, and those that docs/benchmarks keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.results import COLUMNS, main, read, rows

from .examples import GIB, NUMEL, benchmark, device_profile, failed, run, stock, tencache

KEPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "results.csv"


def example():
    runs = [
        run("nvme-nvme", [10.0, 12.0, 11.0], knobs={"sub_group_size": 10**9}),
        run("tencache", [2.0, 4.0], device_profile=device_profile()),
        failed("tencache", "Traceback\n  RuntimeError: no space\n\n", 1),
    ]
    return benchmark([stock(), tencache()], runs, bounds_s={"tencache": 1.234567})


def test_a_row_for_each_run():
    theirs, ours, without = rows(example(), "pair")
    assert (theirs["step_s"], theirs["fastest_s"], theirs["slowest_s"], theirs["steps"]) == (11.0, 10.0, 12.0, 3)
    assert (theirs["forward_s"], theirs["update_s"]) == (1.1, 7.7)
    assert (theirs["nvme_read_nbytes"], theirs["peak_rss_steady_nbytes"]) == (20 * NUMEL, 18 * GIB)
    assert (theirs["first_loss"], theirs["last_loss"]) == (9.0, 7.0)  # the warm-up's is the first
    assert theirs["settings"] == '{"sub_group_size": 1000000000}'
    assert (ours["step_s"], ours["bound_s"], ours["h2d_nbytes"]) == (3.0, 1.2346, 4 * 10**9)
    assert (ours["label"], ours["gpu"], ours["date"]) == ("TenCache (defaults)", "Test GPU", "2026-11-21")
    assert (without["outcome"], without["error"], without["steps"]) == ("failed", "RuntimeError: no space", 0)
    assert "step_s" not in without


def test_rows_of_a_report_are_replaced_and_others_kept(tmp_path):
    record, file = tmp_path / "benchmark.json", tmp_path / "results.csv"
    example().write(record)
    for report in ("first", "second", "first"):
        main([str(record), "--report", report, "--csv", str(file)])
    found = read(file)
    assert [row["report"] for row in found] == ["second"] * 3 + ["first"] * 3
    assert found[0] | {"report": "first"} == found[3]
    assert found[0]["step_s"] == "11.0"
    assert found[2]["step_s"] == ""


def test_a_file_with_other_columns_is_refused(tmp_path):
    file = tmp_path / "results.csv"
    file.write_text("report,seconds\na,1\n")
    with pytest.raises(ValueError, match="other columns than this version writes"):
        read(file)


def test_the_rows_that_are_kept():
    kept = read(KEPT)
    assert set(kept[0]) == set(COLUMNS)
    assert all(float(row["step_s"]) > 0 for row in kept if row["steps"] != "0")
    assert {row["outcome"] for row in kept} == {"ok", "failed"}
