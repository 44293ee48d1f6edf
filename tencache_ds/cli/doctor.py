# SPDX-License-Identifier: Apache-2.0
"""``tencache doctor``: checks TenCache's prerequisites on this machine and suggests fixes."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version
from rich.markup import escape
from rich.table import Table

from tencache_ds import __version__
from tencache_ds.cli.console import Finding, Level, format_nbytes, open_console
from tencache_ds.errors import ConfigError
from tencache_ds.names import DISABLE_VARIABLE, ENABLE_VARIABLE
from tencache_ds.ops.build_lock import build_locks, is_held, remedy
from tencache_ds.profiling.filesystem import (
    BlockDevice,
    block_device_of,
    existing_parent,
    file_system_of,
    supports_direct_io,
)
from tencache_ds.profiling.host import memory_domains

# Checks


DISTRIBUTION = "tencache-ds"
AUTOLOAD_GROUP = "torch.backends"
AUTOLOAD_NAME = "tencache_ds"
FIRST_AUTOLOADING_TORCH = "2.5"
CHECKED_REQUIREMENTS = ("torch", "deepspeed")
EIGHT_BIT = Requirement("bitsandbytes>=0.50")
"""The first version that updates 8-bit state on CPUs."""

HEADER_FOLDERS = (Path("/usr/include"), Path("/usr/local/include"))


def check_versions(
    version_of: Callable[[str], str] = metadata.version,
    requirements_of: Callable[[str], list[str] | None] = metadata.requires,
) -> list[Finding]:
    """Python, TenCache, and torch and DeepSpeed against the ranges this package declares.

    Args:
        version_of: version of an installed distribution, or :class:`importlib.metadata.PackageNotFoundError`.
        requirements_of: the requirements of an installed distribution, with the same error.
    """
    findings = [Finding(Level.OK, "python", sys.version.split()[0])]
    try:
        declared = [Requirement(line) for line in requirements_of(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        declared = []
        findings.append(
            Finding(
                Level.WARNING,
                "tencache",
                f"{__version__}, used from a folder without being installed: the supported versions are unknown",
                "pip install the package (pip install -e . in a checkout)",
            )
        )
    else:
        findings.append(Finding(Level.OK, "tencache", __version__))
    ranges = {requirement.name: requirement.specifier for requirement in declared if requirement.marker is None}
    for name in CHECKED_REQUIREMENTS:
        supported = ranges.get(name)
        wanted = f"{name}{supported}" if supported is not None else name
        try:
            installed = version_of(name)
        except metadata.PackageNotFoundError:
            findings.append(Finding(Level.PROBLEM, name, "not installed", f"pip install '{wanted}'"))
            continue
        if supported is None:
            findings.append(Finding(Level.OK, name, installed))
        elif supported.contains(installed, prereleases=True):
            findings.append(Finding(Level.OK, name, f"{installed} (supported: {supported})"))
        else:
            findings.append(
                Finding(
                    Level.PROBLEM,
                    name,
                    f"{installed} is outside the supported range {supported}",
                    f"pip install '{wanted}'",
                )
            )
    return findings


def check_eight_bit(version_of: Callable[[str], str] = metadata.version) -> list[Finding]:
    """bitsandbytes, where it is installed: nothing but its own optimizers needs it.

    Args:
        version_of: version of an installed distribution, or :class:`importlib.metadata.PackageNotFoundError`.
    """
    try:
        installed = version_of(EIGHT_BIT.name)
    except metadata.PackageNotFoundError:
        return []
    if EIGHT_BIT.specifier.contains(installed, prereleases=True):
        return [Finding(Level.OK, EIGHT_BIT.name, f"{installed} (8-bit Adam: {EIGHT_BIT.specifier})")]
    return [
        Finding(
            Level.WARNING,
            EIGHT_BIT.name,
            f"{installed} has no 8-bit Adam for state in RAM or on NVMe",
            f"pip install '{EIGHT_BIT}', to train with one",
        )
    ]


def check_autoload(
    environment: Mapping[str, str] | None = None, version_of: Callable[[str], str] = metadata.version
) -> Finding:
    """Whether ``import torch`` activates TenCache in every process without a change to the script.

    Args:
        environment: variables to inspect; those of this process when omitted.
        version_of: version of an installed distribution, or :class:`importlib.metadata.PackageNotFoundError`.
    """
    environment = os.environ if environment is None else environment
    by_hand = "import tencache_ds in the script, or start it with: deepspeed --module tencache_ds.run train.py"
    if environment.get(DISABLE_VARIABLE, "") not in ("", "0"):
        return Finding(Level.PROBLEM, "activation", f"switched off by {DISABLE_VARIABLE}", f"unset {DISABLE_VARIABLE}")
    if AUTOLOAD_NAME not in {point.name for point in metadata.entry_points(group=AUTOLOAD_GROUP)}:
        return Finding(
            Level.WARNING, "activation", "the entry point is not installed, so scripts do not load TenCache", by_hand
        )
    try:
        torch = version_of("torch")
    except metadata.PackageNotFoundError:  # which check_versions() reports
        torch = FIRST_AUTOLOADING_TORCH
    if Version(torch).release < Version(FIRST_AUTOLOADING_TORCH).release:  # which 2.5.0a0 of a container has as well
        return Finding(
            Level.WARNING,
            "activation",
            f"torch {torch} loads no entry points (torch {FIRST_AUTOLOADING_TORCH} and later do)",
            by_hand,
        )
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        return Finding(
            Level.WARNING,
            "activation",
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading TenCache",
            f"unset it, or {by_hand}",
        )
    if environment.get(ENABLE_VARIABLE, "") not in ("", "0"):
        everywhere = (
            f"{ENABLE_VARIABLE} is set: every ZeRO stage 3 config that offloads runs with TenCache (entry point)"
        )
        return Finding(Level.OK, "activation", everywhere)
    return Finding(Level.OK, "activation", "torch loads TenCache in every process (entry point)")


def check_build_tools(
    which: Callable[[str], str | None] = shutil.which, header_folders: tuple[Path, ...] = HEADER_FOLDERS
) -> list[Finding]:
    """Compiler, ninja, Python's headers and libaio, with which DeepSpeed builds its operators at first use.

    Args:
        which: path of a command, or ``None``.
        header_folders: where C headers are looked for.
    """
    install = "sudo apt-get install -y"
    compiler_name = os.environ.get("CXX") or "c++"
    compiler = which(compiler_name) or which("g++")
    if compiler is not None:
        findings = [Finding(Level.OK, "compiler", compiler)]
    else:
        findings = [Finding(Level.PROBLEM, "compiler", f"neither {compiler_name} nor g++ found", f"{install} g++")]

    # ninja from PyPI lies beside the interpreter, and a launcher may run without that folder on PATH.
    beside_python = Path(sys.executable).parent / "ninja"
    ninja = which("ninja") or (str(beside_python) if beside_python.exists() else None)
    if ninja is not None:
        findings.append(Finding(Level.OK, "ninja", ninja))
    else:
        findings.append(Finding(Level.PROBLEM, "ninja", "not found", "pip install ninja"))

    python_header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if python_header.exists():
        findings.append(Finding(Level.OK, "python headers", str(python_header.parent)))
    else:
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        findings.append(Finding(Level.PROBLEM, "python headers", f"{python_header} is missing", f"{install} {package}"))

    libaio = next((folder / "libaio.h" for folder in header_folders if (folder / "libaio.h").exists()), None)
    if libaio is not None:
        findings.append(Finding(Level.OK, "libaio", str(libaio)))
    else:
        findings.append(
            Finding(
                Level.WARNING,
                "libaio",
                "headers not found: the posix backend does the I/O, and stock ZeRO-Infinity cannot run",
                f"{install} libaio-dev",
            )
        )
    return findings


def check_build_locks() -> list[Finding]:
    """Locks of killed builds, at which every later start would wait indefinitely; none is the rule."""
    return [
        Finding(
            Level.PROBLEM,
            "build lock",
            f"left behind by a killed process: loading the {lock.parent.name} op hangs until it is removed",
            remedy(lock),
        )
        for lock in build_locks()
        if not is_held(lock)
    ]


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


BYTES_PER_PARAMETER = 14
"""Master weight, two moments (fp32 each) and the 16-bit weight of a parameter kept on NVMe."""

LITTLE_SPACE_NBYTES = 16 << 30


def check_nvme_path(path: Path) -> list[Finding]:
    """Whether ``path`` can be an ``nvme_path``: access, kind of storage, free space, direct I/O."""
    folder = existing_parent(path)
    if not folder.is_dir():
        return [Finding(Level.PROBLEM, "nvme path", f"{folder} is not a folder", "give a folder on a local disk")]
    if not os.access(folder, os.W_OK | os.X_OK):
        return [
            Finding(
                Level.PROBLEM, "nvme path", f"{folder} cannot be written to by this user", f"sudo chown $USER {folder}"
            )
        ]
    text = str(folder) if folder == path.expanduser().resolve() else f"{path} will be created in {folder}"
    findings = [Finding(Level.OK, "nvme path", text), _kind(folder), _free_space(folder), _direct_io(folder)]
    device = block_device_of(folder)
    return findings if device is None else [*findings, _blocks(folder, device)]


def _kind(folder: Path) -> Finding:
    file_system = file_system_of(folder)
    text = f"{file_system.kind} on {file_system.device}, mounted at {file_system.mount_point}"
    remedy = "name a folder on a local NVMe disk"
    if file_system.in_memory:
        return Finding(Level.WARNING, "file system", f"{text}: this is RAM, not a disk", remedy)
    if file_system.over_network:
        return Finding(Level.WARNING, "file system", f"{text}: network storage is slow for this", remedy)
    return Finding(Level.OK, "file system", text)


def _free_space(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    billions = free / BYTES_PER_PARAMETER / 1e9
    text = f"{format_nbytes(free)}: room for {billions:.1f} billion parameters at {BYTES_PER_PARAMETER} bytes each"
    if free < LITTLE_SPACE_NBYTES:
        return Finding(Level.WARNING, "free space", text, "free some space, or name a folder on a larger disk")
    return Finding(Level.OK, "free space", text)


def _blocks(folder: Path, device: BlockDevice) -> Finding:
    text = f"{device.logical_block_nbytes} bytes, {device.physical_block_nbytes} physically ({device.name})"
    try:
        device.check_alignment(folder)
    except ConfigError as error:
        return Finding(Level.PROBLEM, "device blocks", text, str(error))
    return Finding(Level.OK, "device blocks", text)


def _direct_io(folder: Path) -> Finding:
    try:
        direct = supports_direct_io(folder)
    except OSError as error:
        return Finding(Level.PROBLEM, "direct I/O", f"writing a file failed: {error}", "name a folder that works")
    if direct:
        return Finding(Level.OK, "direct I/O", "O_DIRECT works")
    return Finding(
        Level.WARNING,
        "direct I/O",
        "O_DIRECT is not supported: data goes through the page cache, which costs RAM and time",
        "name a folder on ext4 or xfs",
    )


# The command


_MARKS = {
    Level.OK: "[green]ok[/green]",
    Level.WARNING: "[yellow]warning[/yellow]",
    Level.PROBLEM: "[red]problem[/red]",
}


def add_command(commands: Any) -> None:
    """Registers ``doctor`` with what :meth:`argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check prerequisites on this machine and suggest fixes",
        description="Checks TenCache's prerequisites on this machine. Exit status 1 if there is a problem.",
    )
    parser.add_argument(
        "--nvme-path",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="FOLDER",
        help="also check these folders as nvme_path and nvme_paths",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints all findings; returns 1 if one of them is a problem, else 0."""
    console = open_console()
    findings = examine(arguments.nvme_path)
    console.print(render(findings))
    problems, warnings = (sum(f.level is level for f in findings) for level in (Level.PROBLEM, Level.WARNING))
    if problems or warnings:
        console.print(f"{problems} problem(s), {warnings} warning(s)")
    else:
        console.print("No problems found.")
    return 1 if problems else 0


def examine(nvme_paths: Sequence[Path] = ()) -> list[Finding]:
    """Every check of this machine, in the order shown. Takes about two seconds; imports neither torch nor DeepSpeed."""
    findings = [
        *check_versions(),
        *check_eight_bit(),
        check_autoload(),
        *check_build_tools(),
        *check_build_locks(),
        check_cpu(),
        check_memory(),
        check_locked_memory(),
        *check_gpus(),
        check_gds(),
    ]
    for path in nvme_paths:
        findings.extend(check_nvme_path(path))
    return findings


def render(findings: Iterable[Finding]) -> Table:
    """A table with a line for each finding and, under it, the remedy where there is one."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = escape(finding.text)
        if finding.remedy:
            text += f"\n[bold]{escape(finding.remedy)}[/bold]"
        table.add_row(_MARKS[finding.level], finding.subject, text)
    return table
