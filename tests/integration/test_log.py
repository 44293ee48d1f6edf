# SPDX-License-Identifier: Apache-2.0
"""What a training run says, whatever is done to logging."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(200)

SCRIPT = """
import logging, sys, deepspeed, torch
log, destroys, level = sys.argv[1], sys.argv[2] == "destroy", sys.argv[3]
deepspeed.utils.logger.setLevel(level)  # as the Trainer does for its option log_level: the handler's level stays
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


@pytest.mark.parametrize(("end", "level"), [("destroy", "WARNING"), ("exit", "WARNING"), ("exit", "INFO")])
def test_a_line_at_the_start_and_a_summary_at_the_end(harness: Any, end: str, level: str) -> None:
    printed = run(harness, "normal", end, level)
    assert printed.count("is active with DeepSpeed") == 1
    assert re.search(r"never more than \d+\.\d\d [GM]iB of RAM \(.* pinned\).*; built in", printed)
    unused = "zero_optimization.offload_param.buffer_size, zero_optimization.offload_optimizer.pipeline_read"
    assert printed.count(f"TenCache does not use {unused}") == 1
    assert printed.count("TenCache: 3 optimizer steps in") == 1
    assert printed.count("TenCache: at the end: in GPU memory 0.00 GiB, in RAM") == 1
    assert "on NVMe" not in printed[printed.index("TenCache: 3 optimizer steps") :]
    after = printed.index("TenCache: 3 optimizer steps") > printed.index("the script ended")
    assert after == (end == "exit")


def test_quiet(harness: Any) -> None:
    assert "TenCache" not in run(harness, "quiet", "exit", "INFO")


@pytest.fixture(scope="module")
def printed(harness: Any) -> dict[str, str]:
    """What the process of each logging setting printed."""
    folder = harness.folder()
    program = Path(__file__).with_name("logging_settings.py")
    harness.python([str(program), str(folder / "printed.json")], folder=folder, timeout_s=150).succeeded()
    found: dict[str, str] = json.loads((folder / "printed.json").read_text())
    return found


def test_the_user_is_told_once_whatever_the_logging_settings(printed: dict[str, str]) -> None:
    assert len(printed) >= 19
    assert {name: text.count("TenCache is active") for name, text in printed.items()} == dict.fromkeys(printed, 1)


def test_quiet_whatever_the_logging_settings(printed: dict[str, str]) -> None:
    assert not [name for name, text in printed.items() if "TenCache was not quiet" in text]


def test_warnings_are_shown_wherever_those_of_deepspeed_are(printed: dict[str, str]) -> None:
    shown = {name for name, text in printed.items() if text.count("TenCache warns") == 1}
    assert shown == {
        "untouched", "logger at info", "handler at info", "logger and handler at info", "no handler",
        "no handler, logger at info", "no handler, propagation", "root at info", "rich", "logger disabled",
    }  # fmt: skip
    assert {name for name, text in printed.items() if "DeepSpeed warns" in text} == shown - {"logger disabled"}


def test_a_stream_that_is_gone_ends_no_training(harness: Any) -> None:
    script = (
        "import sys, deepspeed\n"
        "from tencache_ds.integration import reporting\n"
        "deepspeed.init_distributed('gloo', verbose=False)\n"
        "for stream in (open('/dev/full', 'w'), open('/dev/null', 'w'), None):\n"
        "    sys.stdout = stream\n"
        "    if stream is not None and stream.name == '/dev/null':\n"
        "        stream.close()\n"
        "    reporting.announce('TenCache', reporting.TenCacheConfig())\n"
        "sys.stderr.write('the training went on')\n"
    )
    folder = harness.folder()
    (folder / "script.py").write_text(script)
    finished = harness.python([str(folder / "script.py")], folder=folder, timeout_s=150)
    assert "the training went on" in finished.log
