# SPDX-License-Identifier: Apache-2.0
"""Master weights as the difference to the bfloat16 weights, which are in host memory anyway: 10 bytes of Adam's state
for each parameter instead of 12, or 4.2 instead of 6 with 8-bit moments, without loss.

[Note: whose bits a master weight shares]
A split chunk is worth nothing without the very weights that it was split over. So a hash of these is kept with it, and
compared whenever master weights are rebuilt, by an update as well: a weight that something has changed meanwhile is an
error, and never another master weight. Before weights change, or leave host memory, the caller has the chunks concerned
rewritten whole first (:meth:`OptimizerStateTier.join`). The next update splits them again.

A chunk is split when it is written to NVMe, or changed in host memory, if its weights are in host memory and are
exactly its rounded master weights, and every bit can be rebuilt; otherwise it is whole.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.planning.chunks import SCALE_NUMEL, Chunk, pieces_of
from tencache_ds.tensors import empty
from tencache_ds.tiers.fused_adam import CHUNK_TIMEOUT_S, FusedAdam, Job
from tencache_ds.tiers.sub_group import (
    MARKS,
    MASTER,
    REMAINDER,
    SCALES_OF_8_BITS,
    SPLIT_DTYPES,
    Kinds,
    Pieces,
    views_of,
)

_NAN_WEIGHT = 0xFFFF
"""Bits of a weight whose remainder holds the bits of a NaN."""


class RoundedWeights(Protocol):
    """The model's weights, as far as they are in host memory."""

    def rounded(self, chunk: Chunk) -> Pieces | None:
        """``(first element in the chunk, 1-D bfloat16 tensor in host memory)`` of the weights that a chunk has elements
        of, all of them, ascending; None where one of them is elsewhere or has another dtype."""

    def being_changed(self, chunk: Chunk) -> bool:
        """Whether these are former values, kept while the weights may be changing."""


