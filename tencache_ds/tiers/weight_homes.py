# SPDX-License-Identifier: Apache-2.0
"""The registry of weights, and the place of each between two uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.tiers.resident_memory import ResidentMemory
from tencache_ds.tiers.weight_record import Weight, WeightHome, WeightState


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
        weight = Weight(key, name, numel, dtype, WeightState.INITIAL)
        if always_resident or weight.nbytes <= self._left_nbytes:
            self._left_nbytes -= 0 if always_resident else weight.nbytes
            weight.state = WeightState.RESIDENT
            weight.resident = self._memory.take(weight.nbytes).view(dtype)
        return weight

    def holds(self, key: int) -> bool:
        """Whether there is such a weight."""
        return key in self.weights

    @property
    def keys(self) -> frozenset[int]:
        """All weights."""
        return frozenset(self.weights)

    def is_resident(self, key: int) -> bool:
        """Whether the weight is in memory, of the host or the device, and nowhere else."""
        return self.weights[key].state is WeightState.RESIDENT

    def on_device(self, key: int) -> bool:
        """Whether the weight is resident in device memory."""
        return self.weights[key].on_device

    def in_host_memory(self, key: int) -> torch.Tensor | None:
        """The shard of a weight that is resident in host memory; None of any other."""
        weight = self.weights[key]
        return None if weight.on_device or weight.state is not WeightState.RESIDENT else weight.resident

    # Host memory of weights that are in device memory

    def belongs_to_host(self, key: int) -> bool:
        """Whether a weight that is resident in device memory came from host memory, and would return to it."""
        return self.weights[key].extent is None

    @property
    def unused_host_nbytes(self) -> int:
        """Bytes that :meth:`free_unused` would free."""
        return sum(weight.nbytes for weight in self.weights.values() if weight.host is not None)

    def host_nbytes_of(self, keys: Iterable[int]) -> int:
        """Bytes of host memory that have to be there before these weights can return to it."""
        weights = (self.weights[key] for key in keys)
        return sum(w.nbytes for w in weights if w.on_device and w.extent is None and w.host is None)

    def free_unused(self) -> None:
        """Frees the host memory of weights that are in device memory. No copy from it may be under way."""
        for weight in self.weights.values():
            if weight.host is not None:
                memory, weight.host = weight.host, None
                self._memory.give_back(memory)

    def make_host_memory(self, weight: Weight) -> None:
        """Host memory for a weight that is to return to it.

        Raises:
            MemoryLimitError, LockedMemoryError: the arena has no such memory.
        """
        if weight.host is None and weight.extent is None:
            weight.host = self._memory.take(weight.nbytes).view(weight.dtype)

    def nbytes_of(self, key: int) -> int:
        """Bytes of one shard."""
        return self.weights[key].nbytes

    def stored_nbytes(self) -> list[int]:
        """Bytes of each shard that lives on NVMe, in the order of registration."""
        return [weight.nbytes for weight in self.weights.values() if weight.state is not WeightState.RESIDENT]

    def all(self) -> list[WeightHome]:
        """Where each weight lives, in the order of registration."""
        return [
            WeightHome(weight.key, weight.name, weight.numel, weight.state is not WeightState.RESIDENT)
            for weight in tuple(self.weights.values())
        ]

    @property
    def largest_nbytes(self) -> int:
        """Bytes of the largest shard."""
        return max((weight.nbytes for weight in self.weights.values()), default=0)

    @property
    def sharing_nbytes(self) -> int:
        """Bytes of resident weights whose host memory comes back only with that of others."""
        resident = (weight.nbytes for weight in self.weights.values() if weight.state is WeightState.RESIDENT)
        return sum(nbytes for nbytes in resident if self._memory.shares_pages(nbytes))

    @property
    def allocated_nbytes(self) -> int:
        """Bytes that the weights take on NVMe."""
        return sum(w.extent.allocated_nbytes for w in self.weights.values() if w.extent is not None)

    @property
    def resident_nbytes(self) -> int:
        """Bytes of host memory that weights keep; those of weights that are in device memory for now among them."""
        kept = (w for w in self.weights.values() if w.state is WeightState.RESIDENT)
        return sum(w.nbytes for w in kept if not w.on_device or w.host is not None)
