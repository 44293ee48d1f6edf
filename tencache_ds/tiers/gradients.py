# SPDX-License-Identifier: Apache-2.0
"""Gradients: accumulated in host memory, never on NVMe, handed to the optimizer from where they were accumulated.

Stock ZeRO-Infinity copies each gradient back to the device, up-casts it, copies it to the host again and writes it to
NVMe. Here the accumulation buffer is the only place. A weight that got no gradient since the last optimizer step counts
as zero (as in ZeRO-1 and ZeRO-2; stock ZeRO-3 re-applies the previous step's gradient).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.observability.counters import Counters, Link


class GradientState(enum.Enum):
    """What a weight's segment of the accumulation buffer holds."""

    ZERO = "zero"
    """Zeros: no gradient since they were written."""

    LIVE = "live"
    """The gradient accumulated since the last optimizer step."""

    STALE = "stale"
    """The gradient of a step that is done; counts as zero, but the zeros are written only when somebody looks."""


@dataclass(frozen=True, slots=True)
class GradientSegment:
    """Where a weight's gradient lies.

    Attributes:
        key: the weight.
        start: first element in the accumulation buffer.
        numel: elements of this rank's partition, padding included.
    """

    key: int
    start: int
    numel: int


class GradientTier:
    """The accumulation buffer of one rank.

    Called from the training thread and autograd threads, one at a time (DeepSpeed reduces gradients serially).
    """

    def __init__(self, buffer: torch.Tensor, segments: Sequence[GradientSegment], counters: Counters) -> None:
        """
        Args:
            buffer: 1-D zeroed host tensor in the accumulation dtype, holding every segment.
            segments: one per weight, ascending and without gaps.
            counters: where bytes from the device are counted.
        """
        self._buffer = buffer
        self._segments = {segment.key: segment for segment in segments}
        self._ordered = tuple(segments)
        self._states = dict.fromkeys(self._segments, GradientState.ZERO)
        self._replaced: dict[int, torch.Tensor] = {}
        self._counters = counters

    @property
    def buffer(self) -> torch.Tensor:
        """The whole accumulation buffer."""
        return self._buffer

    def segment(self, key: int) -> torch.Tensor:
        """A weight's part of the accumulation buffer."""
        segment = self._segments[key]
        return self._buffer[segment.start : segment.start + segment.numel]

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
        """Writes the zeros that stale segments stand for: afterwards the buffer is exactly this step's gradient."""
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

    def value(self, key: int) -> torch.Tensor:
        """A copy of a weight's gradient in fp32, as the optimizer would see it before unscaling."""
        if key in self._replaced:
            return self._replaced[key].clone()
        if self._states[key] is GradientState.STALE:
            return torch.zeros(self._segments[key].numel, dtype=torch.float32)
        return self.segment(key).float()

    def replace(self, key: int, value: torch.Tensor) -> None:
        """Makes ``value`` (1-D fp32, the segment's length) the weight's gradient for this step, at full precision."""
        segment = self._segments[key]
        if value.numel() != segment.numel:
            raise TenCacheError(f"gradient of weight id {key} has {segment.numel} elements here, not {value.numel()}")
        self._replaced[key] = value.detach().to(device="cpu", dtype=torch.float32).reshape(-1).clone()
        self.segment(key).copy_(self._replaced[key])
        self._states[key] = GradientState.LIVE

    def fill(self, target: torch.Tensor, start: int) -> None:
        """Copies gradients into ``target`` (1-D, any float dtype), beginning at element ``start`` of the buffer."""
        end = start + target.numel()
        target.copy_(self._buffer[start:end])
        for key, value in self._replaced.items():
            segment = self._segments[key]
            low, high = max(segment.start, start), min(segment.start + segment.numel, end)
            if low < high:
                target[low - start : high - start].copy_(value[low - segment.start : high - segment.start])

    def view(self, start: int, numel: int) -> torch.Tensor | None:
        """``numel`` elements of the buffer from ``start``, as they were accumulated; None where a gradient among them
        was replaced at a higher precision, so that :meth:`fill` has to be asked."""
        for key in self._replaced:
            segment = self._segments[key]
            if segment.start < start + numel and start < segment.start + segment.numel:
                return None
        return self._buffer[start : start + numel]
