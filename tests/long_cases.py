# SPDX-License-Identifier: Apache-2.0
"""Tests marked ``long``: more cases of what a shorter one compares as well, for the time before a release.

Where a fixture trains all cases of a module in one process, it asks ``wanted`` which ones, and the tests that look at
them are parametrized with ``marked``: what is deselected is not trained either.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

import pytest

ASKED_FOR = re.compile(r"(?<!not )\blong\b")


def are_asked_for(config: pytest.Config) -> bool:
    """Whether ``-m`` names the marker, as in ``-m "long or not long"``."""
    return ASKED_FOR.search(config.getoption("markexpr", "") or "") is not None


def marked(names: Iterable[str], long: Collection[str]) -> list[Any]:
    """The parameters of a test, those in ``long`` with the marker."""
    return [pytest.param(name, marks=pytest.mark.long) if name in long else name for name in names]


def wanted(config: pytest.Config, names: Iterable[str], long: Collection[str]) -> list[str]:
    """Names of the cases that are to be trained."""
    return [name for name in names if name not in long or are_asked_for(config)]
