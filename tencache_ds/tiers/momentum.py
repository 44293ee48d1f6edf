# SPDX-License-Identifier: Apache-2.0
"""The momentum of Muon's matrices: in host memory or on NVMe, and in device memory beside their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from tencache_ds.placement.places import Place
from tencache_ds.planning.chunks import Chunk
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.sub_group import MOMENTUM, ChunkInUse


class Momentum:
    """Momentum of each matrix. Used by the thread that has the optimizer's state.

    One in device memory keeps its place below, with an older value, for when it leaves again.

    Args:
        tier: of their sub-groups, in order, with a chunk for each matrix.
        groups: the matrices (keys) of each, by the sub-group's index among all.

    Raises:
        StorageError: zeros cannot be written.
    """

    def __init__(self, tier: OptimizerStateTier, groups: Mapping[int, Sequence[int]]) -> None:
        self._tier = tier
        self._positions = {index: position for position, index in enumerate(groups)}
        self._indices = list(groups)
        self._chunks = {
            key: chunk
            for position, group in enumerate(groups.values())
            for key, chunk in zip(group, tier.chunks(position), strict=True)
        }
        self._on_device: dict[int, torch.Tensor] = {}
        self._begun: set[int] = set()
        self._in_use: dict[int, ChunkInUse] = {}
        for index in groups:
            self._overwrite(index, None)

    def begun(self, sub_group: int) -> bool:
        """Whether a sub-group has any: after an update, or a load."""
        return sub_group in self._begun

    def numel(self, sub_group: int) -> int:
        """Elements of a sub-group's matrices on this rank."""
        return self._tier.numel(self._positions[sub_group])

    def dtype(self, sub_group: int) -> torch.dtype:
        """Its dtype."""
        return self._tier.dtype(self._positions[sub_group], MOMENTUM)

    def residency(self) -> Iterator[tuple[int, Place, int]]:
        """Of each matrix its key, a place, and the bytes that it takes there on this rank; one in device memory has
        two."""
        for key, chunk in self._chunks.items():
            yield key, self._tier.places(chunk.sub_group)[chunk.index], self._tier.nbytes_of(chunk)
        for key, tensor in self._on_device.items():
            yield key, Place.GPU, tensor.nbytes

    # Device memory

    @property
    def device_nbytes(self) -> int:
        """Bytes in device memory."""
        return sum(tensor.nbytes for tensor in self._on_device.values())

    def nbytes_of(self, key: int) -> int:
        """Bytes that a matrix's takes there; 0 of a parameter that is none."""
        chunk = self._chunks.get(key)
        return 0 if chunk is None else chunk.numel * self._tier.dtype(chunk.sub_group, MOMENTUM).itemsize

    def move(self, key: int, memory: torch.Tensor | None) -> None:
        """A matrix's lives elsewhere from now on. Between two updates; wait for the device before the next one.

        Args:
            key: the matrix.
            memory: of the device, :meth:`nbytes_of` bytes, contents replaced; None: in host memory or on NVMe.
        """
        if memory is None:
            self._write_back([key])
            self._on_device.pop(key, None)
        else:
            values = self.part(key)
            self._on_device[key] = memory.view(values.dtype)
            self._on_device[key].copy_(values)

    def on_device(self, key: int) -> bool:
        """Whether a matrix's lives in device memory."""
        return key in self._on_device

    def _write_back(self, keys: Iterable[int]) -> None:
        """Makes values below those in device memory."""
        for key in keys:
            if key in self._on_device:
                chunk = self._chunks[key]
                self._tier.write(chunk.sub_group, {MOMENTUM: self._on_device[key]}, chunk.start)

    def _of_group(self, position: int) -> Iterator[int]:
        return (key for key, chunk in self._chunks.items() if chunk.sub_group == position)

    # Values

    def whole(self, sub_group: int) -> torch.Tensor:
        """A copy of a sub-group's: 1-D."""
        position = self._positions[sub_group]
        self._write_back(self._of_group(position))
        return self._tier.read(position, MOMENTUM)

    def part(self, key: int) -> torch.Tensor:
        """A copy of a matrix's on this rank: 1-D, of its shard's length."""
        if key in self._on_device:
            return self._on_device[key].to("cpu", copy=True)
        chunk = self._chunks[key]
        return self._tier.read(chunk.sub_group, MOMENTUM, chunk.start, chunk.numel)

    def set_part(self, key: int, values: torch.Tensor) -> None:
        """Replaces a matrix's on this rank."""
        chunk = self._chunks[key]
        self._tier.write(chunk.sub_group, {MOMENTUM: values}, chunk.start)
        if key in self._on_device:
            self._on_device[key].copy_(values)

    def scan(self, visit: Callable[[int, Mapping[str, torch.Tensor]], None]) -> None:
        """Shows all of it once."""
        self._write_back(self._on_device)

        def show(chunk: Chunk, views: Mapping[str, torch.Tensor]) -> None:
            visit(self._indices[chunk.sub_group], views)

        self._tier.scan(show)

    def replace(self, sub_group: int, state: dict[str, torch.Tensor]) -> None:
        """Takes what a load has put into ``optimizer.state`` for a sub-group; zero where that has nothing."""
        if sub_group in self._positions:
            self._overwrite(sub_group, state.pop(MOMENTUM, None))

    def _overwrite(self, sub_group: int, values: torch.Tensor | None) -> None:
        position = self._positions[sub_group]
        for key in self._of_group(position):
            chunk = self._chunks[key]
            used = self._tier.overwrite(chunk)
            view = used.views[MOMENTUM]
            if values is not None:
                view.copy_(values.detach().view(-1)[chunk.start : chunk.start + chunk.numel])
            if key in self._on_device:
                self._on_device[key].copy_(view)
            self._tier.put(used)
        if values is None:
            self._begun.discard(sub_group)
        else:
            self._begun.add(sub_group)

    # An update

    @contextlib.contextmanager
    def updating(self, keys: Sequence[int], synchronize: Callable[[], None]) -> Iterator[None]:
        """Around an update of matrices in this order, which takes and puts each once. After an error nothing on the
        compute device accesses the memory of those that were not put.

        Args:
            keys: the matrices.
            synchronize: waits for the compute device.
        """
        self._tier.begin_pass(self._chunks[key] for key in keys if key not in self._on_device)
        try:
            yield
        finally:
            if self._in_use:
                synchronize()
            while self._in_use:
                self._tier.drop(self._in_use.popitem()[1])
        self._begun.update(self._positions)

    def take(self, key: int) -> torch.Tensor:
        """A matrix's momentum on this rank, in memory until :meth:`put`: 1-D; changes are changes of the state."""
        if key in self._on_device:
            return self._on_device[key]
        used = self._in_use[key] = self._tier.take(self._chunks[key])
        return used.views[MOMENTUM]

    def taken(self, key: int) -> torch.Tensor:
        """What :meth:`take` gave."""
        return self._on_device[key] if key in self._on_device else self._in_use[key].views[MOMENTUM]

    def put(self, keys: Iterable[int]) -> None:
        """Those of some matrices are complete: on NVMe they are written without waiting."""
        for key in keys:
            if key not in self._on_device:
                self._tier.put(self._in_use.pop(key))
