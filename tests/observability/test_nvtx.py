# SPDX-License-Identifier: Apache-2.0
"""On a GPU, spans of a trace are NVTX ranges too: they are read as a profiler reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
TRAINING = """
import sys, deepspeed, torch, tencache_ds
nvme = {"device": "nvme", "nvme_path": sys.argv[1]}
config = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "offload_engine": "tencache",
    "tencache": {"host_memory": 0, "gpu_memory": 0, "chunk_size": 2**18},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme,
                          "stage3_param_persistence_threshold": 0},
}
with deepspeed.zero.Init(config_dict_or_path=config):
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
engine = deepspeed.initialize(model=model, config=config)[0]
for step in range(7):
    if step == 3:
        tencache_ds.trace(engine, sys.argv[2], steps=2)
    engine.backward(engine(torch.randn(8, 512, dtype=torch.bfloat16, device=engine.device)).float().pow(2).mean())
    engine.step()
engine.destroy()
"""


def test_spans_of_a_trace_are_nvtx_ranges(tmp_path: Path) -> None:
    library, script, names, trace = (tmp_path / name for name in ("names.so", "train.py", "names.txt", "trace.json"))
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "nvtx_names.c"], check=True)
    script.write_text(TRAINING)
    # The job's own variables, so that it neither looks for a launcher's nor meets another test's port.
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29879"}
    environment = os.environ | job | {"NVTX_INJECTION64_PATH": str(library), "NVTX_NAMES": str(names)}
    subprocess.run([sys.executable, script, tmp_path / "nvme", trace], check=True, env=environment, timeout=240)

    ranges = {line.split(" ")[0] for line in names.read_text().splitlines() if line.startswith("tencache::")}
    spans = {event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"}
    assert {"tencache::wait::weight_read", "tencache::copy::gradient", "tencache::fetch"} <= ranges
    assert ranges <= spans, "a range that the trace does not have"
