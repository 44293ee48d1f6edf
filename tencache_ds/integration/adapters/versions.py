# SPDX-License-Identifier: Apache-2.0
"""The versions of DeepSpeed that TenCache is tested with. Imports nothing of DeepSpeed."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

OLDEST = "0.16.4"
SUPPORTED = f">={OLDEST},<0.20"
"""The range that the package declares; a test compares the two."""

TESTED = ("0.16.4", "0.16.9", "0.17.6", "0.18.9", "0.19.0", "0.19.6", "0.19.8")
"""In ascending order: those of which the exactness core has passed."""


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
