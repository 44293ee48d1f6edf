# SPDX-License-Identifier: Apache-2.0
"""A sub-group's Adam as a stream of chunks on the team's threads: while it works on one, the next is waited for."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from tencache_ds.errors import StorageError, TenCacheError
from tencache_ds.planning.adam_scalars import AdamScalars
from tencache_ds.tiers.fused_adam import FusedAdam, Job
from tencache_ds.tiers.gradients import GradientTier
from tencache_ds.tiers.optimizer_state import ChunkInUse, OptimizerStateTier
from tencache_ds.tiers.weight_writer import WeightWriter

JOBS_AHEAD = 3
"""Chunks that may be queued behind the one under way where that holds no staging buffer: the team never waits for
Python then."""

JOB_TIMEOUT_S = 3600.0
"""A chunk takes milliseconds; where it takes this long, nothing else gets on either."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A chunk whose update is queued or under way.

    Attributes:
        used: its state.
        job: its update.
        gradient: kept, because the job has only its address.
        rounded: ``(weight, its new value)`` of the weights in device memory; the value is in host memory.
    """

    used: ChunkInUse
    job: Job
    gradient: torch.Tensor
    rounded: Sequence[tuple[torch.Tensor, torch.Tensor]]


class FusedUpdate:
    """Streams chunks past :class:`FusedAdam`. Used by the training thread."""

    def __init__(
        self, adam: FusedAdam, tier: OptimizerStateTier, gradients: GradientTier, writer: WeightWriter
    ) -> None:
        """
        Args:
            adam: the kernel and its team.
            tier: where master weights and moments live.
            gradients: the accumulated gradients.
            writer: where the model's weights get their new values.
        """
        self._adam = adam
        self._tier = tier
        self._gradients = gradients
        self._writer = writer

    def run(
        self,
        sub_group: int,
        start: int,
        scalars: AdamScalars,
        in_passes: Callable[[ChunkInUse], None],
        done: Collection[int] = (),
    ) -> None:
        """Updates a sub-group.

        Args:
            sub_group: which one.
            start: its first element in the gradient buffer.
            scalars: of the step.
            in_passes: updates a chunk that the kernel does not take, and its weights.
            done: indices of chunks that are updated elsewhere.

        Raises:
            StorageError: a read failed, or an earlier write.
        """
        # Chunks on NVMe, and weights on NVMe, hold staging buffers: two of them at a time could wait for each other.
        without_buffers = 0 if self._writer.holds_buffers(sub_group) else JOBS_AHEAD
        begun: deque[_Begun] = deque()
        try:
            for chunk in self._tier.chunks(sub_group):
                if chunk.index in done:
                    continue
                used = self._tier.take(chunk)
                try:
                    while len(begun) > (0 if used.staged else without_buffers):
                        self._finish(begun.popleft())
                    entry = self._begin(used, start + chunk.start, scalars)
                    if entry is None:
                        while begun:
                            self._finish(begun.popleft())
                        in_passes(used)
                except BaseException:
                    self._tier.drop(used)
                    raise
                if entry is None:
                    self._tier.put(used)
                else:
                    begun.append(entry)
            while begun:
                self._finish(begun.popleft())
        except BaseException:
            self._abandon(begun)
            raise

    def _begin(self, used: ChunkInUse, start: int, scalars: AdamScalars) -> _Begun | None:
        """Begins the update of a chunk whose gradient begins at ``start``; None where the kernel does not take it."""
        chunk = used.chunk
        gradient = self._gradients.view(start, chunk.numel)
        if gradient is None:
            gradient = torch.empty(chunk.numel, dtype=torch.float32)
            self._gradients.fill(gradient, start)
        weights = self._writer.open(chunk)
        if not self._adam.takes(used.views, gradient, (weight for _, weight in weights)):
            return None
        targets, rounded = [], []
        for first, weight in weights:
            target = weight
            if weight.device.type != "cpu":
                target = torch.empty(weight.numel(), dtype=weight.dtype, pin_memory=True)
                rounded.append((weight, target))
            targets.append((first, target))
        return _Begun(used, self._adam.start(used.views, gradient, targets, scalars), gradient, rounded)

    def _finish(self, entry: _Begun) -> None:
        if not entry.job.wait(JOB_TIMEOUT_S):
            raise TenCacheError(
                f"the update of chunk {entry.used.chunk.sub_group}.{entry.used.chunk.index} was not done after "
                f"{JOB_TIMEOUT_S:.0f} s: the threads of the optimizer get no time on any core"
            )
        for weight, value in entry.rounded:
            weight.copy_(value, non_blocking=True)  # from memory of torch's, which is not lent again before
        self._writer.close(entry.used.chunk)
        self._tier.put(entry.used)

    def _abandon(self, begun: deque[_Begun]) -> None:
        """After an error: nobody may have the memory back while the team still writes to it."""
        for entry in begun:
            entry.job.wait(JOB_TIMEOUT_S)
            with contextlib.suppress(StorageError):
                self._tier.put(entry.used)
