# SPDX-License-Identifier: Apache-2.0
"""Checks of ``tencache doctor``: versions, activation, and DeepSpeed's build requirements."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from tencache_ds import __version__
from tencache_ds.cli.console import Finding, Level
from tencache_ds.names import DISABLE_VARIABLE, ENABLE_VARIABLE
from tencache_ds.ops.build_lock import build_locks, is_held, remedy

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
