# SPDX-License-Identifier: Apache-2.0
"""Which tests a machine can run: those marked ``gpu`` or ``multigpu`` need CUDA devices and are deselected without;
so are those marked ``gds``, which need KvikIO, and those marked ``nodes`` without ``TENCACHE_TEST_NODES``. Those marked
``long`` are deselected unless ``-m`` names them: see ``long_cases.py``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path

import pytest

from tests.long_cases import are_asked_for

ASKED_ONCE = Path(__file__).parent / "asked_once"


def pytest_configure(config: pytest.Config) -> None:
    """Gives this process and all that it starts py-cpuinfo's answer: see ``asked_once/cpuinfo.py``. Restores Ctrl-C
    where it is ignored, as a shell has it for what it starts in the background: some tests interrupt themselves."""
    import cpuinfo

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if "CPUINFO_ANSWER" in os.environ:
        return  # a worker of pytest-xdist, whose parent has asked
    os.environ["CPUINFO_ANSWER"] = json.dumps(cpuinfo.get_cpu_info())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ASKED_ONCE), os.environ.get("PYTHONPATH", "")]))
    cpuinfo.get_cpu_info = lambda: json.loads(os.environ["CPUINFO_ANSWER"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_kvikio = importlib.util.find_spec("kvikio") is not None
    makes_nodes = bool(os.environ.get("TENCACHE_TEST_NODES"))
    has_time = are_asked_for(config)
    needed = {"gpu": 1, "multigpu": 2}
    kept, dropped = [], []
    for item in items:
        enough = all(devices >= count for mark, count in needed.items() if item.get_closest_marker(mark))
        enough = enough and (has_kvikio or item.get_closest_marker("gds") is None)
        enough = enough and (makes_nodes or item.get_closest_marker("nodes") is None)
        enough = enough and (has_time or item.get_closest_marker("long") is None)
        (kept if enough else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
