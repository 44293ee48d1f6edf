# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed has gained in the versions that TenCache supports. Imports nothing of DeepSpeed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from tencache_ds.integration.adapters.versions import precedes

_LINES = ("v0_19", "v0_18", "v0_17", "v0_16")


@dataclass(frozen=True, slots=True)
class Change:
    """A change of DeepSpeed that code for the newest version depends on.

    The classes are put between TenCache's and DeepSpeed's own. Each turns the interface of the version before the
    change into the one after it; those of later changes come first and see what the earlier ones have made of
    DeepSpeed.

    Attributes:
        since: the first version that has it.
        lacks: seams that an older version does without, by name.
        calls: over :class:`~.calls.Calls`, for an older version.
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
