# SPDX-License-Identifier: Apache-2.0
"""Memory of the compute device for items that reside there between two uses.

[Note: loans] Optimizer state, which only TenCache uses, lies in memory of its own beside torch's allocator, and can be
taken back: where an allocation of training would fail otherwise, the allocator runs a function that copies the last
chunks to their images in host memory and frees theirs (``ops/csrc/lend``). This can happen at any time, on any thread,
but not within :meth:`DeviceMemory.holding`, where whoever uses a loan first looks whether it is still there. Beside
passes a loan is held by itself: an allocation of theirs may need the others.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from tencache_ds.errors import MemoryLimitError
from tencache_ds.layout import BOUNCE_NBYTES, N_BOUNCES
from tencache_ds.placement.places import GpuUsage
from tencache_ds.tensors import empty

HostCopy = Callable[[torch.Tensor, torch.Tensor], object]
"""Copies the bytes of the second tensor to the first, both in host memory."""


class Loan(Protocol):
    """Memory that can be taken back: see [Note: loans]."""

    @property
    def memory(self) -> torch.Tensor:
        """In device memory: uint8, 1-D. Not to be touched once :attr:`taken`."""

    @property
    def image(self) -> torch.Tensor | None:
        """Host memory that gets the bytes when the loan is taken back; None where it never is."""

    @property
    def taken(self) -> bool:
        """Whether it was taken back: its image has the bytes."""

    def end(self) -> None:
        """Gives the memory back. Idempotent. No view of it may be used any more."""


class DeviceMemory(Protocol):
    """The memory of one device, as one rank sees it. One thread at a time uses it."""

    @property
    def device(self) -> torch.device: ...

    @property
    def lends(self) -> bool:
        """Whether loans can be taken back; else they are ordinary allocations."""

    @property
    def taken_nbytes(self) -> int:
        """Bytes of loans that were taken back so far. Any thread; less than a microsecond."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in it."""

    def record(self) -> None:
        """Starts recording the peak memory of tensors. Without loans the same figure is
        ``torch.cuda.max_memory_allocated()``, which begins again."""

    def usage(self) -> GpuUsage:
        """Its usage now, and since :meth:`record`. Some ten microseconds; 200 with some virtual GPUs, which take long
        to tell their free memory."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A 1-D uint8 tensor. Memory goes back with its last view.

        Raises:
            MemoryLimitError: not enough memory.
        """

    def lend(self, nbytes: int, image: torch.Tensor | None, rank: int) -> Loan:
        """Memory that can be taken back.

        Args:
            nbytes: as many.
            image: host memory that gets the bytes then: uint8, 1-D, of that size, kept by the loan; None where
                :attr:`lends` is false.
            rank: the loan of the highest rank is taken back first.

        Raises:
            MemoryLimitError: not enough memory.
        """

    def holding(self, loan: Loan | None = None) -> AbstractContextManager[None]:
        """Within the block no loan is taken back, or one is not. An allocation in it may fail for want of them."""

    def step_done(self, host_room_nbytes: int) -> None:
        """A step is over. From now on images may come to take so much host memory; what an allocation may want is
        estimated by the requests of the last two steps."""

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


class OrdinaryLoan:
    """A :class:`Loan` that is never taken back.

    Args:
        memory: of the loan.
    """

    image = None
    taken = False

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def end(self) -> None:
        """See :meth:`Loan.end`. The memory is freed with its last view."""
        self.memory = self.memory[:0].clone()


class _CudaLoan:
    """A :class:`Loan` of the tencache_lend op."""

    def __init__(self, op: Any, number: int, address: int, image: torch.Tensor, device: torch.device) -> None:
        self._op = op
        self.number = number
        self.image = image  # the op may write to it as long as the loan has not ended
        self._end = weakref.finalize(self, op.end, number)
        self._end.atexit = False  # the driver frees it; a forked child must not try to
        self.memory = torch.as_tensor(_Bytes(address, image.numel()), device=device)

    @property
    def taken(self) -> bool:
        """See :attr:`Loan.taken`."""
        return bool(self._op.taken(self.number))

    def end(self) -> None:
        """See :meth:`Loan.end`."""
        self._end()


