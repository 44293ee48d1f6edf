# SPDX-License-Identifier: Apache-2.0
"""Moves weights into GPU memory and out of it, and keeps account of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tencache_ds.errors import MemoryLimitError, TenCacheError
from tencache_ds.memory.device_memory import DeviceMemory

logger = logging.getLogger("DeepSpeed.tencache")

Agree = Callable[[str, Any, Callable[[Sequence[Any]], Any]], Any]
"""A joint decision of all ranks: the topic, this rank's value, and the function that combines the values."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One weight's shard.

    Attributes:
        key: of the weight.
        nbytes: of the shard.
        stored: whether it is on NVMe.
        frees_host: whether its host memory can be freed when it is in device memory.
    """

    key: int
    nbytes: int
    stored: bool = False
    frees_host: bool = False


class MovableWeights(Protocol):
    """The weights of a model, as far as they may live in device memory. Between two steps."""

    def shards(self) -> Sequence[Shard]:
        """All of them, in the same order on every rank."""

    def to_device(self, key: int, memory: torch.Tensor) -> None:
        """Moves one into device memory (uint8, of its length)."""

    def to_host(self, key: int) -> None:
        """Moves one back to where it was.

        Raises:
            MemoryLimitError, StorageError: there is no place for it; it stays.
        """

    def belongs_to_host(self, key: int) -> bool:
        """Whether it came from host memory, to which it can return without the other ranks noticing."""

    def host_nbytes_of(self, keys: Iterable[int]) -> int:
        """Bytes of host memory that have to be allocated before these can return to it."""

    def free_unused(self) -> int:
        """Frees host memory of those that are in device memory, as far as possible; returns how much."""


class WeightMoves:
    """Used by one thread at a time.

    Args:
        memory: of the compute device.
        weights: the weights.
    """

    def __init__(self, memory: DeviceMemory, weights: MovableWeights) -> None:
        self._memory = memory
        self._weights = weights
        self._there: dict[int, int] = {}  # bytes of each weight, in the order in which they came
        self._out: dict[int, int] = {}  # of those that had to leave, the last one to leave last

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in GPU memory."""
        return sum(self._there.values())

    @property
    def there(self) -> Collection[int]:
        """The weights (keys) in GPU memory, in the order in which they came."""
        return self._there.keys()

    @property
    def out(self) -> Collection[int]:
        """Those that had to leave it and have not come back."""
        return self._out.keys()

    def bring(self, shards: Sequence[Shard], agree: Agree) -> bool:
        """Moves all of them that are not there on all ranks, or none on any: those from NVMe leave the order in which
        collectives are made. Between two passes."""
        shards = [shard for shard in shards if shard.key not in self._there]
        buffers: dict[int, torch.Tensor] = {}
        try:
            for shard in shards:
                buffers[shard.key] = self._memory.allocate(shard.nbytes)
        except MemoryLimitError as error:
            logger.warning("no weight moves to GPU memory: %s", error)
            buffers.clear()
        if not agree("weights in GPU memory", len(buffers) == len(shards), all):
            return False
        for key, memory in buffers.items():
            self._bring(key, memory)
        return True

    def bring_back(self, nbytes: int) -> int:
        """Moves evicted weights back into GPU memory up to ``nbytes``, the last to leave first; returns the bytes
        moved. Between two passes."""
        brought = 0
        try:
            for key, size in reversed(list(self._out.items())):
                if size <= nbytes - brought:
                    self._bring(key, self._memory.allocate(size))
                    brought += size
        except MemoryLimitError as error:
            logger.warning("a weight that left GPU memory stays out: %s", error)
        return brought

    def release(self, key: int) -> int:
        """Takes one that is not in use out of GPU memory; returns its bytes. The device must be done with it.

        Raises:
            MemoryLimitError, StorageError: it has nowhere to go; it stays.
        """
        self._weights.to_host(key)
        self._out[key] = self._there.pop(key)
        return self._out[key]

    def close(self) -> None:
        """Gives all of them back to their model, where they were. Idempotent."""
        for key in reversed(list(self._there)):
            del self._there[key]
            try:
                self._weights.to_host(key)
            except TenCacheError:
                logger.exception("a weight could not leave GPU memory, and stays there")

    def _bring(self, key: int, memory: torch.Tensor) -> None:
        self._weights.to_device(key, memory)
        self._there[key] = memory.nbytes
        self._out.pop(key, None)
