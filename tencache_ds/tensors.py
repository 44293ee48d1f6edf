# SPDX-License-Identifier: Apache-2.0
"""Creates tensors on the device and of the dtype that the caller names, whatever goes on in the process.

[Note: torch's constructors] ``deepspeed.zero.Init`` replaces ``torch.empty`` and its like in the whole process while a
model is being built: without a device they create tensors on the GPU, and those of floating point get the model's dtype
even where another one was asked for. An optimizer step that continues in the background would get buffers in GPU memory
for native code on the CPU, which is a segmentation fault. A default device or dtype that a script sets applies to them
too. Methods of a tensor are not replaced, so one's are used here, and ruff refuses the constructors in this package
(``banned-api`` in ``pyproject.toml``).
"""

from __future__ import annotations

import torch

_SOURCE = torch.empty(0, dtype=torch.uint8, device="cpu")  # noqa: TID251  so called, all of them create this


def empty(numel: int, dtype: torch.dtype, device: torch.device | str = "cpu", *, pinned: bool = False) -> torch.Tensor:
    """A 1-D tensor; its contents are undefined.

    Args:
        numel: number of elements.
        dtype: of each.
        device: where it lies.
        pinned: in page-locked host memory of torch's cache.
    """
    return _SOURCE.new_empty(numel, dtype=dtype, device=device, pin_memory=pinned)


def zeros(numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A 1-D tensor of ``numel`` zeros."""
    return _SOURCE.new_zeros(numel, dtype=dtype, device=device)


def filled(numel: int, value: float, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A 1-D tensor with the same ``value`` in all elements."""
    return _SOURCE.new_full((numel,), value, dtype=dtype, device=device)


class Scratch:
    """Ordinary host memory for one tensor at a time: new memory takes longer to touch than to write to again."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor, valid until the next call; its contents are undefined."""
        if self._memory is None or self._memory.numel() < numel or self._memory.dtype != dtype:
            self._memory = empty(numel, dtype)
        return self._memory[:numel]
