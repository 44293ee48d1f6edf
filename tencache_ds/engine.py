# SPDX-License-Identifier: Apache-2.0
"""The composition root: builds the rooms for one DeepSpeed engine and owns their lifetime. No module-level state."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tencache_ds.config import IoBackend, TenCacheConfig, Verify
from tencache_ds.errors import ConfigError, SpaceError
from tencache_ds.gpu_staging import GpuStaging
from tencache_ds.io import ExtentStore, NvmePaths, RoutedBackend, StorageBackend, open_backend
from tencache_ds.io.fingerprint import Fingerprint, sampled_fingerprint, whole_fingerprint
from tencache_ds.io.scratch import device_of, free_nbytes
from tencache_ds.keys import FAULTS_VARIABLE
from tencache_ds.memory.arena import HostArena, Locking, locked_memory_headroom_nbytes
from tencache_ds.memory.pool import BufferPool
from tencache_ds.observability.counters import Counters, Stats, StepRecord
from tencache_ds.observability.paths import summed
from tencache_ds.planning.budget import AUTO_WEIGHT_STAGING_NBYTES, StagingPlan, plan_staging
from tencache_ds.planning.chunks import LEAST_SLOT_NBYTES, align
from tencache_ds.planning.size_classes import SizeClass, plan_size_classes
from tencache_ds.planning.striping import Striping
from tencache_ds.tiers.optimizer_state import OptimizerStateTier, SubGroupSpec
from tencache_ds.tiers.weights import WeightTier

logger = logging.getLogger("DeepSpeed.tencache")

STORE_GROWTH_NBYTES = 64 * 2**20
FINGERPRINTS: dict[Verify, Fingerprint | None] = {
    Verify.off: None,
    Verify.sampled: sampled_fingerprint,
    Verify.full: whole_fingerprint,
}


@dataclass(frozen=True, slots=True)
class AioSettings:
    """What DeepSpeed's ``aio`` section says."""

    block_nbytes: int
    queue_depth: int
    single_submit: bool
    overlap_events: bool


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an engine needs to know about the process it runs in.

    Attributes:
        rank: global rank.
        local_ranks: ranks on this machine, which share its memory, cores and disks.
        on_cuda: whether the compute device copies over PCIe from registered host memory.
        weights_paths: NVMe folders for weights; none when weights are not offloaded to NVMe.
        optimizer_paths: NVMe folders for optimizer state; none when it stays in host memory.
        pin_memory: DeepSpeed's ``pin_memory`` option.
        aio: DeepSpeed's ``aio`` section.
        resident_nbytes: bytes of weights that may stay in host memory, the same figure on every rank.
        resident_reason: where that figure comes from.
    """

    rank: int
    local_ranks: int
    on_cuda: bool
    weights_paths: tuple[str, ...]
    optimizer_paths: tuple[str, ...]
    pin_memory: bool
    aio: AioSettings
    resident_nbytes: int
    resident_reason: str


class TenCacheEngine:
    """Everything TenCache holds for one DeepSpeed engine (or for one ``zero.Init`` until an engine adopts it)."""

    def __init__(self, options: TenCacheConfig, surroundings: Surroundings) -> None:
        self.options = options
        self.surroundings = surroundings
        self.counters = Counters()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self.nvme = NvmePaths(surroundings.rank, self._open_backend, Striping)
        self._adopted: list[TenCacheEngine] = []
        self._pools: list[BufferPool] = []
        self._chunk_pool: BufferPool | None = None
        self._staging_arena: HostArena | None = None
        self._gpu_staging = GpuStaging(
            options,
            surroundings.on_cuda,
            Locking.CUDA if self._pins_for_copies else Locking.NONE,
            lambda: self._open_plain_backend()[0],
            warn=logger.warning if surroundings.rank == 0 else logger.debug,
        )
        self._routes: list[RoutedBackend] = []  # of each of self.nvme.paths, where it may be read into GPU memory
        self._transient_arena = HostArena(None, Locking.NONE)
        self._resident_arena = HostArena(None, Locking.CUDA if self._pins_for_copies else Locking.NONE, inherited=True)
        self.weights = WeightTier(
            store=lambda: self._open_store("weights", surroundings.weights_paths),
            resident_arena=self._resident_arena,
            transient_arena=self._transient_arena,
            resident_budget_nbytes=self._resident_budget,
            counters=self.counters,
            timeout_s=options.io_timeout_s,
        )
        self.optimizer_state: OptimizerStateTier | None = None

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has run."""
        return self._closed

    @property
    def _pins_for_copies(self) -> bool:
        return self.surroundings.on_cuda and self.surroundings.pin_memory

    # Building

    def host_tensor(self, numel: int, dtype: torch.dtype, purpose: str) -> torch.Tensor:
        """A zeroed 1-D tensor in host memory of exactly that size, registered for fast copies on a GPU."""
        data = self._resident_arena.allocate(max(numel * dtype.itemsize, 1), purpose)
        return data.zero_()[: numel * dtype.itemsize].view(dtype)

    def adopt(self, other: TenCacheEngine) -> None:
        """Takes over the lifetime of an engine that an earlier ``zero.Init`` built for weights of the same model."""
        if other is not self and other not in self._adopted:
            self._adopted.append(other)

    def check_optimizer_space(self, needed_nbytes: int) -> None:
        """Compares what optimizer state needs on NVMe with what is free, for all ranks of this host together.

        Raises:
            SpaceError: too little space; says how much is missing.
        """
        paths = self.surroundings.optimizer_paths
        if not paths or not needed_nbytes:
            return
        ranks = self.surroundings.local_ranks
        needed, free = needed_nbytes * ranks, _free_together(paths)
        if free < needed:
            raise SpaceError(
                "allocate",
                paths[0],
                0,
                needed,
                f"optimizer state of {ranks} rank(s) needs {_gib(needed)}, but only {_gib(free)} are free"
                f"{_together(paths)}: {_gib(needed - free)} are missing. Free some space, name another folder as "
                '"zero_optimization.offload_optimizer.nvme_path", or more of them as "tencache.nvme_paths"',
                errno=errno.ENOSPC,
            )

    def build_optimizer_state(self, specs: Sequence[SubGroupSpec], needed_nbytes: int) -> OptimizerStateTier:
        """Makes the optimizer tier and the room its state needs on NVMe.

        Args:
            specs: the sub-groups.
            needed_nbytes: bytes that will be stored on NVMe, for the check before anything is allocated.

        Raises:
            SpaceError: too little space; says how much is missing.
        """
        store = None
        if self.surroundings.optimizer_paths and needed_nbytes:
            store = self._open_store("optimizer", self.surroundings.optimizer_paths, preallocate_nbytes=needed_nbytes)
        self.optimizer_state = OptimizerStateTier(
            specs,
            store=store,
            pool=self._require_chunk_pool,
            counters=self.counters,
            chunk_nbytes=self.options.chunk_size,
            timeout_s=self.options.io_timeout_s,
        )
        return self.optimizer_state

    def build_staging(self, chunk_nbytes: Sequence[int]) -> StagingPlan:
        """Proves the staging plan against its limit, then allocates it: all pinned memory that I/O passes through.

        Args:
            chunk_nbytes: bytes of every stored optimizer chunk.

        Raises:
            ConfigError: ``staging_memory`` is too small for the model.
            MemoryLimitError, LockedMemoryError: the memory cannot be had.
        """
        tiers = [self.weights, *(engine.weights for engine in self._adopted)]
        shards = [nbytes for tier in tiers for nbytes in tier.stored_nbytes()]
        largest = max([LEAST_SLOT_NBYTES, *(align(nbytes) for nbytes in chunk_nbytes)]) if chunk_nbytes else 0
        self._gpu_staging.build(
            [
                (path.scratch.path("gds-trial.bin"), route)
                for engine in self.all()
                for path, route in zip(engine.nvme.paths, engine._routes, strict=False)
                if any(kind == "weights" for kind, _, _ in path.stores)
            ],
            shards,
        )
        if self._gpu_staging.pool is not None:
            self._pools.append(self._gpu_staging.pool)
        plan = plan_staging(
            self.options.staging_memory,
            shards,
            largest,
            len(chunk_nbytes),
            weights_read_by_gpu=self._gpu_staging.pool is not None,
        )
        self._staging_arena = HostArena(plan.nbytes, self._staging_locking(plan.nbytes))
        poison = self.options.poison_buffers
        if plan.chunk_slots:
            classes = (SizeClass(plan.chunk_slot_nbytes, plan.chunk_slots),)
            self._chunk_pool = BufferPool(self._staging_arena, classes, poison=poison, name="chunks")
            self._pools.append(self._chunk_pool)
        if plan.weight_nbytes:
            classes = plan_size_classes([align(nbytes) for nbytes in shards], plan.weight_nbytes)
            pool = BufferPool(self._staging_arena, classes, poison=poison, name="weights")
            self._pools.append(pool)
            for tier in tiers:
                tier.use_pool(pool, self._gpu_staging.pool)
        return plan

    def all(self) -> list[TenCacheEngine]:
        """This engine and those it adopted."""
        return [self, *self._adopted]

    # Reporting

    def stats(self) -> Stats:
        """Snapshot of the counters and of what is held now."""
        arenas = [self._resident_arena] + ([self._staging_arena] if self._staging_arena is not None else [])
        pools = [pool.stats() for pool in self._pools if pool is not self._gpu_staging.pool]
        stores = [store for engine in self.all() for store in engine.nvme.stores]
        paths = summed(path.stats() for engine in self.all() for path in engine.nvme.paths)
        return Stats(
            total=self.counters.total(),
            last_step=self.counters.last_step,
            pinned_nbytes=sum(arena.nbytes_locked for arena in arenas),
            pinned_peak_nbytes=sum(arena.nbytes_peak for arena in arenas if arena.locking is not Locking.NONE),
            staging_nbytes=sum(pool.nbytes_total for pool in pools),
            staging_peak_nbytes=sum(pool.nbytes_leased_peak for pool in pools),
            gpu_staging_nbytes=self._gpu_staging.nbytes,
            pool_waits=sum(pool.n_waits for pool in pools),
            stored_nbytes=sum(store.nbytes_allocated for store in stores),
            resident_weight_nbytes=sum(engine.weights.resident_nbytes for engine in self.all()),
            healed_reads=sum(store.n_healed_reads for store in stores),
            relocated_extents=sum(store.n_relocated for store in stores),
            io_backend=paths[0].backend if paths else "",
            paths=paths,
        )

    def describe(self) -> str:
        """One line: what lives where and how it moves."""
        stats = self.stats()
        parts = [f"weights in RAM {_gib(stats.resident_weight_nbytes)}", f"on NVMe {_gib(stats.stored_nbytes)}"]
        parts.append(f"staging {_gib(stats.staging_nbytes)}")
        parts.append(f"pinned {_gib(stats.pinned_nbytes)}")
        if self._gpu_staging.choice is not None:
            parts.append(self._gpu_staging.describe())
        reasons = {f"{path.backend.name} ({path.reason})" for engine in self.all() for path in engine.nvme.paths}
        if reasons:
            parts.append(f"I/O {', '.join(sorted(reasons))} on {self.options.io_lanes} lanes")
        if len(stats.paths) > 1:
            held = ", ".join(f"{path.path} {_gib(path.stored_nbytes)}" for path in stats.paths)
            parts[-1] += f" per path, over {len(stats.paths)} paths ({held})"
        return "; ".join(parts)

    def step_done(self, update_ns: int) -> StepRecord:
        """Closes an optimizer step that spent ``update_ns`` in the update, and weighs the NVMe paths by what they gave
        in it."""
        for engine in self.all():
            engine.nvme.reweigh()
        return self.counters.step_done(update_ns)

    def check(self) -> None:
        """Raises the error of an earlier asynchronous write, if one failed. Cheap: called every step."""
        for engine in self.all():
            engine.weights.check()
        if self.optimizer_state is not None:
            self.optimizer_state.check()

    def assert_idle(self) -> None:
        """Raises if a staging buffer is leased, naming its holder."""
        for pool in self._pools:
            pool.assert_idle()

    def close(self) -> None:
        """Waits for I/O in flight, frees all memory and closes the scratch files. Idempotent; a forked child leaves
        all of that to its parent."""
        if os.getpid() != self._pid:  # before any lock
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.ExitStack() as stack:  # every step runs, whatever an earlier one raises
            stack.callback(self._resident_arena.close)
            stack.callback(self._transient_arena.close)
            if self._staging_arena is not None:
                stack.callback(self._staging_arena.close)
            stack.callback(self._gpu_staging.close)
            stack.callback(self.nvme.close)
            for pool in self._pools:
                stack.callback(pool.close, timeout_s=self.options.io_timeout_s)
            for engine in self._adopted:
                stack.callback(engine.close)
            stack.callback(self.weights.close)
            if self.optimizer_state is not None:
                stack.callback(self.optimizer_state.close)

    # Mechanics

    def _resident_budget(self) -> int:
        budget = self.surroundings.resident_nbytes
        logger.info("weights may fill %s of host memory per rank (%s)", _gib(budget), self.surroundings.resident_reason)
        return budget

    def _require_chunk_pool(self) -> BufferPool:
        if self._chunk_pool is None:
            raise RuntimeError("optimizer chunks are used before build_staging()")
        return self._chunk_pool

    def _staging_locking(self, nbytes: int) -> Locking:
        """How staging memory is locked: for fast copies on a GPU, for DeepSpeed's aio op on a CPU, or not at all."""
        if self.surroundings.on_cuda:
            return Locking.CUDA if self.surroundings.pin_memory else Locking.NONE
        wanted = self.options.io_backend
        if not self.surroundings.pin_memory or wanted in (IoBackend.posix, IoBackend.native):
            return Locking.NONE
        headroom = locked_memory_headroom_nbytes()
        if wanted == IoBackend.auto and headroom is not None and headroom < nbytes:
            return Locking.NONE
        return Locking.MLOCK

    def _open_store(self, kind: str, paths: tuple[str, ...], *, preallocate_nbytes: int = 0) -> ExtentStore:
        if not paths:
            raise RuntimeError(f"{kind} are to be stored on NVMe, but no nvme_path is configured")
        return self.nvme.open_store(
            kind,
            paths,
            preallocate_nbytes=preallocate_nbytes,
            growth_nbytes=STORE_GROWTH_NBYTES,
            n_files=self.options.io_lanes,
            fingerprint=FINGERPRINTS[Verify(self.options.verify)],
            timeout_s=self.options.io_timeout_s,
        )

    def _open_backend(self) -> tuple[StorageBackend, str]:
        """The backend of a new path."""
        backend, reason = self._open_plain_backend()
        if self._gpu_staging.possible:
            route = RoutedBackend(backend)
            self._routes.append(route)
            backend = route
        faults = os.environ.get(FAULTS_VARIABLE) if self.options.allow_faults else None
        return self._with_faults(backend, reason, faults) if faults else (backend, reason)

    def _open_plain_backend(self) -> tuple[StorageBackend, str]:
        aio = self.surroundings.aio
        # The first weights are stored before the staging pool is planned: its usual size tells whether it will be
        # locked, without which aio would have nothing to do.
        staging_nbytes = self.options.staging_memory or AUTO_WEIGHT_STAGING_NBYTES
        return open_backend(
            IoBackend(self.options.io_backend).value,
            n_lanes=self.options.io_lanes,
            request_nbytes=self.options.io_request_size,
            block_nbytes=aio.block_nbytes,
            queue_depth=aio.queue_depth,
            single_submit=aio.single_submit,
            overlap_events=aio.overlap_events,
            buffers_are_pinned=self._staging_locking(staging_nbytes) is not Locking.NONE,
            close_timeout_s=self.options.io_timeout_s,
        )

    def _with_faults(self, backend: StorageBackend, reason: str, faults: str) -> tuple[StorageBackend, str]:
        """For a drill: storage that goes wrong on purpose, which nobody must take for the real thing."""
        from tencache_ds.io.faults import FaultBackend, parse_faults

        try:
            rules = parse_faults(faults)
        except ConfigError:
            backend.close()
            raise
        if not self.nvme.paths:  # on every rank: a rule may be for one of them
            logger.warning(
                "%s is set: faults are INJECTED into the storage of rank %d: %s",
                FAULTS_VARIABLE,
                self.surroundings.rank,
                faults,
            )
        return FaultBackend(backend, rules, self.surroundings.rank), f"{reason}; WITH INJECTED FAULTS: {faults}"


def _free_together(paths: Sequence[str]) -> int:
    """Free bytes of all file systems that the paths lie on, each counted once."""
    free = {device_of(path): free_nbytes(path) for path in paths}
    return sum(free.values())


def _together(paths: Sequence[str]) -> str:
    return f" on {len(paths)} paths together" if len(paths) > 1 else ""


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
