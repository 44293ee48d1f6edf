# SPDX-License-Identifier: Apache-2.0
"""What a training run says when all is well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import free_port

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


def run(folder: Path, *arguments: str) -> str:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                                "MASTER_PORT": str(free_port()), "CUDA_VISIBLE_DEVICES": "0"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("end", ["destroy", "exit"])
def test_a_line_at_the_start_and_a_summary_at_the_end(tmp_path: Path, end: str) -> None:
    printed = run(tmp_path, "normal", end)
    assert printed.count("is active with DeepSpeed") == 1
    unused = "zero_optimization.offload_param.buffer_size, zero_optimization.offload_optimizer.pipeline_read"
    assert printed.count(f"TenCache does not use {unused}") == 1
    assert printed.count("TenCache: 3 optimizer steps in") == 1
    assert printed.count("TenCache: NVMe: 0.00 GiB read") == 1
    after = printed.index("TenCache: 3 optimizer steps") > printed.index("the script ended")
    assert after == (end == "exit")


def test_quiet(tmp_path: Path) -> None:
    assert "TenCache" not in run(tmp_path, "quiet", "exit")
