# SPDX-License-Identifier: Apache-2.0
"""transformers, accelerate, PEFT and TRL with the engine line give what they give with DeepSpeed's CPU offload."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest

from tests.long_cases import marked, wanted

pytestmark = pytest.mark.timeout(500)

PROGRAM = "hugging_face_program.py"
INFERENCE = ("trainer_only_predicts", "trainer_predicts_from_memory")
RESUMED = ("trainer_resumes", "trainer_resumes_from_stock")
GRPO = ("grpo_generates", "grpo_generates_ungathered")
MIXED = ("lora_of_every_linear", "lora_of_queries", "fp32_head")
"""With parts in fp32 that were added to a partitioned model in bfloat16."""
TRL = ("sft_trains", "dpo_with_a_reference", *GRPO)
ALONE = (
    "trainer_trains", *RESUMED, "trainer_takes_the_best_model", *INFERENCE,
    "trainer_trains_twice", "trainer_trains_in_8_bits", "from_pretrained_and_generate", "accelerate_saves_and_loads",
    "accelerate_config_file", "accelerate_two_plugins", "accelerate_finds_a_batch_size",
    "accelerate_with_spawned_workers", "lora_trains_and_merges", *MIXED, *TRL,
)  # fmt: skip
TOGETHER = (
    "trainer_trains", "trainer_resumes", "accelerate_saves_and_loads", "lora_trains_and_merges", *MIXED, *TRL,
)  # fmt: skip
IN_GPU_MEMORY = (
    "trainer_takes_the_best_model", "trainer_trains_twice", "from_pretrained_and_generate",
    "accelerate_saves_and_loads", "accelerate_finds_a_batch_size", "lora_trains_and_merges", "lora_of_every_linear",
    *TRL,
)  # fmt: skip
LONG_TOGETHER = {"trainer_resumes", *MIXED, "dpo_with_a_reference", "grpo_generates_ungathered"}
LONG_IN_GPU_MEMORY = {
    "trainer_takes_the_best_model", "accelerate_saves_and_loads", "accelerate_finds_a_batch_size",
    "from_pretrained_and_generate", "lora_of_every_linear", "sft_trains", "grpo_generates_ungathered",
}  # fmt: skip
"""The libraries do the same wherever weights are: what they ask of the places is in test_gpu_memory.py."""
COMPARED = [name for name in ALONE if name not in RESUMED]


def cases(names: Iterable[str]) -> list[tuple[str, dict[str, Any], str]]:
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
    return harness.run(cases(ALONE), program=PROGRAM, timeout_s=480)


@pytest.fixture(scope="module")
def together(harness: Any, pytestconfig: pytest.Config) -> Any:
    names = wanted(pytestconfig, TOGETHER, LONG_TOGETHER)
    return harness.run(cases(names), ranks=2, program=PROGRAM, timeout_s=480)


@pytest.fixture(scope="module")
def in_gpu_memory(harness: Any, pytestconfig: pytest.Config) -> Any:
    names = wanted(pytestconfig, IN_GPU_MEMORY, LONG_IN_GPU_MEMORY)
    return harness.run(cases(names), program="hugging_face_gpu_program.py", timeout_s=480)


def equal(outcome: Any, name: str) -> None:
    for rank in outcome.ranks:
        result = outcome.result(name, "tencache", rank)
        expected = outcome.result(name, "stock", rank)
        assert result.keys() == expected.keys()
        for key in expected.keys() - {"facts"}:
            assert result[key] == expected[key], key


@pytest.mark.parametrize("name", COMPARED)
def test_equal_to_stock(alone: Any, name: str) -> None:
    equal(alone, name)


@pytest.mark.parametrize("name", marked([name for name in TOGETHER if name in COMPARED], LONG_TOGETHER))
def test_equal_to_stock_on_two_ranks(together: Any, name: str) -> None:
    equal(together, name)


@pytest.mark.parametrize("name", marked(IN_GPU_MEMORY, LONG_IN_GPU_MEMORY))
def test_equal_to_stock_in_gpu_memory(in_gpu_memory: Any, name: str) -> None:
    equal(in_gpu_memory, name)


def test_that_was_in_gpu_memory(in_gpu_memory: Any, pytestconfig: pytest.Config) -> None:
    names = wanted(pytestconfig, IN_GPU_MEMORY, LONG_IN_GPU_MEMORY)
    facts = {name: in_gpu_memory.result(name, "tencache")["facts"] for name in names}
    in_use = {name for name, fact in facts.items() if fact.get("gpu_weight_nbytes", 0) > 0}
    assert in_use >= {"trainer_trains_twice", "lora_trains_and_merges", *TRL} & {*names}
    without_hooks = {name for name, fact in facts.items() if fact.get("modules_without_hooks", 0) > 20}
    assert without_hooks >= {"lora_trains_and_merges", "sft_trains", "dpo_with_a_reference"} & {*names}


@pytest.mark.parametrize("name", [name for name in COMPARED if name not in INFERENCE])
def test_the_comparison_means_something(alone: Any, name: str) -> None:
    losses = alone.result(name, "stock")["losses"]
    assert len(set(losses)) > len(losses) // 3
    if name not in GRPO:  # whose loss is the difference to an average
        assert all(float.fromhex(loss) > 0 for loss in losses)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [*((name, 1) for name in RESUMED), pytest.param("trainer_resumes", 2, marks=pytest.mark.long)],
)
def test_a_resumed_trainer_ends_as_if_it_had_never_stopped(alone: Any, together: Any, name: str, ranks: int) -> None:
    outcome = alone if ranks == 1 else together
    for rank in outcome.ranks:
        expected = outcome.result("trainer_trains", "stock", rank)
        result = outcome.result(name, "tencache", rank)
        assert result["losses"] == expected["losses"][len(expected["losses"]) // 2 :]
        for key in expected.keys() - {"losses", "facts"}:
            assert result[key] == expected[key], key


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


@pytest.mark.parametrize("name", MIXED)
def test_parts_of_another_dtype_are_in_the_tier(alone: Any, name: str) -> None:
    assert alone.result(name, "tencache")["facts"]["trained in the tier"] >= 1


@pytest.mark.parametrize("name", marked(MIXED, LONG_TOGETHER))
def test_parts_of_another_dtype_are_in_the_tier_of_two_ranks(together: Any, name: str) -> None:
    assert together.result(name, "tencache")["facts"]["trained in the tier"] >= 1


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_rewards_differ_and_the_model_leaves_its_reference(alone: Any, together: Any, ranks: int) -> None:
    outcome = alone if ranks == 1 else together
    log, other = (outcome.result(name, "tencache")["log"] for name in GRPO)
    assert log == other, "gathering the weights does not change the tokens"
    assert all(entry["reward_std"] > 0 for entry in log if "reward_std" in entry)
    assert [entry["kl"] > 0 for entry in log if "kl" in entry] == [False, True, True]


def test_an_engine_is_rebuilt_after_memory_ran_out(alone: Any) -> None:
    assert alone.result("accelerate_finds_a_batch_size", "tencache")["batch sizes"] == [4, 3, 2]


def test_8_bit_adam_of_the_trainer_goes_by_chunks(alone: Any) -> None:
    kinds = alone.result("trainer_trains_in_8_bits", "tencache")["facts"]["kinds"]
    assert kinds == ["master", "state1", "state2", "absmax1", "absmax2"]


def test_statistics_of_inference_count_forward_passes(alone: Any) -> None:
    facts = alone.result("trainer_only_predicts", "tencache")["facts"]
    assert facts["passes"] == 4
    assert facts["read_nbytes"] > 100_000
    assert re.match(r"weights [\d.]+ MiB on NVMe; staging ", facts["line"])


def test_inference_from_memory_says_that_there_is_nothing_to_do(alone: Any) -> None:
    error = alone.result("trainer_predicts_from_memory", "tencache")["facts"]["error"]
    assert error.startswith("TenCache has no statistics of this DeepSpeed engine: it has no optimizer, and none of ")
    assert alone.finished.log.count("is not in use for this engine: it has no optimizer, and none of its weights") == 1
