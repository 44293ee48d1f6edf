# SPDX-License-Identifier: Apache-2.0
"""The registry of weights, and the place of each between two uses."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.placement.places import Place
from tencache_ds.tiers.weight_home import Home, ResidentMemory
from tencache_ds.tiers.weight_record import CopyState, Weight, WeightHome


class WeightHomes:
    """The weights of a tier. Changed with the tier's lock held; questions may be asked in any thread.

    Args:
        memory: of resident weights.
        budget_nbytes: bytes of weights that may stay resident; asked once, at the first weight.

    Attributes:
        weights: by DeepSpeed's parameter id, in the order of registration.
    """

    def __init__(self, memory: ResidentMemory, budget_nbytes: Callable[[], int]) -> None:
        self.weights: dict[int, Weight] = {}
        self._memory = memory
        self._budget = budget_nbytes
        self._left_nbytes: int | None = None

    def make(self, key: int, name: str, numel: int, dtype: torch.dtype, *, always_resident: bool) -> Weight:
        """A new weight, not among the others yet: in zeroed resident memory, if there is some left or it is to be there
        always; otherwise its first value needs a buffer.

        Raises:
            MemoryLimitError, LockedMemoryError: the arena has no such memory.
            TenCacheError: there is such a weight already.
        """
        if key in self.weights:
            raise TenCacheError(f"weight {name} (id {key}) is registered twice")
        if self._left_nbytes is None:
            self._left_nbytes = self._budget()
        weight = Weight(key, name, numel, dtype, Home(None), CopyState.INITIAL)
        if always_resident or weight.nbytes <= self._left_nbytes:
            weight.counted = not always_resident
            self._left_nbytes -= weight.nbytes if weight.counted else 0
            weight.home = Home(self._memory.take(weight.nbytes).view(dtype), self._memory)
            weight.copy = CopyState.NONE
        return weight

    def drop(self, key: int) -> None:
        """Removes a weight and gives its memory back, which another one may have."""
        weight = self.weights.pop(key)
        if self._left_nbytes is not None and weight.counted:
            self._left_nbytes += weight.nbytes
        weight.home.end()

    def holds(self, key: int) -> bool:
        """Whether there is such a weight."""
        return key in self.weights

    @property
    def keys(self) -> frozenset[int]:
        """All weights."""
        return frozenset(self.weights)

    def of(self, key: int) -> Home:
        """The home of one weight."""
        return self.weights[key].home

    def is_resident(self, key: int) -> bool:
        """Whether the weight lives in memory, of the host or the device, and nowhere else."""
        return not self.of(key).stored

    def on_device(self, key: int) -> bool:
        """Whether the weight lives in device memory."""
        return self.of(key).place is Place.GPU

    def free_unused(self) -> int:
        """Frees the host memory of weights that are in device memory; returns how much. No copy from it may be under
        way."""
        return sum(weight.home.free_unused() for weight in self.weights.values())

    def nbytes_of(self, key: int) -> int:
        """Bytes of one shard."""
        return self.weights[key].nbytes

    def stored_nbytes(self) -> list[int]:
        """Bytes of each shard that lives on NVMe, in the order of registration."""
        return [weight.nbytes for weight in self.weights.values() if weight.home.stored]

    def all(self) -> list[WeightHome]:
        """Where each weight lives, in the order of registration."""
        return [
            WeightHome(weight.key, weight.name, weight.numel, weight.home.stored)
            for weight in tuple(self.weights.values())
        ]

    @property
    def largest_nbytes(self) -> int:
        """Bytes of the largest shard."""
        return max((weight.nbytes for weight in self.weights.values()), default=0)

    @property
    def sharing_nbytes(self) -> int:
        """Bytes of resident weights whose host memory comes back only with that of others."""
        resident = (weight.nbytes for weight in self.weights.values() if not weight.home.stored)
        return sum(nbytes for nbytes in resident if self._memory.shares_pages(nbytes))

    @property
    def allocated_nbytes(self) -> int:
        """Bytes that the weights take on NVMe."""
        return sum(w.extent.allocated_nbytes for w in self.weights.values() if w.extent is not None)

    @property
    def resident_nbytes(self) -> int:
        """Bytes of host memory that weights keep; those of weights that are in device memory for now among them."""
        return sum(weight.home.host_nbytes for weight in self.weights.values())
