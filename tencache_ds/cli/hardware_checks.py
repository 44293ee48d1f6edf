# SPDX-License-Identifier: Apache-2.0
"""Checks of ``tencache doctor``: processor, memory, GPUs and GPUDirect Storage."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from tencache_ds.cli.console import Finding, Level, format_nbytes
from tencache_ds.profiling.host_memory import memory_domains

CAP_IPC_LOCK_BIT = 14
SMALL_LOCKED_MEMORY_NBYTES = 1 << 30
GDS = "gpudirect"
KVIKIO_DISTRIBUTIONS = ("kvikio-cu13", "kvikio-cu12")
VECTOR_FLAGS = ("avx512f", "avx2", "sve", "asimd")


def check_cpu() -> Finding:
    """Model and cores of the processor; the CPU optimizer is several times slower without vector instructions."""
    import cpuinfo  # takes a second: only when asked for

    info = cpuinfo.get_cpu_info()
    model = info.get("brand_raw") or info.get("arch", "unknown")
    cores = len(os.sched_getaffinity(0))
    vector = next((flag for flag in VECTOR_FLAGS if flag in info.get("flags", ())), None)
    text = f"{model}, {cores} cores for this process"
    if vector is None:
        return Finding(
            Level.WARNING,
            "cpu",
            f"{text}, no AVX2 or AVX-512: the optimizer step will be slow",
            "use a machine with AVX2, or configure the virtual machine to expose the host's CPU flags",
        )
    return Finding(Level.OK, "cpu", f"{text}, {vector}")


def check_memory() -> Finding:
    """Total and available RAM, and the container's limit if it has a lower one."""
    machine, *groups = memory_domains()
    text = f"{format_nbytes(machine.available_nbytes)} of {format_nbytes(machine.limit_nbytes)} available"
    tightest = min(groups, key=lambda group: group.available_nbytes, default=machine)
    if tightest.available_nbytes < machine.available_nbytes:
        text += (
            f"; {tightest.name} may use {format_nbytes(tightest.limit_nbytes)}, of which "
            f"{format_nbytes(tightest.available_nbytes)} are free"
        )
    return Finding(Level.OK, "memory", text)


def has_ipc_lock_capability(status: str) -> bool:
    """Whether ``status``, the text of ``/proc/<pid>/status``, grants CAP_IPC_LOCK, which lifts the limit."""
    line = next((line for line in status.splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    return bool(int(line.split()[1], 16) >> CAP_IPC_LOCK_BIT & 1)


def check_locked_memory(limit_nbytes: int | None = None, status: str | None = None) -> Finding:
    """How much memory may be locked, which I/O buffers need; container images often allow 8 MiB.

    Args:
        limit_nbytes: the soft limit, ``resource.RLIM_INFINITY`` for none; this process's own when omitted.
        status: text of ``/proc/<pid>/status``; this process's own when omitted.
    """
    if limit_nbytes is None:
        limit_nbytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if status is None:
        status = Path("/proc/self/status").read_text()
    if limit_nbytes == resource.RLIM_INFINITY:
        return Finding(Level.OK, "locked memory", "unlimited")
    text = f"limit {format_nbytes(limit_nbytes)}"
    if has_ipc_lock_capability(status):
        return Finding(Level.OK, "locked memory", f"{text}, lifted by CAP_IPC_LOCK")
    if limit_nbytes < SMALL_LOCKED_MEMORY_NBYTES:
        return Finding(
            Level.WARNING,
            "locked memory",
            f"{text}: too low for the buffers of most models",
            "ulimit -l unlimited (memlock in /etc/security/limits.conf), or in Docker: --ulimit memlock=-1",
        )
    return Finding(Level.OK, "locked memory", text)


def check_gpus() -> list[Finding]:
    """The NVIDIA GPUs of this machine, and whether the installed torch can use them."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [Finding(Level.OK, "gpu", f"none ({error}): DeepSpeed runs on the CPU with DS_ACCELERATOR=cpu")]
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        findings = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            total = pynvml.nvmlDeviceGetMemoryInfo(handle).total
            name = pynvml.nvmlDeviceGetName(handle)
            findings.append(Finding(Level.OK, f"gpu {index}", f"{name}, {format_nbytes(total)}, driver {driver}"))
    except pynvml.NVMLError as error:
        return [Finding(Level.WARNING, "gpu", f"the driver does not respond: {error}", "run nvidia-smi to see why")]
    finally:
        pynvml.nvmlShutdown()
    if findings and _torch_is_for_cpu_only():
        findings.append(
            Finding(
                Level.WARNING,
                "gpu",
                "the installed torch is a CPU build and does not see the GPU",
                "pip install --force-reinstall torch (from PyPI, or the index of your CUDA version)",
            )
        )
    return findings


def check_gds(
    version_of: Callable[[str], str] = metadata.version,
    driver: Path = Path("/proc/driver/nvidia-fs/version"),
    udev: Path = Path("/run/udev"),
    environment: Mapping[str, str] = os.environ,
) -> Finding:
    """Whether weights could be read into GPU memory without the host. Nothing here is a fault: training measures at its
    start which way is faster. Neither imports KvikIO nor needs a GPU.

    Args:
        version_of: version of an installed distribution, or :class:`importlib.metadata.PackageNotFoundError`.
        driver: where the driver tells its version.
        udev: what cuFile reads of the devices.
        environment: variables to inspect.
    """
    for name in KVIKIO_DISTRIBUTIONS:
        try:
            installed = f"{name} {version_of(name)}"
        except metadata.PackageNotFoundError:
            continue
        break
    else:
        text = "KvikIO is not installed (optional: pip install 'tencache-ds[gds-cu13]', or gds-cu12 for CUDA 12)"
        return Finding(Level.OK, GDS, text)
    if environment.get("KVIKIO_COMPAT_MODE", "").strip().lower() in ("on", "true", "yes", "1"):
        reason = "KVIKIO_COMPAT_MODE requests it"
    elif not driver.exists():
        reason = "the nvidia-fs driver is not loaded"
    elif not udev.is_dir():
        reason = f"{udev} is missing; a container needs -v {udev}:{udev}:ro"
    else:
        return Finding(Level.OK, GDS, f"{installed}, nvidia-fs driver {driver.read_text().split()[-1]}")
    return Finding(
        Level.OK, GDS, f"{installed} in compatibility mode, in which bytes pass through host memory: {reason}"
    )


def _torch_is_for_cpu_only() -> bool:
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False