@lru_cache(maxsize=1 << 16)
def split_layout(chunk: Chunk) -> Chunk:
    """The same chunk as its extent holds it while its master weights are split."""
    kinds, scales = [(REMAINDER, SPLIT_DTYPES[REMAINDER].itemsize)], []
    for piece in chunk.pieces:
        if piece.kind in SCALES_OF_8_BITS:
            scales.append((piece.kind, SCALES_OF_8_BITS[piece.kind].itemsize))
        elif piece.kind != MASTER:
            kinds.append((piece.kind, piece.nbytes // chunk.numel))
    if scales:  # moments without a sign to spare
        scales.append((MARKS, SCALE_NUMEL // 8))
    pieces, nbytes = pieces_of(chunk.numel, tuple(kinds), tuple(scales))
    return replace(chunk, pieces=pieces, nbytes=nbytes)


class SplitMasters:
    """Splits and joins chunks in staging buffers. Used by the thread of the optimizer's state.

    Args:
        arithmetic: on bits.
        weights: that chunks are split over.
        in_memory: see below.

    Attributes:
        in_memory: whether chunks in host memory are split as well as those on NVMe.
    """

    def __init__(self, arithmetic: FusedAdam, weights: RoundedWeights, *, in_memory: bool = False) -> None:
        self.in_memory = in_memory
        self._arithmetic = arithmetic
        self._weights = weights

    def _weights_of(self, chunk: Chunk, states: Kinds) -> Pieces | None:
        """What a chunk with this state can be split over now; None where it cannot be."""
        if dict(states) != self._arithmetic.state_dtypes or split_layout(chunk).nbytes > chunk.nbytes:
            return None  # of few elements, one more kind takes more than is saved
        return self._weights.rounded(chunk)

    def nbytes_of(self, chunk: Chunk, states: Kinds) -> int:
        """Bytes of a chunk with this state that is split if it can be."""
        return chunk.nbytes if self._weights_of(chunk, states) is None else split_layout(chunk).nbytes

    def start(self, chunk: Chunk, states: Kinds) -> bytes:
        """Digest of the weights that a chunk of zeros is split over: master weights that equal them. Nothing, where
        they cannot be split or zeros would not say so."""
        weights = self._weights_of(chunk, states)
        return b"" if weights is None or not self.remainders_are_zero(weights) else self._arithmetic.digest(weights)

    def remainders_are_zero(self, weights: Pieces) -> bool:
        """Whether master weights that equal the weights have remainders of zero: all do but one NaN."""
        return all(int(_bits(weight).max()) != _NAN_WEIGHT for _, weight in weights)

    def in_place(self, chunk: Chunk) -> bool:
        """Whether the weights that an update writes to are those that the chunk is split over, as far as is known: it
        compares their bits."""
        return not self._weights.being_changed(chunk) and self._weights.rounded(chunk) is not None

    def check(self, chunk: Chunk, expected: bytes) -> Pieces:
        """The weights that a chunk was split over.

        Raises:
            TenCacheError: they are not the same any more.
        """
        weights = self._weights.rounded(chunk)
        if weights is None or self._arithmetic.digest(weights) != expected:
            raise changed_unnoticed(chunk)
        return weights

    def join(self, chunk: Chunk, buffer: torch.Tensor, weights: Pieces) -> None:
        """Turns a split chunk in a buffer (uint8, of the whole chunk's bytes) into a whole one."""
        split, whole = self._views(chunk, buffer)
        parts = {kind: view.clone() for kind, view in split.items()}  # both layouts are in the same memory
        for kind in whole.keys() & parts.keys():
            whole[kind].copy_(parts[kind])
        weight = _in_one(weights)
        _wait(self._arithmetic.join(whole, parts, weight), chunk)

    def split(self, chunk: Chunk, buffer: torch.Tensor, states: Kinds) -> bytes:
        """Turns a whole chunk in a buffer into a split one, if it can; returns the digest of the weights. Nothing, and
        the buffer is unchanged, where they are elsewhere or a bit would be lost."""
        weights = self._weights_of(chunk, states)
        if weights is None:
            return b""
        split, whole = self._views(chunk, buffer)
        parts = {kind: empty(view.numel(), view.dtype) for kind, view in split.items()}
        weight = _in_one(weights)
        if not self._arithmetic.splits_exactly(whole, parts, weight):
            return b""
        for kind in whole.keys() & parts.keys():
            parts[kind].copy_(whole[kind])
        _wait(self._arithmetic.split(whole, parts, weight), chunk)
        for kind, view in split.items():
            view.copy_(parts[kind])
        return self._arithmetic.digest(weights)

    def _views(self, chunk: Chunk, buffer: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Of a buffer, as a split and as a whole chunk."""
        dtypes = self._arithmetic.state_dtypes
        return views_of(split_layout(chunk), buffer, dtypes), views_of(chunk, buffer, dtypes)


def changed_unnoticed(chunk: Chunk) -> TenCacheError:
    """Weights that a chunk's master weights are split over are not the same any more."""
    return TenCacheError(
        f"weights of sub-group {chunk.sub_group} (elements from {chunk.start}) were changed without the optimizer, "
        "whose master weights are stored as the difference to them: change weights inside "
        'deepspeed.zero.GatheredParameters(..., modifier_rank=...) only, or set "tencache.split_master" to false. '
        "This state is lost; load a checkpoint."
    )


def _in_one(weights: Pieces) -> torch.Tensor:
    """All weights in one tensor; a copy of several."""
    return weights[0][1] if len(weights) == 1 else torch.cat([weight for _, weight in weights])


def _bits(weight: torch.Tensor) -> np.ndarray:
    bits: np.ndarray = weight.view(torch.int16).numpy().view(np.uint16)
    return bits


def _wait(job: Job, chunk: Chunk) -> None:
    if not job.wait(CHUNK_TIMEOUT_S):
        raise TenCacheError(
            f"master weights of chunk {chunk.sub_group}.{chunk.index} were not ready after {CHUNK_TIMEOUT_S:.0f} s: "
            "the optimizer threads get no CPU time"
        )
