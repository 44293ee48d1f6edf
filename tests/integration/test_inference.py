# SPDX-License-Identifier: Apache-2.0
"""Generation without an optimizer: the same tokens, losses and weights as stock CPU offload, wherever the weights are.

Without a GPU ordinary memory stands in for its own: see ``inference_cases.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from tencache_ds.placement.gpu_policy import LEAST_HEADROOM_NBYTES
from tests.long_cases import marked, wanted

pytestmark = pytest.mark.timeout(400)

PROGRAM = "inference_cases.py"
TWICE = ["generate", "generate_from_a_long_prompt", "generate"]
SHRINKS = ["generate", "need_memory", "generate_from_a_long_prompt", "need_no_memory", "generate", "generate", "save"]
CHANGES = ["generate", "change_weights", "generate", "save", "generate"]
UNUSUAL = ["generate", "run_the_inner_model", "empty_cache", "run_the_inner_model", "generate", "differentiate",
           "generate_without_hooks", "generate", "change_weights", "run_the_inner_model", "save"]  # fmt: skip
BESIDE = ["generate", "train_beside", "generate", "train_no_longer", "generate", "generate"]
INTERRUPTED = ["generate", "interrupt", "generate", "copy_the_model", "search_beams", "interrupt", "generate",
               "generate", "save"]  # fmt: skip
COMPILED = ["compile_the_model", "generate", "need_memory", "generate", "need_no_memory", "generate"]
HANDED_BACK = ["generate", "hand_back", "generate", "take_again", "generate", "hand_back", "save", "generate"]
RAM = {"offload_param": "cpu"}

CASES: dict[str, dict[str, Any]] = {
    "everything": {"actions": TWICE},
    "everything_ram": {"actions": TWICE} | RAM,
    # The shards of the llama take 4.4 MiB.
    "part": {"actions": TWICE, "device_memory": "2MiB"},
    "part_ram": {"actions": TWICE, "device_memory": "2MiB"} | RAM,
    "three_places": {"actions": TWICE, "device_memory": "1MiB", "tencache": {"host_memory": "2MiB"}},
    "nothing": {"actions": TWICE, "device_memory": 0},
    "memory_runs_short": {"actions": SHRINKS},
    "memory_runs_short_ram": {"actions": SHRINKS} | RAM,
    "weights_change": {"actions": CHANGES},
    "weights_change_ram": {"actions": CHANGES} | RAM,
    "weights_change_part": {"actions": CHANGES, "device_memory": "2MiB"},
    "unusual": {"actions": UNUSUAL},
    "unusual_ram": {"actions": UNUSUAL} | RAM,
    "unusual_part": {"actions": UNUSUAL, "device_memory": "2MiB"},
    "unusual_nothing": {"actions": UNUSUAL, "device_memory": 0},
    "interrupted": {"actions": INTERRUPTED},
    "interrupted_ram": {"actions": INTERRUPTED} | RAM,
    "interrupted_part": {"actions": INTERRUPTED, "device_memory": "2MiB"},
    "interrupted_nothing": {"actions": INTERRUPTED, "device_memory": 0},
    "beside_training": {"actions": BESIDE},
    "beside_training_part": {"actions": BESIDE, "device_memory": "2MiB"} | RAM,
    "after_training_began": {"actions": ["train_beside", "generate", "train_no_longer", "generate", "generate"]},
    "gathered_first": {"actions": ["generate_with_gathered_weights", "generate", "generate"]},
    "gathered_later": {"actions": ["generate", "generate_with_gathered_weights", "generate", "save"]} | RAM,
    "compiled": {"actions": COMPILED},
    "compiled_nothing": {"actions": COMPILED, "device_memory": 0},
    "handed_back": {"actions": HANDED_BACK},
    "handed_back_ram": {"actions": HANDED_BACK} | RAM,
    "destroyed": {"actions": ["generate", "destroy", "read", "initialize", "generate", "change_weights", "save"]},
    "destroyed_ram": {"actions": ["generate", "destroy", "read", "initialize", "generate"]} | RAM,
}
TWO_RANKS = ("everything", "everything_ram", "part", "three_places", "memory_runs_short_ram", "weights_change",
             "gathered_first", "handed_back", "destroyed", "interrupted")  # fmt: skip
LONG = {
    "everything_ram", "memory_runs_short", "weights_change_ram", "weights_change_part", "unusual_ram",
    "unusual_nothing", "interrupted", "interrupted_ram", "beside_training_part", "compiled_nothing", "destroyed_ram",
}  # fmt: skip
"""Each of these sequences is also run with the weights in another place, and each place with another sequence."""
LONG_ON_TWO_RANKS = {"everything", "everything_ram", "memory_runs_short_ram", "destroyed"}
ON_DEVICE = 3 * 2**20


def run(harness: Any, names: Any, ranks: int) -> Any:
    stock: dict[str, tuple[str, dict[str, Any], str]] = {}
    for name in names:  # cases that differ in TenCache's keys only share their oracle
        stock.setdefault(str(CASES[name]["actions"]), (name, CASES[name], "stock"))
    ours = [(name, CASES[name], "tencache") for name in names]
    outcome = harness.run([*stock.values(), *ours], ranks=ranks, program=PROGRAM)
    return outcome, {actions: name for actions, (name, _, _) in stock.items()}


@pytest.fixture(scope="module")
def alone(harness: Any, pytestconfig: pytest.Config) -> Any:
    return run(harness, wanted(pytestconfig, CASES, LONG), 1)


@pytest.fixture(scope="module")
def together(harness: Any, pytestconfig: pytest.Config) -> Any:
    return run(harness, wanted(pytestconfig, TWO_RANKS, LONG_ON_TWO_RANKS), 2)


def equal(ran: Any, name: str) -> None:
    outcome, oracles = ran
    for rank in outcome.ranks:
        expected = outcome.result(oracles[str(CASES[name]["actions"])], "stock", rank)
        found = outcome.result(name, "tencache", rank)
        assert found["seen"] == expected["seen"]
        assert found["seen"]


@pytest.mark.parametrize("name", marked(CASES, LONG))
def test_equal_to_stock(alone: Any, name: str) -> None:
    equal(alone, name)


@pytest.mark.parametrize("name", marked(TWO_RANKS, LONG_ON_TWO_RANKS))
def test_equal_to_stock_on_two_ranks(together: Any, name: str) -> None:
    equal(together, name)


@pytest.mark.parametrize("name", marked(["everything", "everything_ram"], LONG))
def test_all_weights_go_to_gpu_memory(alone: Any, name: str) -> None:
    assert min(alone[0].result(name, "tencache")["gpu_weight_nbytes"]) > ON_DEVICE


@pytest.mark.parametrize("name", ["part", "part_ram"])
def test_as_many_as_the_user_allows(alone: Any, name: str) -> None:
    nbytes = alone[0].result(name, "tencache")["gpu_weight_nbytes"]
    assert 2**20 < min(nbytes) <= max(nbytes) <= 2 * 2**20


@pytest.mark.parametrize("name", marked(["memory_runs_short", "memory_runs_short_ram"], LONG))
def test_they_leave_when_memory_is_needed_and_come_back(alone: Any, name: str) -> None:
    result = alone[0].result(name, "tencache")
    nbytes = result["gpu_weight_nbytes"]
    assert nbytes[0] > ON_DEVICE
    assert nbytes[0] < LEAST_HEADROOM_NBYTES // 2 - result["available_nbytes"], "more is missing than they take"
    assert nbytes[2] == 0, "no weight is in use when a pass begins: all of them leave"
    assert nbytes[-1] == nbytes[0]


@pytest.mark.parametrize("name", ["handed_back", "handed_back_ram"])
def test_they_stay_out_while_memory_is_handed_back(alone: Any, name: str) -> None:
    everything, out, waiting, back, taken, *again = alone[0].result(name, "tencache")["gpu_weight_nbytes"]
    assert (out, waiting, taken) == (0, 0, back)
    assert back == everything > 0
    assert again == [0, 0, 0]


def test_they_keep_out_of_memory_that_another_engine_may_need(alone: Any) -> None:
    nbytes = {
        name: alone[0].result(name, "tencache")["gpu_weight_nbytes"]
        for name in ("beside_training", "after_training_began")
    }
    before, _, meanwhile, _, _, after = nbytes["beside_training"]
    assert before > ON_DEVICE
    assert meanwhile == 0
    assert after == before
    assert nbytes["after_training_began"][:2] == [0, 0]
    assert nbytes["after_training_began"][-1] > ON_DEVICE


@pytest.mark.long
def test_they_stay_in_memory_that_the_user_has_named(alone: Any) -> None:
    assert min(alone[0].result("beside_training_part", "tencache")["gpu_weight_nbytes"]) > 2**20


def test_weights_that_a_user_has_gathered_do_not_move(alone: Any) -> None:
    nbytes = alone[0].result("gathered_first", "tencache")["gpu_weight_nbytes"]
    assert nbytes[0] == 0
    assert nbytes[-1] > ON_DEVICE


def test_the_comparison_means_something(alone: Any) -> None:
    seen = alone[0].result("weights_change", "stock")["seen"]
    assert seen[0][0] != seen[1][0]
