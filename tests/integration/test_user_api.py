# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's public functions beside training: the same values and the same training after them as with stock."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tencache_ds.io import BACKENDS
from tencache_ds.observability.trace_file import summarize
from tests.long_cases import marked, wanted
from tests.observability.test_trace_file import assert_nested, check_format

pytestmark = pytest.mark.timeout(300)

PROGRAM = "user_api_cases.py"
COMPARED = (
    "read_state",
    "write_full_state",
    "write_local_state",
    "momentum_of_muon",
    "step_hooks",
    "scheduler_of_torch",
    "gather_before_and_between",
    "masters_of_changed_weights",
    "forward_inside_gathered",
    "gather_everything",
    "gather_what_is_ahead",
    "gathers_that_fail",
    "evaluate_between",
    "evaluate_in_inference_mode",
    "data_loader_workers",
    "two_engines",
    "destroy_one_of_two",
    "train_destroy_train",
    "interrupted_passes",
    "engines_dropped_in_the_loop",
    "hooks_taken_off_and_put_back",
    "copy_of_the_model",
    "memory_runs_out_in_a_pass",
    "modules_called_alone",
    "hooks_of_the_user",
    "weights_frozen_for_a_while",
    "actor_and_critic",
    "two_heads_of_a_frozen_backbone",
    "second_zero_init",
    "parts_of_two_zero_inits",
    "accumulation_by_hand",
    "accumulation_unmanaged",
    "backward_of_the_user",
    "evaluation_without_optimizer",
)
COMPARED_ON_TWO_RANKS = (
    "read_state",
    "write_full_state",
    "write_local_state",
    "momentum_of_muon",
    "gather_before_and_between",
    "masters_of_changed_weights",
    "forward_inside_gathered",
    "gather_everything",
    "gather_what_is_ahead",
    "gathers_that_fail",
    "evaluate_between",
    "train_destroy_train",
    "interrupted_passes",
    "actor_and_critic",
    "parts_of_two_zero_inits",
    "accumulation_unmanaged",
    "evaluation_without_optimizer",
)
SPLIT = (
    "read_state",
    "write_full_state",
    "write_local_state",
    "gather_before_and_between",
    "masters_of_changed_weights",
    "forward_inside_gathered",
)
"""Once more with the weights in host memory, over which master weights on NVMe are split."""
SPLIT_ON_TWO_RANKS = ("write_local_state", "gather_before_and_between")
LONG_ON_TWO_RANKS = {
    "write_full_state", "gather_everything", "evaluate_between", "train_destroy_train", "actor_and_critic",
}  # fmt: skip
"""Without a collective that the others do not have; the local functions are compared there."""

OURS = (
    "gathered_and_not_changed",
    "background_checkpoint",
    "destroy",
    "failed_initialize",
    "dropped_model",
    "stats_and_monitor",
    "read_ahead_across_steps",
    "weights_changed_behind_the_back",
    "shards_on_nvme",
)


def cases(names: Iterable[str]) -> list[tuple[str, dict[str, Any], str]]:
    return [(name, {"scenario": name}, engine) for name in names for engine in ("stock", "tencache")]


def split_cases(names: tuple[str, ...]) -> list[tuple[str, dict[str, Any], str]]:
    return [(f"{name}_split", {"scenario": name, "offload_param": "cpu"}, "tencache") for name in names]


WITH_ACTIVATIONS = (
    "gather_everything",
    "evaluate_between",
    "two_engines",
    "train_destroy_train",
    "interrupted_passes",
    "memory_runs_out_in_a_pass",
    "copy_of_the_model",
    "actor_and_critic",
    "accumulation_unmanaged",
    "backward_of_the_user",
)
LONG_WITH_ACTIVATIONS = {
    "gather_everything", "evaluate_between", "two_engines", "train_destroy_train", "actor_and_critic",
}  # fmt: skip
"""Compared with activations that stay by the same name, and with ones that move in test_activations.py."""


def activation_cases(names: Iterable[str]) -> list[tuple[str, dict[str, Any], str]]:
    on_nvme = {"activations": "on", "activation_min_size": 1024, "activation_memory": 0}
    return [(f"{name}_activations", {"scenario": name, "tencache": on_nvme}, "tencache") for name in names]


