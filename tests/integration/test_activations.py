# SPDX-License-Identifier: Apache-2.0
"""Training whose activations are moved to RAM and NVMe is bit for bit the training that keeps them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.long_cases import marked, wanted

pytestmark = pytest.mark.timeout(400)

PROGRAM = "activation_cases.py"
RAM = {"activation_memory": "1GiB"}
NVME = {"activation_memory": 0}
BOTH = {"activation_memory": "100KiB"}

TRAINING: dict[str, dict[str, Any]] = {
    "llama": {"model": "llama", "places": BOTH, "weights": True},
    "llama_reentrant": {"model": "llama_reentrant", "places": NVME, "weights": True, "steps": 8},
    "llama_nonreentrant": {"model": "llama_nonreentrant", "places": RAM, "weights": True, "steps": 8},
    "dropout": {"model": "residual", "places": NVME},
    "dropout_reentrant": {"model": "residual_reentrant", "places": RAM},
    "dropout_nonreentrant": {"model": "residual_nonreentrant", "places": NVME},
    "deepspeed_checkpointing": {"model": "residual_deepspeed", "places": NVME},
    "transforms": {"model": "transforms", "places": NVME, "steps": 6},
    "transforms_reentrant": {"model": "transforms_reentrant", "places": RAM, "steps": 6},
    "accumulation": {"model": "residual", "accumulation": 3, "places": BOTH, "steps": 8},
    "random_skip": {"model": "random_skip", "places": NVME},
    "lora": {"model": "llama", "lora": True, "places": NVME, "steps": 8},
    "moe_leaf": {"model": "moe_leaf", "places": RAM, "steps": 8},
    "external": {"model": "external", "places": NVME, "steps": 8},
    "weights_in_ram": {
        "model": "residual",
        "offload_param": "cpu",
        "offload_optimizer": "cpu",
        "places": RAM,
        "steps": 8,
    },
}
ON_TWO_RANKS = ("llama", "llama_nonreentrant", "dropout_reentrant", "accumulation")
LONG = {"transforms", "lora"}
"""``transforms_reentrant`` has the transforms too, inside and outside of a checkpoint."""
LONG_ON_TWO_RANKS = {"llama", "dropout_reentrant"}

ACTS: dict[str, dict[str, Any]] = {
    act: {"model": "residual", "act": act, "places": NVME}
    for act in ("exception", "no_backward", "eval", "own_hooks", "retain_graph", "inplace", "memory")
}
SMALL, LARGE = 128, 512
COUNTED: dict[str, dict[str, Any]] = {
    "ample": {"memory": 4, "places": RAM},
    "little": {"memory": 0.7, "places": RAM},
    "little_and_nvme": {"memory": 0.7, "places": NVME},
}
"""With ``"auto"``: in mid-run an engine is built anew, and batches become larger before and after that."""
for counted in COUNTED.values():
    counted |= {"model": "residual", "accumulation": 2, "rows": [SMALL] * 4 + [LARGE] * 3 + [SMALL] * 5 + [LARGE] * 2}
FAULTS: dict[str, dict[str, Any]] = {
    operation: {"model": "residual", "steps": 5, "fault": f"kind=eio,op={operation},match=activation", "places": NVME}
    for operation in ("read", "write")
}


def both(cases: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any], str]]:
    return [(name, case, engine) for name, case in cases.items() for engine in ("off", "on")]


@pytest.fixture(scope="module")
def one_rank(harness: Any, pytestconfig: pytest.Config) -> Any:
    cases = both({name: TRAINING[name] for name in wanted(pytestconfig, TRAINING, LONG)} | ACTS)
    faults = [(name, case, "on") for name, case in FAULTS.items()]
    counted = [("counted", COUNTED["little"], "off"), ("counted", COUNTED["little"], "short")]
    counted += [(name, case, "auto") for name, case in COUNTED.items()]
    return harness.run([*cases, *faults, *counted], program=PROGRAM, timeout_s=380)


@pytest.fixture(scope="module")
def two_ranks(harness: Any, pytestconfig: pytest.Config) -> Any:
    counted = [("counted", COUNTED["little"], "off"), ("little", COUNTED["little"], "auto")]
    cases = both({name: TRAINING[name] for name in wanted(pytestconfig, ON_TWO_RANKS, LONG_ON_TWO_RANKS)})
    return harness.run([*cases, *counted], ranks=2, program=PROGRAM, timeout_s=380)


def assert_same(outcome: Any, name: str) -> dict[str, Any]:
    for rank in outcome.ranks:
        off, on = (outcome.result(name, engine, rank) for engine in ("off", "on"))
        assert on["losses"] == off["losses"]
        assert len(set(off["losses"])) > 1, "the case does not train"
        assert on.get("weights") == off.get("weights")
        assert on["live_nbytes"] == 0
        assert off["stats"]["host_activation_nbytes"] == off["stats"]["nvme_activation_nbytes"] == 0
    return dict(on["stats"])


@pytest.mark.parametrize("name", marked(TRAINING, LONG))
def test_losses_are_the_same(one_rank, name):
    stats, places = assert_same(one_rank, name), TRAINING[name]["places"]
    assert (stats["host_activation_nbytes"] > 0) == (places is not NVME)
    assert (stats["nvme_activation_nbytes"] > 0) == (places is not RAM)


@pytest.mark.parametrize("name", marked(ON_TWO_RANKS, LONG_ON_TWO_RANKS))
def test_losses_are_the_same_on_two_ranks(two_ranks, name):
    assert_same(two_ranks, name)


@pytest.mark.parametrize("act", [act for act in ACTS if act not in ("inplace", "memory")])
def test_training_goes_on_after(one_rank, act):
    assert_same(one_rank, act)
    off, on = (one_rank.result(act, engine)["act"] for engine in ("off", "on"))
    assert off.items() <= on.items()


def test_a_change_in_place_is_an_error_in_both(one_rank):
    off, on = (one_rank.result("inplace", engine)["act"] for engine in ("off", "on"))
    text = "one of the variables needed for gradient computation has been modified by an inplace operation"
    assert text in off["inplace"]
    assert text in on["inplace"]
    assert (off["ours"], on["ours"]) == (False, True)


def test_the_memory_held_between_forward_and_backward_falls_by_what_is_moved(one_rank):
    assert_same(one_rank, "memory")
    off, on = (one_rank.result("memory", engine)["act"] for engine in ("off", "on"))
    moved_nbytes = on["figures"]["host_nbytes"] + on["figures"]["nvme_nbytes"]
    # Of each dropout, a CPU saves a mask in the type of its input, and a GPU one of single bytes.
    assert moved_nbytes > 4 * on["figures"]["kept_nbytes"]
    assert off["alive_nbytes"] - on["alive_nbytes"] == moved_nbytes


def assert_auto_trains(outcome: Any, name: str) -> dict[str, Any]:
    for rank in outcome.ranks:
        off, auto = outcome.result("counted", "off", rank), outcome.result(name, "auto", rank)
        assert "out_of_memory" not in auto
        assert auto["losses"] == off["losses"]
        assert auto["weights"] == off["weights"]
        assert auto["live_nbytes"] == 0
    return dict(auto)


def moved_nbytes(auto: dict[str, Any]) -> list[int]:
    return [figures["host_nbytes"] + figures["nvme_nbytes"] for figures in auto["figures"]]


def test_with_ample_memory_hooks_are_there_only_while_something_new_is_recorded(one_rank):
    auto = assert_auto_trains(one_rank, "ample")
    assert not any(moved_nbytes(auto))
    # In the third step, a forward that failed counts to the pass after it; in the eighth, a new engine begins.
    assert [step for step, calls in enumerate(auto["calls"]) if calls] == [0, 2, 4, 7, 12]
    assert auto["stats"]["activation_placement"].startswith("activations stay in GPU memory from now on")


@pytest.mark.parametrize("name", ["little", "little_and_nvme"])
def test_what_does_not_fit_trains(one_rank, name):
    assert "out_of_memory" in one_rank.result("counted", "short")
    auto = assert_auto_trains(one_rank, name)
    rows, moved = COUNTED[name]["rows"], moved_nbytes(auto)
    assert all(moved[step] > 0 for step, each in enumerate(rows) if each == LARGE)
    assert not any(moved[step] for step, each in enumerate(rows) if each == SMALL)
    assert auto["calls"][1] == auto["calls"][3] == 0
    assert auto["stats"]["activation_placement"].startswith("activations are moved from now on")


def test_where_memory_runs_out_without_moving_the_log_says_what_helps(one_rank):
    assert one_rank.finished.log.count('trains with "tencache": {"activations": "auto"}') == 1  # in the case "short"


def test_what_does_not_fit_trains_on_two_ranks(two_ranks):
    assert any(moved_nbytes(assert_auto_trains(two_ranks, "little")))


@pytest.mark.parametrize("operation", FAULTS)
def test_a_failure_of_storage_names_the_activation(one_rank, operation):
    result = one_rank.result(operation, "on")
    assert f"{operation} of activation " in result["storage_error"]
    assert "Input/output error" in result["storage_error"]
