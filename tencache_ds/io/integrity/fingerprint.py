# SPDX-License-Identifier: Apache-2.0
"""Fingerprints that detect reads which differ from the last write.

Storage stacks lose writes without an error (DeepSpeed's aio op ignores ``io_event.res``, and so does a cut power line).
One 8-byte word of every 4 KiB page, at a position that moves with every write, costs well under a millisecond for 32
MiB and detects every page that was not written: an old page passes only if the sampled word happens to be the same in
both versions. It misses a change within a page, such as a flipped bit, in all but one of 512 cases. Hashing every byte
detects that too, and costs a pass over memory at each write and each read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import xxhash

from tencache_ds.layout import PAGE_NBYTES

_WORDS_PER_PAGE = PAGE_NBYTES // 8
_STEP = 197
"""Odd, hence coprime to the 512 words of a page: 512 writes in a row sample 512 different positions."""


Fingerprint = Callable[[torch.Tensor, int], int]
"""``fingerprint(buffer, generation)``: see the two below."""


def whole_fingerprint(buffer: torch.Tensor, generation: int) -> int:
    """64-bit XXH3 of every byte; arguments as for :func:`sampled_fingerprint`, but host memory only."""
    return salted_hash(buffer.numpy(), generation)


def sampled_fingerprint(buffer: torch.Tensor, generation: int) -> int:
    """64-bit hash of one word per page.

    Args:
        buffer: 1-D contiguous uint8 tensor, its length a multiple of 4096, in host memory or on a GPU, with the same
            result; its bytes are visible to every stream. Any thread; the GIL is released for most of the time.
        generation: number of the write; chooses the word in the page and salts the hash.
    """
    position = sampled_position(generation)
    if buffer.device.type == "cpu":
        words = buffer.numpy().view(np.uint64).reshape(-1, _WORDS_PER_PAGE)[:, position]
    else:
        words = gathered_words(buffer, position)
    return salted_hash(np.ascontiguousarray(words), generation)


def sampled_position(generation: int) -> int:
    """Which word of every page :func:`sampled_fingerprint` takes."""
    return generation * _STEP % _WORDS_PER_PAGE


def salted_hash(array: np.ndarray, generation: int) -> int:
    """64-bit XXH3 of a contiguous array's bytes, salted with the number of a write. Of one uint64 word of every page it
    is :func:`sampled_fingerprint`."""
    return int(xxhash.xxh3_64_intdigest(array.data, seed=generation % 2**64))


def gathered_words(buffer: torch.Tensor, position: int) -> np.ndarray:
    """Word ``position`` of every page, gathered where the buffer is: only these words leave a GPU, on the current
    stream, which this waits for."""
    words: np.ndarray = buffer.view(torch.int64).view(-1, _WORDS_PER_PAGE)[:, position].contiguous().cpu().numpy()
    return words.view(np.uint64)
