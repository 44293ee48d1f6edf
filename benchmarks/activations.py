# SPDX-License-Identifier: Apache-2.0
"""Training with long sequences: what moving activations costs and frees, compared with others that move them.

    tencache bench activations keep tencache stock stock-offload --model 2.7B --sequence 32768 --nvme-path FOLDER

Each system trains in a process of its own, one after the other, with activation checkpointing. The loss is computed in
chunks of tokens, as fused kernels do, so that the logits of a whole sequence never exist.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tencache_ds.cli.arguments import at_least_one
from tencache_ds.config import parse_size

from .comparison.process import PACKAGE, environment, free_port, last_error
from .training.instruments import process_nbytes
from .training.measured_run import limit_gpu_memory
from .workloads import SPECS, build, prepare

LOSS_TOKENS = 4096
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Of long sequences each tensor is large, and their sizes differ: without, much of the memory is lost between them."""

SYSTEMS = {
    "keep": "TenCache, activations stay on the GPU",
    "tencache": "TenCache, activations move; options follow: tencache:activation_memory=0+gpu_memory=8GiB",
    "stock": "DeepSpeed's CPU offload, activations stay on the GPU",
    "stock-offload": "the same, with DeepSpeed's offload of checkpointed inputs",
    "transformers-offload": 'the same, with gradient_checkpointing_kwargs={"offload": True} of transformers',
}
COLUMNS = (
    "system", "s/step", "tokens/s", "activations GPU GiB", "GPU peak GiB", "RAM peak GiB", "moved to RAM GiB",
    "to NVMe GiB", "late", "loss",
)  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    listed = "\n".join(f"  {name}: {text}" for name, text in SYSTEMS.items())
    parser = argparse.ArgumentParser(
        prog="tencache bench activations",
        description=__doc__,
        epilog=f"systems:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("systems", nargs="+", metavar="SYSTEM")
    add("--model", default="1.3B", choices=SPECS, metavar="MODEL")
    add("--sequence", type=at_least_one, nargs="+", default=[8192], metavar="N", help="tokens of each sequence")
    add("--batch", type=at_least_one, default=1, metavar="N", help="sequences of each micro-step")
    add("--accumulation", type=at_least_one, default=1, metavar="N", help="micro-steps of each step")
    add("--steps", type=at_least_one, default=4, metavar="N", help="measured")
    add("--warmup", type=int, default=5, metavar="N", help="steps before; TenCache plans in the third to sixth")
    add("--gpu-cap", type=parse_size, metavar="SIZE", help="GPU memory that torch may take")
    add("--nvme-path", type=Path, metavar="FOLDER", help="without it, everything that moves goes to RAM")
    add("--out", type=Path, metavar="FOLDER", help="gets activations.json")
    add("--train", help=argparse.SUPPRESS)
    return parser


def run(words: list[str]) -> int:
    """Runs the command and returns its exit status."""
    arguments = make_parser().parse_args(words)
    if arguments.train:
        print("RESULT " + json.dumps(train(arguments.train, arguments)), flush=True)
        return 0
    import pandas

    rows, records = [], []
    for sequence in arguments.sequence:
        for system in arguments.systems:
            found = run_system(system, sequence, words)
            records.append({"system": system, "sequence": sequence} | found)
            rows.append(row(f"{system} {sequence}", found))
            print(*rows[-1].values(), flush=True)
            if arguments.out is not None:  # after each: a later one may be killed
                arguments.out.mkdir(parents=True, exist_ok=True)
                record = json.dumps({"command": words, "runs": records}, indent=1)
                (arguments.out / "activations.json").write_text(record)
    print(pandas.DataFrame(rows, columns=COLUMNS, dtype=object).fillna("").to_string(index=False))
    return 1 if any("error" in record for record in records) else 0


def run_system(system: str, sequence: int, words: list[str]) -> dict[str, Any]:
    """Trains one system in a process of its own; its figures, or its error."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-m", f"{PACKAGE}.activations", *words, "--train", system, "--sequence", str(sequence)],
        env=EXPANDABLE | environment() | address | {"WORLD_SIZE": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, check=False,
    )  # fmt: skip
    results = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not results:
        return {"error": last_error(done.stdout) or f"exit status {done.returncode}", "log": done.stdout[-4000:]}
    found: dict[str, Any] = json.loads(results[-1])
    return found


def row(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    if "error" in found:
        return {"system": name, "s/step": " ".join(found["error"].split())[:100]}
    gib = {key: round(found[key] / 2**30, 2) for key in found if key.endswith("_nbytes")}
    return {
        "system": name, "s/step": round(statistics.median(found["seconds"]), 3),
        "tokens/s": round(found["tokens"] / statistics.median(found["seconds"])),
        "activations GPU GiB": gib["activation_peak_nbytes"], "GPU peak GiB": gib["gpu_peak_nbytes"],
        "RAM peak GiB": gib["rss_peak_nbytes"], "moved to RAM GiB": gib["host_activation_nbytes"],
        "to NVMe GiB": gib["nvme_activation_nbytes"], "late": found["late_seconds"], "loss": found["losses"][-1],
    }  # fmt: skip


def deepspeed_config(system: str, arguments: argparse.Namespace, storage: str | None) -> dict[str, Any]:
    name, _, options = system.partition(":")
    device: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    zero = {"stage": 3, "offload_param": device, "offload_optimizer": device}
    config = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_accumulation_steps": arguments.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }
    if name in ("keep", "tencache"):
        if storage is not None:
            zero["offload_optimizer"] = {"device": "nvme", "nvme_path": storage}
        chosen = dict(each.split("=", 1) for each in options.split("+")) if options else {}
        section = {"activations": "on" if name == "tencache" else "off"} | chosen
        config |= {"offload_engine": "tencache", "tencache": section}
    elif options:
        raise SystemExit(f"{name} has no options")
    return config


def train(system: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own: the figures of one system."""
    with contextlib.ExitStack() as stack:
        storage = None
        if arguments.nvme_path is not None:
            storage = stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.nvme_path))
        return _train(system, arguments, storage, stack)


