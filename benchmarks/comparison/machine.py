# SPDX-License-Identifier: Apache-2.0
"""The machine that a benchmark runs on: its identity, its versions, and its rates as the probe measures them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from tencache_ds.errors import ConfigError
from tencache_ds.ops.build_lock import PATIENCE_S, build_locks, explain
from tencache_ds.profiling.hardware import Hardware

from .process import environment, last_error

PROBE_TIMEOUT_S = 300.0
"""The probe keeps its own time; this is for one that hangs."""

OPERATORS = ("AsyncIOBuilder", "CPUAdamBuilder", "tencache_ds.ops.tencache_aio:TenCacheAioBuilder")
"""The operators that most configurations and the probe use."""


_PROBE = """
import pathlib, sys
from tencache_ds.profiling.probe import probe
print(probe(pathlib.Path(sys.argv[1]), seconds=float(sys.argv[2])).model_dump_json())
"""


class Machine:
    """This machine."""

    def gpus(self) -> int:
        """GPUs that training would use: none where ``DS_ACCELERATOR`` names another device."""
        if os.environ.get("DS_ACCELERATOR", "cuda") != "cuda":
            return 0
        import torch

        return torch.cuda.device_count()

    def identity(self) -> tuple[str, int, str | None]:
        """Processor, cores and GPU, which must agree for runs to be comparable, as in :class:`Hardware`."""
        import torch

        from tencache_ds.profiling.host import processor_name

        gpu = torch.cuda.get_device_name(0) if self.gpus() else None
        return processor_name(), len(os.sched_getaffinity(0)), gpu

    def versions(self) -> dict[str, str]:
        """Versions of everything that matters for speed."""
        found = {"python": platform.python_version(), "kernel": platform.release()}
        for name in ("torch", "deepspeed", "transformers", "tencache-ds"):
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = "not installed as a package"
        if self.gpus():
            import torch

            found["cuda"] = str(torch.version.cuda)
        return found

    def build_operators(self, others: Iterable[str] = ()) -> None:
        """Builds the operators of the configurations in parallel. Build failures show where an operator is used.

        Otherwise the run that comes first would build it, and its start would be that of a compiler.

        Stale locks of killed processes, at which builds hang, are reported.

        Args:
            others: those that some configurations use beside the usual ones.
        """
        command = [sys.executable, "-m", "tencache_ds.ops.build"]
        builds = [
            subprocess.Popen([*command, name], env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for name in (*OPERATORS, *sorted(set(others)))
        ]
        wait_for_builds(builds)

    def probe(self, nvme_path: Path, seconds: float) -> Hardware:
        """Measures the machine, in a separate process: a CUDA context here would take memory from the runs.

        Raises:
            ConfigError: the probe failed; says why.
        """
        nvme_path.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", _PROBE, str(nvme_path), str(seconds)]
        try:
            done = subprocess.run(
                command, env=environment(), capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"the hardware probe did not finish within {PROBE_TIMEOUT_S:.0f} s") from None
        if done.returncode != 0:
            raise ConfigError(f"the hardware probe failed: {last_error(done.stderr) or done.stderr[-500:]}")
        return Hardware.model_validate_json(done.stdout.splitlines()[-1])  # DeepSpeed may have spoken before


def wait_for_builds(builds: Sequence[subprocess.Popen[bytes]], patience_s: float = PATIENCE_S) -> None:
    """Waits until all have ended; from ``patience_s`` seconds on it says, once each, which locks they wait at."""
    explained: set[Path] = set()
    for build in builds:
        while True:
            try:
                build.wait(patience_s)
                break
            except subprocess.TimeoutExpired:
                for lock in set(build_locks()) - explained:
                    tqdm.write(explain(lock))
                    explained.add(lock)
