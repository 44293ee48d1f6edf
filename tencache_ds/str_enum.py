# SPDX-License-Identifier: Apache-2.0
"""``enum.StrEnum``, which Python has from 3.11 on. Needs only the standard library."""

from __future__ import annotations

from enum import Enum


class StrEnum(str, Enum):
    """Members are strings: they compare, print and format as their values."""

    def __str__(self) -> str:  # and format() with it: Enum's own say "Kind.eio", format() from Python 3.11 on
        return str.__str__(self)
