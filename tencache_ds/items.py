# SPDX-License-Identifier: Apache-2.0
"""What is placed, and where it can be."""

from __future__ import annotations

from enum import IntEnum


class Place(IntEnum):
    """Where something lives between two uses, fastest first."""

    GPU = 0
    HOST = 1
    NVME = 2
