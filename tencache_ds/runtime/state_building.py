# SPDX-License-Identifier: Apache-2.0
"""Builds the optimizer state of one DeepSpeed engine: the first places of its chunks, its NVMe space, its tier."""

from __future__ import annotations

import errno
import itertools
import logging
import sys
from collections.abc import Callable, Sequence

import torch

from tencache_ds.config import TenCacheConfig
from tencache_ds.errors import SpaceError
from tencache_ds.io import ExtentStore
from tencache_ds.io.scratch import device_of, free_nbytes
from tencache_ds.layout import gib, round_up
from tencache_ds.memory.arena import HostArena
from tencache_ds.memory.device_memory import DeviceMemory
from tencache_ds.observability.counters import Counters
from tencache_ds.placement.places import Place, StateCapacity, place_state, plan_state
from tencache_ds.planning.chunks import automatic_chunk_nbytes, cut_sub_group
from tencache_ds.profiling.host import available_nbytes
from tencache_ds.runtime.engine import TenCacheEngine
from tencache_ds.runtime.staging import Staging
from tencache_ds.runtime.surroundings import Surroundings
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.split_master import SplitMasters
from tencache_ds.tiers.sub_group import MOMENTUM, Kinds, SubGroupSpec

logger = logging.getLogger("DeepSpeed.tencache")

HOST_SHARE_WITHOUT_NVME = 0.9
"""Share of the available host memory that gradients and optimizer state barred from NVMe may take before GPU memory
takes them."""


