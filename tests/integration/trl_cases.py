# SPDX-License-Identifier: Apache-2.0
"""What users of TRL do: scenarios like those of ``hugging_face_cases.py``, which runs them."""

from __future__ import annotations

from typing import Any

import datasets
import hugging_face_cases as common
import torch
import training
import transformers
import trl
from byte_tokenizer import byte_tokenizer
from hugging_face_cases import Case, Recording

PROMPTS = [f"question {number}: " for number in range(8)]
METRICS = (
    "step", "loss", "grad_norm", "learning_rate", "eval_loss", "entropy", "mean_token_accuracy", "reward", "reward_std",
    "kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected",
    "completions/mean_length",
)  # fmt: skip


class RecordingSFT(Recording, trl.SFTTrainer):
    pass


class RecordingDPO(Recording, trl.DPOTrainer):
    pass


class RecordingGRPO(Recording, trl.GRPOTrainer):
    pass


def options_for(case: Case, kind: Any, zero: dict[str, Any] | None = None, **options: Any) -> Any:
    """With the Trainer's own optimizer, and weights that change in every step."""
    settings = {
        "deepspeed": case.config(**common.SMALL_WEIGHTS_TOO, **zero or {}),
        "max_steps": 3, "gradient_accumulation_steps": 1, "dataloader_num_workers": 0,
        "warmup_steps": 0, "lr_scheduler_type": "constant", "learning_rate": 1e-3,
    }  # fmt: skip
    return common.arguments(case, kind=kind, **settings | options)


def model_for(case: Case) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(case.model_folder(), dtype=torch.bfloat16)


def finish(case: Case, trainer: Any) -> None:
    """Observable results of a trained model."""
    case.check_engine(trainer.deepspeed)
    case.seen["log"] = [{key: entry[key] for key in METRICS if key in entry} for entry in trainer.state.log_history]
    case.seen["weights"] = training.digests(trainer.deepspeed.module)
    trainer.accelerator.free_memory()


def sft_trains(case: Case) -> None:
    """With evaluation; the loss is that of the completions alone."""
    args = options_for(case, trl.SFTConfig, max_length=32, eval_strategy="steps", eval_steps=3)
    data = datasets.Dataset.from_dict({"prompt": PROMPTS, "completion": [f"answer {n * n}" for n in range(8)]})
    trainer = RecordingSFT(
        case, model=model_for(case), args=args, train_dataset=data, eval_dataset=data.select(range(4)),
        processing_class=byte_tokenizer(),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(case.folder / "saved"))
    case.seen["saved"] = common.file_digests(case.folder / "saved") if case.rank == 0 else {}
    finish(case, trainer)


def dpo_with_a_reference(case: Case) -> None:
    """Two engines on one NVMe folder; the reference is only read."""
    args = options_for(case, trl.DPOConfig, max_length=32, beta=0.5)
    data = datasets.Dataset.from_dict(
        {"prompt": PROMPTS, "chosen": [f"yes {n}" for n in range(8)], "rejected": ["no"] * 8}
    )
    trainer = RecordingDPO(
        case, model=model_for(case), ref_model=model_for(case), args=args, train_dataset=data,
        processing_class=byte_tokenizer(),
    )  # fmt: skip
    case.seen["reference"] = training.digests(trainer.ref_model.module)
    trainer.train()
    case.check_engine(trainer.ref_model)
    assert training.digests(trainer.ref_model.module) == case.seen["reference"]
    reference = trainer.ref_model
    finish(case, trainer)
    reference.destroy()


def many_vowels(completions: list[str], **_: Any) -> list[float]:
    """A reward that needs no model."""
    return [sum(letter in "aeiou" for letter in text) - 0.1 * len(text) for text in completions]


def grpo_generates(case: Case, *, gathered: bool = True) -> None:
    """Generation in training, with a reference model for the KL term."""
    # TRL uses the output layer's weight without its module, which DeepSpeed cannot do with a weight that it prefetches:
    # "Cannot partition a param in flight". Gathering everything for generation stops the prefetching.
    zero = {} if gathered else {"stage3_prefetch_bucket_size": 0}
    args = options_for(
        case, trl.GRPOConfig, zero, beta=0.1, num_generations=4, per_device_train_batch_size=4,
        steps_per_generation=1, max_completion_length=6, ds3_gather_for_generation=gathered,
    )  # fmt: skip
    trainer = RecordingGRPO(
        case, model=model_for(case), reward_funcs=many_vowels, args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}), processing_class=byte_tokenizer(),
    )  # fmt: skip
    trainer.train()
    case.check_engine(trainer.ref_model)
    reference = trainer.ref_model
    finish(case, trainer)
    reference.destroy()


def grpo_generates_ungathered(case: Case) -> None:
    """Each weight is gathered when a token needs it."""
    grpo_generates(case, gathered=False)


SCENARIOS = {
    function.__name__: function
    for function in (sft_trains, dpo_with_a_reference, grpo_generates, grpo_generates_ungathered)
}
