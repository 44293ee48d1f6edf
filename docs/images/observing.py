# SPDX-License-Identifier: Apache-2.0
"""Makes the pictures of docs/observing.md: trains a small model on two CPU ranks, watches and traces it.

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
from typing import Any

from rich.console import Console, RenderableType

from tencache_ds.cli.trace import record
from tencache_ds.cli.trace_view import render as render_trace
from tencache_ds.cli.watch_view import render as render_watch
from tencache_ds.observability.channel_client import Job, Process, jobs
from tencache_ds.observability.trace_file import write_trace
from tencache_ds.observability.trace_summary import summarize

HERE = Path(__file__).parent
SHOWN_ROWS = 4
COLOURS = {
    "step": "#DDDDDD",
    "forward": "#009E73",
    "backward": "#F0E442",
    "optimizer step": "#999999",
    "stall": "#D55E00",
    "fetch": "#56B4E9",
    "copy": "#CC79A7",
    "update": "#E69F00",
    "nvme": "#0072B2",
}

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
    engine.backward(engine(torch.randn(128, 1024, dtype=torch.bfloat16)).float().pow(2).mean())
    engine.step()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvme-path", required=True)
    parser.add_argument("--warm-up", type=int, default=20, metavar="STEPS")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(TRAINING)
        launcher = [
            sys.executable,
            "-m",
            "deepspeed.launcher.runner",
            "--num_accelerators",
            "2",
            "--master_port",
            "29871",
        ]
        training = subprocess.Popen(
            [*launcher, str(script), arguments.nvme_path],
            env=os.environ | {"DS_ACCELERATOR": "cpu"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
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
    save_timeline(contents, HERE / "observing_trace_timeline.png")


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


def save_timeline(contents: dict[str, Any], path: Path) -> None:
    """The tracks of the first rank, as Perfetto shows them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    names: dict[int, str] = {}
    bars: dict[int, list[tuple[float, float, str]]] = {}
    for event in contents["traceEvents"]:
        if event["pid"] == 0 and event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
        elif event["pid"] == 0 and event["ph"] == "X":
            category = event["name"] if event["cat"] == "phase" else event["cat"]
            bars.setdefault(event["tid"], []).append((event["ts"] / 1000, event["dur"] / 1000, category))
    tracks = [track for track in sorted(bars) if names[track] not in left_out(names)]
    figure, axes = pyplot.subplots(figsize=(11, 0.32 * len(tracks) + 1.2), layout="constrained")
    for row, track in enumerate(tracks):
        for start, length, category in sorted(bars[track], key=lambda bar: -bar[1]):  # short ones lie on top
            axes.broken_barh([(start, length)], (row - 0.4, 0.8), color=COLOURS[category], linewidth=0)
        if names[track] in ("steps", "phases"):
            for start, length, _ in bars[track]:
                axes.vlines([start, start + length], row - 0.4, row + 0.4, color="white", linewidth=1)
    axes.set_yticks(range(len(tracks)), [names[track] for track in tracks], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    shown = {category for track in bars.values() for _, _, category in track}
    legend = [Patch(color=colour, label=category) for category, colour in COLOURS.items() if category in shown]
    axes.legend(handles=legend, ncols=len(legend), loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)
    figure.savefig(path, dpi=110)


def left_out(names: dict[int, str]) -> set[str]:
    """Rows of requests beyond the first few, which are the busiest."""
    return {name for name in names.values() if name.startswith("NVMe") and int(name.split()[-1]) > SHOWN_ROWS}


if __name__ == "__main__":
    main()
