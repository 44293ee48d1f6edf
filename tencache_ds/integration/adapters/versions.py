# SPDX-License-Identifier: Apache-2.0
"""The versions of DeepSpeed that TenCache is tested with, and what DeepSpeed has gained in them. Imports nothing of
DeepSpeed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

OLDEST = "0.16.4"
SUPPORTED = f">={OLDEST},<0.20"
"""The range that the package declares; a test compares the two."""

TESTED = ("0.16.4", "0.16.9", "0.17.6", "0.18.9", "0.19.0", "0.19.6", "0.19.8")
"""In ascending order: those of which the exactness core has passed."""

DeepSpeedClass: Any = object
"""The base of classes that are put over one of DeepSpeed's, which have no types: all that they do not define is its."""

_LINES = ("v0_19", "v0_18", "v0_17", "v0_16")


def parsed(version: str) -> Version | None:
    """A version to compare; None for one that is not by the rules (PEP 440), such as a fork's."""
    try:
        return Version(version)
    except InvalidVersion:
        return None


def is_supported(version: str) -> bool:
    """Whether a version lies in the declared range. Local builds (``0.18.9+a1b2c3d``) and pre-releases do."""
    known = parsed(version)
    return known is not None and SpecifierSet(SUPPORTED).contains(known.public, prereleases=True)


def precedes(version: str, other: str) -> bool:
    """Whether a version is older than another one. One that cannot be compared is taken for the newest."""
    known = parsed(version)
    return known is not None and Version(known.base_version) < Version(other)


def nearest(version: str) -> str:
    """The tested version that is closest to another one: the oldest for an older one, else the newest up to it."""
    return next((each for each in reversed(TESTED) if not precedes(version, each)), TESTED[0])


@dataclass(frozen=True, slots=True)
class Change:
    """A change of DeepSpeed that code for the newest version depends on.

    The classes are put between TenCache's and DeepSpeed's own. Each turns the interface of the version before the
    change into the one after it; those of later changes come first and see what the earlier ones have made of
    DeepSpeed.

    Attributes:
        since: the first version that has it.
        lacks: seams that an older version does without, by name.
        calls: over :class:`~.newest.Calls`, for an older version.
        optimizer: over ``DeepSpeedZeroOptimizer_Stage3``, for an older version.
        coordinator: over ``PartitionedParameterCoordinator``, for an older version.
    """

    since: str
    lacks: frozenset[str] = field(default_factory=frozenset)
    calls: type | None = None
    optimizer: type | None = None
    coordinator: type | None = None


def changes_after(version: str) -> tuple[Change, ...]:
    """The changes that a version of DeepSpeed does not have yet, the latest first."""
    modules = (importlib.import_module(f"{__package__}.{name}") for name in _LINES)
    every: Iterable[Change] = (change for module in modules for change in module.CHANGES)
    return tuple(change for change in every if precedes(version, change.since))
