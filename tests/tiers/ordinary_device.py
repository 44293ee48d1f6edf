# SPDX-License-Identifier: Apache-2.0
"""Ordinary memory in place of a device's: what the stand-ins of several tests have in common."""

from __future__ import annotations

import torch


class OrdinaryDevice:
    """The part of a ``DeviceMemory`` that needs no figures."""

    device = torch.device("cpu")

    def record(self) -> None: ...

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def copy_rate(self) -> float:
        return 1e10

    def synchronize(self) -> None: ...

    def trim(self) -> None: ...
