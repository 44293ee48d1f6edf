# SPDX-License-Identifier: Apache-2.0
"""Train with Lightning's DeepSpeed strategy, on CUDA GPUs (``pip install lightning``).

    python examples/lightning/train.py --config examples/lightning/ds_config.json

TenCache is asked for by one line of the config: "offload_engine": "tencache".
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn


class Regression(lightning.LightningModule):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.width, self.layers = width, layers

    def configure_model(self) -> None:  # layers created here are partitioned at once
        layers = [nn.Sequential(nn.Linear(self.width, self.width), nn.Tanh()) for _ in range(self.layers)]
        self.model = nn.Sequential(*layers)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = (self.model(batch) - batch.roll(1, dims=-1)).float().square().mean()
        self.print(f"step {index + 1}: loss {loss.item()}")
        return loss

    def configure_optimizers(self) -> Any:
        return DeepSpeedCPUAdam(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()

    lightning.seed_everything(1)
    trainer = lightning.Trainer(
        accelerator="cuda", devices=1, precision="bf16-true", max_steps=arguments.steps,
        strategy=DeepSpeedStrategy(config=arguments.config), enable_progress_bar=False, logger=False,
        enable_checkpointing=False,
    )  # fmt: skip
    samples = torch.randn(8 * arguments.steps, arguments.width, dtype=torch.bfloat16)
    trainer.fit(Regression(arguments.width, arguments.layers), torch.utils.data.DataLoader(samples, batch_size=8))


if __name__ == "__main__":
    main()
