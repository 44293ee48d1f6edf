# SPDX-License-Identifier: Apache-2.0
"""Builders of plain benchmark records: made-up figures, easy to work out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.record import (
    Benchmark,
    Caps,
    Configuration,
    DeviceProfile,
    Memory,
    Outcome,
    Placement,
    Run,
    Sample,
    Step,
    Workload,
)
from tencache_ds.profiling.hardware import Hardware, StorageRates

GIB = 2**30
NUMEL = 10**9


def hardware(**changes: Any) -> Hardware:
    """A machine with one GPU and a disk of 4 GB/s."""
    known: dict[str, Any] = {
        "cpu": "Test CPU",
        "cores": 16,
        "memory_nbytes": 128 * GIB,
        "gpu": "Test GPU",
        "gpus": 1,
        "gpu_memory_nbytes": 80 * GIB,
        "storage": storage(),
        "h2d_bytes_per_s": 50e9,
        "d2h_bytes_per_s": 40e9,
        "memory_copy_bytes_per_s": 200e9,
        "cpu_adam_params_per_s": 5e9,
        "gpu_adam_params_per_s": 100e9,
        "matmul_flops_per_s": 700e12,
        "probe_s": 10.0,
    }
    return Hardware(**(known | changes))


def storage(**changes: Any) -> StorageRates:
    """A disk that reads 3.5, writes 3 and does both at 4 GB/s together."""
    known: dict[str, Any] = {
        "read_bytes_per_s": 3.5e9,
        "write_bytes_per_s": 3e9,
        "mixed_bytes_per_s": 4e9,
        "request_nbytes": 8 * 2**20,
        "lanes": 8,
        "direct": True,
        "filesystem": "ext4",
        "device": "Test disk",
    }
    return StorageRates(**(known | changes))


def step(seconds: float, loss: float = 8.0, **changes: Any) -> Step:
    """A step of ``seconds``: a tenth forward, two tenths backward, the rest update; 20 + 18 bytes per parameter."""
    known: dict[str, Any] = {
        "losses": [loss.hex()],
        "seconds": seconds,
        "forward_s": 0.1 * seconds,
        "backward_s": 0.2 * seconds,
        "update_s": 0.7 * seconds,
        "storage_wait_s": 0.5 * seconds,
        "nvme_read_nbytes": 20 * NUMEL,
        "nvme_write_nbytes": 18 * NUMEL,
        "kernel_read_nbytes": 20 * NUMEL,
        "kernel_write_nbytes": 18 * NUMEL,
        "rss_nbytes": 18 * GIB,
        "host_used_nbytes": 17 * GIB,
    }
    return Step(**(known | changes))


def memory(**changes: Any) -> Memory:
    """18 GiB steady, 20 at the start, 8 pinned, 7 of the GPU."""
    known: dict[str, Any] = {
        "peak_rss_start_nbytes": 20 * GIB,
        "peak_rss_steady_nbytes": 18 * GIB,
        "locked_nbytes": 5 * GIB,
        "torch_pinned_nbytes": 2 * GIB,
        "registered_nbytes": 1 * GIB,
        "gpu_peak_nbytes": 7 * GIB,
    }
    return Memory(**(known | changes))


def run(configuration: str, seconds: Sequence[float], index: int = 0, device: str = "nvme", **changes: Any) -> Run:
    """A run that ended well: a warm-up step of 99 s, then steps of ``seconds``."""
    step_changes = changes.pop("step", {})
    offload = {"device": device}
    known: dict[str, Any] = {
        "configuration": configuration,
        "round": index,
        "outcome": Outcome.ok,
        "numel": NUMEL,
        "model_s": 3.0,
        "initialize_s": 12.0,
        "warmup_steps": 1,
        "steps": [
            step(99.0, 9.0, **step_changes),
            *(step(s, 8.0 - 0.5 * i, **step_changes) for i, s in enumerate(seconds)),
        ],
        "memory": memory(),
        "deepspeed_config": {"zero_optimization": {"offload_param": offload, "offload_optimizer": offload}},
    }
    return Run(**(known | changes))


def failed(configuration: str, error: str, index: int = 0, outcome: Outcome = Outcome.failed, **changes: Any) -> Run:
    """A run that did not end well."""
    return Run(configuration=configuration, round=index, outcome=outcome, error=error, **changes)


def stock(name: str = "nvme-nvme", label: str = "stock NVMe + NVMe", **changes: Any) -> Configuration:
    """A configuration of a peer."""
    return Configuration(**({"name": name, "label": label, "peer": name} | changes))


def tencache(name: str = "tencache", label: str = "TenCache (defaults)", **changes: Any) -> Configuration:
    """A configuration of TenCache."""
    return Configuration(**({"name": name, "label": label, "peer": "tencache"} | changes))


def counters(
    accesses: Sequence[int] = (600, 300, 60, 40), weight_read_s: float = 2.0, steps: int = 10, divergence: int = 0
) -> dict[str, Any]:
    """``tencache_stats`` with counts of resident, prefetched, late and demand accesses."""
    total = {
        "step": steps,
        "seconds": 100.0,
        "update_seconds": 60.0,
        "background_seconds": 3.0,
        "nbytes": {"nvme_read": 0, "nvme_write": 0, "h2d": 0, "d2h": 0},
        "stall_seconds": {"weight_read": weight_read_s, "optimizer_read": 10.0, "buffer": 0.0, "write_back": 0.0},
        "accesses": dict(zip(("resident", "prefetched", "late", "demand"), accesses, strict=True)),
        "events": {"divergence": divergence, "overflow_buffer": 0, "discarded_read": 0},
    }
    return {"total": total, "last_step": None}


def timeline(seconds: float, read_gb_per_s: float, write_gb_per_s: float, count: int = 20) -> list[Sample]:
    """Samples at even distances, at even rates."""
    return [
        Sample(
            t_s=seconds * i / count,
            nvme_read_nbytes=round(1e9 * read_gb_per_s * seconds * i / count),
            nvme_write_nbytes=round(1e9 * write_gb_per_s * seconds * i / count),
            rss_nbytes=18 * GIB,
        )
        for i in range(count + 1)
    ]


def device_profile(**changes: Any) -> DeviceProfile:
    """A step of 10 s with 4 GB up, 2 GB down."""
    known: dict[str, Any] = {
        "seconds": 10.0,
        "h2d_nbytes": 4 * 10**9,
        "d2h_nbytes": 2 * 10**9,
        "h2d_busy_s": 0.1,
        "d2h_busy_s": 0.2,
        "kernel_busy_s": 1.5,
    }
    return DeviceProfile(**(known | changes))


def benchmark(configurations: Sequence[Configuration], runs: Sequence[Run], **changes: Any) -> Benchmark:
    """A benchmark on :func:`hardware` of a model of 1e9 parameters."""
    known: dict[str, Any] = {
        "title": "Test benchmark",
        "started_at": "2026-11-21T10:00:00Z",
        "command": "python -m benchmarks run --nvme-path FOLDER",
        "storage": "disk",
        "hardware": hardware(),
        "versions": {"python": "3.12.0", "torch": "2.11.0", "deepspeed": "0.19.8"},
        "workload": Workload(
            model="llama-1b", micro_batch=4, sequence=500, accumulation=1, ranks=1, precision="bf16",
            activation_checkpointing=False,
        ),
        "configurations": list(configurations),
        "runs": list(runs),
    }  # fmt: skip
    return Benchmark(**(known | changes))


def pair(theirs: Sequence[float] | Run, ours: Sequence[float] | Run, **changes: Any) -> Benchmark:
    """Stock on NVMe against TenCache in one round, from the runs or from the seconds of their steps."""
    runs = [
        one if isinstance(one, Run) else run(name, one) for name, one in (("nvme-nvme", theirs), ("tencache", ours))
    ]
    return benchmark([stock(), tencache()], runs, **changes)


def with_failures(error: str = "RuntimeError: lost") -> Benchmark:
    """TenCache at 10 s, stock that failed with ``error``, a peer that cannot run and one whose turn did not come."""
    return benchmark(
        [stock(), stock("gpu-gpu", "GPU only"), tencache(), stock("none", "left out")],
        [
            failed("nvme-nvme", error),
            failed("gpu-gpu", "it needs 300 GiB of GPU memory", outcome=Outcome.cannot_run),
            run("tencache", [10.0]),
        ],
    )


def small() -> Benchmark:
    """Stock on NVMe against TenCache, two rounds of two steps each: 20 s against 10 s, at 0.8 of the bound."""
    lean: dict[str, Any] = {"nvme_read_nbytes": 12 * NUMEL, "nvme_write_nbytes": 12 * NUMEL}
    ours: dict[str, Any] = {
        "step": lean,
        "memory": memory(peak_rss_steady_nbytes=8 * GIB, peak_rss_start_nbytes=7 * GIB),
        "caps": Caps(host_nbytes=24 * GIB, host_enforced_by="cgroup"),
        "tencache_stats": counters(),
        "device_profile": device_profile(),
        "gpu_energy_j": 2000.0,
        "disk_write_nbytes": 24 * NUMEL,
    }
    return benchmark(
        [stock(knobs={"aio_threads": 4}), tencache()],
        [
            run("nvme-nvme", [20.0, 22.0], 0, timeline=timeline(42, 1.0, 0.9)),
            run("tencache", [10.0, 10.0], 0, timeline=timeline(20, 1.2, 1.2), **ours),
            run("nvme-nvme", [18.0, 20.0], 1),
            run("tencache", [9.0, 11.0], 1, **ours),
        ],
        placements={"nvme-nvme": Placement(weights_nvme=1, optimizer_nvme=1)},
        bounds_s={"tencache": 8.0, "nvme-nvme": 12.0},
        limits={"tencache": "nvme", "nvme-nvme": "nvme"},
    )
