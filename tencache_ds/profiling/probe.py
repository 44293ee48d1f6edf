# SPDX-License-Identifier: Apache-2.0
"""The ten-second probe: measures the speed of this machine before training.

Storage: reads, writes, and both at once, with plain threads on files of its own.

[Note: what is measured] Threads call ``preadv`` and ``pwritev`` (which release the GIL) with page-aligned buffers and
O_DIRECT, on areas that have been written before: reading space that was only reserved never reaches the device. The
data is random, so that nothing can compress it away. Requests are spread over several files, because some file systems
(tmpfs, for one) let one writer at a time into a file. A file that has just been written may still be in a cache of the
drive or, on a virtual disk, of its host: no program can see past those.
"""

from __future__ import annotations

import contextlib
import enum
import math
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tencache_ds.errors import ConfigError, StorageError
from tencache_ds.layout import PAGE_NBYTES
from tencache_ds.profiling.filesystem import block_device_of, file_system_of, open_direct
from tencache_ds.profiling.hardware import Hardware, StorageRates
from tencache_ds.profiling.host import available_nbytes, memory_nbytes, processor_name

_Result = TypeVar("_Result")

LANES = (1, 4, 8, 16)
"""Numbers of requests in flight that are tried."""

FILL_LANES = 8
ROUNDS = 3
"""Slices of each kind and number of requests in flight; spread over the whole time, since virtual disks vary."""

LARGEST_REQUEST_NBYTES = 128 << 20
"""Each of the 16 threads has a buffer of one request."""

LARGEST_AREA_NBYTES = 4 << 30
AREA_NBYTES_PER_S = 768 << 20
"""Area for each second of measuring: more than that is not read and written again in the time, on most disks."""

SHARE_OF_FREE = 4
"""At most a quarter of the free space is taken."""

LEAST_FREE_NBYTES = 64 << 20
FILL_SHARE = 0.2
"""Share of the time for writing the area the first time."""


class Kind(enum.Enum):
    """The operation measured in a time slice."""

    READ = "read"
    WRITE = "write"
    MIXED = "mixed"
    """Every thread reads and writes in turn, half of them the other way round: as many bytes of one as of the other."""


@dataclass(frozen=True, slots=True)
class Area:
    """Open files without names and how requests lie in them: request ``i`` is in file ``i % len(fds)``."""

    fds: tuple[int, ...]
    n_requests: int
    request_nbytes: int
    direct: bool
    name: str

    def place(self, index: int) -> tuple[int, int]:
        """File descriptor and offset of a request."""
        return self.fds[index % len(self.fds)], index // len(self.fds) * self.request_nbytes


