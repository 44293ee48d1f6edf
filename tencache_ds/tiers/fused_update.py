# SPDX-License-Identifier: Apache-2.0
"""Adam in one pass over a chunk, on the team's threads: an :class:`~tencache_ds.tiers.update.UpdateKernel`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tencache_ds.errors import StorageError
from tencache_ds.io import ExtentEdit
from tencache_ds.tensors import empty
from tencache_ds.tiers.fused_adam import FusedAdam, Job
from tencache_ds.tiers.sub_group import ChunkEdit
from tencache_ds.tiers.update import Pieces, SubGroupStep


@dataclass(frozen=True, slots=True)
class _FusedJob:
    """A chunk whose update is queued or under way.

    Attributes:
        job: its update.
        gradient: kept, because the job has only its address.
        rounded: ``(weight, its new value)`` of the weights in device memory; the value is in host memory.
        extent: of a chunk in a file.
    """

    job: Job
    gradient: torch.Tensor
    rounded: list[tuple[torch.Tensor, torch.Tensor]]
    extent: ExtentEdit | None = None

    @property
    def end_ns(self) -> int:
        """See :attr:`UpdateJob.end_ns`."""
        return self.job.end_ns

    @property
    def error(self) -> StorageError | None:
        """See :attr:`UpdateJob.error`."""
        if self.extent is None or not self.job.error:
            return None
        return self.extent.failed(self.job.error)

    @property
    def transfer_ns(self) -> int:
        """See :attr:`UpdateJob.transfer_ns`."""
        return self.job.transfer_ns

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
        for weight, value in self.rounded:
            weight.copy_(value, non_blocking=True)  # from memory of torch's, which is not lent again before


class FusedUpdate:
    """Takes state in single precision with weights of one dtype.

    Args:
        adam: the arithmetic and its team.
    """

    asynchronous = True

    def __init__(self, adam: FusedAdam) -> None:
        self._adam = adam

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
        targets, rounded = _in_host_memory(weights)
        return _FusedJob(self._adam.start(state, gradient, targets, step.scalars, digest), gradient, rounded)

    @property
    def n_threads(self) -> int:
        """See :attr:`FileKernel.n_threads`."""
        return self._adam.n_threads

    def start_in_file(
        self, edit: ChunkEdit, gradient: torch.Tensor, weights: Pieces, step: SubGroupStep, digest: bytes
    ) -> _FusedJob:
        """See :meth:`FileKernel.start_in_file`."""
        targets, rounded = _in_host_memory(weights)
        job = self._adam.start_in_file(edit, gradient, targets, step.scalars, digest)
        return _FusedJob(job, gradient, rounded, edit.extent)


def _in_host_memory(weights: Pieces) -> tuple[list[tuple[int, torch.Tensor]], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Where the new values of weights go, and ``(weight, its new value)`` of those in device memory."""
    targets, rounded = [], []
    for first, weight in weights:
        target = weight
        if weight.device.type != "cpu":
            target = empty(weight.numel(), weight.dtype, pinned=True)
            rounded.append((weight, target))
        targets.append((first, target))
    return targets, rounded
