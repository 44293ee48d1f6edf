# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory that torch keeps for later."""

from __future__ import annotations

import torch


def empty_pinned_cache() -> None:
    """Returns host memory to the system that torch has pinned and nothing uses any more. Any thread.

    Torch keeps such memory for the next tensor of that size, rounded up to a power of two. After shards have moved
    elsewhere their size is not requested again. Builds of torch that cannot return it keep it.
    """
    if not torch.cuda.is_available():
        return
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()
