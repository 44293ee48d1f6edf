# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is complete and right on every rank, or it is not there: ``latest`` never names one written from bytes
that were not read back right.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.checkpoint_contents import contents_of

pytestmark = pytest.mark.timeout(300)

PROGRAM = "saving_cases.py"
ALONE = ("undisturbed", "damaged", "flipped", "torn", "failed_write", "measured", "copies")
TOGETHER = ("undisturbed", "damaged", "failed_write")
ASYNC: dict[str, dict[str, Any]] = {
    "async": {"model": "llama", "lora": True},
    "async_split": {"model": "llama", "tencache": {"split_master": True, "host_memory": "1MiB"}},
    "async_little_memory": {"model": "mlp", "tencache": {"checkpoint_memory": 1, "chunk_size": 2**16}},
    "async_ram": {"model": "mlp", "offload_param": "cpu", "offload_optimizer": "cpu"},
    "async_behind_an_update": {"model": "llama", "offload_param": "cpu", "tencache": {"chunk_size": 2**16}},
    "async_without_overlap": {"model": "mlp", "tencache": {"overlap_step": False}},
    "async_eight_bit": {"model": "llama", "optimizer": "bitsandbytes.optim.AdamW8bit", "offload_param": "cpu"},
    "async_muon": {"model": "mlp", "muon": True, "offload_param": "cpu"},
    "async_whole": {"model": "mlp", "optimizer": "torch_adamw"},
    "model": {"model": "gpt2", "zero": {"stage3_gather_16bit_weights_on_model_save": True}, "rank": 0},
    "async_faults": {},
    "async_void": {"model": "mlp", "offload_param": "cpu", "late_s": 2.0},
    "at_exit": {"model": "mlp"},
}
ASYNC_TOGETHER = (
    "async",
    "async_ram",
    "async_muon",
    "async_behind_an_update",
    "model",
    "async_faults",
    "async_void",
    "at_exit",
)
OF_THEIR_OWN = ("model", "async_faults", "async_void", "at_exit")
FAILS_ASYNC = (("eio_optimizer", "Input/output error"), ("not_durable", "Input/output error"))
FAILS = (
    ("damaged", "eio_optimizer", "Input/output error"),
    ("damaged", "eio_frozen_weights", "Input/output error"),
    ("damaged", "full", "File too large"),
    ("damaged", "not_durable", "Input/output error"),
    ("failed_write", "failed_write", "Input/output error"),
)
FAILS_ALONE = (
    *FAILS,
    ("flipped", "flipped", "CorruptionError"),
    ("torn", "torn", "CorruptionError"),
    ("torn", "hang", "not finished after 1.0 s"),
)
FAILING_RANK = 1
STAGING_NBYTES = 2**25
"""Staging buffers of the measured case, that training may not have touched yet."""


def cases(names: tuple[str, ...], **more: Any) -> list[tuple[str, dict[str, Any], str]]:
    return [(name, {"scenario": name, **more}, "tencache") for name in names]


@pytest.fixture(scope="module")
def alone(harness: Any) -> Any:
    return harness.run(cases(ALONE), program=PROGRAM, timeout_s=200)


@pytest.fixture(scope="module")
def together(harness: Any) -> Any:
    """The fault is on one rank; the other hears of it in the same call."""
    return harness.run(cases(TOGETHER, rank=FAILING_RANK), ranks=2, program=PROGRAM, timeout_s=200)


def async_cases(names: tuple[str, ...], **more: Any) -> list[tuple[str, dict[str, Any], str]]:
    scenario = {name: name if name in OF_THEIR_OWN else "in_background" for name in names}
    return [(name, more | ASYNC[name] | {"scenario": scenario[name], "name": name}, "tencache") for name in names]


@pytest.fixture(scope="module")
def alone_async(harness: Any) -> Any:
    return harness.run(async_cases(tuple(ASYNC)), program=PROGRAM, timeout_s=200)


@pytest.fixture(scope="module")
def together_async(harness: Any) -> Any:
    return harness.run(async_cases(ASYNC_TOGETHER, rank=FAILING_RANK), ranks=2, program=PROGRAM, timeout_s=200)


ASYNC_RUNS = [
    (run, name)
    for run, names in (("alone_async", ASYNC), ("together_async", ASYNC_TOGETHER))
    for name in names
    if name not in OF_THEIR_OWN
]


