# SPDX-License-Identifier: Apache-2.0
"""What a training run says when all is well."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(200)

SCRIPT = """
import sys, deepspeed, torch
log, destroys = sys.argv[1], sys.argv[2] == "destroy"
config = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "offload_engine": "tencache",
    "tencache": {"log": log}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {
        "stage": 3, "offload_param": {"device": "cpu", "buffer_size": 1e6},
        "offload_optimizer": {"device": "cpu", "pipeline_read": True},
    },
}
with deepspeed.zero.Init(config_dict_or_path=config):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
engine = deepspeed.initialize(model=model, config=config)[0]
for _ in range(3):
    engine.backward(engine(torch.ones(1, 64, dtype=torch.bfloat16)).sum())
    engine.step()
if destroys:
    engine.destroy()
    engine.destroy()
print("the script ended")
"""


def run(harness: Any, *arguments: str) -> str:
    folder = harness.folder()
    (folder / "script.py").write_text(SCRIPT)
    printed: str = harness.python([str(folder / "script.py"), *arguments], folder=folder, timeout_s=150).succeeded().log
    return printed


@pytest.mark.parametrize("end", ["destroy", "exit"])
def test_a_line_at_the_start_and_a_summary_at_the_end(harness: Any, end: str) -> None:
    printed = run(harness, "normal", end)
    assert printed.count("is active with DeepSpeed") == 1
    assert re.search(r"never more than \d+\.\d\d [GM]iB of RAM \(.* pinned\).*; built in", printed)
    unused = "zero_optimization.offload_param.buffer_size, zero_optimization.offload_optimizer.pipeline_read"
    assert printed.count(f"TenCache does not use {unused}") == 1
    assert printed.count("TenCache: 3 optimizer steps in") == 1
    assert printed.count("TenCache: NVMe: 0.00 GiB read") == 1
    after = printed.index("TenCache: 3 optimizer steps") > printed.index("the script ended")
    assert after == (end == "exit")


def test_quiet(harness: Any) -> None:
    assert "TenCache" not in run(harness, "quiet", "exit")
