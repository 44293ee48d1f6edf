# SPDX-License-Identifier: Apache-2.0
"""The kinds of optimizer state that TenCache itself updates, and where a chunk has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tencache_ds.planning.chunks import Chunk

MASTER, EXP_AVG, EXP_AVG_SQ = "master", "exp_avg", "exp_avg_sq"

MOMENTUM = "momentum_buffer"
"""Muon's state, which is kept apart from master weights."""

ADAM_IN_FP32 = dict.fromkeys((MASTER, EXP_AVG, EXP_AVG_SQ), torch.float32)
"""Dtypes of the state that can be split, and updated in files."""

MASTERS_ALONE = {MASTER: torch.float32}
"""Those of Muon's chunks."""

FIRST, FIRST_SCALE, SECOND, SECOND_SCALE = "state1", "absmax1", "state2", "absmax2"
"""The 8-bit moments of bitsandbytes' Adam, and the largest magnitude in each of their blocks."""

ADAM_IN_8_BITS = {MASTER: torch.float32, FIRST: torch.uint8, SECOND: torch.uint8}
SCALES_OF_8_BITS = {FIRST_SCALE: torch.float32, SECOND_SCALE: torch.float32}

REMAINDER = "remainder"
"""What a split master weight is beside its 16-bit weight: the lower half of their difference."""

MARKS = "marks"
"""A bit for each split master weight, the lowest of a byte first, where the moments have no sign to spare."""

SPLIT_DTYPES = {REMAINDER: torch.int16, MARKS: torch.uint8}


Pieces = Sequence[tuple[int, torch.Tensor]]
"""Weights that a chunk has elements of, ascending: ``(first element in the chunk, 1-D tensor)``."""


def views_of(chunk: Chunk, buffer: torch.Tensor, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """A 1-D tensor per kind in a buffer that holds a chunk.

    Args:
        chunk: whose pieces say where each kind is.
        buffer: 1-D uint8, at least up to the end of the last piece.
        dtypes: of all kinds but those of split master weights.

    Raises:
        KeyError: a kind has no dtype.
    """
    return {
        piece.kind: buffer[piece.offset : piece.offset + piece.nbytes].view(
            SPLIT_DTYPES.get(piece.kind) or dtypes[piece.kind]
        )
        for piece in chunk.pieces
    }