def free_nbytes(folder: Path) -> int:
    """Bytes that this user can still write in ``folder``; on tmpfs no more than there is memory."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if file_system_of(folder).kind == "tmpfs":
        free = min(free, available_nbytes())
    return free


def check_folder(folder: Path) -> None:
    """Raises ConfigError if ``folder`` is not a folder that this user can write to."""
    if not folder.is_dir():
        raise ConfigError(f"nvme_path {folder} is not a folder: create it, or name a folder on a local disk")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"nvme_path {folder} cannot be written to by this user: run `sudo chown $USER {folder}`")


def area_nbytes_for(folder: Path, seconds: float, request_nbytes: int) -> int:
    """Bytes to measure on: whole requests, at least two.

    Raises:
        ConfigError: ``folder`` is not a folder this user can write to, has too little free space, or
            ``request_nbytes`` is not a multiple of 4096 up to 128 MiB.
    """
    if not (0 < request_nbytes <= LARGEST_REQUEST_NBYTES) or request_nbytes % PAGE_NBYTES:
        raise ConfigError(
            f"request_nbytes is {request_nbytes}: direct I/O needs a multiple of {PAGE_NBYTES}, up to "
            f"{LARGEST_REQUEST_NBYTES}"
        )
    check_folder(folder)
    free = free_nbytes(folder)
    needed = max(LEAST_FREE_NBYTES, 2 * SHARE_OF_FREE * request_nbytes)
    if free < needed:
        raise ConfigError(
            f"nvme_path {folder} has {free} bytes free, and measuring with requests of {request_nbytes} bytes needs "
            f"{needed}: free some space or name a folder on a larger disk"
        )
    wanted = min(LARGEST_AREA_NBYTES, int(AREA_NBYTES_PER_S * seconds), free // SHARE_OF_FREE)
    return max(2, wanted // request_nbytes) * request_nbytes


def measure_storage(folder: Path, *, seconds: float, request_nbytes: int) -> StorageRates:
    """Read, write and mixed rate of the storage under ``folder``, each at its own best number of requests in flight.

    A rate is the median of several slices of time. Where O_DIRECT is not supported, every write waits for the device
    (O_DSYNC) and pages are dropped from the page cache after each request: a fair guess, and marked as such.

    Takes ``seconds``, and longer only where the device needs it for a few requests. Uses 16 threads with a buffer of
    ``request_nbytes`` each. The files are in a new folder under ``folder``, without names once they are open, so that
    nothing large is left behind even if the process is killed.

    Raises:
        ConfigError: as :func:`area_nbytes_for` says, or the space it counted on is not there.
        StorageError: a read or write failed.
    """
    start = time.perf_counter()
    area_nbytes = area_nbytes_for(folder, seconds, request_nbytes)
    with open_area(folder, area_nbytes, request_nbytes) as area, _Threads(area) as threads:
        n_written = threads.fill(start + FILL_SHARE * seconds)
        samples = _sample(threads, n_written, start + seconds)
    best = {
        kind: max((statistics.median(rates), lanes) for (other, lanes), rates in samples.items() if other is kind)
        for kind in Kind
    }
    device = block_device_of(folder)
    return StorageRates(
        read_bytes_per_s=best[Kind.READ][0],
        write_bytes_per_s=best[Kind.WRITE][0],
        mixed_bytes_per_s=best[Kind.MIXED][0],
        request_nbytes=request_nbytes,
        lanes=best[Kind.MIXED][1],
        direct=area.direct,
        filesystem=file_system_of(folder).kind,
        device=device.name if device is not None else "",
    )


def _sample(threads: _Threads, n_requests: int, deadline: float) -> dict[tuple[Kind, int], list[float]]:
    """Bytes per second of every slice. Few lanes come first: on a slow device those slices overrun the least."""
    samples: dict[tuple[Kind, int], list[float]] = {}
    slices = [(kind, lanes) for _ in range(ROUNDS) for lanes in LANES for kind in Kind]
    for index, (kind, lanes) in enumerate(slices):
        left_s = deadline - time.perf_counter()
        if left_s <= 0 and len(samples) >= len(Kind):
            break
        rate = threads.rate(kind, lanes, max(0.0, left_s) / (len(slices) - index), n_requests)
        samples.setdefault((kind, lanes), []).append(rate)
    return samples


class _Threads:
    """The lanes: as many threads as requests are ever in flight, each with a buffer. A context; used by one thread."""

    def __init__(self, area: Area) -> None:
        self._area = area
        self._buffers: list[mmap.mmap] = []
        self._lock = threading.Lock()
        self._next = 0

    def __enter__(self) -> _Threads:
        noise = os.urandom(self._area.request_nbytes)
        for lane in range(max(LANES)):
            buffer = mmap.mmap(-1, len(noise), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            turn = lane * 61  # not a multiple of a page: no two requests have equal blocks
            buffer[:] = noise[turn:] + noise[:turn]
            self._buffers.append(buffer)
        self._pool = ThreadPoolExecutor(max(LANES), thread_name_prefix="tencache-probe")
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)  # the files are closed next
        for buffer in self._buffers:
            buffer.close()

    def fill(self, deadline: float) -> int:
        """Writes the area from its start until the deadline, at least one request a lane; returns how many it wrote."""

        def write(lane: int) -> None:
            while (index := self._take()) < self._area.n_requests:
                self._move(Kind.WRITE, index, lane)
                if time.perf_counter() >= deadline:
                    return

        self._next = 0
        self._run(write, FILL_LANES)
        n_written = min(self._next, self._area.n_requests)
        for fd in self._area.fds:  # where the data lies is on the device, too: later writes only replace it
            os.fsync(fd)
        return n_written

    def rate(self, kind: Kind, lanes: int, seconds: float, n_requests: int) -> float:
        """Bytes per second with ``lanes`` requests in flight for ``seconds``, over the first ``n_requests``."""
        far = (n_requests // 2) | 1  # odd, so that the two of a pair are in different files
        deadline = time.perf_counter() + seconds

        def work(lane: int) -> int:
            n_moved = 0
            while True:
                index = self._take() % n_requests
                if kind is Kind.MIXED:
                    pair = [(Kind.READ, index), (Kind.WRITE, (index + far) % n_requests)]
                    for one, place in pair if lane % 2 == 0 else reversed(pair):
                        self._move(one, place, lane)
                    n_moved += 2
                else:
                    self._move(kind, index, lane)
                    n_moved += 1
                if time.perf_counter() >= deadline:
                    return n_moved * self._area.request_nbytes

        start = time.perf_counter()
        nbytes = sum(self._run(work, lanes))
        return nbytes / (time.perf_counter() - start)

    def _run(self, work: Callable[[int], _Result], lanes: int) -> list[_Result]:
        """The results of ``work(lane)`` in each of ``lanes`` threads, or the first error."""
        futures = [self._pool.submit(work, lane) for lane in range(lanes)]
        return [future.result() for future in futures]

    def _take(self) -> int:
        with self._lock:
            index = self._next
            self._next += 1
            return index

    def _move(self, kind: Kind, index: int, lane: int) -> None:
        """One whole request, blocking."""
        area, buffer = self._area, self._buffers[lane]
        fd, offset = area.place(index)
        try:
            n_moved = (os.preadv if kind is Kind.READ else os.pwritev)(fd, [buffer], offset)
            if not area.direct:
                os.posix_fadvise(fd, offset, area.request_nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            cause = error.strerror or str(error)
            raise StorageError(
                kind.value, area.name, offset, area.request_nbytes, cause, errno=error.errno, tag="the storage probe"
            ) from error
        if n_moved != area.request_nbytes:
            cause = f"only {n_moved} bytes were transferred"
            raise StorageError(kind.value, area.name, offset, area.request_nbytes, cause, tag="the storage probe")


def fill_area(area: Area, deadline: float) -> int:
    """Writes random bytes from the start of the area until ``time.perf_counter()`` is at the deadline.

    Returns:
        How many requests were written: at least 8, or all there are.

    Raises:
        StorageError: a write failed.
    """
    with _Threads(area) as threads:
        return threads.fill(deadline)


@contextlib.contextmanager
def open_area(folder: Path, nbytes: int, request_nbytes: int, most_files: int = max(LANES)) -> Iterator[Area]:
    """Reserves ``nbytes`` in files of a new folder, which are removed afterwards in any case.

    Raises:
        ConfigError: too little space, or the files cannot be created.
    """
    n_requests = nbytes // request_nbytes
    n_files = min(most_files, n_requests)
    with contextlib.ExitStack() as stack:
        try:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".tencache-probe-", dir=folder)))
            fds, direct = [], True
            for index in range(n_files):
                fd, direct = _open_file(scratch / f"area-{index}", direct)
                stack.callback(os.close, fd)
                (scratch / f"area-{index}").unlink()
                os.posix_fallocate(fd, 0, len(range(index, n_requests, n_files)) * request_nbytes)
                fds.append(fd)
        except OSError as error:
            raise ConfigError(
                f"nvme_path {folder} cannot be measured: {error.strerror or error}; it needs {nbytes} bytes in files "
                "of this user: free some space or name another folder"
            ) from error
        yield Area(tuple(fds), n_requests, request_nbytes, direct, str(folder))


def _open_file(path: Path, direct: bool) -> tuple[int, bool]:
    """A new file with O_DIRECT if that is wanted and works, else one whose writes wait for the device."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    fd = open_direct(path, flags) if direct else None
    return (fd, True) if fd is not None else (os.open(path, flags | os.O_DSYNC, 0o600), False)


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
