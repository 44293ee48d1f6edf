# SPDX-License-Identifier: Apache-2.0
"""Copies of raw bytes between device and host memory, and the host memory they fill.

[Note: streams] Two streams of their own carry the copies, one in each direction. A copy out begins when the work
issued to the compute stream before it is done, and a copy back when the device memory it fills is free, which is
allocated on the compute stream like any other tensor. The host waits for neither. Memory is not freed under a copy
because whoever started it keeps a reference until the copy's event is done, or until the compute stream has been made
to wait for that event: memory freed after that is reused by later work of the compute stream only. ``record_stream``
is not used, since it delays the reuse until the host next looks.

[Note: streams of the user's] A script may compute on several streams. Autograd saves a tensor on the stream of the node
that saves it, and needs it back there, but a block may be moved while another stream is the current one. So copies are
ordered with all streams on which tensors were saved, which usually is one; memory that a copy back fills is recorded
for the others.

Activations' sizes are known only when they are saved: host memory is allocated at first use, then reused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, cast

import torch

from tencache_ds.layout import PAGE_NBYTES, round_up
from tencache_ds.memory.arena import POISON_BYTE, HostArena
from tencache_ds.memory.lease import DeviceEvent
from tencache_ds.placement.activation_policy import MoveRates
from tencache_ds.tensors import empty

_MEASURED_NBYTES = 32 * 2**20


class Copies(Protocol):
    """Used by one thread at a time. All tensors are 1-D uint8."""

    def saving(self) -> None:
        """A tensor is saved on the current stream: see [Note: streams of the user's]."""

    def out(self, target: torch.Tensor, source: torch.Tensor) -> DeviceEvent | None:
        """Copies device memory to host memory of the same size.

        Returns:
            Done when ``target`` is filled and ``source`` may be freed; None: that is so already.
        """

    def back(self, source: torch.Tensor, after: DeviceEvent | None) -> tuple[torch.Tensor, DeviceEvent | None]:
        """Copies host memory to new device memory, once the copy that fills ``source`` is done.

        Returns:
            The device memory, and an event that is done when it is filled and ``source`` may be reused; None: that is
            so already. Work on the memory may be issued after :meth:`wait`.
        """

    def wait(self, event: DeviceEvent | None) -> None:
        """Later work on the current stream, and on those where tensors were saved, waits for a copy; the host does
        not."""

    def rates(self) -> MoveRates | None:
        """Measured bandwidths; None if unknown."""


class PlainCopies:
    """For a device whose memory is ordinary memory: each copy is over when its call returns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved = [[0, 0.0], [0, 0.0]]  # bytes and seconds, out and back

    def saving(self) -> None:
        """See :meth:`Copies.saving`."""

    def out(self, target: torch.Tensor, source: torch.Tensor) -> DeviceEvent | None:
        """See :meth:`Copies.out`."""
        self._copy(target, source, 0)
        return None

    def back(self, source: torch.Tensor, after: DeviceEvent | None) -> tuple[torch.Tensor, DeviceEvent | None]:
        """See :meth:`Copies.back`."""
        target = empty(source.numel(), torch.uint8, self._device)
        self._copy(target, source, 1)
        return target, None

    def wait(self, event: DeviceEvent | None) -> None:
        """See :meth:`Copies.wait`."""

    def rates(self) -> MoveRates | None:
        """See :meth:`Copies.rates`: of all copies so far."""
        if any(not seconds for _, seconds in self._moved):
            return None
        return MoveRates(*(nbytes / seconds for nbytes, seconds in self._moved))

    def _copy(self, target: torch.Tensor, source: torch.Tensor, direction: int) -> None:
        t_start_s = time.perf_counter()
        target.copy_(source)
        self._moved[direction][0] += source.numel()
        self._moved[direction][1] += time.perf_counter() - t_start_s


class CudaCopies:
    """See [Note: streams] and [Note: streams of the user's]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)
        self._saved_on: set[torch.cuda.Stream] = set()
        self._rates = _measured_rates(device)

    def saving(self) -> None:
        """See :meth:`Copies.saving`."""
        self._saved_on.add(torch.cuda.current_stream(self._device))

    def out(self, target: torch.Tensor, source: torch.Tensor) -> DeviceEvent | None:
        """See :meth:`Copies.out`."""
        # Before the block below, in which the current stream is the copy's own.
        for stream in self._streams():
            self._out.wait_stream(stream)
        with torch.cuda.stream(self._out):
            target.copy_(source, non_blocking=True)
            return self._out.record_event()

    def back(self, source: torch.Tensor, after: DeviceEvent | None) -> tuple[torch.Tensor, DeviceEvent | None]:
        """See :meth:`Copies.back`."""
        target = empty(source.numel(), torch.uint8, self._device)
        current = torch.cuda.current_stream(self._device)
        self._back.wait_stream(current)
        for stream in self._saved_on - {current}:
            target.record_stream(stream)
        if after is not None:
            self._back.wait_event(cast(torch.cuda.Event, after))
        with torch.cuda.stream(self._back):
            target.copy_(source, non_blocking=True)
            return target, self._back.record_event()

    def wait(self, event: DeviceEvent | None) -> None:
        """See :meth:`Copies.wait`."""
        if event is not None:
            for stream in self._streams():
                stream.wait_event(cast(torch.cuda.Event, event))

    def _streams(self) -> set[torch.cuda.Stream]:
        return self._saved_on | {torch.cuda.current_stream(self._device)}

    def rates(self) -> MoveRates | None:
        """See :meth:`Copies.rates`: of pinned memory, measured before training takes device memory."""
        return self._rates


def _measured_rates(device: torch.device) -> MoveRates:
    """Takes some milliseconds."""
    host = empty(_MEASURED_NBYTES, torch.uint8, pinned=True)
    there = empty(_MEASURED_NBYTES, torch.uint8, device)
    return MoveRates(_rate(host, there), _rate(there, host))


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
    """Bytes per second of a copy on the current stream."""
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for event in (started, ended):  # the first copy of all is slow
        target.copy_(source, non_blocking=True)
        event.record()
    ended.synchronize()
    return source.numel() / (started.elapsed_time(ended) / 1e3)


def open_copies(device: torch.device) -> Copies:
    """The copies that suit a device."""
    return CudaCopies(device) if device.type == "cuda" else PlainCopies(device)


_CLASSES_PER_DOUBLING = 8


def class_nbytes(nbytes: int) -> int:
    """The size of the buffer for so many bytes: at most an eighth more, so that batches of varying length share
    buffers; a multiple of 4096."""
    step = (1 << max(nbytes - 1, 0).bit_length()) // (2 * _CLASSES_PER_DOUBLING)
    return round_up(nbytes, max(step, PAGE_NBYTES))


class HostBuffers:
    """Used by one thread at a time.

    Args:
        arena: where the memory comes from. Registering it with a GPU takes about 0.5 s per GB, so it is kept.
        allows: whether so many more bytes may be allocated.
        count: called with the bytes that are allocated, or freed (negative).
        purpose: in errors and reports.
        poison: for tests: fill what is given back.
    """

    def __init__(
        self,
        arena: HostArena,
        allows: Callable[[int], bool],
        count: Callable[[int], None],
        purpose: str,
        *,
        poison: bool = False,
    ) -> None:
        self._arena = arena
        self._allows = allows
        self._count = count
        self._purpose = purpose
        self._poison = poison
        self._free: dict[int, list[torch.Tensor]] = {}
        self._free_nbytes = 0
        self.allocated_nbytes = 0
        """In use or free for the next."""

    @property
    def used_nbytes(self) -> int:
        """In use."""
        return self.allocated_nbytes - self._free_nbytes

    def take(self, nbytes: int, *, regardless: bool = False) -> torch.Tensor | None:
        """A 1-D page-aligned uint8 tensor of at least ``nbytes``, or None if there is no room.

        Args:
            nbytes: at least 1.
            regardless: take it even if ``allows`` says no.

        Raises:
            MemoryLimitError, LockedMemoryError: the system has no such memory.
        """
        size = class_nbytes(nbytes)
        free = self._free.get(size)
        if free:
            self._free_nbytes -= size
            return free.pop()
        if not self._allows(size):
            self._release(size)
            if not (regardless or self._allows(size)):
                return None
        buffer = self._arena.allocate(size, self._purpose)
        self.allocated_nbytes += size
        self._count(size)
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Takes back what :meth:`take` returned; no device may still read or write it."""
        if self._poison:
            buffer.fill_(POISON_BYTE)
        self._free.setdefault(buffer.numel(), []).append(buffer)
        self._free_nbytes += buffer.numel()

    def trim(self) -> None:
        """Frees what nobody uses."""
        for size in self._free:
            while self._free[size]:
                self._free_one(size)

    def _release(self, needed_nbytes: int) -> None:
        """Frees buffers of other sizes that nobody uses, largest first, until so many more bytes are allowed."""
        for size in sorted(self._free, reverse=True):
            while self._free[size] and not self._allows(needed_nbytes):
                self._free_one(size)

    def _free_one(self, size: int) -> None:
        self._arena.free(self._free[size].pop())
        self._free_nbytes -= size
        self.allocated_nbytes -= size
        self._count(-size)
