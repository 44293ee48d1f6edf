# SPDX-License-Identifier: Apache-2.0
"""One step under torch's profiler: bytes and busy time of copies between host and GPU, and busy time of kernels."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..record import DeviceProfile


def busy_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of the intervals runs, of ``(start, duration)`` pairs in microseconds."""
    total, covered_until = 0.0, float("-inf")
    for start, duration in sorted(intervals):
        end = start + duration
        total += max(end - max(start, covered_until), 0.0)
        covered_until = max(covered_until, end)
    return total / 1e6


def parse_trace(events: Iterable[Mapping[str, Any]], seconds: float, device: int) -> DeviceProfile | None:
    """Figures of one device, of the events of a Chrome trace by torch's profiler; None if it has no device events.

    Args:
        events: the trace's ``traceEvents``.
        seconds: duration of the profiled step by the wall clock.
        device: CUDA index of the device.
    """
    found: dict[str, list[Mapping[str, Any]]] = {"HtoD": [], "DtoH": [], "kernel": []}
    for event in events:
        category = event.get("cat")
        if category in ("kernel", "gpu_memcpy") and event.get("args", {}).get("device") == device:
            for kind, of_kind in found.items():
                if kind in (event["name"] if category == "gpu_memcpy" else category):
                    of_kind.append(event)
    if not found["kernel"]:
        return None
    busy = {kind: busy_s((event["ts"], event["dur"]) for event in of_kind) for kind, of_kind in found.items()}
    h2d_nbytes, d2h_nbytes = (sum(int(event["args"]["bytes"]) for event in found[way]) for way in ("HtoD", "DtoH"))
    return DeviceProfile(
        seconds=seconds, h2d_nbytes=h2d_nbytes, d2h_nbytes=d2h_nbytes,
        h2d_busy_s=busy["HtoD"], d2h_busy_s=busy["DtoH"], kernel_busy_s=busy["kernel"],
    )  # fmt: skip


def profile_step(step: Callable[[], object]) -> DeviceProfile | None:
    """Runs a step, which must end synchronised, under the profiler; None, with the reason printed, if that fails.

    The step is made in any case: other ranks make it too. Needs a CUDA device. Only CUDA activities are recorded: the
    CPU's operators would make the step slower and the trace many times larger.

    Raises:
        Exception: errors of the step itself.
    """
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    try:
        profiler.start()
    except RuntimeError as error:
        print(f"no device profile: {error}", flush=True)
        step()
        return None
    t_start = time.perf_counter()
    step()
    seconds = time.perf_counter() - t_start
    try:
        profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text(errors="replace"))["traceEvents"]
        profile = parse_trace(events, seconds, torch.cuda.current_device())
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        print(f"no device profile: {type(error).__name__}: {error}", flush=True)
        return None
    if profile is None:
        print("no device profile: the trace has no kernels; is CUPTI usable here?", flush=True)
    return profile
