# SPDX-License-Identifier: Apache-2.0
"""Gradients: accumulated where the optimizer reads them, in host memory or in device memory, never on NVMe.

Stock ZeRO-Infinity copies each gradient back to the device, up-casts it, copies it to the host again and writes it to
NVMe. Here the place of accumulation is the only one. A weight that got no gradient since the last optimizer step counts
as zero (as in ZeRO-1 and ZeRO-2; stock ZeRO-3 re-applies the previous step's gradient).
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.memory.arena import HostTensors
from tencache_ds.observability.counters import Counters, Link
from tencache_ds.observability.spans import Category, span
from tencache_ds.tensors import empty, zeros


class GradientState(enum.Enum):
    """The contents of a weight's segment of the accumulation buffer."""

    ZERO = "zero"
    """Zeros: no gradient since they were written."""

    LIVE = "live"
    """The gradient accumulated since the last optimizer step."""

    STALE = "stale"
    """The gradient of a step that is done; counts as zero, but the zeros are written only on access."""


@dataclass(frozen=True, slots=True)
class GradientSegment:
    """Where a weight's gradient lies.

    Attributes:
        key: the weight.
        start: first element among those of all gradients.
        numel: elements of this rank's partition, padding included.
    """

    key: int
    start: int
    numel: int


class _Buffer:
    """The host memory of some gradients that follow each other; None while all of them are in device memory and it is
    needed for something else."""

    __slots__ = ("end", "keys", "start", "tensor")

    def __init__(self, segments: Sequence[GradientSegment], tensor: torch.Tensor) -> None:
        self.keys = tuple(segment.key for segment in segments)
        self.start = segments[0].start
        self.end = self.start + tensor.numel()
        self.tensor: torch.Tensor | None = tensor

    def part(self, low: int, high: int) -> torch.Tensor:
        assert self.tensor is not None
        return self.tensor[low - self.start : high - self.start]


