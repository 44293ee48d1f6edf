# SPDX-License-Identifier: Apache-2.0
"""Ordinary memory that is counted and limited like a GPU's."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tencache_ds.placement.places import GpuUsage


class CountedMemory(TorchDispatchMode):
    """The storages that operations make within it, as long as they live. An operation whose result does not fit fails.

    Args:
        capacity: in bytes.
    """

    def __init__(self, capacity: int = 2**50) -> None:
        super().__init__()
        self.capacity = capacity
        self.nbytes = self.peak_nbytes = self.n_failures = self.n_looks = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, tuple(kwargs.values())))}
        result = function(*args, **kwargs)
        made = [tensor.untyped_storage() for tensor in _tensors(result)]
        self._forget()
        for storage in made:
            if storage._cdata not in given and storage._cdata not in self._storages:
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.nbytes += storage.nbytes()
        self.peak_nbytes = max(self.peak_nbytes, min(self.nbytes, self.capacity))
        if self.nbytes > self.capacity:
            self.n_failures += 1
            raise torch.OutOfMemoryError(f"{self.nbytes} bytes, of {self.capacity}")
        return result

    def _forget(self) -> None:
        for key in [key for key, (reference, _) in self._storages.items() if reference.expired()]:
            self.nbytes -= self._storages.pop(key)[1]

    def alive_nbytes(self, without: Collection[int] = ()) -> int:
        """Bytes of the storages that still live, but for some, by ``_cdata``."""
        gc.collect()
        self._forget()
        return sum(nbytes for key, (_, nbytes) in self._storages.items() if key not in without)

    def usage(self) -> GpuUsage:
        """At present."""
        self.n_looks += 1
        self._forget()
        return GpuUsage(self.capacity - self.nbytes, 0, self.nbytes, self.peak_nbytes, n_failures=self.n_failures)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
