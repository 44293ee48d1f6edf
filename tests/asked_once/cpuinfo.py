# SPDX-License-Identifier: Apache-2.0
"""Stands before py-cpuinfo on the path of every process that the tests start, with the answer that it gave them.

DeepSpeed asks for the processor several times per operator it loads, and py-cpuinfo keeps a core busy for a second each
time. ``tests/conftest.py`` asks the real one, once.
"""

import json
import os
from typing import Any

VARIABLE = "CPUINFO_ANSWER"


def get_cpu_info() -> dict[str, Any]:
    """What py-cpuinfo said of this machine."""
    answer: dict[str, Any] = json.loads(os.environ[VARIABLE])
    return answer
