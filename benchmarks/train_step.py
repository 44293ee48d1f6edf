# SPDX-License-Identifier: Apache-2.0
"""One measured training run: what ``benchmarks.compare`` starts through the ``deepspeed`` launcher, once per side.

Measures both sides with the same means: wall clock with device synchronisation, the kernel's I/O counters of the
process, resident memory, locked and pinned memory. The script does not mention TenCache except to read its counters
at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import build


def process_io() -> tuple[int, int]:
    """Bytes this process has read from and written to storage, as the kernel counts them (0 on tmpfs)."""
    text = Path("/proc/self/io").read_text()
    return tuple(int(re.search(rf"^{key}: (\d+)", text, re.M).group(1)) for key in ("read_bytes", "write_bytes"))  # type: ignore[union-attr]


def status_nbytes(key: str) -> int:
    """A size in ``/proc/self/status`` (VmRSS, VmHWM, VmLck), in bytes."""
    match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(match.group(1)) * 1024 if match else 0


def reset_peak_rss() -> None:
    """Makes VmHWM start again from the present."""
    Path("/proc/self/clear_refs").write_text("5")


def host_used_nbytes() -> int:
    """Memory in use on the whole host without page cache: also counts pages that a driver pinned for this process."""
    info = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M))
    return (int(info["MemTotal"]) - int(info["MemAvailable"])) * 1024


def pinned_by_torch_nbytes() -> int:
    """Bytes of torch's pinned host allocator."""
    if not torch.cuda.is_available():
        return 0
    stats = torch.cuda.host_memory_stats()
    return int(stats.get("allocated_bytes.current", stats.get("reserved_bytes.current", 0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--config", required=True, help="DeepSpeed config, a JSON file")
    parser.add_argument("--result", required=True, help="JSON file to write, on rank 0")
    arguments = parser.parse_args()

    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if arguments.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    deepspeed.init_distributed()
    used_before = host_used_nbytes()
    t_start = time.perf_counter()
    torch.manual_seed(1234)
    with deepspeed.zero.Init(config_dict_or_path=arguments.config):
        model = build(arguments.model, arguments.sequence, checkpointing=arguments.checkpointing)
    t_model = time.perf_counter()
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=json.loads(Path(arguments.config).read_text())
    )[0]
    get_accelerator().synchronize()
    numel = sum(p.ds_numel for p in model.parameters())
    result: dict[str, Any] = {
        "numel": numel,
        "model_s": t_model - t_start,
        "initialize_s": time.perf_counter() - t_model,
        "peak_rss_start": status_nbytes("VmHWM"),
        "steps": [],
    }
    print(
        f"model {result['model_s']:.1f} s, initialize {result['initialize_s']:.1f} s, {numel / 1e9:.3f} B", flush=True
    )
    reset_peak_rss()
    generator = torch.Generator().manual_seed(99 + deepspeed.comm.get_rank())
    vocabulary = model.config.vocab_size
    for index in range(arguments.steps):
        tokens = torch.randint(0, vocabulary, (arguments.batch, arguments.sequence), generator=generator)
        tokens = tokens.to(engine.device)
        before = process_io()
        marks = [time.perf_counter()]
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        get_accelerator().synchronize()
        marks.append(time.perf_counter())
        engine.backward(loss)
        get_accelerator().synchronize()
        marks.append(time.perf_counter())
        engine.step()
        get_accelerator().synchronize()
        marks.append(time.perf_counter())
        after = process_io()
        step = {
            "loss": float(loss.item()).hex(),
            "seconds": marks[3] - marks[0],
            "forward_s": marks[1] - marks[0],
            "backward_s": marks[2] - marks[1],
            "update_s": marks[3] - marks[2],
            "read_nbytes": after[0] - before[0],
            "write_nbytes": after[1] - before[1],
            "rss": status_nbytes("VmRSS"),
            "host_used": host_used_nbytes() - used_before,
        }
        result["steps"].append(step)
        print(
            f"step {index}: {step['seconds']:.2f} s (forward {step['forward_s']:.2f}, "
            f"backward {step['backward_s']:.2f}, update {step['update_s']:.2f}), loss {float(loss.item()):.6f}",
            flush=True,
        )
    result["peak_rss_steady"] = status_nbytes("VmHWM")
    result["locked_nbytes"] = status_nbytes("VmLck")
    result["torch_pinned_nbytes"] = pinned_by_torch_nbytes()
    if torch.cuda.is_available():
        result["gpu_peak_nbytes"] = torch.cuda.max_memory_allocated()
    steady = result["steps"][min(2, len(result["steps"]) - 1) :]
    result["median_s"] = statistics.median(step["seconds"] for step in steady)
    if getattr(engine.optimizer, "tencache", None) is not None:
        import tencache_ds

        stats = tencache_ds.stats(engine)
        result["stats"] = dataclasses.asdict(stats)
        result["registered_nbytes"] = stats.pinned_nbytes
    if deepspeed.comm.get_rank() == 0:
        Path(arguments.result).write_text(json.dumps(result, indent=1))
    engine.destroy()


if __name__ == "__main__":
    main()
