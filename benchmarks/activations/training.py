# SPDX-License-Identifier: Apache-2.0
"""One process that trains one system. The loss is computed in chunks of tokens, as fused kernels do, so that the logits
of a whole sequence never exist.

    deepspeed --module benchmarks.activations.training task.json    # a benchmarks.activations.result.ActivationTask
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.utils.checkpoint import checkpoint

from ..training.instruments import process_nbytes
from ..training.measured_run import limit_gpu_memory
from ..training.warm_up import has_settled, warm_up
from ..workloads import SPECS, build, prepare
from .result import ActivationRun, ActivationTask

LOSS_TOKENS = 4096


def measure(task: ActivationTask) -> ActivationRun:
    """Trains one system."""
    import deepspeed
    from deepspeed.runtime.activation_checkpointing import offload_activations

    prepare()
    name, accelerator, config = task.system, get_accelerator(), task.deepspeed_config
    deepspeed.init_distributed()
    accelerator.set_device(0)
    limit_gpu_memory(task.gpu_nbytes)
    torch.manual_seed(1)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build(task.model, task.sequence)
    options = {"use_reentrant": False} | ({"offload": True} if name == "transformers-offload" else {})
    model.gradient_checkpointing_enable(options)
    model = with_chunked_loss(model)
    engine = deepspeed.initialize(model=model, config=config)[0]
    generator = torch.Generator().manual_seed(2)
    vocabulary = SPECS[task.model].sizes["vocab_size"]
    losses: list[torch.Tensor] = []

    def step() -> tuple[float, int]:
        """Its seconds, and the GPU memory that its last micro-step took at most."""
        t_start_s = time.perf_counter()
        for _ in range(task.accumulation):
            tokens = torch.randint(vocabulary, (task.batch, task.sequence), generator=generator).to(engine.device)
            before = accelerator.memory_allocated()
            offload = contextlib.nullcontext()
            if name == "stock-offload":
                offload = offload_activations.get_checkpoint_hidden_states_offloading_ctx_manager()
            with offload:
                loss = engine(tokens)
                engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        accelerator.synchronize()
        return time.perf_counter() - t_start_s, accelerator.max_memory_allocated() - before

    session = getattr(engine.optimizer, "tencache", None)
    warm_up(task.warmup, step, lambda: has_settled(session))
    accelerator.synchronize()  # there may have been no step yet
    accelerator.reset_peak_memory_stats()
    stats_before = None if session is None else session.stats()
    measured = [step() for _ in range(task.steps)]
    stats = None if session is None else session.stats()
    return ActivationRun(
        seconds=[seconds for seconds, _ in measured],
        tokens=task.accumulation * task.batch * task.sequence,
        losses=[float(loss) for loss in losses[: (task.warmup + task.steps) * task.accumulation]],
        activation_peak_nbytes=max(nbytes for _, nbytes in measured),
        gpu_peak_nbytes=accelerator.max_memory_allocated(),
        rss_peak_nbytes=process_nbytes("VmHWM"),
        late_seconds=round(_late_seconds(stats) - _late_seconds(stats_before), 3),
        host_activation_nbytes=0 if stats is None else stats.host_activation_nbytes,
        nvme_activation_nbytes=0 if stats is None else stats.nvme_activation_nbytes,
    )


def _late_seconds(stats: Any) -> float:
    """Host waits for activations on NVMe so far; 0 of None, without TenCache."""
    if stats is None:
        return 0.0
    return sum(seconds for stall, seconds in stats.total.stall_seconds.items() if str(stall).startswith("activation"))


def with_chunked_loss(model: Any) -> Any:
    """A module that takes tokens of shape ``(batch, sequence)`` and returns the loss of the next ones."""

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.language_model.model(input_ids=tokens, use_cache=False).last_hidden_state
            pairs = zip(
                hidden[:, :-1].flatten(0, 1).split(LOSS_TOKENS), tokens[:, 1:].flatten().split(LOSS_TOKENS), strict=True
            )
            losses = [checkpoint(self.loss_of, each, labels, use_reentrant=False) for each, labels in pairs]
            return torch.stack(losses).sum() / tokens[:, 1:].numel()

        def loss_of(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self.language_model.lm_head(hidden).float()
            return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    return WithLoss()


def main() -> None:
    task = ActivationTask.of_command_line()
    measure(task).write(Path(task.result))


if __name__ == "__main__":
    main()
