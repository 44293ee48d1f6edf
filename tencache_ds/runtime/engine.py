# SPDX-License-Identifier: Apache-2.0
"""The composition root of a model's weights: builds the components for them and owns their lifetime. No module-level
state. Components that belong to a DeepSpeed engine are in :mod:`tencache_ds.runtime.session`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tencache_ds.config import IoBackend, TenCacheConfig, Verify
from tencache_ds.errors import ConfigError
from tencache_ds.io import (
    BackendSettings,
    ExtentStore,
    NvmePath,
    NvmePaths,
    RoutedBackend,
    StorageBackend,
    open_backend,
)
from tencache_ds.io.backends.registry import may_need_pinned_buffers
from tencache_ds.io.integrity import Fingerprint, sampled_fingerprint, whole_fingerprint
from tencache_ds.io.stripes import Striping
from tencache_ds.layout import gib
from tencache_ds.memory.arena import HostArena, Locking, locked_memory_headroom_nbytes
from tencache_ds.names import FAULTS_VARIABLE
from tencache_ds.observability.counters import Counters
from tencache_ds.planning.budget import AUTO_WEIGHT_STAGING_NBYTES
from tencache_ds.planning.cores import block_nbytes, lane_count
from tencache_ds.profiling.filesystem import file_system_of
from tencache_ds.runtime.gpu_staging import gpu_staging_possible
from tencache_ds.runtime.surroundings import Surroundings
from tencache_ds.tiers.weight_homes import ResidentMemory
from tencache_ds.tiers.weights import WeightTier

if TYPE_CHECKING:
    from tencache_ds.runtime.session import Session

logger = logging.getLogger("DeepSpeed.tencache")

STORE_GROWTH_NBYTES = 64 * 2**20
FINGERPRINTS: dict[Verify, Fingerprint | None] = {
    Verify.off: None,
    Verify.sampled: sampled_fingerprint,
    Verify.full: whole_fingerprint,
}


@dataclass(slots=True)
class _Shared:
    """Storage and memory for the weights of one ``zero.Init`` context, of one or several models; reference-counted by
    its owners.

    Attributes:
        nvme: paths, with their lanes, and stores.
        transient_arena: ordinary memory for weights without a staging buffer.
        resident: memory of resident weights.
        tiers: of the engines that use it.
        store: of the weights, once one had to go to NVMe.
        reserved_nbytes: host memory for gradients and optimizer state of those who train with them.
        routes: of each path that was opened, where it may be read into GPU memory.
    """

    nvme: NvmePaths
    transient_arena: HostArena
    resident: ResidentMemory
    lock: threading.Lock = field(default_factory=threading.Lock)
    tiers: list[WeightTier] = field(default_factory=list)
    store: ExtentStore | None = None
    reserved_nbytes: int = 0
    routes: list[tuple[StorageBackend, RoutedBackend]] = field(default_factory=list)


class TenCacheEngine:
    """The weights of one model on one rank and all they live in, for as long as the model does.

    All weights created in one ``zero.Init`` context initially belong to one engine; when a part of them turns out to be
    a separate model, :meth:`split` gives that part its own engine. Memory, files and lanes are released with the last
    of them. See [Note: who owns what] in :mod:`tencache_ds.runtime.session`.
    """

    def __init__(
        self, options: TenCacheConfig, surroundings: Surroundings, *, beside: TenCacheEngine | None = None
    ) -> None:
        """
        Args:
            options: of the user.
            surroundings: the process.
            beside: an engine whose storage and memory hold the weights.
        """
        self.options = options
        self.surroundings = surroundings
        self.counters = Counters()
        self.before_unclaim: Callable[[], None] = lambda: None
        """Called before the staging buffers are released, so that the code that exposed them to DeepSpeed withdraws
        them."""
        self.claimant: Session | None = None
        """The owner of the staging and the counters of its weights."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._device = torch.cuda.current_device() if surroundings.on_cuda else None
        if beside is None:
            self._shared = _Shared(
                NvmePaths(surroundings.rank, self._open_backend, Striping),
                HostArena(None, Locking.NONE),
                ResidentMemory(
                    HostArena(None, Locking.CUDA if self._pins_for_copies else Locking.NONE, inherited=True)
                ),
            )
        else:
            self._shared = beside._shared
        self.nvme = self._shared.nvme
        self.weights = WeightTier(
            store=self._open_weight_store,
            resident=self._shared.resident,
            transient_arena=self._shared.transient_arena,
            resident_budget_nbytes=self._resident_budget if beside is None else lambda: 0,
            counters=self.counters,
            timeout_s=options.io_timeout_s,
        )
        with self._shared.lock:
            self._shared.tiers.append(self.weights)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has run."""
        return self._closed

    @property
    def _pins_for_copies(self) -> bool:
        return self.surroundings.on_cuda and self.surroundings.pin_memory

    @property
    def host_left_nbytes(self) -> int:
        """Bytes of this rank's ``host_memory`` beside weights and reservations. Negative if these take more."""
        with self._shared.lock:
            weights = sum(tier.homes.resident_nbytes for tier in self._shared.tiers)
            return self.surroundings.host_nbytes - weights - self._shared.reserved_nbytes

    def reserve_host_memory(self, nbytes: int) -> None:
        """Accounts for host memory that gradients and optimizer state take besides the weights; negative values release
        it."""
        with self._shared.lock:
            self._shared.reserved_nbytes += nbytes

    # Claims

    def split(self, keys: Iterable[int]) -> TenCacheEngine:
        """An engine for some of the weights, which leave this one. Only while this engine is unclaimed."""
        part = TenCacheEngine(self.options, self.surroundings, beside=self)
        self.weights.hand_over(keys, part.weights)
        return part

    def claim(self, claimant: Session) -> bool:
        """From now on ``claimant`` stages the weights and counts for them, including the counts since the last
        claim; False if there is another claimant."""
        with self._lock:
            if self.claimant is None:
                self.claimant = claimant
                claimant.counters.add(self.counters)
                self.counters = claimant.counters
                self.weights.begin_service(self.counters)
            return self.claimant is claimant

    def unclaim(self, claimant: Session) -> None:
        """Ends the claim: ordinary memory serves until the next one."""
        with self._lock:
            if self.claimant is not claimant:
                return
            self.before_unclaim()
            self.counters = Counters()
            self.weights.end_service(self.counters)
            self.claimant = None

    # Reporting

    @property
    def resident_nbytes(self) -> int:
        """Host memory of the resident weights; with all of its slabs if they are not shared."""
        alone = len(self._shared.tiers) == 1
        return self._shared.resident.arena.nbytes_in_use if alone else self.weights.homes.resident_nbytes

    @property
    def pinned_nbytes(self) -> int:
        """The part of :attr:`resident_nbytes` that is pinned: all or nothing."""
        return 0 if self._shared.resident.arena.locking is Locking.NONE else self.resident_nbytes

    def routes(self) -> list[tuple[NvmePath, RoutedBackend]]:
        """The open paths that may be read into GPU memory, each with the backend that decides by the buffer."""
        by_backend = {id(backend): route for backend, route in self._shared.routes}
        return [(path, by_backend[id(path.backend)]) for path in self.nvme.paths if id(path.backend) in by_backend]

    def close(self) -> None:
        """The model is gone: waits for I/O in flight and releases the memory and space of the weights; the last engine
        that shares them closes storage, lanes and memory. Idempotent; a forked child leaves all of that to its parent.

        Resident memory that is still referenced stays until the last reference is gone.
        """
        if os.getpid() != self._pid:  # before any lock
            return
        with contextlib.ExitStack() as stack:
            if self._device is not None:
                stack.enter_context(torch.cuda.device(self._device))
                torch.cuda.synchronize()  # copies from this memory may be under way
            self._close()

    def _close(self) -> None:
        claimant = self.claimant
        if claimant is not None:
            claimant.close()
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with self._shared.lock:
            self._shared.tiers.remove(self.weights)
            last = not self._shared.tiers
        with contextlib.ExitStack() as stack:  # every step runs, even if an earlier one raises
            if last:
                stack.callback(self._shared.resident.arena.disown)
                stack.callback(self._shared.transient_arena.close)
                stack.callback(self.nvme.close)
            stack.callback(self.weights.close)

    # Mechanics

    def _resident_budget(self) -> int:
        budget = self.surroundings.host_nbytes
        logger.info("%s of host memory per rank may be used (%s)", gib(budget), self.surroundings.host_reason)
        return budget

    def staging_locking(self, nbytes: int) -> Locking:
        """How staging memory is locked: for fast copies on a GPU, for DeepSpeed's aio op on a CPU, or not at all."""
        if self.surroundings.on_cuda:
            return Locking.CUDA if self.surroundings.pin_memory else Locking.NONE
        wanted = IoBackend(self.options.io_backend).value
        if not self.surroundings.pin_memory or not may_need_pinned_buffers(wanted):
            return Locking.NONE
        headroom = locked_memory_headroom_nbytes()
        if wanted == IoBackend.auto and headroom is not None and headroom < nbytes:
            return Locking.NONE
        return Locking.MLOCK

    def _open_weight_store(self) -> ExtentStore:
        with self._shared.lock:
            if self._shared.store is None:
                self._shared.store = self.open_store("weights", self.surroundings.weights_paths)
            return self._shared.store

    def open_store(self, kind: str, paths: tuple[str, ...], *, preallocate_nbytes: int = 0) -> ExtentStore:
        """A store on NVMe; see :meth:`tencache_ds.io.NvmePaths.open_store`."""
        if not paths:
            raise RuntimeError(f"{kind} need NVMe, but no nvme_path is configured")
        return self.nvme.open_store(
            kind,
            paths,
            preallocate_nbytes=preallocate_nbytes,
            growth_nbytes=STORE_GROWTH_NBYTES,
            n_files=self.n_lanes,
            fingerprint=FINGERPRINTS[Verify(self.options.verify)],
            timeout_s=self.options.io_timeout_s,
        )

    def _open_backend(self) -> tuple[StorageBackend, str]:
        """The backend of a new path."""
        backend, reason = self.open_plain_backend()
        route = None
        if gpu_staging_possible(self.options, self.surroundings.on_cuda):
            backend = route = RoutedBackend(backend)
        if self._injected_faults:
            backend, reason = self._with_faults(backend, reason, self._injected_faults)
        if route is not None:
            self._shared.routes.append((backend, route))
        return backend, reason

    @functools.cached_property
    def n_lanes(self) -> int:
        """I/O threads of each path."""
        if self.options.io_lanes is not None:
            return self.options.io_lanes
        return lane_count(self.surroundings.cores_beside_training, in_memory=self._paths_in_memory)

    @functools.cached_property
    def _paths_in_memory(self) -> bool:
        """Whether a lane copies every byte of a transfer itself."""
        return any(map(_in_memory, (*self.surroundings.weights_paths, *self.surroundings.optimizer_paths)))

    def open_plain_backend(self) -> tuple[StorageBackend, str]:
        """A backend for host memory, and the reason for the choice."""
        aio = self.surroundings.aio
        # The first weights are stored before the staging pool is planned: its usual size tells whether it will be
        # locked, without which aio would have nothing to do.
        staging_nbytes = self.options.staging_memory or AUTO_WEIGHT_STAGING_NBYTES
        return open_backend(
            IoBackend(self.options.io_backend).value,
            BackendSettings(
                buffers_are_pinned=self.staging_locking(staging_nbytes) is not Locking.NONE,
                n_lanes=self.n_lanes,
                request_nbytes=self.options.io_request_size,
                block_nbytes=aio.block_nbytes or block_nbytes(in_memory=self._paths_in_memory),
                queue_depth=aio.queue_depth,
                single_submit=aio.single_submit,
                overlap_events=aio.overlap_events,
                close_timeout_s=self.options.io_timeout_s,
            ),
        )

    @property
    def _injected_faults(self) -> str:
        return os.environ.get(FAULTS_VARIABLE, "") if self.options.allow_faults else ""

    def _with_faults(self, backend: StorageBackend, reason: str, faults: str) -> tuple[StorageBackend, str]:
        """For tests: storage that fails on purpose, and must not be mistaken for a real failure."""
        from tencache_ds.io.wrappers.faults import FaultBackend, parse_faults

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


def _in_memory(path: str) -> bool:
    """Whether files in a folder are in memory."""
    return file_system_of(Path(path)).in_memory