@pytest.fixture(scope="module")
def one_rank(harness: Any, pytestconfig: pytest.Config) -> Any:
    ours = [(name, {"scenario": name}, "tencache") for name in OURS]
    moved = activation_cases(wanted(pytestconfig, WITH_ACTIVATIONS, LONG_WITH_ACTIVATIONS))
    cases_here = [*ours, *cases((*COMPARED, "observed")), *split_cases(SPLIT), *moved]
    return harness.run(cases_here, program=PROGRAM, timeout_s=270)


@pytest.fixture(scope="module")
def two_ranks(harness: Any, pytestconfig: pytest.Config) -> Any:
    ours = ("read_ahead_across_steps", "gathered_and_not_changed")
    ours_here = [(name, {"scenario": name}, "tencache") for name in ours]
    names = wanted(pytestconfig, COMPARED_ON_TWO_RANKS, LONG_ON_TWO_RANKS)
    cases_here = [*cases((*names, "observed")), *split_cases(SPLIT_ON_TWO_RANKS), *ours_here]
    return harness.run(cases_here, ranks=2, program=PROGRAM, timeout_s=270)


@pytest.mark.parametrize("name", COMPARED)
def test_as_with_stock(one_rank: Any, name: str) -> None:
    assert one_rank.result(name, "tencache") == one_rank.result(name, "stock")


@pytest.mark.parametrize("name", marked(COMPARED_ON_TWO_RANKS, LONG_ON_TWO_RANKS))
def test_as_with_stock_on_two_ranks(two_ranks: Any, name: str) -> None:
    for rank in two_ranks.ranks:
        assert two_ranks.result(name, "tencache", rank) == two_ranks.result(name, "stock", rank)


def test_a_shard_on_nvme_says_what_to_use_instead(one_rank: Any) -> None:
    result = one_rank.result("shards_on_nvme", "tencache")
    for error in result["errors"]:
        assert error.startswith("TenCacheError: ds_tensor of the weight of shape (512, 512)"), error
        assert "deepspeed.zero.GatheredParameters([param])" in error
    assert (result["shape"], result["dtype"]) == ([512 * 512], "torch.bfloat16")


@pytest.mark.parametrize("name", SPLIT)
def test_as_with_stock_with_split_master_weights(one_rank: Any, name: str) -> None:
    assert one_rank.result(f"{name}_split", "tencache") == one_rank.result(name, "stock")


@pytest.mark.parametrize("name", SPLIT_ON_TWO_RANKS)
def test_as_with_stock_with_split_master_weights_on_two_ranks(two_ranks: Any, name: str) -> None:
    for rank in two_ranks.ranks:
        assert two_ranks.result(f"{name}_split", "tencache", rank) == two_ranks.result(name, "stock", rank)


@pytest.mark.parametrize("name", marked(WITH_ACTIVATIONS, LONG_WITH_ACTIVATIONS))
def test_as_with_stock_with_activations_on_nvme(one_rank: Any, name: str) -> None:
    assert one_rank.result(f"{name}_activations", "tencache") == one_rank.result(name, "stock")


def test_weights_changed_behind_the_back_are_an_error(one_rank: Any) -> None:
    assert "GatheredParameters" in one_rank.result("weights_changed_behind_the_back", "tencache")["refused"]


def test_what_nobody_has_changed_is_not_written(one_rank: Any, two_ranks: Any) -> None:
    for outcome in (one_rank, two_ranks):
        for rank in outcome.ranks:
            seen = outcome.result("gathered_and_not_changed", "tencache", rank)
            changed = seen["shard_nbytes"] if rank == outcome.ranks[-1] else 0
            assert seen["written"] == [0, 0, changed, 0]


def test_step_hooks_are_called_for_every_sub_group(one_rank: Any) -> None:
    calls = [call if isinstance(call, str) else call[0] for call in one_rank.result("step_hooks", "tencache")["hooks"]]
    assert {"before", "after", "global"} == set(calls)
    assert calls.count("before") == calls.count("after") == calls.count("global")


