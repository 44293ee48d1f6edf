# SPDX-License-Identifier: Apache-2.0
"""Gradients in ordinary memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tencache_ds.observability.counters import Counters
from tencache_ds.tiers.gradients import GradientSegment, GradientTier


class OrdinaryGradientMemory:
    """Memory of the host; what is given back must not be looked at."""

    def __init__(self) -> None:
        self.nbytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.nbytes += numel * dtype.itemsize
        return torch.zeros(numel, dtype=dtype)

    def give_back(self, tensor: torch.Tensor) -> None:
        self.nbytes -= tensor.nbytes
        tensor.fill_(float("nan"))


def gradient_tier(
    groups: Sequence[Sequence[GradientSegment]], dtype: torch.dtype, counters: Counters | None = None
) -> GradientTier:
    """Gradients of sub-groups."""
    return GradientTier(groups, dtype, OrdinaryGradientMemory(), counters or Counters())
