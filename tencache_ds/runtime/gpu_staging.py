# SPDX-License-Identifier: Apache-2.0
"""Reading of weights into GPU memory for one engine: the decision, the memory and the backends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from tencache_ds.config import Gds, TenCacheConfig, Verify
from tencache_ds.errors import MemoryLimitError
from tencache_ds.io import GdsBackend, RoutedBackend, StorageBackend
from tencache_ds.io.backends.gds import obstacle, try_gds
from tencache_ds.layout import gib, round_up
from tencache_ds.memory.arena import DeviceArena, Locking
from tencache_ds.memory.pool import BufferPool
from tencache_ds.planning.budget import plan_gpu_staging
from tencache_ds.planning.cores import LANES
from tencache_ds.planning.gds import GdsChoice, GdsTrial, choose_gds, combined
from tencache_ds.planning.size_classes import plan_size_classes


def gpu_staging_possible(options: TenCacheConfig, on_cuda: bool) -> bool:
    """Whether a trial is possible at all: a path to read from must be a ``RoutedBackend``."""
    return options.gds == Gds.on or (options.gds == Gds.auto and on_cuda)


class GpuStaging:
    """Used by one thread.

    Args:
        options: of the user.
        on_cuda: whether the compute device is a CUDA GPU.
        locking: of the host memory that weights would be staged in otherwise.
        open_host: opens a backend for host memory, for the trial.
        warn: tells the user what must not be missed.

    Attributes:
        choice: the decision and its reason; None before :meth:`build`, and when no weight is on NVMe.
        pool: GPU memory that weights are read into; None when they are not.
    """

    def __init__(
        self,
        options: TenCacheConfig,
        on_cuda: bool,
        locking: Locking,
        open_host: Callable[[], StorageBackend],
        *,
        warn: Callable[[str], None],
    ) -> None:
        self.choice: GdsChoice | None = None
        self.pool: BufferPool | None = None
        self._options = options
        self._on_cuda = on_cuda
        self._locking = locking
        self._open_host = open_host
        self._warn = warn
        self._arena: DeviceArena | None = None
        self._routes: list[RoutedBackend] = []

    def build(self, paths: Sequence[tuple[str, RoutedBackend]], shards: Sequence[int]) -> None:
        """Decides; then allocates the memory and opens the backends, if weights are to be read into GPU memory.

        Args:
            paths: file name of the trial, and the backend, of every path with weights.
            shards: bytes of every weight on NVMe.

        Raises:
            ConfigError: it was requested but does not work, or ``gds_memory`` is too small.
        """
        if not paths or not shards:
            return
        wanted, options = Gds(self._options.gds).value, self._options
        problem = obstacle(self._on_cuda, Verify(options.verify).value)
        if problem:
            self.choice = choose_gds(wanted, GdsTrial(problem))
            return
        classes = plan_size_classes(
            [round_up(nbytes) for nbytes in shards], plan_gpu_staging(options.gds_memory, shards)
        )
        self.choice = choose_gds(wanted, self._try([trial for trial, _ in paths]))
        if self.choice.warning:
            self._warn(self.choice.warning)
        if not self.choice.use:
            return
        self._arena = DeviceArena(self._device)
        try:
            self.pool = BufferPool(self._arena, classes, poison=options.poison_buffers, name="weights on the GPU")
        except MemoryLimitError as error:
            self.choice = choose_gds(wanted, GdsTrial(str(error)))
            return
        for _, backend in paths:
            backend.add_device(self._open_gds(), self._arena.owns)
            self._routes.append(backend)

    @property
    def nbytes(self) -> int:
        """GPU memory of the pool."""
        return self.pool.stats().nbytes_total if self.pool is not None else 0

    def describe(self) -> str:
        """The decision as text, "" for none."""
        if self.choice is None:
            return ""
        if not self.choice.use:
            return f"no GPUDirect Storage ({self.choice.reason})"
        return f"weights read by GPUDirect Storage into {gib(self.nbytes)} on the GPU ({self.choice.reason})"

    def close(self) -> None:
        """Closes the backends and frees the memory, after the pool was closed by its owner. Idempotent."""
        if self._arena is None:
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._arena.close)
            for route in self._routes:
                stack.callback(route.remove_device, self._arena.owns)

    def _try(self, files: Sequence[str]) -> GdsTrial:
        return combined(
            [
                try_gds(
                    file,
                    self._device,
                    self._open_host,
                    self._open_gds,
                    locking=self._locking,
                    request_nbytes=self._options.io_request_size,
                    timeout_s=self._options.io_timeout_s,
                )
                for file in files
            ]
        )

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self._on_cuda else torch.device("cpu")

    def _open_gds(self) -> StorageBackend:
        options = self._options
        n_lanes = options.io_lanes or LANES
        return GdsBackend(self._device, n_lanes, options.io_request_size, close_timeout_s=options.io_timeout_s)