class StateBuilder:
    """Used by the training thread.

    Args:
        options: of the user.
        surroundings: of the DeepSpeed engine.
        engine: whose lanes and host memory the state shares with weights.
        staging: buffers of chunks on NVMe.
        counters: of the session.
        count_host: counts host memory that state takes.
    """

    def __init__(
        self,
        options: TenCacheConfig,
        surroundings: Surroundings,
        engine: TenCacheEngine,
        staging: Staging,
        counters: Counters,
        count_host: Callable[[int], None],
    ) -> None:
        self._options = options
        self._surroundings = surroundings
        self._engine = engine
        self._staging = staging
        self._counters = counters
        self._count_host = count_host
        self._tier: OptimizerStateTier | None = None
        self._momentum: OptimizerStateTier | None = None
        self._store: ExtentStore | None = None

    @property
    def momentum_nbytes(self) -> int:
        """Bytes of Muon's momentum that live in host memory."""
        return 0 if self._momentum is None else self._momentum.resident_nbytes

    @property
    def tier(self) -> OptimizerStateTier | None:
        """The state; None before :meth:`build`, and where it stays with the optimizer."""
        return self._tier

    @property
    def store(self) -> ExtentStore | None:
        """Its NVMe space; None as long as there is none."""
        return self._store

    @property
    def stored_nbytes(self) -> int:
        """NVMe space that it takes."""
        return 0 if self._store is None else self._store.nbytes_allocated

    def plan_momentum(
        self, numels: Sequence[Sequence[int]], dtype: torch.dtype, gradient_nbytes: int
    ) -> tuple[list[SubGroupSpec], int, list[int]]:
        """Decides where Muon's momentum lives, before :meth:`plan`: host memory that weights and gradients leave, then
        NVMe. It has memory before master weights have, since a step waits for it.

        Args:
            numels: elements of each matrix's shard, in each of its sub-groups.
            dtype: of momentum.
            gradient_nbytes: of the gradients.

        Returns:
            The sub-groups, with a chunk for each matrix; bytes of all in host memory; bytes of each that goes to NVMe.
        """
        nbytes = [round_up(numel * dtype.itemsize) for numel in itertools.chain.from_iterable(numels)]
        left = max(self._engine.host_left_nbytes - gradient_nbytes, 0) if self._paths else sum(nbytes)
        places = place_state(nbytes, left)
        stored = [each for each, place in zip(nbytes, places, strict=True) if place is Place.NVME]
        rest, specs = iter(places), []
        for each in numels:
            cuts = tuple(itertools.accumulate(each[:-1]))
            here = tuple(itertools.islice(rest, len(each)))
            specs.append(SubGroupSpec(sum(each), ((MOMENTUM, dtype),), here, cuts=cuts))
        return specs, sum(nbytes) - sum(stored), stored

    def plan(
        self,
        numels: Sequence[int],
        kinds: Sequence[Kinds],
        gradient_nbytes: int,
        *,
        scales: Kinds = (),
        by_chunks: bool,
        masters: SplitMasters | None = None,
        gpu_nbytes: int = 0,
        visible: Sequence[Sequence[tuple[int, int]]] | None = None,
        cuts: Sequence[Sequence[int]] | None = None,
    ) -> tuple[list[SubGroupSpec], list[int]]:
        """Decides the first places: the rest of ``host_memory`` after weights and gradients, then NVMe; GPU memory for
        state that fits into neither.

        Args:
            numels: elements of each sub-group.
            kinds: of each sub-group, ``(kind, dtype)`` of each state that is kept per element.
            gradient_nbytes: of the gradients, which begin in host memory, and of momentum there.
            scales: of those with one value for several elements.
            by_chunks: an update takes one chunk at a time; else a whole sub-group.
            masters: splits master weights; None where they are always whole.
            gpu_nbytes: GPU memory that may be used before anything is known about what training needs.
            visible: of each sub-group the ascending ``(first element, end)`` of weights that have their new values when
                a step returns.
            cuts: of each sub-group the elements where another buffer of gradients begins.

        Returns:
            The sub-groups, and the bytes of each chunk that goes to NVMe.
        """
        # On NVMe many small chunks would cost more than they gain.
        apart: Sequence[Sequence[tuple[int, int]]] = [()] * len(numels)
        if visible is not None and by_chunks and not self._paths:
            apart = visible
        cuts = cuts or [()] * len(numels)
        splits = masters if masters is not None and masters.in_memory else None
        groups, nbytes = [], []
        for index, numel in enumerate(numels):
            sizes, scale_sizes = ([(kind, dtype.itemsize) for kind, dtype in each] for each in (kinds[index], scales))
            chunks = cut_sub_group(index, numel, sizes, self._chunk_nbytes, apart[index], cuts[index], scale_sizes)
            groups.append(chunks)
            states = kinds[index] + scales
            nbytes.append([splits.nbytes_of(chunk, states) if splits else chunk.nbytes for chunk in chunks])
        homes = plan_state(nbytes, self._capacity(gradient_nbytes, gpu_nbytes), by_chunks=by_chunks)
        if splits is not None:  # only chunks can be split
            homes = tuple(places or (Place.HOST,) * len(group) for places, group in zip(homes, groups, strict=True))
        by_place: dict[Place, list[int]] = {place: [] for place in Place}
        for index, places in enumerate(homes):
            for position, chunk in enumerate(groups[index]):
                place = Place.HOST if places is None else places[position]
                by_place[place].append(nbytes[index][position] if place is Place.HOST else chunk.nbytes)
        self._count_host(sum(by_place[Place.HOST]))
        if by_place[Place.GPU]:
            logger.info("%s of optimizer state fit nowhere but in GPU memory", gib(sum(by_place[Place.GPU])))
        specs = [
            SubGroupSpec(numel, each, places, tuple(ranges), tuple(starts), scales)
            for numel, each, places, ranges, starts in zip(numels, kinds, homes, apart, cuts, strict=True)
        ]
        return specs, by_place[Place.NVME]

    def check_space(self, needed_nbytes: int) -> None:
        """Compares the NVMe space that the state needs with the free space, for all ranks of this host together.

        Raises:
            SpaceError: too little space; says how much is missing.
        """
        if not self._paths or not needed_nbytes:
            return
        ranks = self._surroundings.local_ranks
        needed, free = needed_nbytes * ranks, _free_together(self._paths)
        if free < needed:
            raise SpaceError(
                "allocate",
                self._paths[0],
                0,
                needed,
                f"optimizer state of {ranks} rank(s) needs {gib(needed)}, but only {gib(free)} are free"
                f"{_together(self._paths)}: {gib(needed - free)} are missing. Free some space, name another folder as "
                '"zero_optimization.offload_optimizer.nvme_path", or more of them as "tencache.nvme_paths"',
                errno=errno.ENOSPC,
            )

    def build(
        self,
        specs: Sequence[SubGroupSpec],
        needed_nbytes: int,
        device: DeviceMemory | None = None,
        masters: SplitMasters | None = None,
    ) -> OptimizerStateTier:
        """Builds the tier and reserves its NVMe space.

        Args:
            specs: the sub-groups.
            needed_nbytes: bytes that will be stored on NVMe, for the check before anything is allocated.
            device: where device memory comes from, for chunks that live there.
            masters: splits master weights; None where they are always whole.

        Raises:
            MemoryLimitError: not enough device memory.
            SpaceError: too little space; says how much is missing.
        """
        if self._paths and needed_nbytes:
            self._store = self._engine.open_store("optimizer", self._paths, preallocate_nbytes=needed_nbytes)
        self._tier = OptimizerStateTier(
            specs,
            store=self._store,
            pool=self._staging.chunk_pool,
            counters=self._counters,
            chunk_nbytes=self._chunk_nbytes,
            timeout_s=self._options.io_timeout_s,
            device=device,
            masters=masters,
        )
        return self._tier

    def build_momentum(self, specs: Sequence[SubGroupSpec], memory: HostArena) -> OptimizerStateTier:
        """Builds the tier of Muon's momentum, in the NVMe space of :meth:`build`.

        Args:
            specs: from :meth:`plan_momentum`.
            memory: of that in host memory, for fast copies to the compute device.

        Raises:
            MemoryLimitError, SpaceError: too little of it.
        """
        self._momentum = OptimizerStateTier(
            specs,
            store=self._store,
            pool=self._staging.momentum_pool,
            counters=self._counters,
            chunk_nbytes=sys.maxsize,
            timeout_s=self._options.io_timeout_s,
            memory=memory,
        )
        self._count_host(self.momentum_nbytes)
        return self._momentum

    def close(self) -> None:
        """Gives buffers and memory back. Idempotent; the store is closed by its owner."""
        for tier in (self._tier, self._momentum):
            if tier is not None:
                tier.close()

    def open_store(self) -> bool:
        """Makes NVMe ready for the state, where none went there at the start; False where none may.

        Raises:
            ConfigError: ``staging_memory`` is too small for it.
            StorageError: not enough space, or the folder cannot be used.
        """
        if not self._paths or self._tier is None:
            return False
        self._staging.build_late(self._tier.chunk_nbytes)
        if self._store is None:
            self._store = self._engine.open_store("optimizer", self._paths)
            self._tier.use_store(self._store)
        return True

    @property
    def _paths(self) -> tuple[str, ...]:
        return self._surroundings.optimizer_paths

    @property
    def _chunk_nbytes(self) -> int:
        return self._options.chunk_size or automatic_chunk_nbytes(may_be_stored=bool(self._paths))

    def _capacity(self, gradient_nbytes: int, gpu_nbytes: int) -> StateCapacity:
        ranks = self._surroundings.local_ranks
        if not self._paths:  # then limited by the available memory, not by host_memory
            available = int(HOST_SHARE_WITHOUT_NVME * available_nbytes()) // ranks
            return StateCapacity(max(available - gradient_nbytes, 0), None, gpu_nbytes)
        left = self._engine.host_left_nbytes - gradient_nbytes
        return StateCapacity(max(left, 0), _free_together(self._paths) // ranks, gpu_nbytes)


def _free_together(paths: Sequence[str]) -> int:
    """Free bytes of all file systems that the paths lie on, each counted once."""
    free = {device_of(path): free_nbytes(path) for path in paths}
    return sum(free.values())


def _together(paths: Sequence[str]) -> str:
    return f" on {len(paths)} paths together" if len(paths) > 1 else ""
