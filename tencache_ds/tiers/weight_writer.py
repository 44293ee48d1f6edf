# SPDX-License-Identifier: Apache-2.0
"""Writes the weights' new values after an update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tencache_ds.planning.chunks import Chunk


class WeightWriter(Protocol):
    """The model's weights, as an update of optimizer chunks sees them. Used by one thread."""

    def open(self, chunk: Chunk) -> Sequence[tuple[int, torch.Tensor]]:
        """Where the rounded master weights of a chunk go.

        Returns:
            ``(first element in the chunk, tensor)`` of each weight that the chunk has elements of, ascending; the
            tensors are 1-D, in the model's dtype, in host or device memory. :meth:`close` has to follow.
        """

    def close(self, chunk: Chunk) -> None:
        """The values are there, or on their way: in device memory when the current stream comes to this point. Whatever
        gathers them waits for that."""

    def order_gathers(self) -> None:
        """Whatever gathers weights in device memory from now on waits for what the current stream has been given."""

    def addresses(self, sub_group: int) -> tuple[int, ...]:
        """Where each weight of a sub-group lies now; 0 of one without memory of its own."""

    def stored(self, chunk: Chunk) -> bool:
        """Whether a weight that the chunk has elements of is on NVMe."""

    def holds_buffers(self, sub_group: int) -> bool:
        """Whether weights of a sub-group are open in staging buffers, of which there are few."""
