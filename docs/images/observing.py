# SPDX-License-Identifier: Apache-2.0
"""Makes the pictures of docs/observing.md: trains a small model on two ranks, on GPUs where there are two, watches and
traces it.

python docs/images/observing.py --nvme-path /local_nvme
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console, RenderableType

from tencache_ds.cli.plots import write_trace_plot
from tencache_ds.cli.trace import record, title_of
from tencache_ds.cli.trace import render as render_trace
from tencache_ds.cli.watch import render as render_watch
from tencache_ds.observability.channel_client import Job, Process, jobs
from tencache_ds.observability.trace_file import summarize, timelines, write_trace

HERE = Path(__file__).parent
TRAINING = """
import sys, deepspeed, torch
nvme = {"device": "nvme", "nvme_path": sys.argv[-1]}
config = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "offload_engine": "tencache",
    "tencache": {"host_memory": "5MiB", "chunk_size": 2**20, "log": "quiet"},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme, "sub_group_size": 4000000,
                          "stage3_param_persistence_threshold": 2000},
}
with deepspeed.zero.Init(config_dict_or_path=config):
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)])
engine = deepspeed.initialize(model=model, config=config)[0]
while True:
    batch = torch.randn(128, 1024, dtype=torch.bfloat16, device=engine.device)
    engine.backward(engine(batch).float().pow(2).mean())
    engine.step()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvme-path", required=True)
    parser.add_argument("--warm-up", type=int, default=20, metavar="STEPS")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count() >= 2
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(TRAINING)
        launcher = [
            sys.executable,
            "-m",
            "deepspeed.launcher.runner",
            "--num_gpus" if gpus else "--num_accelerators",
            "2",
            "--master_port",
            "29871",
        ]
        training = subprocess.Popen(
            [*launcher, str(script), arguments.nvme_path],
            env=dict(os.environ) if gpus else os.environ | {"DS_ACCELERATOR": "cpu"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            before = wait_for_job(str(script), arguments.warm_up)
            t_start = time.monotonic()
            time.sleep(2)
            job = wait_for_job(str(script), 0)
            job.processes[0].snapshot["host"] = "node1"
            save_svg(render_watch(job, (time.monotonic() - t_start, before)), "watch", "tencache watch")
            contents = write_trace(Path(folder, "trace.json"), record(job, 2))
        finally:
            for process in processes_of(str(script)):  # the launcher ends with them
                os.kill(process.pid, signal.SIGTERM)
            training.wait()
    save_svg(render_trace(summarize(contents)), "trace_summary", "tencache trace")
    write_trace_plot(HERE / "observing_trace_timeline.png", title_of(contents), timelines(contents))


def wait_for_job(program: str, steps: int) -> Job:
    """The training, once it has taken some steps."""
    while True:
        for job in jobs()[0]:
            snapshot = job.processes[0].snapshot
            if snapshot["program"] == program and min(engine["steps"] for engine in snapshot["engines"]) >= steps:
                return job
        time.sleep(0.2)


def processes_of(program: str) -> list[Process]:
    return [p for job in jobs()[0] for p in job.processes if p.snapshot["program"] == program]


def save_svg(picture: RenderableType, name: str, title: str) -> None:
    console = Console(record=True, width=90, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(picture)
    console.save_svg(str(HERE / f"observing_{name}.svg"), title=title)


if __name__ == "__main__":
    main()
