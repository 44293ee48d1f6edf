# SPDX-License-Identifier: Apache-2.0
"""Carries out moves of optimizer state between its places and keeps account of host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tencache_ds.placement.places import Place, place_state
from tencache_ds.tiers.optimizer_state import OptimizerStateTier


class Accounts(Protocol):
    """The owner of the memory accounts (a :class:`tencache_ds.runtime.session.Session`)."""

    @property
    def host_left_nbytes(self) -> int:
        """The unused part of this rank's host memory."""

    def count_host(self, nbytes: int) -> None:
        """Adds ``nbytes`` (may be negative) to the host memory in use by gradients and optimizer state."""

    def note_gpu(self, *, weight_nbytes: int, gradient_nbytes: int) -> None:
        """Bytes of weights and gradients in GPU memory now."""


class StateMoves:
    """Used by one thread at a time.

    Args:
        tier: the optimizer's state.
        n_sub_groups: of it.
        accounts: of host memory.
        open_store: makes NVMe ready for state, if it may go there; returns whether it may.
        moved: called with a sub-group whose state has changed its places.
    """

    def __init__(
        self,
        tier: OptimizerStateTier,
        n_sub_groups: int,
        accounts: Accounts,
        *,
        open_store: Callable[[], bool],
        moved: Callable[[int], None],
    ) -> None:
        self.tier = tier
        self.n_sub_groups = n_sub_groups
        self.accounts = accounts
        self.open_store = open_store
        self._moved = moved
        self._collected_nbytes = 0
        self._counted_nbytes = tier.resident_nbytes
        self.before: Callable[[], None] = lambda: None
        """Called before anything moves, to wait until it is not in use."""
        self.free_unused: Callable[[], int] = lambda: 0
        """Frees host memory that nothing is in, and returns how much: that of weights and gradients in GPU memory,
        which is kept so that they can return quickly."""

    @property
    def any_on_nvme(self) -> bool:
        """Whether state is on NVMe."""
        return any(Place.NVME in self.tier.places(index) for index in range(self.n_sub_groups))

    def relocate(self, places: Mapping[int, Sequence[Place]]) -> None:
        """Gives the chunks of some sub-groups other places. Between two passes over the state.

        Raises:
            MemoryLimitError: not enough memory.
            SpaceError, StorageError: not enough space on NVMe, or a transfer failed.
        """
        self.collect()
        try:
            self.tier.relocate(places)
        finally:
            self._count()
            self._collected_nbytes = self.tier.collected_nbytes
            for index in places:
                self._moved(index)

    def collect(self) -> int:
        """Takes note of state whose GPU memory training has taken back, and that is in host memory since; returns the
        bytes that are new."""
        self.before()
        self.tier.collect()
        nbytes, self._collected_nbytes = self.tier.collected_nbytes - self._collected_nbytes, self.tier.collected_nbytes
        self._count()  # master weights that were split or joined, too
        if nbytes:
            for index in range(self.n_sub_groups):
                self._moved(index)
        return nbytes

    def take_host_memory(self, nbytes: int) -> int:
        """Moves chunks from NVMe to host memory, spread evenly over the step.

        Args:
            nbytes: upper limit.

        Returns:
            How many did.
        """
        return self._move(Place.NVME, Place.HOST, lambda sizes: place_state(sizes, max(nbytes, 0)))

    def leave_host_memory(self, nbytes: int) -> int:
        """Chunks that are in host memory go to NVMe, as evenly.

        Args:
            nbytes: lower limit, as far as available.

        Returns:
            How many did: 0 where state may not go there.
        """
        if not self.open_store():
            return 0
        return self._move(Place.HOST, Place.NVME, lambda sizes: place_state(sizes, max(sum(sizes) - nbytes, 0)))

    def _move(self, old: Place, new: Place, place: Callable[[list[int]], Sequence[Place]]) -> int:
        places = {
            index: list(self.tier.places(index)) for index in range(self.n_sub_groups) if not self.tier.whole(index)
        }
        candidates = [
            (group, index, self.tier.host_nbytes_of(self.tier.chunks(group)[index]))
            for group, homes in places.items()
            for index, home in enumerate(homes)
            if home is old
        ]
        moved, changed = 0, {}
        for (group, index, nbytes), home in zip(
            candidates, place([nbytes for _, _, nbytes in candidates]), strict=True
        ):
            if home is new:
                places[group][index] = new
                changed[group] = places[group]
                moved += nbytes
        if changed:
            self.relocate(changed)
        return moved

    def _count(self) -> None:
        nbytes = self.tier.resident_nbytes
        self.accounts.count_host(nbytes - self._counted_nbytes)
        self._counted_nbytes = nbytes
