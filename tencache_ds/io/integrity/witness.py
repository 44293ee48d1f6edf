# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of written data."""

from __future__ import annotations

import torch

from tencache_ds.io.integrity.fingerprint import Fingerprint


class Witness:
    """The record of one write in RAM: its number among the writes of its extent, and the fingerprint of its buffer.

    Attributes:
        generation: the number, from 0.
        fingerprint: None until the write has ended.
    """

    __slots__ = ("fingerprint", "generation")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.fingerprint: int | None = None


class Witnesses:
    """Takes and compares fingerprints in the caller's thread. Any thread.

    Args:
        fingerprint: hash of a buffer and of the number of its write; None takes and compares nothing.
    """

    def __init__(self, fingerprint: Fingerprint | None) -> None:
        self._fingerprint = fingerprint

    @property
    def active(self) -> bool:
        """Whether anything is compared."""
        return self._fingerprint is not None

    def take(self, witness: Witness, buffer: torch.Tensor) -> None:
        """Records the fingerprint of a write; the buffer still has the written bytes."""
        if self._fingerprint is not None:
            witness.fingerprint = self._fingerprint(buffer, witness.generation)

    def differ(self, witness: Witness, buffer: torch.Tensor) -> bool:
        """Whether the buffer differs from the written data."""
        return self._fingerprint is not None and self._fingerprint(buffer, witness.generation) != witness.fingerprint
