# SPDX-License-Identifier: Apache-2.0
"""The buffers that I/O of one DeepSpeed engine passes through: pinned host memory for weights and for chunks of
optimizer state, and GPU memory for weights that are read there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence

from tencache_ds.config import TenCacheConfig
from tencache_ds.errors import ConfigError
from tencache_ds.io import ExtentStore
from tencache_ds.layout import round_up
from tencache_ds.memory.arena import HostArena, Locking
from tencache_ds.memory.pool import BufferPool, PoolStats, PoolTimeout
from tencache_ds.planning.budget import AUTO_CHUNK_SLOTS, StagingPlan, plan_staging
from tencache_ds.planning.chunks import LEAST_SLOT_NBYTES
from tencache_ds.planning.size_classes import SizeClass, plan_size_classes
from tencache_ds.runtime.engine import TenCacheEngine
from tencache_ds.runtime.gpu_staging import GpuStaging
from tencache_ds.runtime.surroundings import Surroundings

logger = logging.getLogger("DeepSpeed.tencache")


class Staging:
    """Built and closed by the training thread, or closed by the one that closes the session; figures: any thread.

    Args:
        options, surroundings: of the session.
        engine: one of the session's, whose limits of pinned memory apply.
        locking: of host memory that a GPU copies from.

    Attributes:
        gpu: reads weights into GPU memory, where that is worth it.
        arenas: host memory of the buffers, in the order in which it was allocated.
    """

    def __init__(
        self, options: TenCacheConfig, surroundings: Surroundings, engine: TenCacheEngine, locking: Locking
    ) -> None:
        self.gpu = GpuStaging(
            options,
            surroundings.on_cuda,
            locking,
            lambda: engine.open_plain_backend()[0],
            warn=logger.warning if surroundings.rank == 0 else logger.debug,
        )
        self.arenas: list[HostArena] = []
        self._options = options
        self._engine = engine
        self._pools: list[BufferPool] = []
        self._chunk_pool: BufferPool | None = None
        self._momentum_pool: BufferPool | None = None
        self._keeps_memory = False

    def build(
        self, engines: Sequence[TenCacheEngine], chunk_nbytes: Sequence[int], momentum: SizeClass | None = None
    ) -> StagingPlan:
        """Proves the plan against its limit, then allocates it: all pinned memory that I/O passes through.

        Args:
            engines: of the weights that are staged here.
            chunk_nbytes: bytes of every stored optimizer chunk.
            momentum: buffers for Muon's momentum; None where none is stored.

        Raises:
            ConfigError: ``staging_memory`` is too small for the model.
            MemoryLimitError, LockedMemoryError: the memory cannot be allocated.
        """
        tiers = [engine.weights for engine in engines]
        shards = [nbytes for tier in tiers for nbytes in tier.homes.stored_nbytes()]
        largest = max([LEAST_SLOT_NBYTES, *(round_up(nbytes) for nbytes in chunk_nbytes)]) if chunk_nbytes else 0
        self.gpu.build(
            [
                (path.scratch.path("gds-trial.bin"), route)
                for engine in {id(engine.nvme): engine for engine in engines}.values()
                for path, route in engine.routes()
                if any(kind == "weights" for kind, _, _ in path.stores)
            ],
            shards,
        )
        if self.gpu.pool is not None:
            self._pools.append(self.gpu.pool)
        plan = plan_staging(
            self._options.staging_memory,
            shards,
            largest,
            len(chunk_nbytes),
            weights_read_by_gpu=self.gpu.pool is not None,
            momentum_nbytes=0 if momentum is None else momentum.nbytes,
        )
        arena = self._allocate(plan.nbytes)
        if momentum is not None:
            self._momentum_pool = self._pool_of(momentum, self._allocate(momentum.nbytes), "momentum")
        if plan.chunk_slots:
            self._build_chunk_pool(arena, plan)
        if plan.weight_nbytes:
            classes = plan_size_classes([round_up(nbytes) for nbytes in shards], plan.weight_nbytes)
            pool = BufferPool(arena, classes, poison=self._options.poison_buffers, name="weights")
            self._pools.append(pool)
            for tier in tiers:
                tier.use_pool(pool, self.gpu.pool)
        return plan

    # Chunks of optimizer state

    @property
    def stages_chunks(self) -> bool:
        """Whether there are buffers for chunks."""
        return self._chunk_pool is not None

    def chunk_pool(self) -> BufferPool:
        """The buffers for chunks, which must have been built."""
        if self._chunk_pool is None:
            raise RuntimeError("optimizer chunks are used before build_staging()")
        return self._chunk_pool

    def momentum_pool(self) -> BufferPool:
        """The buffers for Muon's momentum, which must have been built."""
        if self._momentum_pool is None:
            raise RuntimeError("momentum is on NVMe, but build_staging() was not told")
        return self._momentum_pool

    def build_late(self, chunk_nbytes: Sequence[int]) -> None:
        """Builds the buffers for chunks, if there are none, because state goes to NVMe although none did at the start.

        Args:
            chunk_nbytes: bytes of every chunk.

        Raises:
            ConfigError: ``staging_memory`` is too small for it.
            MemoryLimitError, LockedMemoryError: the memory cannot be allocated.
        """
        if self._chunk_pool is None:
            plan = self._plan_late(chunk_nbytes)
            self._build_chunk_pool(self._allocate(plan.nbytes), plan)

    def late_nbytes(self, chunk_nbytes: Sequence[int]) -> int:
        """What :meth:`build_late` would allocate; 0 where the buffers are there, or there is no room for them, so that
        no state goes to NVMe."""
        if self._chunk_pool is not None:
            return 0
        try:
            return self._plan_late(chunk_nbytes).nbytes
        except ConfigError:
            return 0

    def _plan_late(self, chunk_nbytes: Sequence[int]) -> StagingPlan:
        largest = max((round_up(nbytes) for nbytes in chunk_nbytes), default=LEAST_SLOT_NBYTES)
        return plan_staging(self._options.staging_memory, [], largest, AUTO_CHUNK_SLOTS)

    def _allocate(self, nbytes: int) -> HostArena:
        arena = HostArena(nbytes, self._engine.staging_locking(nbytes))
        self.arenas.append(arena)
        return arena

    def _build_chunk_pool(self, arena: HostArena, plan: StagingPlan) -> None:
        self._chunk_pool = self._pool_of(SizeClass(plan.chunk_slot_nbytes, plan.chunk_slots), arena, "chunks")

    def _pool_of(self, size_class: SizeClass, arena: HostArena, name: str) -> BufferPool:
        pool = BufferPool(arena, (size_class,), poison=self._options.poison_buffers, name=name)
        self._pools.append(pool)
        return pool

    # Figures

    def stats(self) -> list[PoolStats]:
        """Figures of each pool in host memory."""
        return [pool.stats() for pool in self._pools if pool is not self.gpu.pool]

    @property
    def nbytes(self) -> int:
        """Host memory of the buffers."""
        return sum(pool.nbytes_total for pool in self.stats())

    # The end

    def keep_memory(self) -> None:
        """:meth:`free` will leave the host memory mapped."""
        self._keeps_memory = True

    def close_pools(self, stores: Iterable[ExtentStore]) -> None:
        """Waits until the buffers have come back, unless their memory is kept: then not all do.

        Args:
            stores: that transfers in flight belong to. If buffers do not return in time, the transfer that holds them
                is more informative than the lessee.

        Raises:
            PoolTimeout, StorageError: a buffer did not return in time.
        """
        stores = list(stores)
        with contextlib.ExitStack() as stack:  # every pool closes, even if an earlier one raises
            for pool in () if self._keeps_memory else self._pools:
                stack.callback(self._close_pool, pool, stores)

    def _close_pool(self, pool: BufferPool, stores: Sequence[ExtentStore]) -> None:
        timeout_s = self._options.io_timeout_s
        try:
            pool.close(timeout_s=timeout_s)
        except PoolTimeout:
            for store in stores:
                store.raise_overdue(timeout_s)
            raise

    def free(self) -> None:
        """Frees the memory, or keeps it mapped, after :meth:`close_pools`."""
        with contextlib.ExitStack() as stack:  # every step runs, even if an earlier one raises
            for arena in self.arenas:
                stack.callback(arena.close)
                if self._keeps_memory:
                    stack.callback(arena.keep_all, "gathers that other ranks did not start")
            stack.callback(self.gpu.close)
