# SPDX-License-Identifier: Apache-2.0
"""Allocates the places of optimizer state, and moves it between GPU memory, host memory and NVMe.

A chunk is copied to its new home before it gives up the old one: an error leaves it complete where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.memory.arena import HostArena
from tencache_ds.memory.device_memory import DeviceMemory, Loan
from tencache_ds.memory.pages import discard
from tencache_ds.placement.places import Place
from tencache_ds.planning.chunks import Chunk
from tencache_ds.tiers.state_chunks import PURPOSE, ResidentChunks, StoredChunks
from tencache_ds.tiers.sub_group import SubGroup, SubGroupSpec

IMAGES = "images of optimizer state in device memory"


class StateRelocation:
    """Used by the thread of the optimizer's state, between two passes.

    Args:
        memory: host memory, of images too.
        resident: chunks in host memory.
        stored: chunks on NVMe.
        device: the compute device's memory; None where no chunk may live there.
    """

    def __init__(
        self, memory: HostArena, resident: ResidentChunks, stored: StoredChunks, device: DeviceMemory | None
    ) -> None:
        self._memory = memory
        self._resident = resident
        self._stored = stored
        self._device = device

    def house(self, spec: SubGroupSpec, chunks: tuple[Chunk, ...]) -> SubGroup:
        """A sub-group's chunks in their homes, their contents still to be written.

        Raises:
            SpaceError: the store has no room for them; nothing was taken.
            MemoryLimitError: nor has the device; nothing was taken.
        """
        group = SubGroup(spec, chunks)
        try:
            for chunk, place in zip(chunks, spec.places or (), strict=True):
                if place is Place.NVME:
                    self._stored.allocate(group, chunk)
                elif place is Place.GPU:
                    group.device[chunk.index] = self._borrow(chunk)
                else:
                    self._resident.allocate(group, chunk)
        except BaseException:
            self.vacate(group)
            raise
        return group

    def vacate(self, group: SubGroup) -> None:
        """Gives up the homes of a sub-group's chunks."""
        for chunk in group.chunks:
            self._stored.forget(group, chunk)
            self._free_memory(group, chunk)

    def cut_whole(self, group: SubGroup, places: Sequence[Place]) -> SubGroup:
        """A whole sub-group's state in chunks, those for device memory there and the others in host memory.

        The pages of a chunk's old home are given up before the next chunk gets a new one, so that no more than one
        chunk is there twice. Tensors that the optimizer has created keep theirs.

        Raises:
            MemoryLimitError: not enough memory; nothing was taken.
        """
        cut = SubGroup(replace(group.spec, places=tuple(places)), group.chunks)
        moved: list[Chunk] = []
        try:
            for chunk, place in zip(group.chunks, places, strict=True):
                if place is Place.GPU:
                    cut.device[chunk.index] = self._borrow(chunk)
                else:
                    cut.resident[chunk.index] = self._memory.allocate(chunk.nbytes, PURPOSE)
                for home, values in self._pieces(group, cut, chunk):
                    if place is Place.GPU:
                        self._require_device(chunk).write(home, values)
                    else:
                        home.copy_(values)
                if group.own:
                    moved.append(chunk)
                    for _, values in self._pieces(group, cut, chunk):
                        discard(values)
        except BaseException:
            for chunk in moved:
                for home, values in self._pieces(group, cut, chunk):
                    if chunk.index in cut.device:
                        self._require_device(chunk).read(values, home)
                    else:
                        values.copy_(home)
            for chunk in cut.chunks:
                self._free_memory(cut, chunk)
            raise
        return cut

    @staticmethod
    def _pieces(whole: SubGroup, cut: SubGroup, chunk: Chunk) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Bytes of a chunk, kind by kind, in its own home and in the tensors of the whole sub-group."""
        home = cut.device[chunk.index].memory if chunk.index in cut.device else cut.resident[chunk.index]
        views = whole.resident_views(chunk)
        return [
            (
                home[piece.offset : piece.offset + piece.nbytes],
                views[piece.kind].view(torch.uint8),
            )
            for piece in chunk.pieces
        ]

    def move(self, group: SubGroup, chunk: Chunk, place: Place) -> None:
        """Moves one chunk.

        Raises:
            MemoryLimitError: not enough memory.
            SpaceError, StorageError: not enough space on NVMe, or a transfer failed.
            TenCacheError: there is no device, or no store.
        """
        self._resident.join(chunk)
        with self._bytes_of(group, chunk) as source:
            if place is Place.NVME:
                self._stored.store(group, chunk, source)
                self._free_memory(group, chunk)
                return
            if place is Place.GPU:
                loan = self._borrow(chunk)
                self._require_device(chunk).write(loan.memory, source)
            else:
                target = self._memory.allocate(chunk.nbytes, PURPOSE)
                if chunk.index in group.device:
                    self._require_device(chunk).read(target, source)
                else:
                    target.copy_(source)
        self._stored.forget(group, chunk)
        self._free_memory(group, chunk)
        if place is Place.GPU:
            group.device[chunk.index] = loan
        else:
            group.resident[chunk.index] = target
            self._resident.split(chunk)

    def collect(self, group: SubGroup) -> int:
        """Houses those chunks in host memory whose device memory was taken back; returns their bytes."""
        taken = {index: loan for index, loan in group.device.items() if loan.taken}
        nbytes = 0
        for index, loan in taken.items():
            image = loan.image
            if image is None:
                raise TenCacheError("device memory was taken back that has no image in host memory")
            del group.device[index]
            loan.end()
            group.resident[index] = image
            nbytes += image.nbytes
        return nbytes

    def _bytes_of(self, group: SubGroup, chunk: Chunk) -> AbstractContextManager[torch.Tensor]:
        """A chunk's bytes where they are, or in a staging buffer."""
        if chunk.index in group.device:
            return nullcontext(group.device[chunk.index].memory[: chunk.nbytes])
        if chunk.index in group.resident:
            return nullcontext(group.resident[chunk.index][: chunk.nbytes])
        return self._stored.reading(chunk)

    def _borrow(self, chunk: Chunk) -> Loan:
        """Device memory for a chunk, with an image: host memory whose pages nobody has touched yet."""
        device = self._require_device(chunk)
        image = self._memory.allocate(chunk.nbytes, IMAGES) if device.lends else None
        try:
            nbytes = chunk.nbytes if image is None else image.numel()
            return device.lend(nbytes, image, (chunk.sub_group << 32) + chunk.index)
        except BaseException:
            if image is not None:
                self._memory.free(image)
            raise

    def _require_device(self, chunk: Chunk) -> DeviceMemory:
        if self._device is None:
            raise TenCacheError(f"chunk {chunk.sub_group}.{chunk.index} is assigned to a device, but there is none")
        return self._device

    def _free_memory(self, group: SubGroup, chunk: Chunk) -> None:
        loan, memory = group.device.pop(chunk.index, None), group.resident.pop(chunk.index, None)
        if loan is not None:
            loan.end()
            memory = loan.image
        if memory is not None:
            self._memory.free(memory)
