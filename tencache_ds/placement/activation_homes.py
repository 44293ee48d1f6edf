# SPDX-License-Identifier: Apache-2.0
"""Memory and storage for the activations of one engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from tencache_ds.activations.auto_places import AutoPlaces
from tencache_ds.activations.copies import HostBuffers, open_copies
from tencache_ds.activations.saved_tensors import ActivationFigures, SavedTensors
from tencache_ds.config import Activations, TenCacheConfig
from tencache_ds.io import ExtentStore
from tencache_ds.layout import gib
from tencache_ds.memory.arena import HostArena
from tencache_ds.observability.counters import Counters
from tencache_ds.placement.moves import StateMoves
from tencache_ds.profiling.waits import MoveCost, StreamClock

if TYPE_CHECKING:
    from tencache_ds.runtime.engine import TenCacheEngine
    from tencache_ds.runtime.surroundings import Surroundings

logger = logging.getLogger("DeepSpeed.tencache")

BUFFER_SHARE = 1.125
"""Largest size of a buffer, as a multiple of its block's."""

STAGING_NBYTES = 512 * 2**20
"""Host memory for activations on their way to and from NVMe: at most this, or four of the largest."""


class ActivationHomes:
    """Used by the training thread; :attr:`saved` by autograd's threads, too.

    Args:
        options, surroundings: of the session.
        engine: whose NVMe paths are used, and whose host memory is accounted for.
        counters: of the session.
        count_host: more host memory is taken, or less.
        device: whose tensors are moved.
        is_weight: whether a tensor lies in the storage of a weight.
        auto: decides which passes are taken; None: all of them.
    """

    def __init__(
        self,
        options: TenCacheConfig,
        surroundings: Surroundings,
        engine: TenCacheEngine,
        counters: Counters,
        count_host: Callable[[int], None],
        device: torch.device,
        is_weight: Callable[[torch.Tensor], bool],
        auto: AutoPlaces | None,
    ) -> None:
        self._options = options
        self.auto = auto
        self._wanted_nbytes = 0  # of host memory, when state left it
        self._engine = engine
        self._paths = surroundings.optimizer_paths or surroundings.weights_paths
        self._store: ExtentStore | None = None
        self.arena = HostArena(None, engine.staging_locking(STAGING_NBYTES))
        poison, limit_nbytes = options.poison_buffers, options.activation_memory
        if limit_nbytes is None:
            resident = HostBuffers(
                self.arena, lambda nbytes: nbytes <= engine.host_left_nbytes, count_host, "activations", poison=poison
            )
        else:
            count_host(limit_nbytes)  # now, so that nothing else takes it
            resident = HostBuffers(
                self.arena,
                lambda nbytes: resident.allocated_nbytes + nbytes <= limit_nbytes,
                _nothing,
                "activations",
                poison=poison,
            )
        staging = HostBuffers(
            self.arena,
            lambda nbytes: staging.allocated_nbytes + nbytes <= max(STAGING_NBYTES, 4 * nbytes),
            _nothing,
            "activation staging",
            poison=poison,
        )

        def capacity_nbytes() -> int:
            if limit_nbytes is not None:
                return limit_nbytes
            return resident.allocated_nbytes + max(engine.host_left_nbytes, 0)

        self.saved = SavedTensors(
            device=device,
            copies=open_copies(device),
            resident=resident,
            staging=staging,
            open_store=self._open if self._paths else None,
            counters=counters,
            is_weight=is_weight,
            least_nbytes=options.activation_min_size,
            host_capacity=capacity_nbytes,
            timeout_s=options.io_timeout_s,
            auto=auto,
        )

    def _open(self) -> ExtentStore:
        self._store = self._engine.open_store("activations", self._paths)
        return self._store

    @property
    def figures(self) -> ActivationFigures:
        """Figures of the last pass. Any thread."""
        return self.saved.figures

    # What GpuHomes decides, for "auto"

    @property
    def moves_some(self) -> bool:
        """Whether activations of the last pass were moved."""
        return bool(self.figures.host_nbytes or self.figures.nvme_nbytes)

    def measure(self, clock: StreamClock) -> None:
        """In the next step all activations move that can be back in time, and what each costs is measured."""
        if self.auto is not None:
            self.auto.measure(clock)

    def measured(self) -> dict[int, MoveCost]:
        """Cost of each block that was moved in the last step, by its position."""
        return {} if self.auto is None else self.auto.measured()

    def follow(self, leaving: Iterable[int]) -> None:
        """From now on these move, and others only where they do not fit; host memory that nothing is in is freed."""
        if self.auto is not None:
            self.auto.follow(leaving)
            self.saved.trim()

    def make_room(self, moves: StateMoves) -> None:
        """A step is over: optimizer state that may be on NVMe leaves host memory for activations that would be there.
        A byte of those is written and read in every micro-step, and one of state once in a step."""
        figures = self.figures
        wanted_nbytes = figures.nvme_nbytes
        if self.auto is not None and self.auto.waits is not None:
            wanted_nbytes += figures.kept_nbytes  # they are about to move
        if self._options.activation_memory is not None or wanted_nbytes <= self._wanted_nbytes:
            return
        self._wanted_nbytes = wanted_nbytes
        short_nbytes = int(BUFFER_SHARE * wanted_nbytes) - max(self._engine.host_left_nbytes, 0)
        left_nbytes = moves.leave_host_memory(short_nbytes) if short_nbytes > 0 else 0
        if left_nbytes:
            logger.info("%s of optimizer state moved to NVMe, for activations", gib(left_nbytes))

    @property
    def stored_nbytes(self) -> int:
        """Space taken on NVMe."""
        return 0 if self._store is None else self._store.nbytes_allocated

    def most_nbytes(self, left_nbytes: int) -> int:
        """Host memory that activations take at most, with those on their way to and from NVMe.

        Args:
            left_nbytes: what is left of ``host_memory`` once everything else has its place.
        """
        limit_nbytes = self._options.activation_memory
        return (left_nbytes if limit_nbytes is None else limit_nbytes) + STAGING_NBYTES

    def describe(self) -> str:
        """The places that activations may go to."""
        limit_nbytes = self._options.activation_memory
        ram = "what host_memory leaves" if limit_nbytes is None else gib(limit_nbytes)
        when = "if they do not fit, " if self._options.activations == Activations.auto else ""
        return f"{when}activations are moved to RAM ({ram}){' and NVMe' if self._paths else ''}"

    def close(self) -> None:
        """No graph can use it any more; waits for requests in flight.

        Raises:
            StorageError: a write failed that nobody has read.
        """
        self.saved.close()
        store, self._store = self._store, None
        if store is not None:
            self._engine.nvme.close_store(store)

    def free(self) -> None:
        """Frees the memory, after :meth:`close` and the end of all copies."""
        for buffer, ticket in self.saved.in_flight:
            if not ticket.done or ticket.given_up:
                self.arena.keep(buffer, ticket.tag)
        self.arena.close()


def _nothing(nbytes: int) -> None:
    """This memory is accounted for elsewhere."""
