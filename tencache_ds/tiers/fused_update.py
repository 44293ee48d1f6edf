# SPDX-License-Identifier: Apache-2.0
"""Adam in one pass over a chunk, on the team's threads: an :class:`~tencache_ds.tiers.update.UpdateKernel`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tencache_ds.tensors import empty
from tencache_ds.tiers.fused_adam import FusedAdam, Job
from tencache_ds.tiers.update import Pieces, SubGroupStep


class _PinnedBuffers:
    """Pinned memory in which weights of device memory get their new values. torch's cache of such memory pinned new one
    for nearly every chunk, which takes 6 ms: an update of 0.25 s took twice as long. Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._free: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def take(self, nbytes: int) -> torch.Tensor:
        """One of at least that size (uint8): the one given back first, if the device is done with it."""
        if self._free and self._free[0][1].query():
            buffer, _ = self._free.popleft()
            if buffer.numel() >= nbytes:
                return buffer
        return empty(nbytes, torch.uint8, pinned=True)

    def give_back(self, buffer: torch.Tensor) -> None:
        """It can be used again when the current stream gets to this point."""
        event = torch.cuda.Event()
        event.record()
        self._free.append((buffer, event))


@dataclass(frozen=True, slots=True)
class _FusedJob:
    """A chunk whose update is queued or under way.

    Attributes:
        job: its update.
        gradient: kept, because the job has only its address.
        copy_rounded: copies the new values of weights in device memory there, on the current stream. Once.
    """

    job: Job
    gradient: torch.Tensor
    copy_rounded: Callable[[], None]

    @property
    def end_ns(self) -> int:
        """See :attr:`UpdateJob.end_ns`."""
        return self.job.end_ns

    @property
    def match(self) -> bool:
        """See :attr:`UpdateJob.match`."""
        return self.job.match

    @property
    def digest(self) -> bytes:
        """See :attr:`UpdateJob.digest`."""
        return self.job.digest

    def wait(self, timeout_s: float) -> bool:
        """See :meth:`UpdateJob.wait`."""
        return self.job.wait(timeout_s)

    def publish(self) -> None:
        """See :meth:`UpdateJob.publish`."""
        self.copy_rounded()


class FusedUpdate:
    """Takes state in single precision with weights of one dtype.

    Args:
        adam: the arithmetic and its team.
    """

    asynchronous = True

    def __init__(self, adam: FusedAdam) -> None:
        self._adam = adam
        self._buffers = _PinnedBuffers()

    def takes(self, state: Mapping[str, torch.Tensor], gradient: torch.Tensor, weights: Pieces) -> bool:
        """See :meth:`UpdateKernel.takes`."""
        return self._adam.takes(state, gradient, (weight for _, weight in weights))

    def start(
        self,
        state: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        weights: Pieces,
        step: SubGroupStep,
        digest: bytes,
    ) -> _FusedJob:
        """See :meth:`UpdateKernel.start`."""
        targets, copy_rounded = self._in_host_memory(weights)
        return _FusedJob(self._adam.start(state, gradient, targets, step.scalars, digest), gradient, copy_rounded)

    def _in_host_memory(self, weights: Pieces) -> tuple[Pieces, Callable[[], None]]:
        """Where the new values of weights go; and what copies those of weights in device memory there."""
        nbytes = sum(weight.nbytes for _, weight in weights if weight.device.type != "cpu")
        if not nbytes:
            return weights, _nothing
        buffer, start = self._buffers.take(nbytes), 0
        targets, rounded = [], []
        for first, weight in weights:
            target = weight
            if weight.device.type != "cpu":
                target = buffer[start : start + weight.nbytes].view(weight.dtype)
                start += weight.nbytes
                rounded.append((weight, target))
            targets.append((first, target))

        def copy_rounded() -> None:
            for weight, value in rounded:
                weight.copy_(value, non_blocking=True)
            self._buffers.give_back(buffer)

        return targets, copy_rounded


def _nothing() -> None: ...
