# SPDX-License-Identifier: Apache-2.0
"""A tiny model with a byte tokenizer, and data in the format of each framework, made in the framework's environment:

python tests/frameworks/inputs.py FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.append(str(Path(__file__).parents[1] / "integration"))

from byte_tokenizer import byte_tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_model(folder: Path) -> None:
    """Saves a Llama of 100,000 weights in bf16, with random values."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(7)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def questions() -> list[tuple[str, str]]:
    numbers = random.Random(3)
    pairs = [(numbers.randrange(100), numbers.randrange(100)) for _ in range(64)]
    return [(f"What is {first} + {second}?", f"It is {first + second}.") for first, second in pairs]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_data(folder: Path) -> None:
    """Writes the same questions and answers as each framework reads them."""
    asked = questions()
    alpaca: list[dict[str, Any]] = [
        {"instruction": question, "input": "", "output": answer} for question, answer in asked
    ]
    write_lines(folder / "alpaca.jsonl", alpaca)
    (folder / "dataset_info.json").write_text(json.dumps({"bytes": {"file_name": "alpaca.jsonl"}}))
    write_lines(
        folder / "messages.jsonl",
        [
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for question, answer in asked
        ],
    )
    write_lines(
        folder / "prompts" / "train.jsonl", [{"prompt": question, "completion": answer} for question, answer in asked]
    )
    (folder / "text.txt").write_text("\n".join(f"{question} {answer}" for question, answer in asked))


if __name__ == "__main__":
    make_model(Path(sys.argv[1]) / "model")
    make_data(Path(sys.argv[1]))
