# SPDX-License-Identifier: Apache-2.0
"""The weights of a model without optimizer that live in GPU memory.

Each weight is used once per forward pass, so per byte all of those in one place save the same: the time of their
transfer. What is on NVMe goes first, because its link is the slowest. Within a place the weights are spread evenly over
the pass: between two that have to be fetched, the link has the arithmetic of those that are there to hide behind.
"""

from __future__ import annotations

from collections.abc import Sequence


def spread_order(n: int) -> list[int]:
    """The numbers below ``n`` such that those of any prefix lie nearly evenly apart.

    Source: the van der Corput sequence: numbers in the order of their reversed binary digits.
    """
    bits = max(n - 1, 0).bit_length()
    reversed_digits = (int(format(i, f"0{bits}b")[::-1], 2) if bits else 0 for i in range(1 << bits))
    return [number for number in reversed_digits if number < n]


def choose_weights(nbytes: Sequence[int], stored: Sequence[bool], budget_nbytes: int) -> list[int]:
    """The weights to move to GPU memory.

    Args:
        nbytes: of each, in the order of their use.
        stored: whether each is on NVMe; otherwise it is in host memory.
        budget_nbytes: GPU memory that they may take.

    Returns:
        Their indices, in the order of worth: what has to leave later leaves from the end.
    """
    chosen, left = [], budget_nbytes
    for wanted in (True, False):
        indices = [index for index, each in enumerate(stored) if each is wanted]
        for position in spread_order(len(indices)):
            index = indices[position]
            if nbytes[index] <= left:
                chosen.append(index)
                left -= nbytes[index]
    return chosen
