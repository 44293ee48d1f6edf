# SPDX-License-Identifier: Apache-2.0
"""How fast memory, processor and GPU are: copies, Adam, matrix multiplication.

Every function here takes about the given number of seconds, plus the time to allocate its buffers, to initialise CUDA,
and to import DeepSpeed. All of them run in the calling thread on the current CUDA device, which should be otherwise
idle.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from threadpoolctl import ThreadpoolController

from tencache_ds.errors import LockedMemoryError
from tencache_ds.tensors import empty, filled

logger = logging.getLogger("DeepSpeed.tencache.profiling")

MEMORY_COPY_NBYTES = 512 << 20
"""More than the caches of current processors."""

ADAM_NUMEL = 1 << 26
"""16 bytes each: 1 GiB, also more than any cache."""

SMALLEST_ADAM_NUMEL = 1 << 22
PINNED_NBYTES = 256 << 20
CUDA_MATMUL_SIZE = 8192
CPU_MATMUL_SIZES = (128, 256, 512, 1024, 2048, 4096)
CUDA_SLICES = 5
"""Measurements of each figure on the GPU: the best one counts."""

SCALED_BELOW_S = 0.5
"""With less time than this, buffers are smaller in proportion: they take time to be filled, too."""


@contextlib.contextmanager
def openmp_threads(threads: int | None) -> Iterator[None]:
    """Within the block OpenMP (of torch and of DeepSpeed's operators) uses ``threads`` threads, unless it is None."""
    if threads is None:
        yield
        return
    # Created late: an operator loaded in between brings its own OpenMP library.
    with ThreadpoolController().select(user_api="openmp").limit(limits=threads):
        yield


def memory_copy_rate(seconds: float, threads: int) -> float:
    """Bytes read plus bytes written per second when ``threads`` threads copy host memory: the median of all copies."""
    nbytes = int(MEMORY_COPY_NBYTES * _scale(seconds))
    with openmp_threads(threads):
        source = filled(nbytes, 1, torch.uint8)
        target = torch.zeros_like(source)
        return _median_rate(lambda: target.copy_(source), 2 * nbytes, seconds)


def cpu_adam_rate(seconds: float, threads: int | None = None) -> float | None:
    """Parameters per second that DeepSpeedCPUAdam updates: fp32 weights, gradients and moments in host memory.

    The median of all updates. ``threads`` is None for as many as OpenMP would use anyway, that is OMP_NUM_THREADS or
    all cores. Imports DeepSpeed, which compiles its operator the first time. Where there is no DeepSpeed or no compiler
    the result is None, and a warning in the log says why.
    """
    numel = max(SMALLEST_ADAM_NUMEL, int(ADAM_NUMEL * _scale(seconds)))
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        weights = torch.nn.Parameter(filled(numel, 1.0, torch.float32))
        weights.grad = torch.full_like(weights, 1e-3)
        optimizer = DeepSpeedCPUAdam([weights], lr=1e-6)
    except (ImportError, RuntimeError) as error:
        logger.warning("the rate of DeepSpeed's CPU Adam was not measured: %s", error)
        return None
    with openmp_threads(threads):
        return _median_rate(optimizer.step, numel, seconds)


def cpu_matmul_rate(seconds: float) -> float:
    """Floating-point operations per second of bf16 matrix multiplication on the CPU: the median at the largest size.

    Sizes grow for as long as there is time. A processor without bf16 instructions is slower than with fp32, and so is a
    bf16 model there.
    """
    deadline = time.perf_counter() + seconds
    for size in CPU_MATMUL_SIZES:
        left, right = (_normal(size) for _ in range(2))
        product = torch.empty_like(left)
        elapsed_s = min(_time(lambda: torch.matmul(left, right, out=product)) for _ in range(2))  # noqa: B023
        left_s = deadline - time.perf_counter()
        if size == CPU_MATMUL_SIZES[-1] or left_s < 4 * 8 * elapsed_s:
            break
    return _median_rate(lambda: torch.matmul(left, right, out=product), 2 * size**3, left_s)


def cuda_copy_rates(seconds: float) -> tuple[float, float]:
    """Bytes per second from pinned host memory to the GPU, and back: one direction and one GPU at a time.

    Raises:
        LockedMemoryError: the driver refused to register host memory.
    """
    with _pinned(PINNED_NBYTES) as host:
        device = torch.empty_like(host, device="cuda")
        h2d = _best_cuda_rate(lambda: device.copy_(host, non_blocking=True), PINNED_NBYTES, seconds / 2)
        d2h = _best_cuda_rate(lambda: host.copy_(device, non_blocking=True), PINNED_NBYTES, seconds / 2)
    return h2d, d2h


def gpu_adam_rate(seconds: float) -> float:
    """Parameters per second that torch's fused AdamW updates on the GPU: fp32 weights, gradients and moments there."""
    free_nbytes, _ = torch.cuda.mem_get_info()
    numel = max(SMALLEST_ADAM_NUMEL, min(ADAM_NUMEL, free_nbytes // 64))
    weights = torch.nn.Parameter(filled(numel, 1.0, torch.float32, "cuda"))
    weights.grad = torch.full_like(weights, 1e-3)
    optimizer = torch.optim.AdamW([weights], lr=1e-6, fused=True)
    return _best_cuda_rate(optimizer.step, numel, seconds)


def cuda_matmul_rate(seconds: float) -> float:
    """Floating-point operations per second of dense bf16 matrix multiplication (fp32 accumulation) on the GPU."""
    size = CUDA_MATMUL_SIZE
    left, right = (_normal(size, "cuda") for _ in range(2))
    product = torch.empty_like(left)
    return _best_cuda_rate(lambda: torch.matmul(left, right, out=product), 2 * size**3, seconds)


def _normal(size: int, device: str = "cpu") -> torch.Tensor:
    """A square matrix in bf16."""
    return empty(size * size, torch.bfloat16, device).normal_().view(size, size)


def _scale(seconds: float) -> float:
    return min(1.0, max(seconds / SCALED_BELOW_S, 1 / 16))


def _time(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _median_rate(work: Callable[[], object], amount: float, seconds: float) -> float:
    """Amount per second: the median over calls for ``seconds``, at least one, after one that does not count."""
    deadline = time.perf_counter() + seconds
    work()
    times_s = [_time(work)]
    while time.perf_counter() < deadline:
        times_s.append(_time(work))
    return amount / statistics.median(times_s)


def _best_cuda_rate(work: Callable[[], object], amount: float, seconds: float) -> float:
    """Amount per second, between CUDA events: the best of a few slices, each of them many calls long.

    The best, since an exclusive GPU has no noise in its favour; many calls, since a rate has to be sustained.
    """
    work()  # allocates, chooses kernels
    one_s = _cuda_seconds(work, 1)
    n_calls = max(1, round(seconds / CUDA_SLICES / max(one_s, 1e-6)))
    deadline = time.perf_counter() + seconds
    best_s = one_s
    for _ in range(CUDA_SLICES):
        best_s = min(best_s, _cuda_seconds(work, n_calls) / n_calls)
        if time.perf_counter() >= deadline:
            break
    return amount / best_s


def _cuda_seconds(work: Callable[[], object], n_calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(n_calls):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@contextlib.contextmanager
def _pinned(nbytes: int) -> Iterator[torch.Tensor]:
    """Host memory registered with CUDA, uint8 of shape ``[nbytes]``: unlike torch's pinned memory, released
    afterwards."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    host = torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
    cudart = torch.cuda.cudart()
    result = cudart.cudaHostRegister(host.data_ptr(), nbytes, 0)
    if int(result) != 0:
        raise LockedMemoryError(
            f"cudaHostRegister of {nbytes} bytes failed: {cudart.cudaGetErrorString(result)}; give the host or the "
            "container more memory"
        )
    try:
        yield host
    finally:
        torch.cuda.synchronize()
        cudart.cudaHostUnregister(host.data_ptr())