class _Bytes:
    """Device memory that torch makes a tensor of without a copy. Does not own it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class CudaMemory:
    """See :class:`DeviceMemory`.

    Args:
        device: a CUDA device.
        host_copy: copies into pinned memory, at the memory's speed.
        lent: the tencache_lend op's memory of that device; None where loans cannot be taken back.
    """

    def __init__(self, device: torch.device, host_copy: HostCopy, lent: Any | None = None) -> None:
        self._device = device
        self._host_copy = host_copy
        self._lent = lent
        self._recorded_nbytes = 0  # in tensors when recording began
        self._unused_stream: torch.cuda.Stream | None = None
        self._bounce: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._turn = 0
        self._bouncing = threading.Lock()  # state is read in the background, too

    @property
    def device(self) -> torch.device:
        """Which it is."""
        return self._device

    def holds(self, tensor: torch.Tensor) -> bool:
        """See :meth:`DeviceMemory.holds`."""
        return tensor.device == self._device

    def record(self) -> None:
        """See :meth:`DeviceMemory.record`."""
        if self._lent is None:
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        self._recorded_nbytes = torch.cuda.memory_allocated(self._device)
        self._lent.record()

    @property
    def lends(self) -> bool:
        """See :attr:`DeviceMemory.lends`."""
        return self._lent is not None

    @property
    def taken_nbytes(self) -> int:
        """See :attr:`DeviceMemory.taken_nbytes`."""
        return 0 if self._lent is None else int(self._lent.taken_nbytes)

    @property
    def _lent_nbytes(self) -> int:
        return 0 if self._lent is None else int(self._lent.lent_nbytes)

    def usage(self) -> GpuUsage:
        """See :meth:`DeviceMemory.usage`. A limit set with ``set_per_process_memory_fraction`` is the device's end, for
        loans too. Loans count as allocated."""
        free, total = torch.cuda.mem_get_info(self._device)
        # Not memory_stats(), which sorts some hundred figures by name: this is asked for between modules in inference.
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        reserved, allocated = stats["reserved_bytes"]["all"]["current"], stats["allocated_bytes"]["all"]["current"]
        lent = self._lent_nbytes
        if self._lent is None:
            peak = stats["allocated_bytes"]["all"]["peak"]
        else:
            peak = max(self._recorded_nbytes + int(self._lent.peak_nbytes), allocated)
        return GpuUsage(
            free_nbytes=max(min(free, int(self._fraction() * total) - reserved - lent), 0),
            cached_nbytes=reserved - allocated,
            allocated_nbytes=allocated + lent,
            peak_nbytes=peak + lent,
            n_flushes=stats["num_alloc_retries"],
            n_failures=stats["num_ooms"],
            pool_nbytes=reserved,
        )

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See :meth:`DeviceMemory.allocate`."""
        try:
            with torch.inference_mode(False):
                return empty(nbytes, torch.uint8, self._device)
        except torch.OutOfMemoryError as error:
            raise MemoryLimitError(
                f"{nbytes} bytes of GPU memory are needed, which {self._device} does not have: {error}"
            ) from error

    def lend(self, nbytes: int, image: torch.Tensor | None, rank: int) -> Loan:
        """See :meth:`DeviceMemory.lend`. Segments of the driver's, which are free for torch at once when they end."""
        if self._lent is None or image is None:
            return OrdinaryLoan(self.allocate(nbytes))
        self._note_limit(self._lent)
        for _ in range(2):
            if self.usage().free_nbytes >= nbytes:
                number, address = self._lent.lend(nbytes, image.data_ptr(), rank)
                if number:
                    return _CudaLoan(self._lent, number, address, image, self._device)
            torch.cuda.empty_cache()
        raise MemoryLimitError(f"{nbytes} bytes of GPU memory are needed, which {self._device} does not have")

    @contextlib.contextmanager
    def holding(self, loan: Loan | None = None) -> Iterator[None]:
        """See :meth:`DeviceMemory.holding`."""
        if self._lent is None:
            yield
            return
        number = loan.number if isinstance(loan, _CudaLoan) else 0
        self._lent.hold(number)
        try:
            yield
        finally:
            self._lent.release(number)

    def step_done(self, host_room_nbytes: int) -> None:
        """See :meth:`DeviceMemory.step_done`."""
        if self._lent is not None:
            self._lent.set_host_room(host_room_nbytes)
            self._lent.step_done()
            self._note_limit(self._lent)
            self._cache_a_segment()

    def _note_limit(self, lent: Any) -> None:
        """Has loans taken back for a limit of the process as for the device's end; it may have changed."""
        fraction = self._fraction()
        lent.set_limit(int(fraction * torch.cuda.mem_get_info(self._device)[1]) if fraction < 1 else 0)

    def _cache_a_segment(self) -> None:
        """Sees to it that torch has a cached segment that nothing else uses, of 2 MiB: when the driver refuses, the
        allocator releases it, and only then asks again. That is when everything lent is taken back."""
        if self._unused_stream is None:
            self._unused_stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._unused_stream), contextlib.suppress(torch.OutOfMemoryError):
            empty(1, torch.uint8, self._device)

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See :meth:`DeviceMemory.write`. Passes through two pinned buffers, in turns."""
        stream = torch.cuda.current_stream(self._device)  # another thread's current device may be another one
        with self._bouncing:
            for start in range(0, source.numel(), BOUNCE_NBYTES):
                piece = source[start : start + BOUNCE_NBYTES]
                buffer, copied = self._next_buffer()
                self._host_copy(buffer[: piece.numel()], piece)
                target[start : start + piece.numel()].copy_(buffer[: piece.numel()], non_blocking=True)
                copied.record(stream)

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See :meth:`DeviceMemory.read`. Through the same buffers: one is filled while the other one is emptied."""
        under_way: tuple[int, torch.Tensor, torch.cuda.Event] | None = None
        stream = torch.cuda.current_stream(self._device)  # another thread's current device may be another one
        with self._bouncing:
            for start in range(0, source.numel() + BOUNCE_NBYTES, BOUNCE_NBYTES):
                before, under_way = under_way, None
                if start < source.numel():
                    buffer, copied = self._next_buffer()
                    piece = source[start : start + BOUNCE_NBYTES]
                    buffer[: piece.numel()].copy_(piece, non_blocking=True)
                    copied.record(stream)
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