def test_a_scheduler_of_torch_sees_the_steps(one_rank: Any) -> None:
    assert one_rank.result("scheduler_of_torch", "tencache")["warnings"] == []


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_no_step_waits_for_a_read_that_could_have_been_asked_for_before(
    ranks: str, request: pytest.FixtureRequest
) -> None:
    """Not even at its start, and not at the turn from forward to backward: the first two steps record the order."""
    outcome = request.getfixturevalue(ranks)
    for rank in outcome.ranks:
        for model, steps in outcome.result("read_ahead_across_steps", "tencache", rank).items():
            for step in steps[2:]:
                assert step["accesses"]["prefetched"] > 0, model
                assert step["accesses"]["demand"] == 0, (model, step)
                assert step["events"] == {"divergence": 0, "overflow_buffer": 0, "discarded_read": 0}


def test_beside_tencache_a_stock_engine_is_stock(one_rank: Any) -> None:
    assert one_rank.result("two_engines", "tencache")["class_of_stock"] == "DeepSpeedZeroOptimizer_Stage3"


def test_a_checkpoint_written_in_the_background_keeps_its_values(one_rank: Any) -> None:
    seen = one_rank.result("background_checkpoint", "tencache")
    assert seen["after"] == seen["before"]
    assert seen["later"] != seen["before"]


@pytest.mark.parametrize("place", ["NVMe", "RAM", "interrupted"])
def test_destroy_ends_what_is_the_engines_and_the_end_of_the_model_the_rest(one_rank: Any, place: str) -> None:
    seen = one_rank.result("destroy", "tencache")[place]
    files, threads = zip(seen["before"], seen["during"], seen["after"], strict=True)
    assert {name.split("-")[0] for name in set(files[1]) - set(files[0])} >= {"optimizer"}
    assert {name.split("-")[0] for name in set(files[2]) - set(files[0])} == (set() if place == "RAM" else {"weights"})
    assert len(threads[0]) < len(threads[1])
    assert (threads[2] == threads[0]) is (place == "RAM")
    assert min(seen["memory"]) > 0
    assert seen["memory_after"] == [0, 0]
    assert seen["settings"][1] == seen["settings"][0]
    assert seen["updates_on"] > seen["settings"][0]["update threads"]
    assert len(seen["errors"]) == 3
    for error in seen["errors"]:
        assert error.startswith("TenCacheError: this DeepSpeed engine and its optimizer state were destroyed")
    assert seen["gone"]
    assert seen["views"], "memory that a user still looks at has changed"


def test_after_a_failed_initialize_the_model_can_have_another_engine(one_rank: Any) -> None:
    seen = one_rank.result("failed_initialize", "tencache")
    too_small, no_key, no_section, twice = seen["errors"]
    assert "staging_memory" in too_small
    assert no_key.startswith('ConfigError: this model was made with "offload_engine": "tencache"')
    assert no_section.startswith('ConfigError: this model was created with "offload_param"')
    assert twice.startswith("TenCacheError: the parameter of shape (512, 512)")
    assert "destroy()" in twice
    assert seen["later"] == seen["weights"]
    assert len(set(seen["losses"])) == 2


def test_a_dropped_model_takes_its_files_and_threads_along(one_rank: Any) -> None:
    seen = one_rank.result("dropped_model", "tencache")
    assert seen["during"] != seen["before"]
    assert seen["after"] == seen["before"]


def test_stats(one_rank: Any) -> None:
    seen = one_rank.result("stats_and_monitor", "tencache")
    before, after = seen["before"], seen["after"]
    assert before["last_step"] is None
    assert before["total"]["step"] == 0
    assert after["total"]["step"] == after["last_step"]["step"] == 4
    step = after["last_step"]
    assert 0 < step["update_seconds"] < step["seconds"]
    # 12 bytes of state and 2 of weights each way and once more for backward, and the padding of chunks to 4 KiB.
    assert 13 * seen["numel"] < step["nbytes"]["nvme_read"] < 18 * seen["numel"]
    assert 13 * seen["numel"] < step["nbytes"]["nvme_write"] < 16 * seen["numel"]
    assert step["nbytes"]["d2h"] == 2 * seen["numel"]
    assert sum(step["accesses"].values()) > 0
    assert step["events"] == {"divergence": 0, "overflow_buffer": 0, "discarded_read": 0}
    assert after["stored_nbytes"] >= 14 * seen["numel"] * 0.99
    assert 0 < after["staging_peak_nbytes"] <= after["staging_nbytes"]
    assert after["pinned_nbytes"] <= after["pinned_peak_nbytes"]
    assert after["io_backend"] in BACKENDS
    assert "on NVMe" in seen["description"]
    assert "offload_engine" in seen["error_for_stock"]


