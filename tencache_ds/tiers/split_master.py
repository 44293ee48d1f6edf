# SPDX-License-Identifier: Apache-2.0
"""Master weights on NVMe as the difference to the bfloat16 weights, which are in host memory anyway: 10 bytes of Adam's
state for each parameter instead of 12, without loss.

[Note: whose bits a master weight shares]
A split chunk is worth nothing without the very weights that it was split over. So a hash of these is kept with it, and
compared whenever master weights are rebuilt, by an update as well: a weight that something has changed meanwhile is an
error, and never another master weight. Before weights change, or leave host memory, the caller has the chunks concerned
rewritten whole first (:meth:`OptimizerStateTier.join`). The next update splits them again.

A chunk is split when it is written, if its weights are in host memory and are exactly its rounded master weights, and
every bit can be rebuilt; otherwise it is written whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.planning.chunks import Chunk, pieces_of
from tencache_ds.tensors import empty
from tencache_ds.tiers.kinds import ADAM_IN_FP32, EXP_AVG, EXP_AVG_SQ, MASTER, REMAINDER, REMAINDER_DTYPE, views_of

_NAN_WEIGHT = 0xFFFF
"""Bits of a weight whose remainder holds the bits of a NaN."""

SPLIT_TIMEOUT_S = 600.0
"""A chunk takes milliseconds; where it takes this long, nothing else gets on either."""

Pieces = Sequence[tuple[int, torch.Tensor]]


class RoundedWeights(Protocol):
    """The model's weights, as far as they are in host memory."""

    def rounded(self, chunk: Chunk) -> Pieces | None:
        """``(first element in the chunk, 1-D bfloat16 tensor in host memory)`` of the weights that a chunk has elements
        of, all of them, ascending; None where one of them is elsewhere or has another dtype."""

    def being_changed(self, chunk: Chunk) -> bool:
        """Whether these are former values, kept while the weights may be changing."""


class SplitJob(Protocol):
    """Splitting or joining, under way."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within this number of seconds."""


class SplitArithmetic(Protocol):
    """Integer arithmetic on the bits of master weights (:class:`~tencache_ds.tiers.fused_adam.FusedAdam`).

    All tensors are 1-D, contiguous, in host memory and of one length: fp32 master weights, int16 remainders, fp32
    exp_avg_sq; the weights are those of :meth:`RoundedWeights.rounded`.
    """

    def splits_exactly(
        self, master: torch.Tensor, remainder: torch.Tensor, exp_avg_sq: torch.Tensor, weights: Pieces
    ) -> bool:
        """Whether the master weights can be rebuilt; changes nothing."""

    def split(
        self, master: torch.Tensor, remainder: torch.Tensor, exp_avg_sq: torch.Tensor, weights: Pieces
    ) -> SplitJob:
        """Begins to fill ``remainder``, and to mark elements in the sign of ``exp_avg_sq``."""

    def join(
        self, master: torch.Tensor, remainder: torch.Tensor, exp_avg_sq: torch.Tensor, weights: Pieces
    ) -> SplitJob:
        """Begins to fill ``master``, and to take the marks away."""

    def digest(self, weights: Pieces) -> bytes:
        """A hash of the weights' bits, in parts; waits for it."""


