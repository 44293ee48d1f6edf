# SPDX-License-Identifier: Apache-2.0
"""Which tests a machine can run: those marked ``gpu`` or ``multigpu`` need CUDA devices and are deselected without."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needed = {"gpu": 1, "multigpu": 2}
    kept, dropped = [], []
    for item in items:
        enough = all(devices >= count for mark, count in needed.items() if item.get_closest_marker(mark))
        (kept if enough else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