def test_monitor_gets_every_figure_of_a_step(one_rank: Any) -> None:
    files = one_rank.result("stats_and_monitor", "tencache")["csv"]
    for name in ("step_seconds", "bytes_nvme_read", "bytes_nvme_write", "stall_weight_read", "place_ram_nbytes"):
        # At the places of DeepSpeed's own events.
        assert files[f"TenCache_{name}.csv"] == files["Train_Samples_lr.csv"]


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_a_running_job_is_traced_watched_and_planned(ranks: str, request: pytest.FixtureRequest) -> None:
    outcome = request.getfixturevalue(ranks)
    for rank in outcome.ranks:
        ours, stock = (outcome.result("observed", engine, rank)["losses"] for engine in ("tencache", "stock"))
        assert ours == stock[: len(ours)], "a trace has changed the training"
    seen = outcome.result("observed", "tencache")
    printed = [seen[f"{command} printed"] for command in ("trace", "watch", "plan")]
    assert seen["status"] == [0, 0, 0], printed
    n_ranks = len(outcome.ranks)
    title = "rank 0 of 1" if n_ranks == 1 else "ranks 0-1 of 2"
    assert f"recording 2 steps of {title}" in seen["trace printed"]
    assert title in seen["watch printed"]
    assert "bound by" in seen["watch printed"]
    assert title in seen["plan printed"]
    assert "a step takes" in seen["plan printed"]
    assert "RAM per rank beyond what the job has now" in seen["plan printed"]
    assert "optimizer state, 0.0" in Path(seen["plan drawn"]).read_text(), "of a model this small"
    contents = json.loads(Path(seen["trace"]).read_text())
    for track in check_format(contents).values():
        assert_nested(track)
    summaries = summarize(contents)
    assert [each.rank for each in summaries] == list(outcome.ranks)
    headers = contents["otherData"]["tencache"]["ranks"]
    assert len({tuple(step["step"] for step in header["steps"]) for header in headers}) == 1
    for each, header in zip(summaries, headers, strict=True):
        assert each.n_steps == 2
        assert each.n_dropped == 0
        measured = sum(step["record"]["seconds"] for step in header["steps"]) / 2
        assert each.step_seconds == pytest.approx(measured, rel=0.02)
        assert sum(each.seconds.values()) == pytest.approx(each.step_seconds)
        moved = {use.link: use.nbytes for use in each.links}
        for link, key in (("NVMe read", "nvme_read"), ("NVMe write", "nvme_write")):
            counted = sum(step["record"]["nbytes"][key] for step in header["steps"]) / 2
            assert moved[link] == pytest.approx(counted, rel=0.25), "requests of other steps are cut off at the ends"
        names = {(e["cat"], e["name"]) for e in contents["traceEvents"] if e["pid"] == each.rank and e["ph"] == "X"}
        assert names >= {
            ("phase", "forward"), ("phase", "backward"), ("phase", "optimizer step"), ("fetch", "tencache::fetch"),
            ("update", "tencache::update::chunk"), ("nvme", "tencache::nvme::read"),
            ("copy", "tencache::copy::gradient"),
        }  # fmt: skip
    whats = {event["args"].get("what", "") for event in contents["traceEvents"] if event["ph"] == "X"}
    assert any(what.startswith("layers.0.weight") for what in whats), "weights are not shown by their names"


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_a_trace_from_python(ranks: str, request: pytest.FixtureRequest) -> None:
    outcome = request.getfixturevalue(ranks)
    for rank in outcome.ranks:
        seen = outcome.result("observed", "tencache", rank)
        (summary,) = summarize(json.loads(Path(seen["own trace"]).read_text()))
        assert (summary.rank, summary.n_steps) == (rank, 1)
        assert seen["error for two traces"].startswith("TenCacheError: another trace")
        assert "/no/such/folder/b.json cannot be written" in seen["error for no folder"]
        assert seen["channel threads"] == [["tencache-channel"], []], "nothing answers once the engine is destroyed"
