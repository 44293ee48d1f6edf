# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimization with TRL: a model that is trained and a reference that is only read.

    deepspeed examples/hugging_face/dpo.py --model Qwen/Qwen3-0.6B --data preferences.jsonl \
        --deepspeed examples/hugging_face/ds_config.json --output_dir out --max_steps 100

Each line of the data is {"prompt": "…", "chosen": "…", "rejected": "…"}. TenCache is asked for by one line of the
config: "offload_engine": "tencache". It holds for both models; they share the folder on NVMe.
"""

from __future__ import annotations

from dataclasses import dataclass

from datasets import load_dataset
from transformers import HfArgumentParser
from trl import DPOConfig, DPOTrainer


@dataclass
class ScriptArguments:
    """What TRL does not have an option for."""

    model: str
    data: str
    """JSON lines."""


def main() -> None:
    script, args = HfArgumentParser((ScriptArguments, DPOConfig)).parse_args_into_dataclasses()
    data = load_dataset("json", data_files=script.data, split="train")
    # Without a ref_model the trainer loads the same model a second time, as the reference.
    trainer = DPOTrainer(model=script.model, args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
