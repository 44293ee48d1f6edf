# SPDX-License-Identifier: Apache-2.0
"""The components of one DeepSpeed engine, from ``deepspeed.initialize`` to its ``destroy()``: optimizer state,
gradients, staging memory and counters.

[Note: who owns what] Weights belong to their model. Their store, lanes, scratch folder and resident memory (a
:class:`~tencache_ds.runtime.engine.TenCacheEngine`) live until the model is dropped, so that it can be read, saved and
given to DeepSpeed again after ``destroy()``. A session claims the engines of its model's weights: it stages them,
counts for them, and keeps its optimizer's state on the same lanes, where both kinds of requests have one order of
urgency. When it ends, all memory that it pinned is released; resident weights stay registered, because the next session
needs that and registration is expensive (about 0.5 s per GB).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence, Set

import torch

from tencache_ds.activations.auto_places import AutoPlaces
from tencache_ds.activations.saved_tensors import ActivationFigures
from tencache_ds.config import Activations, Checkpoint, TenCacheConfig
from tencache_ds.errors import TenCacheError
from tencache_ds.io import ExtentStore
from tencache_ds.io.archive_writer import AT_ONCE_NBYTES, COPY_NBYTES, CopyBuffers
from tencache_ds.io.paths import NvmePaths
from tencache_ds.io.scratch import device_of
from tencache_ds.layout import BOUNCE_NBYTES, N_BOUNCES, gib
from tencache_ds.memory.arena import HostArena, HostTensors, Locking
from tencache_ds.observability import tracing
from tencache_ds.observability.counters import Counters, Stats, StepRecord
from tencache_ds.observability.paths import summed
from tencache_ds.placement.activation_homes import ActivationHomes
from tencache_ds.placement.host_homes import HostHomes
from tencache_ds.placement.memory_watch import HostWatch
from tencache_ds.placement.moves import StateMoves
from tencache_ds.placement.places import GpuUsage, Place
from tencache_ds.planning.budget import (
    MemoryNeeds,
    OutsideNeeds,
    PeakMemory,
    StagingPlan,
    memory_of_own_weights,
    peak_memory,
)
from tencache_ds.planning.size_classes import SizeClass
from tencache_ds.profiling.host import available_nbytes, memory_nbytes
from tencache_ds.runtime.engine import TenCacheEngine
from tencache_ds.runtime.staging import Staging
from tencache_ds.runtime.state_building import StateBuilder
from tencache_ds.runtime.surroundings import Surroundings
from tencache_ds.tiers.fused_adam import FusedAdam
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.sub_group import SubGroupSpec
from tencache_ds.tiers.update import BackgroundUpdate

logger = logging.getLogger("DeepSpeed.tencache")


class Session:
    """Everything TenCache holds for one DeepSpeed engine. Built and closed by the training thread; a dropped model
    closes it from a separate thread.
    """

    def __init__(
        self, options: TenCacheConfig, surroundings: Surroundings, engines: Sequence[TenCacheEngine], *, owns: bool
    ) -> None:
        """
        Args:
            options: of the DeepSpeed engine's config.
            surroundings: of the DeepSpeed engine.
            engines: of the model's weights, one per ``zero.Init`` context; at least one. Those that another session
                has claimed are used, staged and counted by that one.
            owns: there are no weights: the only engine is for the optimizer state, and ends with the session.
        """
        self.options = options
        self.surroundings = surroundings
        self.counters = Counters()
        self.activations: ActivationHomes | None = None
        """Memory of activations; None unless they are moved."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._engines = list(engines)
        self._owns = owns
        self._reserved_nbytes = 0
        self._gpu_weight_nbytes = self._gpu_gradient_nbytes = self._gpu_momentum_nbytes = 0
        self._peak = PeakMemory(0, 0, 0)
        self._copies: CopyBuffers | None = None
        self._placement = self._activation_placement = ""
        self._predicted_seconds: float | None = None
        self._settled = True
        self._fused_adam: FusedAdam | None = None
        self._on_close: list[Callable[[Stats], None]] = []
        self._no_update = threading.Event()
        self._no_update.set()
        self._background: BackgroundUpdate | None = None
        locking = Locking.CUDA if surroundings.on_cuda and surroundings.pin_memory else Locking.NONE
        self._gradient_arena = HostArena(None, locking, inherited=True)
        self.gradient_memory = HostTensors(self._gradient_arena, "gradients", self.count_host)
        """Host memory of gradients, registered for fast copies on a GPU."""
        # DeepSpeed pins these weights whatever "pin_memory" says.
        self._weight_arena = HostArena(None, Locking.CUDA if surroundings.on_cuda else Locking.NONE, inherited=True)
        self._staging = Staging(options, surroundings, engines[0], locking)
        self.state = StateBuilder(options, surroundings, engines[0], self._staging, self.counters, self.count_host)
        """Builds the optimizer's state."""
        self._claimed = [engine for engine in self._engines if engine.claim(self)]

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has run."""
        return self._closed

    @property
    def claimed(self) -> list[TenCacheEngine]:
        """Those of :meth:`all` that no other session has claimed."""
        return list(self._claimed)

    def all(self) -> list[TenCacheEngine]:
        """The engines of the model's weights."""
        return list(self._engines)

    @property
    def optimizer_state(self) -> OptimizerStateTier | None:
        """The optimizer's state; None before it is built, and where it stays with the optimizer."""
        return self.state.tier

    # Building

    def build_activations(
        self,
        device: torch.device,
        is_weight: Callable[[torch.Tensor], bool],
        *,
        usage: Callable[[], GpuUsage] | None,
        releasable_nbytes: Callable[[], int],
        say: Callable[[str], None],
    ) -> bool:
        """Prepares to move activations, if the options say so; before :meth:`StateBuilder.plan`, which takes what host
        memory they leave.

        Args:
            device: where they are.
            is_weight: whether a tensor lies in the storage of a weight.
            usage: of the device's memory; None if it cannot be asked for: then ``auto`` moves nothing.
            releasable_nbytes: see :class:`AutoPlaces`.
            say: tells the user, on one rank.
        """

        def placed(placement: str) -> None:
            self._activation_placement = placement
            say(placement)

        wanted = self.options.activations
        auto = None
        if wanted == Activations.auto and usage is not None:
            auto = AutoPlaces(usage, releasable_nbytes, placed)
        if wanted == Activations.on or auto is not None:
            engine = self._engines[0]
            self.activations = ActivationHomes(
                self.options, self.surroundings, engine, self.counters, self.count_host, device, is_weight, auto
            )
        return self.activations is not None

    @property
    def competing_activations(self) -> ActivationHomes | None:
        """Activations that move only where that is worth it; None if they stay, or move in any case."""
        return self.activations if self.options.activations == Activations.auto else None

    def weight_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory for weights that DeepSpeed keeps in RAM: exact, where torch pins a power of two.

        Returns:
            A 1-D tensor, uninitialized; on a GPU registered for fast copies until :meth:`close`.

        Raises:
            MemoryLimitError, LockedMemoryError: there is no such memory.
        """
        nbytes = numel * dtype.itemsize
        return self._weight_arena.allocate(max(nbytes, 1), "weights")[:nbytes].view(dtype)

    @property
    def host_left_nbytes(self) -> int:
        """This rank's host memory not taken by weights, gradients or optimizer state."""
        return self._engines[0].host_left_nbytes

    def count_host(self, nbytes: int) -> None:
        """Adds ``nbytes`` (may be negative) to the host memory in use by gradients and optimizer state."""
        self._reserved_nbytes += nbytes
        self._engines[0].reserve_host_memory(nbytes)

    def note_gpu(self, *, weight_nbytes: int, gradient_nbytes: int, momentum_nbytes: int) -> None:
        """GPU memory taken by weights, gradients and momentum now, for :meth:`stats`."""
        self._gpu_weight_nbytes, self._gpu_gradient_nbytes = weight_nbytes, gradient_nbytes
        self._gpu_momentum_nbytes = momentum_nbytes

    def await_placement(self) -> None:
        """The first decision about GPU memory is made after some steps, for :meth:`stats`."""
        self._settled = False

    def note_placement(self, placement: str, predicted_seconds: float | None) -> None:
        """The latest placement decision, and the predicted step time since then, for :meth:`stats`."""
        self._placement, self._predicted_seconds, self._settled = placement, predicted_seconds, True

    def checkpoint_buffers(self) -> CopyBuffers:
        """Host memory for optimizer state that a checkpoint has yet to write, for one that begins now."""
        # Not torch's threads: after each copy they spin, all of them, on the cores of the thread that trains.
        copy = torch.Tensor.copy_ if self._fused_adam is None else self._fused_adam.copy
        if self.options.checkpoint == Checkpoint.synchronous:
            return CopyBuffers(AT_ONCE_NBYTES, copy)
        most_nbytes, kept = self.options.checkpoint_memory, True
        if most_nbytes is None:
            most_nbytes, kept = available_nbytes() // (2 * self.surroundings.local_ranks), False
        if self._copies is None or not kept:
            self._copies = CopyBuffers(most_nbytes, copy, kept=kept)
        return self._copies

    def drive_in_use(self, devices: Set[int]) -> Callable[[float], bool]:
        """Tells one who writes to some file systems, given seconds to wait at most, whether an update uses one of
        them."""
        paths = self.surroundings.optimizer_paths
        if not self.state.stored_nbytes or devices.isdisjoint(map(device_of, paths)):
            return lambda seconds: False
        return self.update_under_way

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Around the part of an update on the training thread."""
        self._no_update.clear()
        try:
            yield
        finally:
            self._no_update.set()

    @property
    def background(self) -> BackgroundUpdate | None:
        """The optimizer step that overlaps training."""
        return self._background

    def overlap(self, background: BackgroundUpdate) -> None:
        """An optimizer step overlaps training from now on: whoever needs its results waits for it."""
        self._background = background

    def update_under_way(self, seconds: float) -> bool:
        """Waits at most so long until no update is under way, here or in the background, where state may be read for a
        checkpoint, too; whether one still is. Any thread."""
        if not self._no_update.wait(seconds):
            return True
        return self._background is not None and self._background.busy(seconds)

    def plan_peak(self, others: OutsideNeeds) -> None:
        """Computes an upper bound of this rank's peak memory from the initial placement.

        Args:
            others: what DeepSpeed and the optimizer need.
        """
        tiers = [engine.weights.homes for engine in self._engines]
        pinned = self._weight_arena.locking is not Locking.NONE
        resident = sum(engine.resident_nbytes for engine in self._engines)
        weights = memory_of_own_weights(others.own_shards, pinned=pinned and others.own_shards_pinned)
        tier, by_place = self.optimizer_state, dict.fromkeys(Place, 0)
        chunk_nbytes = [] if tier is None else tier.chunk_nbytes
        if tier is not None:
            by_place = {
                Place.GPU: tier.device_nbytes, Place.HOST: tier.resident_nbytes, Place.NVME: self.state.stored_nbytes
            }  # fmt: skip
        staging = self._staging.nbytes
        locking = self._engines[0].staging_locking(staging)
        left_nbytes = max(self.host_left_nbytes, 0)
        copies = sum(by_place.values()) + self.state.momentum_nbytes + others.later_state
        at_once = self.options.checkpoint == Checkpoint.synchronous
        most_nbytes = AT_ONCE_NBYTES if at_once else self.options.checkpoint_memory
        if most_nbytes is not None:
            copies = min(copies, max(most_nbytes, COPY_NBYTES))
        self._peak = peak_memory(
            MemoryNeeds(
                weights_host=resident + weights.kept,
                weights_building=resident + weights.building,
                weights_nvme=sum(homes.allocated_nbytes for homes in tiers),
                largest_weight=max((homes.largest_nbytes for homes in tiers), default=0),
                weights_sharing_pages=sum(homes.sharing_nbytes for homes in tiers),
                gradients=self._gradient_arena.nbytes_in_use,
                state_host=by_place[Place.HOST] + others.later_state,
                state_gpu=by_place[Place.GPU],
                state_nvme=by_place[Place.NVME],
                state_may_go_to_nvme=tier is not None and bool(self.surroundings.optimizer_paths),
                largest_chunk=max(chunk_nbytes, default=0),
                update=others.update,
                copies=copies,
                host_budget=self.surroundings.host_nbytes,
                activations=0 if self.activations is None else self.activations.most_nbytes(left_nbytes),
                staging=staging,
                late_staging=0 if tier is None else self._staging.late_nbytes(chunk_nbytes),
                bounces=N_BOUNCES * BOUNCE_NBYTES if self.surroundings.on_cuda and others.gpu_limit is not None else 0,
                gpu_weights=others.gpu_weights,
                gpu_limit=others.gpu_limit,
                gpu_staging=self._staging.gpu.nbytes,
                weights_pinned=pinned,
                gradients_pinned=self._gradient_arena.locking is not Locking.NONE,
                staging_pinned=locking is not Locking.NONE,
            )
        )

    def watch_host_memory(self, moves: StateMoves) -> HostHomes | None:
        """Moves optimizer state to NVMe when host memory runs out; None if there is no place for it."""
        if not self.surroundings.optimizer_paths:
            return None
        watch = HostWatch(memory_nbytes(), self.surroundings.local_ranks)
        return HostHomes(watch, moves, available_nbytes)

    def fused_adam(self, make: Callable[[int], FusedAdam] = FusedAdam) -> FusedAdam | None:
        """Adam in one pass, on the cores that it may use beside training and until the session ends; None where
        the optimizer's own op has to do.

        Args:
            make: from a number of threads.
        """
        if self._fused_adam is None:
            try:
                self._fused_adam = make(self.surroundings.cores_beside_training)
            except TenCacheError as error:
                if self.surroundings.rank == 0:
                    logger.warning("the optimizer's update takes several passes over memory: %s", error)
        return self._fused_adam

    def build_staging(self, chunk_nbytes: Sequence[int], momentum: SizeClass | None = None) -> StagingPlan:
        """Allocates all pinned memory that I/O passes through; see :meth:`Staging.build`.

        Args:
            chunk_nbytes: bytes of every stored optimizer chunk.
            momentum: buffers for Muon's momentum; None where none is stored.
        """
        return self._staging.build(self._claimed, chunk_nbytes, momentum)

    def build_momentum(self, specs: Sequence[SubGroupSpec]) -> OptimizerStateTier:
        """See :meth:`StateBuilder.build_momentum`; in host memory it is registered as gradients are."""
        return self.state.build_momentum(specs, self._gradient_arena)

    # Reporting

    def stats(self) -> Stats:
        """Snapshot of the counters and of the memory held now, when the optimizer step is over."""
        if self._background is not None:
            with contextlib.suppress(TenCacheError):  # the next step raises it
                self._background.finish()
        return self.look()

    def look(self) -> Stats:
        """:meth:`stats` without waiting for anything: what an optimizer step in the background does until its end is
        not in the counters yet. Any thread."""
        arenas = [self._weight_arena, self._gradient_arena, *self._staging.arenas]
        pools = self._staging.stats()
        weights = [engine.weights for engine in self._engines]
        stores = self._stores
        paths = summed(path.stats() for nvme in self._all_nvme for path in nvme.paths)
        stored_weight_nbytes = stored_nbytes = sum(tier.homes.allocated_nbytes for tier in weights)
        stored_nbytes += self.state.stored_nbytes
        moved = ActivationFigures()
        if self.activations is not None:
            moved = self.activations.figures
            stored_nbytes += self.activations.stored_nbytes
            arenas.append(self.activations.arena)
        pinned_weights_nbytes = sum(engine.pinned_nbytes for engine in self._engines)
        return Stats(
            total=self.counters.total(),
            last_step=self.counters.last_step,
            pinned_nbytes=pinned_weights_nbytes + sum(arena.nbytes_locked for arena in arenas),
            pinned_peak_nbytes=pinned_weights_nbytes
            + sum(arena.nbytes_peak for arena in arenas if arena.locking is not Locking.NONE),
            planned_host_peak_nbytes=self._peak.host_nbytes,
            planned_pinned_peak_nbytes=self._peak.pinned_nbytes,
            planned_gpu_peak_nbytes=self._peak.gpu_nbytes,
            staging_nbytes=sum(pool.nbytes_total for pool in pools),
            staging_peak_nbytes=sum(pool.nbytes_leased_peak for pool in pools),
            gpu_staging_nbytes=self._staging.gpu.nbytes,
            pool_waits=sum(pool.n_waits for pool in pools),
            stored_nbytes=stored_nbytes,
            stored_weight_nbytes=stored_weight_nbytes,
            resident_weight_nbytes=sum(tier.homes.resident_nbytes for tier in weights),
            resident_state_nbytes=self.state.momentum_nbytes
            + (0 if self.optimizer_state is None else self.optimizer_state.resident_nbytes),
            host_gradient_nbytes=self._gradient_arena.nbytes_in_use - self.state.momentum_nbytes,
            gpu_weight_nbytes=self._gpu_weight_nbytes,
            gpu_gradient_nbytes=self._gpu_gradient_nbytes,
            gpu_state_nbytes=self._gpu_momentum_nbytes
            + (0 if self.optimizer_state is None else self.optimizer_state.device_nbytes),
            state_nbytes=0 if self.optimizer_state is None else self.optimizer_state.in_memory_nbytes,
            gpu_activation_nbytes=moved.kept_nbytes,
            host_activation_nbytes=moved.host_nbytes,
            nvme_activation_nbytes=moved.nvme_nbytes,
            checkpoint_nbytes=0 if self._copies is None else self._copies.nbytes,
            activation_buffer_nbytes=0 if self.activations is None else self.activations.arena.nbytes_in_use,
            placement=self._placement,
            activation_placement=self._activation_placement,
            predicted_seconds=self._predicted_seconds,
            settled=self._settled,
            healed_reads=sum(store.n_healed_reads for store in stores),
            relocated_extents=sum(store.n_relocated for store in stores),
            io_backend=paths[0].backend if paths else "",
            paths=paths,
        )

    def describe(self) -> str:
        """One line: the places of everything and the way it moves."""
        stats = self.stats()
        state_nbytes = self.state.stored_nbytes
        weights = _by_place(
            gpu=stats.gpu_weight_nbytes, ram=stats.resident_weight_nbytes, nvme=stats.stored_nbytes - state_nbytes
        )
        parts = [f"weights {weights}"]
        if self.optimizer_state is not None:
            state = _by_place(gpu=stats.gpu_state_nbytes, ram=stats.resident_state_nbytes, nvme=state_nbytes)
            parts.append(f"optimizer state {state}")
        if self.activations is not None:
            parts.append(self.activations.describe())
        parts.append(f"staging {gib(stats.staging_nbytes)}")
        parts.append(f"pinned {gib(stats.pinned_nbytes)}")
        if self._staging.gpu.choice is not None:
            parts.append(self._staging.gpu.describe())
        reasons = {f"{path.backend.name} ({path.reason})" for engine in self._engines for path in engine.nvme.paths}
        if reasons:
            parts.append(f"I/O {', '.join(sorted(reasons))} on {self._engines[0].n_lanes} lanes")
        if len(stats.paths) > 1:
            held = ", ".join(f"{path.path} {gib(path.stored_nbytes)}" for path in stats.paths)
            parts[-1] += f" per path, over {len(stats.paths)} paths ({held})"
        if self._fused_adam is not None:
            parts.append(f"Adam in one pass ({self._fused_adam.instructions}) on {self._fused_adam.n_threads} cores")
        parts.append(self._peak.describe())
        return "; ".join(parts)

    def step_done(self, update_ns: int) -> StepRecord:
        """Closes an optimizer step that spent ``update_ns`` in the update, and reweights the NVMe paths by their
        measured bandwidth."""
        for nvme in self._all_nvme:
            nvme.reweigh()
        record = self.counters.step_done(update_ns)
        tracing.boundary(self.counters, record)
        return record

    def pass_done(self) -> None:
        """Closes a forward pass of an engine without optimizer, whose steps they are."""
        self.counters.step_done(0)

    def check(self) -> None:
        """Raises the error of an earlier asynchronous write, if one failed. Cheap: called every step."""
        for engine in self._engines:
            engine.weights.check()
        if self.optimizer_state is not None:
            self.optimizer_state.check()
        if self.activations is not None:
            self.activations.saved.step_done()

    def keep_memory(self) -> None:
        """:meth:`close` will leave the staging memory mapped: a collective that never ended may still read it."""
        self._staging.keep_memory()

    def on_close(self, callback: Callable[[Stats], None]) -> None:
        """Has a function called with the final figures when everything is released, or as much of it as could be."""
        self._on_close.append(callback)

    def close(self) -> None:
        """Waits for I/O in flight, frees this engine's memory and storage and returns the weights to their model.
        Idempotent; a forked child leaves all of that to its parent."""
        if os.getpid() != self._pid:  # before any lock
            return
        with self._lock:  # a second caller finds it done
            if self._closed:
                return
            self._closed = True
            tracing.engine_closed(self.counters)
            with contextlib.ExitStack() as stack:  # every step runs, even if an earlier one raises
                for callback in self._on_close:
                    stack.callback(callback, self.stats())
                if self._owns:
                    stack.callback(self._engines[0].close)
                stack.callback(self._engines[0].reserve_host_memory, -self._reserved_nbytes)
                stack.callback(self._gradient_arena.disown)
                stack.callback(self._weight_arena.disown)
                if self.activations is not None:
                    stack.callback(self.activations.free)
                if self.surroundings.on_cuda:
                    stack.callback(torch.cuda.synchronize)  # copies from this memory may be under way
                stack.callback(self._staging.free)
                if self.state.store is not None:
                    stack.callback(self._engines[0].nvme.close_store, self.state.store)
                stack.callback(lambda: self._staging.close_pools(self._stores))
                if self.activations is not None:
                    stack.callback(self.activations.close)
                for engine in self._claimed:
                    stack.callback(engine.unclaim, self)
                stack.callback(self.state.close)
                if self._fused_adam is not None:
                    stack.callback(self._fused_adam.close)
                if self._background is not None:
                    stack.callback(self._background.close)

    @property
    def _all_nvme(self) -> list[NvmePaths]:
        """Those of the engines, each once: some share theirs."""
        return list({id(engine.nvme): engine.nvme for engine in self._engines}.values())

    @property
    def _stores(self) -> list[ExtentStore]:
        """Those of the weights and of the optimizer state."""
        return [store for nvme in self._all_nvme for store in nvme.stores]


def _by_place(*, gpu: int, ram: int, nvme: int) -> str:
    """Bytes in each place; empty places are left out."""
    places = {"in GPU memory": gpu, "in RAM": ram, "on NVMe": nvme}
    return ", ".join(f"{gib(nbytes)} {place}" for place, nbytes in places.items() if nbytes) or "kept by DeepSpeed"