@lru_cache(maxsize=1 << 16)
def split_layout(chunk: Chunk) -> Chunk:
    """The same chunk as its extent holds it while its master weights are split."""
    kinds = (
        (REMAINDER, REMAINDER_DTYPE.itemsize) if piece.kind == MASTER else (piece.kind, piece.nbytes // chunk.numel)
        for piece in chunk.pieces
    )
    pieces, nbytes = pieces_of(chunk.numel, tuple(kinds))
    return replace(chunk, pieces=pieces, nbytes=nbytes)


class SplitMasters:
    """Splits and joins chunks in staging buffers. Used by the thread of the optimizer's state.

    Args:
        arithmetic: on bits.
        weights: that chunks are split over.
    """

    def __init__(self, arithmetic: SplitArithmetic, weights: RoundedWeights) -> None:
        self._arithmetic = arithmetic
        self._weights = weights

    def weights_of(self, chunk: Chunk, kinds: Mapping[str, torch.dtype]) -> Pieces | None:
        """What a chunk with this state can be split over now; None where it cannot be."""
        if dict(kinds) != ADAM_IN_FP32:
            return None
        return self._weights.rounded(chunk)

    def remainders_are_zero(self, weights: Pieces) -> bool:
        """Whether master weights that equal the weights have remainders of zero: all do but one NaN."""
        return all(int(_bits(weight).max()) != _NAN_WEIGHT for _, weight in weights)

    def in_place(self, chunk: Chunk) -> bool:
        """Whether the weights that an update writes to are those that the chunk is split over, as far as is known: it
        compares their bits."""
        return not self._weights.being_changed(chunk) and self._weights.rounded(chunk) is not None

    def digest(self, weights: Pieces) -> bytes:
        """Hash of the weights' bits."""
        return self._arithmetic.digest(weights)

    def check(self, chunk: Chunk, expected: bytes) -> Pieces:
        """The weights that a chunk was split over.

        Raises:
            TenCacheError: they are not the same any more.
        """
        weights = self._weights.rounded(chunk)
        if weights is None or self.digest(weights) != expected:
            raise changed_unnoticed(chunk)
        return weights

    def join(self, chunk: Chunk, buffer: torch.Tensor, weights: Pieces) -> None:
        """Turns a split chunk in a buffer (uint8, of the whole chunk's bytes) into a whole one."""
        split, whole = (views_of(layout, buffer, ADAM_IN_FP32) for layout in (split_layout(chunk), chunk))
        parts = {kind: view.clone() for kind, view in split.items()}  # both layouts are in the same memory
        for kind in (EXP_AVG, EXP_AVG_SQ):
            whole[kind].copy_(parts[kind])
        job = self._arithmetic.join(whole[MASTER], parts[REMAINDER], whole[EXP_AVG_SQ], weights)
        _wait(job, chunk)

    def split(self, chunk: Chunk, buffer: torch.Tensor, weights: Pieces) -> bool:
        """Turns a whole chunk in a buffer into a split one; False, and unchanged, where that would lose a bit."""
        split, whole = (views_of(layout, buffer, ADAM_IN_FP32) for layout in (split_layout(chunk), chunk))
        remainder = empty(chunk.numel, REMAINDER_DTYPE)
        if not self._arithmetic.splits_exactly(whole[MASTER], remainder, whole[EXP_AVG_SQ], weights):
            return False
        _wait(self._arithmetic.split(whole[MASTER], remainder, whole[EXP_AVG_SQ], weights), chunk)
        parts = {EXP_AVG: whole[EXP_AVG].clone(), EXP_AVG_SQ: whole[EXP_AVG_SQ].clone(), REMAINDER: remainder}
        for kind, view in split.items():
            view.copy_(parts[kind])
        return True


def changed_unnoticed(chunk: Chunk) -> TenCacheError:
    """Weights that a chunk's master weights are split over are not the same any more."""
    return TenCacheError(
        f"weights of sub-group {chunk.sub_group} (elements from {chunk.start}) were changed without the optimizer, "
        "whose master weights are stored as the difference to them: change weights inside "
        'deepspeed.zero.GatheredParameters(..., modifier_rank=...) only, or set "tencache.split_master" to false. '
        "This state is lost; load a checkpoint."
    )


def _bits(weight: torch.Tensor) -> np.ndarray:
    bits: np.ndarray = weight.view(torch.int16).numpy().view(np.uint16)
    return bits


def _wait(job: SplitJob, chunk: Chunk) -> None:
    if not job.wait(SPLIT_TIMEOUT_S):
        raise TenCacheError(
            f"master weights of chunk {chunk.sub_group}.{chunk.index} were not ready after {SPLIT_TIMEOUT_S:.0f} s: "
            "the optimizer threads get no CPU time"
        )
