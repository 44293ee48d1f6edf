# SPDX-License-Identifier: Apache-2.0
"""Train with a loop of your own and accelerate.

    accelerate launch --use_deepspeed --deepspeed_config_file examples/hugging_face/ds_config.json \
        examples/hugging_face/accelerate_loop.py --model gpt2 --text train.txt --output out

TenCache is asked for by one line of the config: "offload_engine": "tencache". With options of accelerate's launcher
alone, set TENCACHE_ENABLE=1 instead.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--length", type=int, default=128, help="tokens per example")
    parser.add_argument("--batch", type=int, default=1, help="examples per process and step")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()

    set_seed(1)
    accelerator = Accelerator()  # before the model is loaded, so that its weights are partitioned as they are read
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    tokens = torch.tensor(AutoTokenizer.from_pretrained(arguments.model)(Path(arguments.text).read_text())["input_ids"])
    rows = tokens[: len(tokens) // arguments.length * arguments.length].view(-1, arguments.length)
    loader = DataLoader(rows, batch_size=arguments.batch, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader)

    model.train()
    step = 0
    while step < arguments.steps:
        for batch in loader:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            accelerator.print(f"step {step}: loss {loss.item():.4f}")
            if step == arguments.steps:
                break
    accelerator.save_state(f"{arguments.output}/state")  # accelerator.load_state resumes from it
    state = accelerator.get_state_dict(model)  # on every process: the weights are gathered
    accelerator.unwrap_model(model).save_pretrained(
        arguments.output, is_main_process=accelerator.is_main_process, state_dict=state
    )


if __name__ == "__main__":
    main()
