# SPDX-License-Identifier: Apache-2.0
"""transformers, accelerate and PEFT with the engine line give what they give with DeepSpeed's CPU offload."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)

PROGRAM = "hugging_face_cases.py"
RESUMED = ("trainer_resumes", "trainer_resumes_from_stock")
ALONE = (
    "trainer_trains", *RESUMED, "trainer_takes_the_best_model", "trainer_only_predicts",
    "trainer_trains_twice", "from_pretrained_and_generate", "accelerate_saves_and_loads", "accelerate_config_file",
    "accelerate_two_plugins", "lora_trains_and_merges",
)  # fmt: skip
TOGETHER = ("trainer_trains", "trainer_resumes", "accelerate_saves_and_loads", "lora_trains_and_merges")


def cases(names: tuple[str, ...]) -> list[tuple[str, dict[str, Any], str]]:
    # Stock does not resume exactly, since its Adam recomputes the powers of its betas: a resumed run is compared with
    # stock's run that never stopped.
    return [
        (name, {"scenario": name}, engine)
        for name in names
        for engine in ("stock", "tencache")
        if not (name in RESUMED and engine == "stock")
    ]


@pytest.fixture(scope="module")
def alone(harness: Any) -> Any:
    return harness.run(cases(ALONE), program=PROGRAM, timeout_s=280)


@pytest.fixture(scope="module")
def together(harness: Any) -> Any:
    return harness.run(cases(TOGETHER), ranks=2, program=PROGRAM, timeout_s=280)


def equal(outcome: Any, name: str) -> None:
    for rank in outcome.ranks:
        found = outcome.result(name, "tencache", rank)
        expected = outcome.result(name, "stock", rank)
        assert found.keys() == expected.keys()
        for key in expected.keys() - {"facts"}:
            assert found[key] == expected[key], key


@pytest.mark.parametrize("name", [name for name in ALONE if name not in RESUMED])
def test_equal_to_stock(alone: Any, name: str) -> None:
    equal(alone, name)


@pytest.mark.parametrize("name", [name for name in TOGETHER if name not in RESUMED])
def test_equal_to_stock_on_two_ranks(together: Any, name: str) -> None:
    equal(together, name)


@pytest.mark.parametrize("name", [name for name in ALONE if name not in (*RESUMED, "trainer_only_predicts")])
def test_the_comparison_means_something(alone: Any, name: str) -> None:
    losses = alone.result(name, "stock")["losses"]
    assert len(set(losses)) > len(losses) // 3
    assert all(float.fromhex(loss) > 0 for loss in losses)


@pytest.mark.parametrize(("name", "ranks"), [*((name, 1) for name in RESUMED), ("trainer_resumes", 2)])
def test_a_resumed_trainer_ends_as_if_it_had_never_stopped(alone: Any, together: Any, name: str, ranks: int) -> None:
    outcome = alone if ranks == 1 else together
    for rank in outcome.ranks:
        expected = outcome.result("trainer_trains", "stock", rank)
        found = outcome.result(name, "tencache", rank)
        assert found["losses"] == expected["losses"][len(expected["losses"]) // 2 :]
        for key in expected.keys() - {"losses", "facts"}:
            assert found[key] == expected[key], key


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_saved_model_has_the_trained_weights(alone: Any, together: Any, ranks: int) -> None:
    outcome = alone if ranks == 1 else together
    for name in ("trainer_trains", "accelerate_saves_and_loads"):
        seen = outcome.result(name, "tencache")
        assert seen["saved"]
        assert seen["saved"] == {name: seen["weights"][name] for name in seen["saved"]}


def test_the_best_model_is_the_first_one(alone: Any) -> None:
    seen = alone.result("trainer_takes_the_best_model", "tencache")
    assert seen["best"] == "checkpoint-1"
    assert seen["evaluation"][0]["eval_loss"] == seen["log"][1]["eval_loss"]


def test_weights_are_loaded_under_zero_3(alone: Any) -> None:
    seen = alone.result("from_pretrained_and_generate", "tencache")
    assert seen["expected"]
    assert seen["loaded"] == seen["expected"]


def test_a_frozen_base_is_read_from_nvme_and_never_written(alone: Any) -> None:
    facts = alone.result("lora_trains_and_merges", "tencache")["facts"]
    assert facts["read_nbytes"] > facts["base_nbytes"]
    assert facts["written_nbytes"] < facts["base_nbytes"] // 8
