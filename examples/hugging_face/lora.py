# SPDX-License-Identifier: Apache-2.0
"""Train LoRA adapters of PEFT on a frozen model whose weights are on NVMe.

    deepspeed examples/hugging_face/lora.py --model gpt2 --text train.txt \
        --deepspeed examples/hugging_face/ds_config.json --output_dir adapter --max_steps 100

TenCache is asked for by one line of the config: "offload_engine": "tencache". The adapter is saved alone; merge it
without DeepSpeed: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), "adapter").merge_and_unload().
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class ScriptArguments:
    """What the Trainer does not have an option for."""

    model: str
    text: str
    length: int = 128
    """Tokens per example."""
    rank: int = 16
    """Of the adapters."""


def main() -> None:
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_pretrained(script.model)  # partitioned as the parsed arguments say
    model = get_peft_model(model, LoraConfig(r=script.rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    tokens = torch.tensor(AutoTokenizer.from_pretrained(script.model)(Path(script.text).read_text())["input_ids"])
    rows = tokens[: len(tokens) // script.length * script.length].view(-1, script.length)
    data = [{"input_ids": row, "labels": row} for row in rows]

    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
