# SPDX-License-Identifier: Apache-2.0
"""What TenCache's coordinator asks of DeepSpeed's and does not override, in the newest version's way.

DeepSpeed keeps account of the modules that are in backward, and attributes to them frozen weights that a recomputation
gathers: a release of these is DeepSpeed's.
"""

from __future__ import annotations

from typing import Any


class NewestCoordinator:
    """Over ``PartitionedParameterCoordinator``."""

    def backward_begins(self, module: Any) -> None:
        """A module is about to be in backward."""
        self._PartitionedParameterCoordinator__active_backward_submodules[module.ds_id] = module

    def backward_ends(self, module: Any) -> None:
        """A module is through backward."""
        self._PartitionedParameterCoordinator__active_backward_submodules.pop(module.ds_id, None)

    def releases_own_weights(self, module: Any, forward: bool) -> bool:
        """Whether a release of a module concerns its own weights only, and no error of the order of hooks."""
        if module.__dict__["ds_recompute_parameters"]:
            return False
        return forward or bool(self._PartitionedParameterCoordinator__active_backward_submodules)
