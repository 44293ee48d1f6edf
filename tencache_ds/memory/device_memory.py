# SPDX-License-Identifier: Apache-2.0
"""Memory of the compute device for items that reside there between two uses, from torch's allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tencache_ds.errors import MemoryLimitError
from tencache_ds.items import GpuUsage
from tencache_ds.layout import BOUNCE_NBYTES, N_BOUNCES
from tencache_ds.tensors import empty

HostCopy = Callable[[torch.Tensor, torch.Tensor], None]
"""Copies the bytes of the second tensor to the first, both in host memory."""


class DeviceMemory(Protocol):
    """The memory of one device, as one rank sees it. One thread at a time uses it."""

    @property
    def device(self) -> torch.device: ...

    def record(self) -> None:
        """Starts recording the peak memory of tensors."""

    def usage(self) -> GpuUsage:
        """Its usage now, and since :meth:`record`. Some ten microseconds; 200 with some virtual GPUs, which take long
        to tell their free memory."""

    def allocated_nbytes(self) -> int:
        """Bytes of this process's tensors. Does not ask the driver: some ten microseconds everywhere."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A 1-D uint8 tensor. Memory goes back with its last view.

        Raises:
            MemoryLimitError: not enough memory.
        """

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies 1-D uint8 host memory of any kind to the device; later work on the current stream finds it there, and
        the source may be freed."""

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies 1-D uint8 device memory to host memory of any kind, where it is when this returns."""

    def copy_rate(self) -> float:
        """Bytes per second from pinned host memory, measured now: some milliseconds."""

    def synchronize(self) -> None:
        """Waits for all work issued to the device."""

    def trim(self) -> None:
        """Releases unused memory in the cache of torch's allocator to the device."""


class CudaMemory:
    """See :class:`DeviceMemory`.

    Args:
        device: a CUDA device.
        host_copy: copies into pinned memory, at the memory's speed.
    """

    def __init__(self, device: torch.device, host_copy: HostCopy) -> None:
        self._device = device
        self._host_copy = host_copy
        self._bounce: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._turn = 0

    @property
    def device(self) -> torch.device:
        """Which it is."""
        return self._device

    def record(self) -> None:
        """See :meth:`DeviceMemory.record`. DeepSpeed's initialization resets the same figure several times."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def usage(self) -> GpuUsage:
        """See :meth:`DeviceMemory.usage`. A limit set with ``set_per_process_memory_fraction`` is the device's end."""
        free, total = torch.cuda.mem_get_info(self._device)
        # Not memory_stats(), which sorts some hundred figures by name: this is asked for between modules.
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        reserved, allocated = stats["reserved_bytes"]["all"]["current"], stats["allocated_bytes"]["all"]["current"]
        return GpuUsage(
            free_nbytes=max(min(free, int(self._fraction() * total) - reserved), 0),
            cached_nbytes=reserved - allocated,
            allocated_nbytes=allocated,
            peak_nbytes=stats["allocated_bytes"]["all"]["peak"],
            n_flushes=stats["num_alloc_retries"],
            n_failures=stats["num_ooms"],
        )

    def allocated_nbytes(self) -> int:
        """See :meth:`DeviceMemory.allocated_nbytes`."""
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]["current"])

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See :meth:`DeviceMemory.allocate`."""
        try:
            with torch.inference_mode(False):
                return empty(nbytes, torch.uint8, self._device)
        except torch.OutOfMemoryError as error:
            raise MemoryLimitError(
                f"{nbytes} bytes of GPU memory are needed, which {self._device} does not have: {error}"
            ) from error

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See :meth:`DeviceMemory.write`. Passes through two pinned buffers, in turns."""
        for start in range(0, source.numel(), BOUNCE_NBYTES):
            piece = source[start : start + BOUNCE_NBYTES]
            buffer, copied = self._next_buffer()
            self._host_copy(buffer[: piece.numel()], piece)
            target[start : start + piece.numel()].copy_(buffer[: piece.numel()], non_blocking=True)
            copied.record()

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See :meth:`DeviceMemory.read`. Through the same buffers: one is filled while the other one is emptied."""
        under_way: tuple[int, torch.Tensor, torch.cuda.Event] | None = None
        for start in range(0, source.numel() + BOUNCE_NBYTES, BOUNCE_NBYTES):
            before, under_way = under_way, None
            if start < source.numel():
                buffer, copied = self._next_buffer()
                piece = source[start : start + BOUNCE_NBYTES]
                buffer[: piece.numel()].copy_(piece, non_blocking=True)
                copied.record()
                under_way = start, buffer[: piece.numel()], copied
            if before is not None:
                first, values, filled = before
                filled.synchronize()
                self._host_copy(target[first : first + values.numel()], values)

    def _next_buffer(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        """The one whose last copy was issued first, when that is over."""
        if not self._bounce:
            for _ in range(N_BOUNCES - 1):
                buffer = empty(BOUNCE_NBYTES, torch.uint8, pinned=True)
                self._bounce.append((buffer, torch.cuda.Event()))
        buffer, copied = self._bounce[self._turn]
        self._turn = 1 - self._turn
        copied.synchronize()
        return buffer, copied

    def copy_rate(self) -> float:
        """See :meth:`DeviceMemory.copy_rate`."""
        source = empty(BOUNCE_NBYTES, torch.uint8, pinned=True)
        target = empty(BOUNCE_NBYTES, torch.uint8, self._device)
        started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for event in (started, ended):  # the first copy of all is slow
            target.copy_(source, non_blocking=True)
            event.record()
        ended.synchronize()
        return BOUNCE_NBYTES / (started.elapsed_time(ended) / 1e3)

    def synchronize(self) -> None:
        """See :meth:`DeviceMemory.synchronize`."""
        torch.cuda.synchronize(self._device)

    def trim(self) -> None:
        """See :meth:`DeviceMemory.trim`. The buffers of :meth:`write` go too."""
        self._bounce.clear()
        torch.cuda.empty_cache()

    def _fraction(self) -> float:
        get = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch 2.8 and later
        return float(get(self._device)) if get is not None else 1.0
