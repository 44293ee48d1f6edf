# SPDX-License-Identifier: Apache-2.0
"""The ten-second probe: measures the speed of this machine before training."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from tencache_ds.errors import ConfigError
from tencache_ds.profiling.hardware import Hardware
from tencache_ds.profiling.host_memory import memory_nbytes
from tencache_ds.profiling.probe_storage import area_nbytes_for, measure_storage
from tencache_ds.profiling.processor import processor_name

REQUEST_NBYTES = 8 << 20

STORAGE_SHARE = 0.5
"""Minimum share of the time for storage, which is the noisiest part; it also gets the time left over by the rest."""

MEMORY_COPY_SHARE = 0.06
CPU_ADAM_SHARE = 0.12
CUDA_COPY_SHARE = 0.08
GPU_ADAM_SHARE = 0.04
MATMUL_SHARE = 0.08


def probe(
    nvme_path: Path | None,
    *,
    seconds: float = 10.0,
    request_nbytes: int = REQUEST_NBYTES,
    cpu_threads: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Hardware:
    """Measures this machine in about ``seconds``.

    Every part keeps to a share of that time on machines of any speed. On top of it come the imports of torch and
    DeepSpeed and, once per machine, the compilation of DeepSpeed's CPU Adam. Run it while nothing else uses the
    machine, from one thread and preferably in a separate process: CUDA, once initialised, keeps some GPU memory.

    - storage: reads, writes, and equal amounts of both at once, with direct I/O at several numbers of requests in
      flight; medians of slices spread over the time (see :func:`~.probe_storage.measure_storage`);
    - H2D, D2H: copies of pinned memory, one direction at a time, best sustained rate. Copies in both directions at
      once, or of several GPUs behind one switch, can be slower;
    - host memory copy: on all cores, bytes read plus bytes written, median;
    - CPU Adam: DeepSpeedCPUAdam, fp32 weights and gradients, median;
    - GPU Adam: torch's fused AdamW on fp32 state, best sustained rate;
    - matmul: bf16 on the device that trains: dense 8192 x 8192 on a GPU, as large as time allows on a CPU.

    A GPU is measured if torch can use one and ``DS_ACCELERATOR`` names no other device; it is the current CUDA device.

    Args:
        nvme_path: existing folder on the storage to measure, which gets files of at most 4 GiB and a quarter of its
            free space, removed at the end; None to leave storage out.
        seconds: time for the measurements.
        request_nbytes: bytes of one I/O request, a multiple of 4096.
        cpu_threads: threads for CPU Adam; None for OMP_NUM_THREADS or all cores, as in a process that trains.
        progress: is called with a line of text before each part.

    Raises:
        ConfigError: the path cannot be measured, or an argument is invalid; gives the remedy.
        StorageError: an I/O request failed.
        LockedMemoryError: the CUDA driver refused pinned memory.
    """
    start = time.perf_counter()
    if not 0 < seconds < math.inf:
        raise ConfigError(f"the probe needs a positive number of seconds, got {seconds}")
    if cpu_threads is not None and cpu_threads < 1:
        raise ConfigError(f"cpu_threads must be at least 1, or None for the default, got {cpu_threads}")
    if nvme_path is not None:
        area_nbytes_for(nvme_path, seconds, request_nbytes)  # errors of the path are reported at once
    tell = progress or (lambda line: None)

    import torch

    from tencache_ds.profiling import probe_compute

    cores = len(os.sched_getaffinity(0))
    figures: dict[str, float | None] = {}
    tell(f"host memory: copying on {cores} cores")
    figures["memory_copy_bytes_per_s"] = probe_compute.memory_copy_rate(MEMORY_COPY_SHARE * seconds, cores)
    tell("CPU Adam: updating with DeepSpeed's operator (compiled first if this machine has not used it yet)")
    figures["cpu_adam_params_per_s"] = probe_compute.cpu_adam_rate(CPU_ADAM_SHARE * seconds, cpu_threads)
    gpu = None
    # DeepSpeed's way to train on the CPU of a machine that has a GPU.
    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda":
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        tell(f"GPU: copying to and from {gpu.name}")
        h2d, d2h = probe_compute.cuda_copy_rates(CUDA_COPY_SHARE * seconds)
        figures |= {"h2d_bytes_per_s": h2d, "d2h_bytes_per_s": d2h}
        tell("GPU: updating with Adam and multiplying matrices")
        figures["gpu_adam_params_per_s"] = probe_compute.gpu_adam_rate(GPU_ADAM_SHARE * seconds)
        figures["matmul_flops_per_s"] = probe_compute.cuda_matmul_rate(MATMUL_SHARE * seconds)
        torch.cuda.empty_cache()
    else:
        tell("CPU: multiplying matrices")
        figures["matmul_flops_per_s"] = probe_compute.cpu_matmul_rate(MATMUL_SHARE * seconds)
    storage = None
    if nvme_path is not None:
        tell(f"storage: reading and writing in {nvme_path}")
        left_s = seconds - (time.perf_counter() - start)
        storage = measure_storage(
            nvme_path, seconds=max(left_s, STORAGE_SHARE * seconds), request_nbytes=request_nbytes
        )
    return Hardware(
        cpu=processor_name(),
        cores=cores,
        memory_nbytes=memory_nbytes(),
        gpu=gpu.name if gpu is not None else None,
        gpus=torch.cuda.device_count() if gpu is not None else 0,
        gpu_memory_nbytes=gpu.total_memory if gpu is not None else None,
        storage=storage,
        probe_s=time.perf_counter() - start,
        **figures,
    )