@pytest.mark.parametrize(("run", "name"), ASYNC_RUNS)
def test_a_save_in_the_background_has_the_same_contents(request: pytest.FixtureRequest, run: str, name: str) -> None:
    outcome = request.getfixturevalue(run)
    for rank in outcome.ranks:
        result = outcome.result(name, "tencache", rank)
        kinds = ("momentum_buffer",) if name == "async_muon" else ("exp_avg_sq", "absmax2")
        assert any(kind in key for kind in kinds for key in result["async"])
        assert result["async"] == result["expected"]
        assert result["scripts"] == result["expected_scripts"] != {}
        assert result["next"] == result["expected_next"] != result["async"]
        assert (result["copies_left_nbytes"] > 0) == ("checkpoint_memory" in ASYNC[name].get("tencache", {}))
        if name in ("async_ram", "async_behind_an_update"):
            assert result["hidden_share"] > 0.5
        assert result["under_way"]
        assert result["gives_way"] == (name != "async_ram")  # whose state is not on the drive
        assert result["latest_at_the_next"] == "async"
        assert result["latest_at_last"] == "next"
        assert result["latest_after_destroy"] == "unfinished"
        assert result["partial"] == []


@pytest.mark.parametrize("run", ["alone_async", "together_async"])
def test_a_save_does_not_wait_for_the_update_behind_which_it_is(request: pytest.FixtureRequest, run: str) -> None:
    outcome = request.getfixturevalue(run)
    for rank in outcome.ranks:
        result = outcome.result("async_void", "tencache", rank)
        assert result["begun"]["failure"] == ""
        assert result["begun"]["seconds"] < ASYNC["async_void"]["late_s"] / 2
        assert result["behind"] == result["expected"]


@pytest.mark.parametrize("run", ["alone_async", "together_async"])
def test_a_save_behind_an_update_that_fails_is_none(request: pytest.FixtureRequest, run: str) -> None:
    outcome = request.getfixturevalue(run)
    for rank in outcome.ranks:
        result = outcome.result("async_void", "tencache", rank)
        if len(outcome.ranks) == 1 or rank == FAILING_RANK:
            assert result["void"]["failure"].startswith(
                "VoidStepError: the last optimizer step or load failed half-way"
            )
        else:
            assert f"rank {FAILING_RANK} could not write" in result["void"]["failure"]
        assert result["void"]["latest"] == "behind_at_once"
        assert result["void"]["files"] == {}
        assert result["again"]["failure"] == ""
        assert result["again"]["latest"] == "again"


@pytest.mark.parametrize("run", ["alone_async", "together_async"])
def test_a_model_saved_in_the_background(request: pytest.FixtureRequest, run: str) -> None:
    outcome = request.getfixturevalue(run)
    for rank in outcome.ranks:
        result = outcome.result("model", "tencache", rank)
        assert result["saved"]["failure"] == ""
        assert result["contents"] == result["expected"] != result["next"]
        for attempt in ("not_durable", "not_durable_at_once"):
            assert ("Input/output error" if rank == 0 else "was not saved: rank 0 ") in result[attempt]["failure"]
            assert result[attempt]["latest"] == "good"
            assert result[attempt]["files"] == result["saved"]["files"]
            assert list(result[attempt]["files"]) == ["weights.pt"]


@pytest.mark.parametrize("run", ["alone_async", "together_async"])
def test_a_process_that_ends_completes_its_checkpoint(request: pytest.FixtureRequest, run: str) -> None:
    outcome = request.getfixturevalue(run)
    result = outcome.result("at_exit", "tencache")
    folder = outcome.finished.folder / "checkpoints" / "at_exit"
    assert result["latest"] == "at_once"
    assert (folder / "latest").read_text() == "at_exit"
    assert contents_of(folder / "at_exit") == result["expected"]
    assert list(folder.rglob("*.partial")) == []


