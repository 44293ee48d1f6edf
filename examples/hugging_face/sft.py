# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning with TRL.

    deepspeed examples/hugging_face/sft.py --model Qwen/Qwen3-0.6B --data train.jsonl \
        --deepspeed examples/hugging_face/ds_config.json --output_dir out --max_steps 100

Each line of the data is {"prompt": "…", "completion": "…"}; another format of TRL will do as well. TenCache is asked
for by one line of the config: "offload_engine": "tencache". All other options are TRL's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from datasets import load_dataset
from transformers import HfArgumentParser
from trl import SFTConfig, SFTTrainer


@dataclass
class ScriptArguments:
    """What TRL does not have an option for."""

    model: str
    data: str
    """JSON lines."""


def main() -> None:
    script, args = HfArgumentParser((ScriptArguments, SFTConfig)).parse_args_into_dataclasses()
    data = load_dataset("json", data_files=script.data, split="train")
    # The trainer loads the model, after the arguments were parsed: its weights are partitioned as they are read.
    trainer = SFTTrainer(model=script.model, args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
