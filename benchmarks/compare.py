# SPDX-License-Identifier: Apache-2.0
"""Stock ZeRO-Infinity and TenCache on one machine in one run, alternating; a Markdown table at the end.

    python -m benchmarks.compare --model 1.3B --nvme-path /local_nvme --sides stock,tencache --rounds 2

Every run is a process of its own, started by the ``deepspeed`` launcher. A run that fails is a row with its error.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GIB = 2**30


def base_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """What both sides share."""
    return {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": arguments.stock_threads,
            "single_submit": False,
            "overlap_events": True,
        },
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": arguments.sub_group_size,
            "stage3_prefetch_bucket_size": arguments.prefetch_bucket_size,
            # Stock holds a swap buffer for every weight live on the device: with the default distance it asserts.
            "stage3_max_reuse_distance": 0,
        },
    }


def config_for(side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed config of a side: ``stock``, ``tencache``, or either with a suffix (see :func:`main`)."""
    engine, _, variant = side.partition(":")
    config = base_config(arguments)
    nvme = {"device": "nvme", "nvme_path": arguments.nvme_path, "pin_memory": True}
    ram = {"device": "cpu", "pin_memory": True}
    params, optimizer = (dict(ram), dict(ram)) if "ram" in variant.split("+") else (dict(nvme), dict(nvme))
    if "weights_ram" in variant.split("+"):
        params = dict(ram)
    if params["device"] == "nvme" and engine == "stock":
        params |= {
            "buffer_count": arguments.stock_param_buffers,
            "buffer_size": arguments.stock_param_buffer_size,
            "max_in_cpu": 0,
        }
    if optimizer["device"] == "nvme" and engine == "stock":
        optimizer |= {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
    config["zero_optimization"] |= {"offload_param": params, "offload_optimizer": optimizer}
    if engine == "tencache":
        config["offload_engine"] = "tencache"
        options: dict[str, Any] = {"host_memory": 0}
        for word in variant.split("+"):
            key, equals, value = word.partition("=")
            if equals:
                options[key] = None if value == "auto" else int(value) if value.isdigit() else value
        config["tencache"] = options
    return config


def run_side(side: str, index: int, arguments: argparse.Namespace, out: Path) -> dict[str, Any]:
    """One process of one side; its result or its error."""
    name = f"{index:02d}_{side.replace(':', '_').replace('+', '_').replace('=', '-').replace('/', '-')}"
    config, result, log = out / f"{name}.config.json", out / f"{name}.json", out / f"{name}.log"
    config.write_text(json.dumps(config_for(side, arguments), indent=1))
    shutil.rmtree(Path(arguments.nvme_path) / "zero_stage_3", ignore_errors=True)
    command = [
        sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(arguments.ranks),
        "--master_port", str(free_port()), "--module", "benchmarks.train_step",
        "--model", arguments.model, "--batch", str(arguments.batch), "--sequence", str(arguments.sequence),
        "--steps", str(arguments.steps), "--config", str(config), "--result", str(result),
    ]  # fmt: skip
    if arguments.checkpointing:
        command.append("--checkpointing")
    if arguments.deterministic:
        command.append("--deterministic")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    t_start = time.perf_counter()
    with log.open("w") as stream:
        # A session of its own: after a time-out the launcher's children must not go on and disturb the next side.
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(arguments.timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return {"side": side, "error": f"not finished after {arguments.timeout:.0f} s"}
        if code != 0:
            return {"side": side, "error": _last_error(log) or f"exit code {code}"}
    measured = json.loads(result.read_text()) | {"side": side, "wall_s": time.perf_counter() - t_start}
    print(f"{side}: {measured['median_s']:.2f} s per step ({measured['wall_s']:.0f} s in all)", flush=True)
    return measured


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    return lines[-1][-200:] if lines else ""


def report(results: list[dict[str, Any]], sides: list[str]) -> str:
    """Markdown table of medians over the rounds, and the losses' agreement."""
    lines = [
        "| side | s/step | forward | backward | update | read B/param | written B/param | peak RSS start / steady GiB "
        "| host used GiB | pinned GiB | GPU GiB | start s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    medians: dict[str, float] = {}
    for side in sides:
        runs = [result for result in results if result["side"] == side]
        good = [run for run in runs if "error" not in run]
        if not good:
            lines.append(f"| {side} | failed: {runs[0]['error'] if runs else 'not run'} |" + " |" * 10)
            continue
        steady = [step for run in good for step in run["steps"][min(2, len(run["steps"]) - 1) :]]
        numel = good[0]["numel"]
        medians[side] = statistics.median(step["seconds"] for step in steady)

        def middle(key: str, steps: list[dict[str, Any]] = steady) -> float:
            return statistics.median(step[key] for step in steps)

        pinned = max(r["locked_nbytes"] + r["torch_pinned_nbytes"] + r.get("registered_nbytes", 0) for r in good)
        spread = f"{min(s['seconds'] for s in steady):.2f}-{max(s['seconds'] for s in steady):.2f}"
        lines.append(
            f"| {side} | {medians[side]:.2f} ({spread}) | {middle('forward_s'):.2f} | {middle('backward_s'):.2f} "
            f"| {middle('update_s'):.2f} | {middle('read_nbytes') / numel:.1f} | {middle('write_nbytes') / numel:.1f} "
            f"| {max(r['peak_rss_start'] for r in good) / GIB:.1f} / "
            f"{max(r['peak_rss_steady'] for r in good) / GIB:.1f} "
            f"| {middle('host_used') / GIB:.1f} | {pinned / GIB:.1f} "
            f"| {max(r.get('gpu_peak_nbytes', 0) for r in good) / GIB:.1f} "
            f"| {statistics.median(r['model_s'] for r in good):.1f} + "
            f"{statistics.median(r['initialize_s'] for r in good):.1f} |"
        )
    if len(medians) > 1:
        first = next(iter(medians))
        ratios = ", ".join(f"{side} {medians[first] / value:.2f}x" for side, value in medians.items() if side != first)
        lines.append(f"\nSpeed relative to {first}: {ratios}.")
    losses = {tuple(step["loss"] for step in run["steps"]) for run in results if "error" not in run}
    lines.append(f"Losses of all runs identical bit for bit: {'yes' if len(losses) == 1 else 'no'}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.3B")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5, help="per run; the first two are warm-up")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--nvme-path", required=True)
    parser.add_argument("--out", default="benchmark_results")
    parser.add_argument(
        "--sides",
        default="stock,tencache",
        help="comma-separated; after a colon, joined by '+': 'ram' (all in RAM), 'weights_ram', option=value",
    )
    parser.add_argument("--stock-threads", type=int, default=4)
    parser.add_argument("--stock-param-buffers", type=int, default=40)
    parser.add_argument(
        "--stock-param-buffer-size", type=float, default=7e7, help="elements; the largest weight must fit"
    )
    parser.add_argument("--sub-group-size", type=float, default=1e8)
    parser.add_argument(
        "--prefetch-bucket-size",
        type=float,
        default=2e7,
        help="for both sides; with DeepSpeed's default of 5e7 stock runs out of swap buffers on the 1.3B model",
    )
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--timeout", type=float, default=600)
    arguments = parser.parse_args()
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    sides = arguments.sides.split(",")
    results = []
    for index in range(arguments.rounds * len(sides)):
        results.append(run_side(sides[index % len(sides)], index, arguments, out))
        (out / "results.json").write_text(json.dumps(results, indent=1))
    table = report(results, sides)
    (out / "report.md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main()
