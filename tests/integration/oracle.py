# SPDX-License-Identifier: Apache-2.0
"""What stock DeepSpeed gave in a case, kept from one run of the tests to the next.

Stock's training is half of every comparison, and gives the same bits while nothing changes that it depends on. A result
is kept with all of that: the case and the place of its rank, every program of this folder, what of TenCache had been
imported before the first case, the installed packages, DeepSpeed's files and compiled ops, the processor and the
environment. Where anything differs, stock trains again. Cases that write or read files for others are never kept.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

HERE = Path(__file__).parent
LONGEST_UNUSED_S = 30 * 24 * 3600.0
"""After which an entry is removed."""

PACKAGES = (
    "accelerate", "datasets", "deepspeed", "numpy", "peft", "py-cpuinfo", "safetensors", "tokenizers", "torch",
    "transformers", "trl",
)  # fmt: skip
PREFIXES = (
    "ACCELERATE_", "ATEN_", "CUBLAS_", "CUDA_", "CUDNN_", "DEEPSPEED_", "DNNL_", "DS_", "GLOO_", "GOMP_", "HF_", "KMP_",
    "LD_", "MKL_", "NCCL_", "NUMEXPR_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "TENCACHE_", "TOKENIZERS_", "TORCH",
    "TRANSFORMERS_", "TRL_", "XDG_",
)  # fmt: skip
"""Prefixes of variables that may have an effect on a training."""

NOT_OF_THE_PROCESSOR = ("mhz", "bogomips", "processor", "core id", "apicid", "physical id", "siblings", "cpu cores")
"""What differs between cores or from one look at ``/proc/cpuinfo`` to the next."""


def digest(value: Any) -> str:
    """Digest of anything that JSON can express."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def of_files(paths: Iterable[Path], base: Path) -> dict[str, str]:
    return {os.path.relpath(path, base): xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in sorted(paths)}


def programs(folder: Path = HERE) -> dict[str, str]:
    """Everything that a case may run, whichever program it belongs to."""
    return of_files((path for path in folder.glob("*.py") if not path.name.startswith("test_")), folder)


def imported(package: str) -> dict[str, str]:
    """The modules of a package that are in use."""
    found = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == package]
    files = [Path(file) for module in found if (file := getattr(module, "__file__", None)) is not None]
    return of_files((file for file in files if file.suffix == ".py"), Path("/"))


@functools.cache
def packages() -> dict[str, str]:
    """Versions, and a digest of the files that were installed."""
    found = {}
    for name in PACKAGES:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
        else:
            found[name] = f"{distribution.version} {digest(distribution.read_text('RECORD'))}"
    return found


@functools.cache
def deepspeed_files() -> str:
    """Names, sizes and times: they are often edited where they are installed."""
    import deepspeed

    root = Path(deepspeed.__file__).parent
    files = [(str(path.relative_to(root)), path.stat()) for path in sorted(root.rglob("*.py"))]
    return digest([(name, stat.st_size, stat.st_mtime_ns) for name, stat in files])


@functools.cache
def compiled_ops() -> dict[str, str]:
    from tencache_ds.ops.build_lock import extension_root

    root = extension_root()
    return of_files((path for path in root.glob("**/*.so") if not path.name.startswith("tencache_")), root)


@functools.cache
def processor() -> list[str]:
    """Names of the first core, and of the GPU if there is one."""
    import torch

    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    known = [line for line in first if not any(word in line.split(":")[0].lower() for word in NOT_OF_THE_PROCESSOR)]
    gpu = str(torch.cuda.get_device_properties(0)) if torch.cuda.is_available() else ""
    return [*known, gpu, str(torch.get_num_threads()), *platform.libc_ver(), sys.version]


def circumstances(environment: Mapping[str, str]) -> dict[str, str]:
    """A digest of each thing that stock's results depend on, beside the case."""
    variables = {key: value for key, value in environment.items() if key.startswith(PREFIXES)}
    found = {
        "programs": programs(), "imported of TenCache": imported("tencache_ds"), "packages": packages(),
        "files of DeepSpeed": deepspeed_files(), "compiled ops": compiled_ops(), "processor": processor(),
        "environment": variables,
    }  # fmt: skip
    return {name: digest(value) for name, value in found.items()}


class KeptResults:
    """Results of the cases of a program, of one rank. Not for threads; processes may share the folder.

    Args:
        folder: for all programs.
        program: its name.
        place: rank and number of ranks.
        on: what the results depend on beside the case.
    """

    def __init__(self, folder: Path, program: str, place: tuple[int, int], on: dict[str, str]) -> None:
        self._folder = folder / program
        self._place = place
        self._on = on

    def find(self, name: str, case: dict[str, Any]) -> dict[str, Any] | None:
        """What was kept, unless it is damaged or anything differs now."""
        path = self._path(name, case)
        try:
            entry = json.loads(path.read_text())
            if entry["key"] != self._key(case) or entry["digest"] != digest(entry["result"]):
                return None
            os.utime(path)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        result: dict[str, Any] = entry["result"]
        return result

    def keep(self, name: str, case: dict[str, Any], result: dict[str, Any]) -> None:
        """Takes the place of what was kept for the case before."""
        entry = {"key": self._key(case), "result": result, "digest": digest(result)}
        path = self._path(name, case)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(entry))
        os.replace(unfinished, path)

    def _key(self, case: dict[str, Any]) -> dict[str, Any]:
        return {"case": json.loads(json.dumps(case)), "place": list(self._place), "on": self._on}

    def _path(self, name: str, case: dict[str, Any]) -> Path:
        rank, ranks = self._place
        return self._folder / f"{name}-{digest(case)[:8]}-{rank}-of-{ranks}.json"


def remove_unused(folder: Path) -> None:
    """Removes entries that no run has wanted for a long time."""
    for path in folder.glob("*/*"):
        try:
            if time.time() - path.stat().st_mtime > LONGEST_UNUSED_S:
                path.unlink()
        except FileNotFoundError:
            continue  # another worker was faster
