# SPDX-License-Identifier: Apache-2.0
"""Group relative policy optimization with TRL: each step generates completions, rewards them and trains on them.

    deepspeed examples/hugging_face/grpo.py --model Qwen/Qwen3-0.6B --data prompts.jsonl \
        --deepspeed examples/hugging_face/ds_config.json --output_dir out --max_steps 100

Each line of the data is {"prompt": "…"}. TenCache is asked for by one line of the config: "offload_engine": "tencache".
By default TRL gathers the whole model for generation, which then has to fit into GPU memory. With
--ds3_gather_for_generation False each layer is gathered for each token, and need not; that needs
"stage3_prefetch_bucket_size": 0 in the config.
"""

from __future__ import annotations

from dataclasses import dataclass

from datasets import load_dataset
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer


@dataclass
class ScriptArguments:
    """What TRL does not have an option for."""

    model: str
    data: str
    """JSON lines."""


def variety(completions: list[str], **_: object) -> list[float]:
    """The reward: the share of words that are not repeated."""
    words = [completion.split() for completion in completions]
    return [len(set(said)) / max(len(said), 1) for said in words]


def main() -> None:
    script, args = HfArgumentParser((ScriptArguments, GRPOConfig)).parse_args_into_dataclasses()
    data = load_dataset("json", data_files=script.data, split="train")
    trainer = GRPOTrainer(model=script.model, reward_funcs=variety, args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
