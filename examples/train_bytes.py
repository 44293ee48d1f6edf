# SPDX-License-Identifier: Apache-2.0
"""Train a Llama-shaped byte-level language model on the sources of Python's standard library, with DeepSpeed.

    deepspeed examples/train_bytes.py --steps 30 --deepspeed --deepspeed_config ds_config.json

An ordinary DeepSpeed script: the places of weights and optimizer state depend on the config. Rank 0 prints one JSON
line per step. The same flags and number of processes give the same losses, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.nn import functional
from tqdm import tqdm

VOCABULARY = 256  # every byte is a token
CORPUS_LIMIT_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the model."""

    hidden: int
    layers: int
    heads: int
    feed_forward: int


SHAPES = {
    "small": Shape(hidden=768, layers=3, heads=12, feed_forward=2048),  # 22 M parameters
    "medium": Shape(hidden=1024, layers=12, heads=16, feed_forward=2816),  # 155 M
    "large": Shape(hidden=2048, layers=24, heads=16, feed_forward=5632),  # 1.2 B
}


def multiplies_slowly(x: torch.Tensor) -> bool:
    """Whether to compute matrix products of ``x`` in fp32: for bf16 on a processor without instructions for it, where
    torch falls back to a plain loop that takes 200 times as long."""
    slow = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
    return slow and x.dtype is torch.bfloat16 and x.device.type == "cpu"


class Linear(nn.Linear):
    """Linear layer without a bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if multiplies_slowly(x):
            return functional.linear(x.float(), self.weight.float()).to(x.dtype)
        return super().forward(x)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of ``x`` (batch, heads, time, head size), computed in fp32."""
    time_steps, half = x.shape[-2], x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.outer(torch.arange(time_steps, device=x.device, dtype=torch.float32), frequency)
    first, second = x.float().chunk(2, dim=-1)
    rotated = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
    return torch.cat(rotated, dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query = Linear(shape.hidden, shape.hidden)
        self.key = Linear(shape.hidden, shape.hidden)
        self.value = Linear(shape.hidden, shape.hidden)
        self.output = Linear(shape.hidden, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time_steps, hidden = x.shape
        split = (batch, time_steps, self.heads, hidden // self.heads)
        query, key, value = (layer(x).view(split).transpose(1, 2) for layer in (self.query, self.key, self.value))
        query, key = rotate(query), rotate(key)
        if multiplies_slowly(x):
            query, key, value = query.float(), key.float(), value.float()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True).to(x.dtype)
        return self.output(mixed.transpose(1, 2).reshape(batch, time_steps, hidden))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = Linear(shape.hidden, shape.feed_forward)
        self.up = Linear(shape.hidden, shape.feed_forward)
        self.down = Linear(shape.feed_forward, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One transformer layer, normalised before each half."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class ByteModel(nn.Module):
    """Llama-shaped decoder over bytes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.head = Linear(shape.hidden, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy (nats per byte) of predicting ``tokens[:, 1:]`` from ``tokens[:, :-1]`` (batch, time)."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def read_corpus() -> torch.Tensor:
    """The standard library's sources as one uint8 tensor, in a fixed order, cut at ``CORPUS_LIMIT_BYTES``."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for file in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests"}.isdisjoint(file.relative_to(root).parts):
            text += file.read_bytes()
        if len(text) > CORPUS_LIMIT_BYTES:
            break
    return torch.frombuffer(text[:CORPUS_LIMIT_BYTES], dtype=torch.uint8)


def batches(corpus: torch.Tensor, batch: int, sequence: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless random windows of the corpus, int64 (batch, sequence + 1), the same for the same ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(corpus) - sequence - 1, (batch,), generator=generator)
        yield torch.stack([corpus[start : start + sequence + 1] for start in starts.tolist()]).long()


def disk_bytes() -> tuple[int, int]:
    """Bytes this process has read from and written to block devices so far, as the kernel counts them."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far. Not ``ru_maxrss``: that one inherits the launcher's peak."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def make_deterministic(seed: int) -> None:
    """The same sums in the same order in every run: without it, CUDA's atomics change the last bits of a loss."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(seed)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level language model with DeepSpeed.")
    parser.add_argument("--size", choices=SHAPES, default="small")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sequence", type=int, default=128, help="bytes per sample")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return deepspeed.add_config_arguments(parser).parse_args()


def main() -> None:
    arguments = parse_arguments()
    started = time.perf_counter()
    deepspeed.init_distributed()
    make_deterministic(arguments.seed)
    with deepspeed.zero.Init(config_dict_or_path=arguments.deepspeed_config):
        model = ByteModel(SHAPES[arguments.size])
    parameters = sum(getattr(weight, "ds_numel", weight.numel()) for weight in model.parameters())
    engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=list(model.parameters()))

    rank = deepspeed.comm.get_rank()
    data = batches(
        read_corpus(), engine.train_micro_batch_size_per_gpu(), arguments.sequence, seed=1000 * arguments.seed + rank
    )
    if rank == 0:
        print(json.dumps({"parameters": parameters, "setup_seconds": time.perf_counter() - started}), flush=True)

    for step in tqdm(range(1, arguments.steps + 1), desc="training", unit="step", disable=rank != 0, file=sys.stderr):
        started = time.perf_counter()
        read_before, written_before = disk_bytes()
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(next(data).to(engine.device))
            engine.backward(loss)
            engine.step()
        get_accelerator().synchronize()
        read, written = disk_bytes()
        if rank == 0:
            record = {
                "step": step,
                "loss": loss.item(),
                "seconds": time.perf_counter() - started,
                "read_bytes": read - read_before,
                "written_bytes": written - written_before,
                "peak_rss": peak_rss_bytes(),
            }
            print(json.dumps(record), flush=True)
    engine.destroy()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