@pytest.mark.parametrize("run", ["alone_async", "together_async"])
@pytest.mark.parametrize(("attempt", "cause"), FAILS_ASYNC)
def test_a_failure_in_background_leaves_the_last_checkpoint(
    request: pytest.FixtureRequest, run: str, attempt: str, cause: str
) -> None:
    outcome = request.getfixturevalue(run)
    for rank in outcome.ranks:
        result = outcome.result("async_faults", "tencache", rank)
        for told in (attempt, "told_by_the_next_save"):
            if len(outcome.ranks) == 1 or rank == FAILING_RANK:
                assert cause in result[told]["failure"]
                assert any("was not saved" in note for note in result[told]["notes"])
            else:
                assert f"was not saved: rank {FAILING_RANK} " in result[told]["failure"]
            assert result[told]["latest"] == "good"
            assert result[told]["files"] == {}
        assert result["again"]["failure"] == ""
        assert result["again"]["latest"] == "again"
        assert result["again"]["files"] == result["at_once"]["files"] == result["good"]["files"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_while_saves_fail(
    alone: Any, together: Any, alone_async: Any, together_async: Any, ranks: int
) -> None:
    outcome, reference = (alone_async, alone) if ranks == 1 else (together_async, together)
    for rank in outcome.ranks:
        result, expected = (
            outcome.result("async_faults", "tencache", rank),
            reference.result("undisturbed", "tencache", rank),
        )
        assert (result["losses"], result["weights"]) == (expected["losses"], expected["weights"])


@pytest.mark.parametrize(("scenario", "attempt", "cause"), FAILS_ALONE)
def test_a_save_that_cannot_be_right_says_so_and_leaves_the_last_one(
    alone: Any, scenario: str, attempt: str, cause: str
) -> None:
    result = alone.result(scenario, "tencache")
    assert cause in result[attempt]["failure"]
    assert result[attempt]["storage"]
    assert any("was not saved" in note for note in result[attempt]["notes"])
    assert result[attempt]["latest"] == "good"
    assert result[attempt]["files"] == {}


@pytest.mark.parametrize(("scenario", "attempt", "cause"), FAILS)
def test_all_ranks_hear_that_one_could_not_save(together: Any, scenario: str, attempt: str, cause: str) -> None:
    for rank in together.ranks:
        actual = together.result(scenario, "tencache", rank)[attempt]
        assert actual["latest"] == "good"
        assert actual["files"] == {}
        assert actual["seconds"] < 30
        if rank == FAILING_RANK:
            assert cause in actual["failure"]
            assert actual["storage"]
        else:
            assert actual["failure"].startswith(f"CheckpointError: the checkpoint was not saved: rank {FAILING_RANK} ")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_save_over_a_checkpoint_leaves_it_as_it_was(alone: Any, together: Any, ranks: int) -> None:
    result = (alone if ranks == 1 else together).result("damaged", "tencache")
    assert result["eio_over_a_good_one"]["failure"]
    assert len(result["good"]["files"]) == 2 * ranks
    assert result["eio_over_a_good_one"]["files"] == result["good"]["files"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_next_save_is_right_and_training_goes_on(alone: Any, together: Any, ranks: int) -> None:
    outcome = alone if ranks == 1 else together
    for rank in outcome.ranks:
        result, expected = (outcome.result(name, "tencache", rank) for name in ("damaged", "undisturbed"))
        for attempt in ("again", "names_removed"):  # open files outlive their names
            assert result[attempt]["failure"] == ""
            assert result[attempt]["latest"] == attempt
            assert result[attempt]["files"] == result["good"]["files"]
        assert result["losses"] == expected["losses"]
        assert result["weights"] == expected["weights"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_is_durable_on_every_rank_before_latest_moves(alone: Any, together: Any, ranks: int) -> None:
    outcome, above = (alone if ranks == 1 else together), []
    for rank in outcome.ranks:
        events = outcome.result("damaged", "tencache", rank)["events"]
        done = [(what, path) for what, path, _ in events]
        replaced = [path for what, path in done if what == "replace" and path != "latest"]
        assert len(replaced) == 2
        for path in replaced:
            assert done.index(("fsync", f"{path}.partial")) < done.index(("replace", path))
        n_before = max(done.index(("replace", path)) for path in replaced)
        assert ("fsync", "again") in done[n_before:]
        if rank == 0:
            assert done[-2:] == [("replace", "latest"), ("fsync", ".")]
            assert ("fsync", "latest.partial") in done[:n_before]
            del events[-2:]
        assert {latest for *_, latest in events} == {"good"}
        above += [event for event in events if event[:2] == ["fsync", "."]]
    assert above, "a rank has made the folder of the tag"


def test_saving_reads_the_state_once_and_holds_little_of_it(alone: Any) -> None:
    result = alone.result("measured", "tencache")
    assert result["measured"]["failure"] == ""
    state_nbytes = 12 * result["numel"]  # 100 MB
    assert state_nbytes <= result["read_nbytes"] < 1.01 * state_nbytes
    assert result["written_nbytes"] == 0
    assert result["peak_growth_nbytes"] < STAGING_NBYTES


def test_other_checkpoint_engines_and_users_get_copies(alone: Any) -> None:
    result = alone.result("copies", "tencache")
    assert any("frozen_param_fragments" in name for name in result["actual"])
    assert result["actual"] == result["expected"]
    assert any("exp_avg_sq" in name for name in result["outside"])
    assert set(result["outside"].values()) <= set(result["expected"].values())
