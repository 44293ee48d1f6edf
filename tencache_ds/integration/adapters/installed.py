# SPDX-License-Identifier: Apache-2.0
"""The installed DeepSpeed with the interface of the newest one."""

from __future__ import annotations

from typing import Any, cast

import deepspeed
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from tencache_ds.integration.adapters.newest import Calls, NewestCoordinator, NewestOptimizer
from tencache_ds.integration.adapters.versions import changes_after

_changes = changes_after(deepspeed.__version__)


def _composed(name: str, kind: str, *bases: type) -> Any:
    older = [adapter for change in _changes if (adapter := getattr(change, kind)) is not None]
    return type(name, (*older, *bases), {})


calls = cast(Calls, _composed("InstalledCalls", "calls", Calls)())
"""Functions and attributes of DeepSpeed that are not the same in all versions."""

ZeroOptimizer: Any = _composed("ZeroOptimizer", "optimizer", NewestOptimizer, DeepSpeedZeroOptimizer_Stage3)
"""``DeepSpeedZeroOptimizer_Stage3``, with the methods of :class:`.NewestOptimizer`."""

Coordinator: Any = _composed("Coordinator", "coordinator", NewestCoordinator, PartitionedParameterCoordinator)
"""``PartitionedParameterCoordinator``, with the methods of :class:`.NewestCoordinator`."""