def _train(
    system: str, arguments: argparse.Namespace, storage: str | None, stack: contextlib.ExitStack
) -> dict[str, Any]:
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.activation_checkpointing import offload_activations

    prepare()
    (sequence,) = arguments.sequence
    name, accelerator = system.partition(":")[0], get_accelerator()
    config = deepspeed_config(system, arguments, storage)
    deepspeed.init_distributed()
    accelerator.set_device(0)
    limit_gpu_memory(arguments.gpu_cap)
    torch.manual_seed(1)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build(arguments.model, sequence)
    options = {"use_reentrant": False} | ({"offload": True} if name == "transformers-offload" else {})
    model.gradient_checkpointing_enable(options)
    model = with_chunked_loss(model)
    engine = deepspeed.initialize(model=model, config=config)[0]
    generator = torch.Generator().manual_seed(2)
    vocabulary = SPECS[arguments.model].sizes["vocab_size"]
    seconds, losses, activations = [], [], []
    for number in range(arguments.warmup + arguments.steps):
        if number == arguments.warmup:
            accelerator.synchronize()
            accelerator.reset_peak_memory_stats()
            late_s = _late_seconds(engine)
        t_start_s = time.perf_counter()
        for _ in range(arguments.accumulation):
            tokens = torch.randint(vocabulary, (arguments.batch, sequence), generator=generator).to(engine.device)
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
        if number >= arguments.warmup:
            seconds.append(time.perf_counter() - t_start_s)
            activations.append(accelerator.max_memory_allocated() - before)
    stats: dict[str, int] = {}
    if getattr(engine.optimizer, "tencache", None) is not None:
        found = engine.optimizer.tencache.stats()
        stats = {key: getattr(found, key) for key in ("host_activation_nbytes", "nvme_activation_nbytes")}
    return {
        "seconds": seconds,
        "tokens": arguments.accumulation * arguments.batch * sequence,
        "losses": [float(loss) for loss in losses],
        "activation_peak_nbytes": max(activations),
        "gpu_peak_nbytes": accelerator.max_memory_allocated(),
        "rss_peak_nbytes": process_nbytes("VmHWM"),
        "late_seconds": round(_late_seconds(engine) - late_s, 3),
        "host_activation_nbytes": 0,
        "nvme_activation_nbytes": 0,
    } | stats


def _late_seconds(engine: Any) -> float:
    """Host waits for activations on NVMe so far."""
    session = getattr(engine.optimizer, "tencache", None)
    if session is None:
        return 0.0
    stalls = session.stats().total.stall_seconds
    return sum(seconds for stall, seconds in stalls.items() if str(stall).startswith("activation"))


def with_chunked_loss(model: Any) -> Any:
    """A module that takes tokens of shape ``(batch, sequence)`` and returns the loss of the next ones."""
    import torch
    from torch.utils.checkpoint import checkpoint

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


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
