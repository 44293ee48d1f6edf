# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of written data."""

from __future__ import annotations

import numpy as np
import torch

from tencache_ds.io.integrity.fingerprint import Fingerprint, salted_hash


class Witness:
    """The record of one write in RAM: its number among the writes of its extent, and the fingerprint of its buffer.

    Args:
        generation: the number, from 0.
        fingerprint: hash of a buffer and of the number of its write.
    """

    __slots__ = ("_fingerprint", "_taken", "generation")

    def __init__(self, generation: int, fingerprint: Fingerprint) -> None:
        self.generation = generation
        self._fingerprint = fingerprint
        self._taken: int | None = None

    def take(self, buffer: torch.Tensor) -> None:
        """Records the fingerprint; the buffer has the written bytes. Computed in the caller's thread."""
        self._taken = self._fingerprint(buffer, self.generation)

    def differs(self, buffer: torch.Tensor) -> bool:
        """Whether the buffer differs from the written data, or nothing is known of these. Computed in the caller's
        thread."""
        return self._fingerprint(buffer, self.generation) != self._taken

    # Of a sampled fingerprint, by the words that it samples

    def take_words(self, words: np.ndarray) -> None:
        """:meth:`take`, of a buffer with these words."""
        self._taken = salted_hash(words, self.generation)

    def differs_in(self, words: np.ndarray) -> bool:
        """:meth:`differs`, of a buffer with these words."""
        return salted_hash(words, self.generation) != self._taken
