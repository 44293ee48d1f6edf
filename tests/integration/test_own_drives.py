# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on drives of the nodes, here a folder per rank: ``latest`` is on each of them, or no rank loads."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(240)

MLP = {"model": "mlp"}
CASES: dict[str, dict[str, Any]] = {
    "kept": MLP | {"loads": [None]},
    "lost": MLP | {"loads": [None, "second"], "lost_by": 1},
    "damaged": MLP | {"loads": [None, "second"], "damaged_on": 1},
    "blocked": MLP | {"blocked_on": 1},
}


@pytest.fixture(scope="module")
def outcome(harness: Any) -> Any:
    cases = [(name, case | {"name": name}, "tencache") for name, case in CASES.items()]
    return harness.run(cases, ranks=2, program="own_drive_cases.py", timeout_s=180)


def test_every_drive_has_latest_and_the_files_of_its_rank(outcome: Any) -> None:
    for rank in outcome.ranks:
        result = outcome.result("kept", "tencache", rank)
        assert result["failure"] == ""
        assert result["latest"] == "second"
        assert result["files"] == [
            f"second/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            f"second/zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        ]
        assert result["losses_after_loading"] == result["losses"]


@pytest.mark.parametrize(
    ("name", "problem"), [("lost", "is not there"), ("damaged", "cannot be read (Is a directory)")]
)
def test_a_drive_without_latest_is_named_and_the_tag_helps(outcome: Any, name: str, problem: str) -> None:
    for rank in outcome.ranks:
        result = outcome.result(name, "tencache", rank)
        assert result["failure"].startswith(
            "AgreementError: the ranks differ in the checkpoint to load: tag 'second' on rank 0 ("
        )
        assert f"{name}_drive1/latest {problem} on rank 1 (" in result["failure"]
        assert result["losses_after_loading"] == result["losses"]


def test_latest_that_cannot_be_written_is_an_error_of_all_ranks(outcome: Any) -> None:
    failures = [outcome.result("blocked", "tencache", rank)["failure"] for rank in outcome.ranks]
    assert failures[0].startswith("CheckpointError: the checkpoint was not saved: rank 1 could not write their part")
    assert failures[1].startswith("IsADirectoryError: ")
    for rank in outcome.ranks:
        assert outcome.result("blocked", "tencache", rank)["files"] == []
