# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, for comparisons."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch


def hashes(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """A hash of each tensor's dtype, shape and bytes."""
    return {
        name: f"{value.dtype}{list(value.shape)}"
        + hashlib.sha256(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in tensors.items()
    }


def flat(value: Any, name: str) -> dict[str, torch.Tensor]:
    """Every tensor of a nested state by its place."""
    if torch.is_tensor(value):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    tensors: dict[str, torch.Tensor] = {}
    for key, inner in items:
        tensors |= flat(inner, f"{name}.{key}")
    return tensors


def contents_of(folder: Path) -> dict[str, str]:
    """Hashes of all tensors of a checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.pt")):
        tensors |= flat(torch.load(path, weights_only=False), path.name)
    return hashes(tensors)
