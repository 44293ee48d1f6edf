# SPDX-License-Identifier: Apache-2.0
"""How bytes are laid out in host memory and in files, and how messages count them. Imports nothing."""

from __future__ import annotations

PAGE_NBYTES = 4096
"""Buffer addresses, lengths and file offsets are multiples of it: what O_DIRECT needs on every common device."""

BOUNCE_NBYTES = 32 * 2**20
"""One of the pinned buffers through which pageable host memory is copied to and from a GPU."""

N_BOUNCES = 3
"""Two for the copies, one to measure their rate."""

N_LANES = 3
"""Chunks of state in GPU memory that are updated side by side without their weights: the gradient of one is copied, one
is updated, and the weights of one are copied back."""


def round_up(nbytes: int, multiple: int = PAGE_NBYTES) -> int:
    """The smallest multiple that is not below ``nbytes``; by default whole pages."""
    return -(-nbytes // multiple) * multiple


def gib(nbytes: int) -> str:
    """Bytes, formatted in GiB; in MiB or KiB where two decimals would leave one digit or none."""
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if not nbytes or abs(nbytes) >= 2**shift / 10:
            return f"{nbytes / 2**shift:.2f} {unit}"
    return f"{nbytes / 2**10:.2f} KiB"
