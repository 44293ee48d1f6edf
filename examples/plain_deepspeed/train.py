# SPDX-License-Identifier: Apache-2.0
"""Train a model of your own with DeepSpeed alone.

    deepspeed examples/plain_deepspeed/train.py --deepspeed_config examples/plain_deepspeed/ds_config.json

TenCache is asked for by one line of the config: "offload_engine": "tencache".
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser = deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(1)
    # Weights are partitioned at creation, so that the whole model is never in memory.
    with deepspeed.zero.Init(config_dict_or_path=arguments.deepspeed_config):
        layers = [
            nn.Sequential(nn.Linear(arguments.width, arguments.width), nn.Tanh()) for _ in range(arguments.layers)
        ]
        model = nn.Sequential(*layers)
    engine = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())[0]

    dtype = next(engine.module.parameters()).dtype
    for step in range(arguments.steps):
        inputs = torch.randn(engine.train_micro_batch_size_per_gpu(), arguments.width)
        inputs = inputs.to(engine.device, dtype)
        loss = (engine(inputs) - inputs.roll(1, dims=-1)).float().square().mean()
        engine.backward(loss)
        engine.step()
        if deepspeed.comm.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    engine.save_checkpoint("checkpoints")  # engine.load_checkpoint resumes from it
    engine.destroy()


if __name__ == "__main__":
    main()
