# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a language model on a text file with the Trainer of transformers.

    deepspeed examples/hugging_face/trainer.py --model gpt2 --text train.txt \
        --deepspeed examples/hugging_face/ds_config.json --output_dir out --max_steps 100

TenCache is asked for by one line of the config: "offload_engine": "tencache". All other options are the Trainer's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class ScriptArguments:
    """What the Trainer does not have an option for."""

    model: str
    text: str
    length: int = 128
    """Tokens per example."""


def main() -> None:
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    # The arguments are parsed before the model is loaded: they tell from_pretrained that weights are to be partitioned
    # as they are read, so that the whole model is never in memory.
    model = AutoModelForCausalLM.from_pretrained(script.model)
    tokenizer = AutoTokenizer.from_pretrained(script.model)
    tokens = torch.tensor(tokenizer(Path(script.text).read_text())["input_ids"])
    rows = tokens[: len(tokens) // script.length * script.length].view(-1, script.length)
    data = [{"input_ids": row, "labels": row} for row in rows]

    trainer = Trainer(model=model, args=args, train_dataset=data[1:], eval_dataset=data[:1])
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    print(trainer.evaluate())
    trainer.save_model()


if __name__ == "__main__":
    main()
