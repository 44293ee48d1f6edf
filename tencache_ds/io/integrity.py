# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of written data, and what happens to a read that differs from the last write.

Storage stacks lose writes without an error (DeepSpeed's aio op ignores ``io_event.res``, and so does a cut power line).
One 8-byte word of every 4 KiB page, at a position that moves with every write, costs well under a millisecond for 32
MiB and detects every page that was not written: an old page passes only if the sampled word happens to be the same in
both versions. It misses a change within a page, such as a flipped bit, in all but one of 512 cases. Hashing every byte
detects that too, and costs a pass over memory at each write and each read.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable

import numpy as np
import torch
import xxhash

from tencache_ds.errors import CorruptionError
from tencache_ds.io.backends.posix import PosixFiles
from tencache_ds.io.backends.protocol import Operation
from tencache_ds.io.extents import Extent
from tencache_ds.layout import PAGE_NBYTES
from tencache_ds.memory.arena import wait_for_device

_WORDS_PER_PAGE = PAGE_NBYTES // 8
_STEP = 197
"""Odd, hence coprime to the 512 words of a page: 512 writes in a row sample 512 different positions."""


Fingerprint = Callable[[torch.Tensor, int], int]
"""``fingerprint(buffer, generation)``: see the two below."""


def whole_fingerprint(buffer: torch.Tensor, generation: int) -> int:
    """64-bit XXH3 of every byte; arguments as for :func:`sampled_fingerprint`, but host memory only."""
    return _salted_hash(buffer.numpy(), generation)


def sampled_fingerprint(buffer: torch.Tensor, generation: int) -> int:
    """64-bit hash of one word per page.

    Args:
        buffer: 1-D contiguous uint8 tensor, its length a multiple of 4096, in host memory or on a GPU, with the same
            result; its bytes are visible to every stream. Any thread; the GIL is released for most of the time.
        generation: number of the write; chooses the word in the page and salts the hash.
    """
    position = generation * _STEP % _WORDS_PER_PAGE
    if buffer.device.type == "cpu":
        words = buffer.numpy().view(np.uint64).reshape(-1, _WORDS_PER_PAGE)[:, position]
    else:
        words = gathered_words(buffer, position)
    return _salted_hash(np.ascontiguousarray(words), generation)


def _salted_hash(array: np.ndarray, generation: int) -> int:
    """64-bit XXH3 of a contiguous array's bytes, salted with the number of a write."""
    return int(xxhash.xxh3_64_intdigest(array.data, seed=generation % 2**64))


def gathered_words(buffer: torch.Tensor, position: int) -> np.ndarray:
    """Word ``position`` of every page, gathered where the buffer is: only these words leave a GPU, on the current
    stream, which this waits for."""
    words: np.ndarray = buffer.view(torch.int64).view(-1, _WORDS_PER_PAGE)[:, position].contiguous().cpu().numpy()
    return words.view(np.uint64)


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


_logger = logging.getLogger("DeepSpeed.tencache.io")


def verify_read(witness: Witness, extent: Extent, fd: int, buffer: torch.Tensor) -> bool:
    """Compares a buffer that was read with the last write of its extent; reads it once more, from the file of ``fd``,
    if they differ. Any thread.

    Returns:
        False when the bytes differed and are right now: in ``buffer`` too, but the device is one to watch.

    Raises:
        CorruptionError: they still differ.
        StorageError: reading again failed.
    """
    if not witness.differs(buffer):
        return True
    # The aio op cannot say what went wrong. Plain descriptors can: this raises the device's errno, if it has one.
    files = PosixFiles()
    files.add(extent.file, fd)
    again = buffer
    if buffer.device.type != "cpu":
        again = torch.frombuffer(mmap.mmap(-1, buffer.numel()), dtype=torch.uint8)  # page aligned, for O_DIRECT
    try:
        files.transfer(Operation.READ, extent.file, extent.offset, again, extent.tag)
    finally:
        files.close()
    if not witness.differs(again):
        if again is not buffer:
            buffer.copy_(again)
            wait_for_device(buffer)
        _logger.warning(
            "%s at offset %d of %s was read with wrong bytes, and correctly when read again; watch this device",
            extent.tag,
            extent.offset,
            extent.file,
        )
        return False
    raise CorruptionError(
        "read",
        extent.file,
        extent.offset,
        buffer.nbytes,
        f"the bytes are not those of write {witness.generation + 1}: it was lost or torn, or something else "
        "has changed the file since; check the device (smartctl, dmesg) and that no other job uses this folder",
        tag=extent.tag,
    )