class GradientTier:
    """The accumulated gradients of one rank: buffers in host memory with a segment for every weight, some of which are
    accumulated in device memory instead.

    Called from the training thread and autograd threads, one at a time (DeepSpeed reduces gradients serially).
    """

    def __init__(
        self,
        buffers: Sequence[Sequence[GradientSegment]],
        dtype: torch.dtype,
        memory: HostTensors,
        counters: Counters,
    ) -> None:
        """
        Args:
            buffers: of each buffer the segments, one per weight; ascending and without gaps, of one sub-group each.
            dtype: in which gradients are accumulated.
            memory: of the host.
            counters: where bytes from the device are counted.

        Raises:
            MemoryLimitError: there is not enough host memory.
        """
        self.dtype = dtype
        """In which gradients are accumulated."""
        self._memory = memory
        self._ordered = tuple(segment for buffer in buffers for segment in buffer)
        self._segments = {segment.key: segment for segment in self._ordered}
        self._starts = [segment.start for segment in self._ordered]
        self._buffers = [
            _Buffer(buffer, memory.take(sum(segment.numel for segment in buffer), dtype))
            for buffer in buffers
            if buffer
        ]
        self._buffer_starts = [buffer.start for buffer in self._buffers]
        self._buffer_of = {key: buffer for buffer in self._buffers for key in buffer.keys}
        self._on_device: dict[int, torch.Tensor] = {}
        self.version = 0
        """Grows whenever a gradient changes its place."""
        self._states = dict.fromkeys(self._segments, GradientState.ZERO)
        self._replaced: dict[int, torch.Tensor] = {}
        self._counters = counters

    @property
    def device_nbytes(self) -> int:
        """Bytes of the gradients that are accumulated in device memory."""
        return sum(tensor.nbytes for tensor in self._on_device.values())

    def move(self, key: int, memory: torch.Tensor | None) -> torch.Tensor:
        """Accumulates a weight's gradient elsewhere from now on; its present contents move along. To host memory
        without waiting for the copy: wait for the device before reading it there.

        Args:
            key: the weight.
            memory: 1-D device tensor of the segment's length and the accumulation dtype; its contents are replaced.
                None: in host memory.

        Returns:
            Where the gradient is accumulated.

        Raises:
            MemoryLimitError: there is no host memory for it; it stays where it is.
        """
        before, buffer = self.segment(key), self._buffer_of[key]
        if memory is None and buffer.tensor is None:
            buffer.tensor = self._memory.take(buffer.end - buffer.start, self.dtype)
        if memory is None:
            self._on_device.pop(key, None)
        else:
            self._on_device[key] = memory
        if self._states[key] is GradientState.LIVE:
            self.segment(key).copy_(before, non_blocking=True)
        else:
            self._states[key] = GradientState.STALE
        self.version += 1
        return self.segment(key)

    @property
    def any_replaced(self) -> bool:
        """Whether a gradient of this step was replaced at a higher precision."""
        return bool(self._replaced)

    def on_device(self, key: int) -> bool:
        """Whether a weight's gradient is accumulated in device memory."""
        return key in self._on_device

    def accumulates(self, key: int) -> bool:
        """Whether a weight has a gradient here."""
        return key in self._segments

    def nbytes_of(self, key: int) -> int:
        """Bytes of a weight's accumulated gradient."""
        return self._segments[key].numel * self.dtype.itemsize

    def segment(self, key: int) -> torch.Tensor:
        """A weight's accumulated gradient, where it is accumulated."""
        if key in self._on_device:
            return self._on_device[key]
        segment = self._segments[key]
        return self._buffer_of[key].part(segment.start, segment.start + segment.numel)

    # Host memory

    @property
    def unused_host_nbytes(self) -> int:
        """Bytes that :meth:`free_unused` would free."""
        return sum(buffer.tensor.nbytes for buffer in self._unused() if buffer.tensor is not None)

    def host_nbytes_of(self, keys: Iterable[int]) -> int:
        """Bytes of host memory that have to be there before these gradients can be accumulated in it."""
        buffers = {id(buffer): buffer for buffer in map(self._buffer_of.__getitem__, keys) if buffer.tensor is None}
        return sum((buffer.end - buffer.start) * self.dtype.itemsize for buffer in buffers.values())

    def free_unused(self) -> None:
        """Frees the buffers of host memory all of whose gradients are in device memory. No copy from them may be
        under way."""
        for buffer in self._unused():
            assert buffer.tensor is not None
            self._memory.give_back(buffer.tensor)
            buffer.tensor = None

    def _unused(self) -> list[_Buffer]:
        return [
            buffer
            for buffer in self._buffers
            if buffer.tensor is not None and all(key in self._on_device for key in buffer.keys)
        ]

    def accumulate(self, key: int, partition: torch.Tensor, *, first: bool) -> torch.Tensor:
        """Puts a micro-step's gradient into the buffer, without waiting for the copy.

        Args:
            key: the weight.
            partition: 1-D gradient partition on the compute device, in the accumulation dtype, not longer than the
                segment.
            first: whether this is the first micro-step since the last optimizer step (its value replaces, later ones
                are added).

        Returns:
            The accumulated gradient on the compute device, for its norm. On a CPU accelerator this is the buffer
            itself.
        """
        target = self.segment(key)[: partition.numel()]
        with span(Category.COPY, "copy::gradient", f"weight id {key}", target.nbytes):
            return self._accumulate(key, target, partition, first)

    def _accumulate(self, key: int, target: torch.Tensor, partition: torch.Tensor, first: bool) -> torch.Tensor:
        if key not in self._on_device:
            self._counters.moved(Link.D2H, target.nbytes)
        fresh = first or self._states[key] is not GradientState.LIVE
        self._states[key] = GradientState.LIVE
        self._replaced.pop(key, None)
        if fresh:
            if partition.numel() < self._segments[key].numel:
                self.segment(key)[partition.numel() :].zero_()
            target.copy_(partition, non_blocking=True)
            if partition.device == target.device:
                return target
            # A reduction's order of summation depends on alignment: give it the alignment of a fresh allocation, which
            # is what DeepSpeed's own copy would have.
            partition = partition.to(target.dtype)
            return partition if partition.data_ptr() % 512 == 0 else partition.clone()
        if partition.device == target.device:
            return target.add_(partition.to(target.dtype).view(target.shape))
        self._counters.moved(Link.H2D, target.nbytes)
        accumulated = target.to(partition.device, non_blocking=True)
        accumulated.add_(partition.to(target.dtype).view(accumulated.shape))
        target.copy_(accumulated, non_blocking=True)
        return accumulated

    def settle(self) -> None:
        """Writes the zeros of stale segments: afterwards the buffer is exactly this step's gradient."""
        for key, state in self._states.items():
            if state is GradientState.STALE:
                self.segment(key).zero_()
                self._states[key] = GradientState.ZERO

    def end_step(self) -> None:
        """The optimizer step is over (or skipped): every gradient is out of date."""
        for key, state in self._states.items():
            if state is GradientState.LIVE:
                self._states[key] = GradientState.STALE
        self._replaced.clear()

    def live(self) -> Iterable[int]:
        """Weights that got a gradient since the last optimizer step, in buffer order."""
        return [segment.key for segment in self._ordered if self._states[segment.key] is GradientState.LIVE]

    def all_finite(self, pieces_of: int) -> bool:
        """Whether all accumulated gradients are finite, checking this number of elements at a time."""
        finite = all(bool(torch.isfinite(piece).all()) for run in self._host_runs() for piece in run.split(pieces_of))
        by_device: dict[torch.device, torch.Tensor] = {}
        for tensor in self._on_device.values():  # one wait for a device, not one for each gradient
            here = torch.isfinite(tensor).all()
            by_device[tensor.device] = by_device[tensor.device] & here if tensor.device in by_device else here
        return finite and all(bool(each) for each in by_device.values())

    def _host_runs(self) -> Iterator[torch.Tensor]:
        """The gradients in host memory, as few tensors."""
        for buffer in self._buffers:
            low = high = buffer.start
            for key in buffer.keys:
                segment = self._segments[key]
                if key in self._on_device:
                    if low < high:
                        yield buffer.part(low, high)
                    low = segment.start + segment.numel
                high = segment.start + segment.numel
            if low < high:
                yield buffer.part(low, high)

    def value(self, key: int) -> torch.Tensor:
        """A copy of a weight's gradient in host memory in fp32, as the optimizer would see it before unscaling."""
        if key in self._replaced:
            return self._replaced[key].clone()
        if self._states[key] is GradientState.STALE:
            return zeros(self._segments[key].numel, torch.float32)
        return self.segment(key).to("cpu", torch.float32, copy=True)

    def replace(self, key: int, value: torch.Tensor) -> None:
        """Makes ``value`` (1-D fp32, the segment's length) the weight's gradient for this step, at full precision."""
        segment = self._segments[key]
        if value.numel() != segment.numel:
            raise TenCacheError(f"gradient of weight id {key} has {segment.numel} elements here, not {value.numel()}")
        self._replaced[key] = value.detach().to(device="cpu", dtype=torch.float32).reshape(-1).clone()
        self.segment(key).copy_(self._replaced[key])
        self._states[key] = GradientState.LIVE

    def contents(self, key: int) -> torch.Tensor:
        """A weight's settled gradient, where it is: as it was accumulated, or as it was replaced, in fp32."""
        replaced = self._replaced.get(key)
        return self.segment(key) if replaced is None else replaced

    def overwrite(self, key: int, value: torch.Tensor) -> None:
        """Makes ``value`` (1-D, the segment's length) the weight's gradient for this step, in the accumulation dtype,
        without waiting for the copy."""
        self._replaced.pop(key, None)
        self.segment(key).copy_(value, non_blocking=True)
        self._states[key] = GradientState.LIVE

    def fill(self, target: torch.Tensor, start: int) -> None:
        """Copies gradients into ``target`` (1-D, any float dtype), beginning at element ``start`` of all."""
        end = start + target.numel()
        for index in range(max(bisect.bisect_right(self._buffer_starts, start) - 1, 0), len(self._buffers)):
            buffer = self._buffers[index]
            low, high = max(buffer.start, start), min(buffer.end, end)
            if low >= high:
                break
            if buffer.tensor is not None:
                target[low - start : high - start].copy_(buffer.part(low, high))
        if not self._replaced and not self._on_device:
            return
        for segment, low, high in self._between(start, end):
            value = self._replaced.get(segment.key)
            if value is None:
                value = self._on_device.get(segment.key)
            if value is not None:
                target[low - start : high - start].copy_(value[low - segment.start : high - segment.start])

    def view(self, start: int, numel: int) -> torch.Tensor | None:
        """``numel`` elements from ``start`` in host memory, as they were accumulated; None where a gradient among them
        was replaced at a higher precision or is in device memory, or where they belong to several buffers, so that
        :meth:`fill` has to be asked."""
        if self._replaced or self._on_device:
            for segment, _, _ in self._between(start, start + numel):
                if segment.key in self._replaced or segment.key in self._on_device:
                    return None
        buffer = self._buffers[max(bisect.bisect_right(self._buffer_starts, start) - 1, 0)]
        return buffer.part(start, start + numel) if start + numel <= buffer.end else None

    def in_fp32(self, start: int, numel: int) -> torch.Tensor:
        """A copy of ``numel`` elements from ``start`` in host memory, at full precision."""
        copy = empty(numel, torch.float32)
        self.fill(copy, start)
        return copy

    def pieces(self, start: int, numel: int) -> list[tuple[int, torch.Tensor]] | None:
        """``numel`` elements from ``start`` as ``(first element, tensor)``, each where it is accumulated; ascending and
        without gaps. None where a gradient among them was replaced at a higher precision."""
        segments = []
        for segment, low, high in self._between(start, start + numel):
            if segment.key in self._replaced:
                return None
            tensor = self.segment(segment.key)[low - segment.start : high - segment.start]
            segments.append((low - start, tensor))
        return segments

    def _between(self, start: int, end: int) -> Iterator[tuple[GradientSegment, int, int]]:
        """The segments with elements of ``[start, end)``, each with the first of them and the one after the last."""
        for index in range(max(bisect.bisect_right(self._starts, start) - 1, 0), len(self._ordered)):
            segment = self._ordered[index]
            if segment.start >= end:
                return
            low, high = max(segment.start, start), min(segment.start + segment.numel, end)
            if low < high:
                yield segment, low, high
