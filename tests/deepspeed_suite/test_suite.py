# SPDX-License-Identifier: Apache-2.0
"""The parts of the suite that decide: what a config becomes, which failures count, what the table of exclusions may
say. And the runner, on a small folder of tests that pass, fail, hang and crash.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.deepspeed_suite.__main__ import EXCLUSIONS
from tests.deepspeed_suite.forcing import Mode, Seen, changes, forced, seen_in
from tests.deepspeed_suite.outcomes import (
    Exclusion,
    Kind,
    Outcome,
    Result,
    differences,
    forget,
    read_exclusions,
    read_results,
    report,
    stale,
    to_run,
)
from tests.deepspeed_suite.runner import Runner
from tests.deepspeed_suite.selection import is_about_another_stage, selected_files

PLAIN = {"zero_optimization": {"stage": 3}}
OFFLOADED = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}
STAGE_2 = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
STAGE_3_PASS = frozenset({Seen.stage3})


@pytest.mark.parametrize(
    ("config", "seen"),
    [
        (PLAIN, {Seen.stage3}),
        (OFFLOADED, {Seen.stage3, Seen.offload}),
        (STAGE_2, set()),
        ({}, set()),
        ({"zero_optimization": True}, set()),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}}, {Seen.stage3}),
        ({"zero_optimization": {"stage": 3, "offload_param": None}}, {Seen.stage3}),
    ],
)
def test_what_a_config_asks_for_is_seen(config: dict, seen: set[Seen]) -> None:
    assert seen_in(config) == seen


def test_line_adds_the_key_to_configs_that_offload_and_nothing_else() -> None:
    assert forced(OFFLOADED, Mode.line, "/n") == OFFLOADED | {"offload_engine": "tencache"}
    for config in (PLAIN, STAGE_2, {}):
        assert forced(config, Mode.line, "/n") is config
    assert forced(OFFLOADED, Mode.stock, "/n") is OFFLOADED


def test_nvme_sends_every_stage_3_config_to_nvme_and_leaves_the_test_s_own_dict_alone() -> None:
    before = json.dumps(OFFLOADED)
    result = forced(OFFLOADED, Mode.nvme, "/n")
    nvme = {"device": "nvme", "nvme_path": "/n", "pin_memory": False}
    assert result["zero_optimization"]["offload_param"] == nvme
    assert result["zero_optimization"]["offload_optimizer"] == nvme
    assert result["zero_optimization"]["stage3_param_persistence_threshold"] == 0
    assert result["offload_engine"] == "tencache"
    assert result["tencache"]["host_memory"] == 0
    assert json.dumps(OFFLOADED) == before
    assert forced(STAGE_2, Mode.nvme, "/n") is STAGE_2


def test_nvme_keeps_what_the_test_chose() -> None:
    config = {
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 10,
            "offload_optimizer": {"device": "cpu", "ratio": 0.3},
        },
        "zero_force_ds_cpu_optimizer": True,
    }
    result = forced(config, Mode.nvme, "/n")
    assert result["zero_optimization"]["stage3_param_persistence_threshold"] == 10
    assert result["zero_optimization"]["offload_optimizer"]["ratio"] == 0.3
    assert result["zero_force_ds_cpu_optimizer"] is True


def test_other_spellings_of_what_is_forced_do_not_stand_beside_it() -> None:
    zero = {"stage": 3, "cpu_offload": True, "param_persistence_threshold": 7}
    result = forced({"zero_optimization": zero}, Mode.nvme, "/n")["zero_optimization"]
    assert "cpu_offload" not in result
    assert "stage3_param_persistence_threshold" not in result
    assert result["param_persistence_threshold"] == 7


def test_the_reference_differs_from_nvme_only_in_device_and_engine() -> None:
    nvme, reference = forced(PLAIN, Mode.nvme, "/n"), forced(PLAIN, Mode.offload, "/n")
    assert set(nvme) - set(reference) == {"offload_engine", "tencache"}
    assert reference["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": False}
    assert set(nvme["zero_optimization"]) == set(reference["zero_optimization"])


def test_tests_about_other_stages_are_told_by_their_parameters() -> None:
    assert is_about_another_stage({"zero_stage": 2})
    assert not is_about_another_stage({"zero_stage": 3})
    assert not is_about_another_stage({"world_size": 2})


def _stock(*tests: str, seen: frozenset[Seen] = STAGE_3_PASS) -> dict[str, Result]:
    return {test: Result(test, Outcome.passed, seen=seen) for test in tests}


def _failed(test: str, error: str = "ValueError: x") -> dict[str, Result]:
    return {test: Result(test, Outcome.failed, error)}


def _excluded(tests: str, error: str = "ValueError", mode: Mode = Mode.nvme) -> Exclusion:
    return Exclusion(tests, frozenset({mode}), Kind.internals, error, "looks at stock's swapper")


def test_only_what_stock_passes_and_a_mode_changes_is_run() -> None:
    stock = _stock("a") | _failed("b") | _stock("c", seen=frozenset()) | _stock("d", seen=frozenset(Seen))
    assert to_run(Mode.nvme, stock) == ["a", "d"]
    assert to_run(Mode.line, stock) == ["d"]
    assert not changes(Mode.stock, set(Seen))


@pytest.mark.parametrize("outcome", [Outcome.failed, Outcome.skipped, Outcome.hung, Outcome.crashed])
def test_whatever_is_not_a_pass_is_a_difference(outcome: Outcome) -> None:
    (difference,) = differences(_stock("a", "b"), {Mode.nvme: {"a": Result("a", outcome)} | _stock("b")}, [])
    assert difference.result.test == "a"
    assert not difference.accounted_for
    assert "not accounted for: 1" in report(_stock("a", "b"), {}, [difference], [])


def test_an_exclusion_covers_its_tests_with_its_error_in_its_mode_only() -> None:
    failures = {Mode.nvme: _failed("f.py::T::t[1-x]")}
    stock = _stock("f.py::T::t[1-x]")
    for entry, covered in (
        (_excluded("f.py::T::t[1-x]"), True),
        (_excluded("f.py::T::t[*]"), True),
        (_excluded("f.py::T::t"), False),
        (_excluded("f.py::T::t[*]", error="KeyError"), False),
        (_excluded("f.py::T::t[*]", mode=Mode.line), False),
    ):
        (difference,) = differences(stock, failures, [entry])
        assert difference.accounted_for is covered
        assert bool(stale([entry], stock, [difference], complete=True)) is not covered


def test_a_stale_exclusion_is_an_error_unless_its_tests_were_not_run() -> None:
    passing = _stock("a")
    assert stale([_excluded("a")], passing, [], complete=False) != []
    assert stale([_excluded("b")], passing, [], complete=False) == []
    assert stale([_excluded("b")], passing, [], complete=True) != []


def test_a_failure_that_stock_s_cpu_offload_shares_is_no_difference_of_tencache() -> None:
    shared = {
        "a": ("ValueError: 0.25 is not 1e-3", "ValueError: 0.5 is not 2"),
        "b": ("ValueError: x", "ValueError: y"),
    }
    with_mode: dict[Mode, dict[str, Result]] = {Mode.nvme: {}, Mode.offload: {}}
    for test, (error, other) in shared.items():
        with_mode[Mode.nvme] |= _failed(test, error)
        with_mode[Mode.offload] |= _failed(test, other)
    assert [difference.shared for difference in differences(_stock("a", "b"), with_mode, [])] == [True, False]


def test_every_exclusion_has_a_reason() -> None:
    for entry in read_exclusions(EXCLUSIONS):
        assert len(entry.reason) > 20, entry.tests
        assert not entry.modes - {Mode.line, Mode.nvme}, entry.tests


def test_an_incomplete_exclusion_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "exclusions.toml"
    table.write_text('[[excluded]]\ntests = "a"\nmodes = ["nvme"]\nkind = "refusal"\nerror = "E"\nreason = ""\n')
    with pytest.raises(ValueError, match="none of them empty"):
        read_exclusions(table)


def test_a_folder_that_is_no_checkout_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="finds no file of DeepSpeed's tests"):
        selected_files(tmp_path)


def test_results_can_be_forgotten_by_outcome_or_by_name(tmp_path: Path) -> None:
    file = tmp_path / "nvme.jsonl"
    lines = [{"test": "a", "outcome": "passed"}, {"test": "b", "started": True}, {"test": "b", "outcome": "failed"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    forget(file, [])
    assert set(read_results(file)) == {"a"}
    forget(file, ["a"])
    assert file.read_text() == ""


def test_the_runner_gives_every_test_a_result_and_goes_on_after_a_crash(tmp_path: Path) -> None:
    tests = tmp_path / "checkout" / "tests"
    tests.mkdir(parents=True)
    (tests / "pytest.ini").write_text("[pytest]\n")
    (tests / "test_small.py").write_text(
        "import os, pytest\n"
        "def test_passes(): pass\n"
        "def test_ends_the_process(): os._exit(7)\n"
        "def test_fails(): raise KeyError('what')\n"
        "@pytest.mark.parametrize('zero_stage', [1, 3])\n"
        "def test_skips(zero_stage): pytest.skip('no reason')\n"
    )
    runner = Runner(tests, tmp_path / "work")
    (tmp_path / "work").mkdir()
    results = runner.run(Mode.stock, ["test_small.py"])
    outcomes = {test.partition("::")[2]: (result.outcome, result.error) for test, result in results.items()}
    assert outcomes == {
        "test_passes": (Outcome.passed, ""),
        "test_ends_the_process": (Outcome.crashed, "crashed: exit status 7 of pytest"),
        "test_fails": (Outcome.failed, "KeyError: 'what'"),
        "test_skips[3]": (Outcome.skipped, "no reason"),
    }
    before = runner.results_of(Mode.stock).read_text()
    assert runner.run(Mode.stock, ["test_small.py"], only=list(results)) == results
    assert runner.results_of(Mode.stock).read_text() == before, "what is done is not run again"
