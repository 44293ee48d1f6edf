# SPDX-License-Identifier: Apache-2.0
"""The example for Lightning, with the engine and without it. Lightning's DeepSpeed strategy refuses all but CUDA."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning"


def run(harness: Any, folder: Path, zero: dict[str, Any]) -> str:
    """The example's output with this ``zero_optimization`` section."""
    config = folder / "ds_config.json"
    config.write_text(json.dumps({"zero_optimization": zero}))
    script = [str(EXAMPLE / "train.py"), "--config", str(config), "--width", "512", "--layers", "4", "--steps", "6"]
    finished = harness.python(script, folder=folder, ranks=1, timeout_s=140)
    assert finished.code == 0, finished.log[-3000:]
    return finished.log


def test_losses_equal_those_without_the_line(harness: Any, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    zero = json.loads((EXAMPLE / "ds_config.json").read_text())["zero_optimization"]
    losses, active = {}, {}
    for engine in (True, False):
        folder = tmp_path / f"engine_{engine}"
        folder.mkdir()
        device = {"device": "nvme", "nvme_path": str(folder / "nvme")} if engine else {"device": "cpu"}
        section = zero | {"offload_param": device, "offload_optimizer": device}
        if not engine:
            del section["offload_engine"]
        log = run(harness, folder, section)
        losses[engine] = re.findall(r"step \d+: loss (\S+)", log)
        active[engine] = "is active with DeepSpeed" in log
    assert active == {True: True, False: False}
    assert len(set(losses[True])) == 6
    assert losses[True] == losses[False]
