# SPDX-License-Identifier: Apache-2.0
"""Build the operators that TenCache and its tests use, two at a time, before anything waits for them.

    python .ci/build_ops.py [AsyncIOBuilder ...] [module:Builder ...]

DeepSpeed's are named by their builder, TenCache's own by module and builder. DeepSpeed compiles each at its first use
and keeps it (in ``TORCH_EXTENSIONS_DIR``, by default ``~/.cache/torch_extensions``): about six minutes in all on two
cores, once per environment. Here it happens in parallel and with a line of progress for each.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

# AsyncIOBuilder builds DeepSpeed's pin_memory op as well; in a separate list, two would wait for one lock.
ON_EVERY_ACCELERATOR = ("AsyncIOBuilder", "CPUAdamBuilder", "CPUAdagradBuilder", "CPULionBuilder")
OF_TENCACHE = (
    "tencache_ds.ops.tencache_aio:TenCacheAioBuilder",
    "tencache_ds.ops.tencache_update:TenCacheUpdateBuilder",
)
SOURCES_OF_TENCACHE = Path(__file__).parent.parent / "ops"
SOURCE_SUFFIXES = (".cpp", ".h", ".inc", ".cu", ".cuh", ".py")
ON_CPU_ONLY = ("ShareMemCommBuilder", "FusedAdamBuilder")
AT_ONCE = 2
WITHOUT_FRONTEND = "-DTORCH_INDUCTOR_CPP_WRAPPER"
"""Has torch/extension.h leave out torch/all.h."""


def stamp_file(names: tuple[str, ...]) -> Path:
    """A file that exists once all of ``names`` were built with the installed versions."""
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    versions = [importlib.metadata.version(name) for name in ("torch", "deepspeed")]
    variables = [os.environ.get(name, "") for name in ("DS_ACCELERATOR", "CXX")]
    own = sorted(path for path in SOURCES_OF_TENCACHE.rglob("*") if path.suffix in SOURCE_SUFFIXES)
    contents = [hashlib.sha256(path.read_bytes()).hexdigest() for path in own]
    setting = [sys.prefix, sys.version, *variables, *versions, *names, *contents]
    return cache / f".tencache-ops-{hashlib.sha256(repr(setting).encode()).hexdigest()[:16]}"


def quicker_compiler(folder: Path) -> None:
    """Makes a ``c++`` in ``folder`` that leaves out two parts of the compiling time: what DeepSpeed's ``-g`` asks for,
    a quarter, and torch's C++ frontend, a third. No operator uses that; a file that did would be compiled with it.

    A program of that name on PATH, not CXX: ninja compares commands, and a later start without the variable would
    build everything again.
    """
    real = shutil.which("c++")
    if real is not None and "CXX" not in os.environ:
        wrapper = folder / "c++"
        compiler = f'{shlex.quote(real)} "$@" -g0'
        wrapper.write_text(f"#!/bin/sh\n{compiler} {WITHOUT_FRONTEND} 2>/dev/null || exec {compiler}\n")
        wrapper.chmod(0o755)


def build(name: str, compiler_folder: Path) -> tuple[float, str]:
    """Builds one operator in a separate process; returns its seconds and, if it failed, the end of its output."""
    # A compiler takes up to 1.5 GiB here, and the longest build has the most files: it should fill cores left idle.
    memory_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    jobs = max(1, min(os.cpu_count() or 1, memory_nbytes // (AT_ONCE * 3 * 2**29)))
    environment = {"MAX_JOBS": str(jobs)} | os.environ
    folders = [str(compiler_folder), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    environment["PATH"] = os.pathsep.join(folders)
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(
            [sys.executable, "-m", "tencache_ds.ops.build", name],
            stdout=output, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
        output.seek(0)
        lines = output.read().splitlines()
    return time.perf_counter() - started, "" if done.returncode == 0 else "\n".join(lines[-30:])


def main() -> int:
    names = tuple(sys.argv[1:]) or ON_EVERY_ACCELERATOR + OF_TENCACHE + ON_CPU_ONLY
    if os.environ.get("DS_ACCELERATOR") != "cpu":
        names = tuple(name for name in names if name not in ON_CPU_ONLY)
    stamp = stamp_file(names)
    if stamp.exists():
        return 0
    print(f"building {len(names)} operators (minutes on a small machine, once)", flush=True)
    failures = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        quicker_compiler(Path(folder))
        builds = {
            pool.submit(build, name, Path(folder)): name.rpartition(":")[2].removesuffix("Builder") for name in names
        }
        for count, done in enumerate(as_completed(builds), 1):
            seconds, error = done.result()
            state = "FAILED" if error else "ready"
            print(f"  [{count}/{len(names)}] {builds[done]} {state} after {seconds:.0f} s", flush=True)
            if error:
                failures += 1
                print(error, flush=True)
    if failures == 0:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
