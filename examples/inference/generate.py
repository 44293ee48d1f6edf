# SPDX-License-Identifier: Apache-2.0
"""Generate with a model larger than the GPU (ZeRO-Inference).

    deepspeed examples/inference/generate.py --model Qwen/Qwen3-0.6B --prompt "The sea is" \\
        --deepspeed_config examples/inference/ds_config.json

TenCache is asked for by one line of the config: "offload_engine": "tencache".
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import deepspeed
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", action="append", required=True, help="several times for a batch")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--deepspeed_config", required=True)
    arguments = parser.parse_args()

    deepspeed.init_distributed()
    config = json.loads(Path(arguments.deepspeed_config).read_text())
    kept = HfDeepSpeedConfig(config)  # weights are partitioned as they are loaded; has to live until then
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    del kept
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.eval()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer(arguments.prompt, return_tensors="pt", padding=True).to(engine.device)
    for _ in range(2):  # the second time weights are where they stay
        t_start_s = time.perf_counter()
        with torch.no_grad():
            made = engine.module.generate(
                **inputs, min_new_tokens=arguments.tokens, max_new_tokens=arguments.tokens, do_sample=False,
                pad_token_id=tokenizer.pad_token_id, synced_gpus=True,
            )  # fmt: skip
        seconds = time.perf_counter() - t_start_s
    if deepspeed.comm.get_rank() == 0:
        for line in tokenizer.batch_decode(made, skip_special_tokens=True):
            print(f"generated: {line!r}")
        print(f"{len(arguments.prompt) * arguments.tokens / seconds:.1f} tokens/s")
    engine.destroy()


if __name__ == "__main__":
    main()
